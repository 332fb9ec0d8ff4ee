/* Adam and AdamW, in the form of PyTorch's torch.optim.Adam and AdamW:
 *
 *     m += (1 - beta1) (g - m)      v = beta2 v + (1 - beta2) g^2
 *     p -= rate / (1 - beta1^n) * m / (sqrt(v) / sqrt(1 - beta2^n) + eps)           n: updates, this one included
 *
 * Adam's decay enters g; AdamW's shrinks p before the step. One loop does both: g + couple p, shrink p.
 */
#include "optim/hyper.h"
#include "optim/optimizer.h"

#include <math.h>

OPT_CUDA_RULE(opt_adam_cuda);
OPT_CUDA_RULE(opt_adamw_cuda);

#define ADAM_LOOP(T, SQRT)                                                    \
    do {                                                                      \
        T *restrict p = r->parameter, *restrict m = r->moment[0], *restrict v = r->moment[1]; \
        const T *restrict grad = r->gradient;                                 \
        const T scale = (T)r->gradient_scale, couple = (T)(decoupled ? 0 : decay); \
        const T shrink = (T)(decoupled ? 1 - r->rate * decay : 1);            \
        const T rest1 = (T)(1 - beta1), keep2 = (T)beta2, rest2 = (T)(1 - beta2), eps = (T)r->hyper[ADAM_EPS]; \
        const T step = (T)(r->rate / correction1), inverse = (T)(1 / sqrt(correction2)); \
        const int64_t count = r->count;                                       \
        for (int64_t i = 0; i < count; i++) {                                 \
            T g = scale * grad[i] + couple * p[i];                            \
            m[i] += rest1 * (g - m[i]);                                       \
            v[i] = keep2 * v[i] + rest2 * (g * g);                            \
            p[i] = shrink * p[i] - step * (m[i] / (SQRT(v[i]) * inverse + eps)); \
        }                                                                     \
    } while (0)

static inline void adam_range(const td_update_range *r, bool decoupled)
{
    double decay = r->hyper[ADAM_DECAY], beta1 = r->hyper[ADAM_BETA1], beta2 = r->hyper[ADAM_BETA2];
    double correction1 = 1 - pow(beta1, r->updates), correction2 = 1 - pow(beta2, r->updates);
    if (r->dtype == TD_F64) ADAM_LOOP(double, sqrt);
    else ADAM_LOOP(float, sqrtf);
}

static void adam_cpu(const td_update_range *r)
{
    adam_range(r, false);
}

static void adamw_cpu(const td_update_range *r)
{
    adam_range(r, true);
}

static const td_update_rule adam_rule = {
    .name = "adam",
    .moments = 2,
    .moment_name = { "exp_avg", "exp_avg_sq" },
    .hyper_name = { "decay", "beta1", "beta2", "eps" },
    .cpu = adam_cpu,
    .cuda = TD_CUDA_ONLY(opt_adam_cuda),
    .copies = true,
    .flops = 17,
};

static const td_update_rule adamw_rule = {
    .name = "adamw",
    .moments = 2,
    .moment_name = { "exp_avg", "exp_avg_sq" },
    .hyper_name = { "decay", "beta1", "beta2", "eps" },
    .cpu = adamw_cpu,
    .cuda = TD_CUDA_ONLY(opt_adamw_cuda),
    .copies = true,
    .flops = 17,
};

static opt_optimizer *make(td_module under, const opt_adam_options *options, const char *call,
                           const td_update_rule *rule)
{
    td_context *td = td_module_context(under);
    opt_adam_options o = options ? *options : (opt_adam_options){ 0 };
    if (o.beta1 == 0) o.beta1 = 0.9;
    if (o.beta2 == 0) o.beta2 = 0.999;
    if (o.eps == 0) o.eps = 1e-8;
    if (!opt_check(td, call, "beta1", o.beta1, 0, 1)) return NULL;
    if (!opt_check(td, call, "beta2", o.beta2, 0, 1)) return NULL;
    if (!opt_check(td, call, "eps", o.eps, 0, INFINITY)) return NULL;
    if (!opt_check(td, call, "decay", o.decay, 0, INFINITY)) return NULL;
    return opt_make(under, &(opt_making){
        .call = call, .rule = rule,
        .hyper = { [ADAM_DECAY] = o.decay, [ADAM_BETA1] = o.beta1, [ADAM_BETA2] = o.beta2, [ADAM_EPS] = o.eps },
        .decay = ADAM_DECAY, .max_norm = o.max_norm, .clip_inf = o.clip_inf, .track_norm = o.track_norm,
        .groups = o.groups, .group_count = o.group_count, .name = o.name, .scaler = o.scaler,
    });
}

opt_optimizer *opt_adam(td_module under, const opt_adam_options *options)
{
    return make(under, options, "opt_adam", &adam_rule);
}

opt_optimizer *opt_adamw(td_module under, const opt_adamw_options *options)
{
    return make(under, options, "opt_adamw", &adamw_rule);
}
