/* Adagrad, dense (formula in optim.h, after PyTorch's torch.optim.Adagrad). */
#include "optim/optimizer.h"

#include <math.h>

enum { ADAGRAD_DECAY, ADAGRAD_EPS, ADAGRAD_RATE_DECAY };

#define ADAGRAD_LOOP(T, SQRT)                                                 \
    do {                                                                      \
        T *restrict p = r->parameter, *restrict s = r->moment[0];             \
        const T *restrict g = r->gradient;                                    \
        const T scale = (T)r->gradient_scale, decay = (T)r->hyper[ADAGRAD_DECAY], eps = (T)r->hyper[ADAGRAD_EPS]; \
        const T rate = (T)(r->rate / (1 + (r->updates - 1) * r->hyper[ADAGRAD_RATE_DECAY])); \
        const int64_t count = r->count;                                       \
        for (int64_t i = 0; i < count; i++) {                                 \
            T d = scale * g[i] + decay * p[i];                                \
            s[i] += d * d;                                                    \
            p[i] -= rate * d / (SQRT(s[i]) + eps);                            \
        }                                                                     \
    } while (0)

static void adagrad_cpu(const td_update_range *r)
{
    if (r->dtype == TD_F64) ADAGRAD_LOOP(double, sqrt);
    else ADAGRAD_LOOP(float, sqrtf);
}

static const td_update_rule adagrad_rule = {
    .name = "adagrad",
    .moments = 1,
    .moment_name = { "sum" },
    .hyper_name = { "decay", "eps", "rate_decay" },
    .cpu = adagrad_cpu,
    .flops = 9,
};

opt_optimizer *opt_adagrad(td_module under, const opt_adagrad_options *options)
{
    static const char call[] = "opt_adagrad";
    td_context *td = td_module_context(under);
    opt_adagrad_options o = options ? *options : (opt_adagrad_options){ 0 };
    if (o.eps == 0) o.eps = 1e-10;
    if (!opt_check(td, call, "decay", o.decay, 0, INFINITY)) return NULL;
    if (!opt_check(td, call, "eps", o.eps, 0, INFINITY)) return NULL;
    if (!opt_check(td, call, "rate_decay", o.rate_decay, 0, INFINITY)) return NULL;
    return opt_make(under, &(opt_making){
        .call = call, .rule = &adagrad_rule,
        .hyper = { [ADAGRAD_DECAY] = o.decay, [ADAGRAD_EPS] = o.eps, [ADAGRAD_RATE_DECAY] = o.rate_decay },
        .decay = ADAGRAD_DECAY, .max_norm = o.max_norm, .track_norm = o.track_norm,
        .groups = o.groups, .group_count = o.group_count, .name = o.name,
    });
}
