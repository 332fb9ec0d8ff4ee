/* Stochastic gradient descent, with momentum or without (formula in optim.h, after PyTorch's torch.optim.SGD). */
#include "optim/hyper.h"
#include "optim/optimizer.h"

#include <math.h>

OPT_CUDA_RULE(opt_sgd_cuda);
OPT_CUDA_ROWS(opt_sgd_cuda_rows);
OPT_CUDA_RULE(opt_momentum_cuda);

#define SGD_LOOP(T)                                                           \
    do {                                                                      \
        T *restrict p = r->parameter;                                         \
        const T *restrict g = r->gradient;                                    \
        const T scale = (T)r->gradient_scale, rate = (T)r->rate, decay = (T)r->hyper[SGD_DECAY]; \
        const int64_t count = r->count;                                       \
        for (int64_t i = 0; i < count; i++) p[i] -= rate * (scale * g[i] + decay * p[i]); \
    } while (0)

static void sgd_cpu(const td_update_range *r)
{
    if (r->dtype == TD_F64) SGD_LOOP(double);
    else SGD_LOOP(float);
}

/* The step is direct * d + through * b, so that Nesterov's is the same loop. */
#define MOMENTUM_LOOP(T)                                                      \
    do {                                                                      \
        T *restrict p = r->parameter, *restrict b = r->moment[0];             \
        const T *restrict g = r->gradient;                                    \
        const T scale = (T)r->gradient_scale, rate = (T)r->rate, decay = (T)r->hyper[SGD_DECAY]; \
        const T momentum = (T)r->hyper[SGD_MOMENTUM], direct = (T)nesterov;   \
        const T enters = (T)(r->updates > 1 ? 1 - r->hyper[SGD_DAMPENING] : 1); \
        const T through = nesterov ? momentum : 1;                            \
        const int64_t count = r->count;                                       \
        for (int64_t i = 0; i < count; i++) {                                 \
            T d = scale * g[i] + decay * p[i];                                \
            b[i] = momentum * b[i] + enters * d;                              \
            p[i] -= rate * (direct * d + through * b[i]);                     \
        }                                                                     \
    } while (0)

static void momentum_cpu(const td_update_range *r)
{
    bool nesterov = r->hyper[SGD_NESTEROV] != 0;
    if (r->dtype == TD_F64) MOMENTUM_LOOP(double);
    else MOMENTUM_LOOP(float);
}

static const td_update_rule sgd_rule = {
    .name = "sgd",
    .hyper_name = { "decay" },
    .cpu = sgd_cpu,
    .cuda = TD_CUDA_ONLY(opt_sgd_cuda),
    .copies = true,
    .cuda_rows = TD_CUDA_ONLY(opt_sgd_cuda_rows),
    .flops = 5,
    .sparse = true,
};

static const td_update_rule momentum_rule = {
    .name = "sgd_momentum",
    .moments = 1,
    .moment_name = { "momentum_buffer" },
    .hyper_name = { "decay", "momentum", "dampening", "nesterov" },
    .cpu = momentum_cpu,
    .cuda = TD_CUDA_ONLY(opt_momentum_cuda),
    .copies = true,
    .flops = 11,
};

opt_optimizer *opt_sgd(td_module under, const opt_sgd_options *options)
{
    static const char call[] = "opt_sgd";
    td_context *td = td_module_context(under);
    opt_sgd_options o = options ? *options : (opt_sgd_options){ 0 };
    if (!opt_check(td, call, "momentum", o.momentum, 0, 1)) return NULL;
    if (!opt_check(td, call, "dampening", o.dampening, 0, INFINITY)) return NULL;
    if (!opt_check(td, call, "decay", o.decay, 0, INFINITY)) return NULL;
    if (o.nesterov && (o.momentum == 0 || o.dampening != 0)) {
        td_fail(td, TD_ERROR_USAGE, "%s: nesterov needs a momentum and no dampening", call);
        return NULL;
    }
    return opt_make(under, &(opt_making){
        .call = call, .rule = o.momentum > 0 ? &momentum_rule : &sgd_rule,
        .hyper = { [SGD_DECAY] = o.decay, [SGD_MOMENTUM] = o.momentum, [SGD_DAMPENING] = o.dampening,
                   [SGD_NESTEROV] = o.nesterov },
        .decay = SGD_DECAY, .max_norm = o.max_norm, .clip_inf = o.clip_inf, .track_norm = o.track_norm,
        .groups = o.groups, .group_count = o.group_count, .name = o.name, .scaler = o.scaler,
    });
}
