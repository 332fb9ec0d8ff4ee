/* Lion (formula in optim.h). */
#include "optim/hyper.h"
#include "optim/optimizer.h"

#include <math.h>

OPT_CUDA_RULE(opt_lion_cuda);

#define LION_LOOP(T)                                                          \
    do {                                                                      \
        T *restrict p = r->parameter, *restrict m = r->moment[0];             \
        const T *restrict g = r->gradient;                                    \
        const T scale = (T)r->gradient_scale, rate = (T)r->rate, decay = (T)r->hyper[LION_DECAY]; \
        const T beta1 = (T)r->hyper[LION_BETA1], beta2 = (T)r->hyper[LION_BETA2]; \
        const int64_t count = r->count;                                       \
        for (int64_t i = 0; i < count; i++) {                                 \
            T d = scale * g[i], c = beta1 * m[i] + (1 - beta1) * d;           \
            T direction = (T)((c > 0) - (c < 0));                             \
            p[i] -= rate * (direction + decay * p[i]);                        \
            m[i] = beta2 * m[i] + (1 - beta2) * d;                            \
        }                                                                     \
    } while (0)

static void lion_cpu(const td_update_range *r)
{
    if (r->dtype == TD_F64) LION_LOOP(double);
    else LION_LOOP(float);
}

static const td_update_rule lion_rule = {
    .name = "lion",
    .moments = 1,
    .moment_name = { "exp_avg" },
    .hyper_name = { "decay", "beta1", "beta2" },
    .cpu = lion_cpu,
    .cuda = TD_CUDA_ONLY(opt_lion_cuda),
    .copies = true,
    .flops = 11,
};

opt_optimizer *opt_lion(td_module under, const opt_lion_options *options)
{
    static const char call[] = "opt_lion";
    td_context *td = td_module_context(under);
    opt_lion_options o = options ? *options : (opt_lion_options){ 0 };
    if (o.beta1 == 0) o.beta1 = 0.9;
    if (o.beta2 == 0) o.beta2 = 0.99;
    if (!opt_check(td, call, "beta1", o.beta1, 0, 1)) return NULL;
    if (!opt_check(td, call, "beta2", o.beta2, 0, 1)) return NULL;
    if (!opt_check(td, call, "decay", o.decay, 0, INFINITY)) return NULL;
    return opt_make(under, &(opt_making){
        .call = call, .rule = &lion_rule, .hyper = { [LION_DECAY] = o.decay, [LION_BETA1] = o.beta1, [LION_BETA2] = o.beta2 },
        .decay = LION_DECAY, .max_norm = o.max_norm, .clip_inf = o.clip_inf, .track_norm = o.track_norm,
        .groups = o.groups, .group_count = o.group_count, .name = o.name, .scaler = o.scaler,
    });
}
