/* Adagrad with a sum for each element or for each row (formulas in optim.h, after PyTorch's torch.optim.Adagrad). */
#include "optim/hyper.h"
#include "optim/optimizer.h"

#include <math.h>

OPT_CUDA_RULE(opt_adagrad_cuda);
OPT_CUDA_ROWS(opt_adagrad_cuda_rows);
OPT_CUDA_ROWS(opt_row_wise_adagrad_cuda_rows);

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
    .cuda = TD_CUDA_ONLY(opt_adagrad_cuda),
    .copies = true,
    .cuda_rows = TD_CUDA_ONLY(opt_adagrad_cuda_rows),
    .flops = 9,
    .sparse = true,
};

enum { LANES = 8 };

/* Squares are summed in LANES parts, so that the loop has independent additions. */
#define ROW_WISE_LOOP(T, SQRT)                                                \
    do {                                                                      \
        T *restrict p = r->parameter, *restrict s = r->moment[0];             \
        const T *restrict g = r->gradient;                                    \
        const T scale = (T)r->gradient_scale, decay = (T)r->hyper[ADAGRAD_DECAY], eps = (T)r->hyper[ADAGRAD_EPS]; \
        const T rate = (T)(r->rate / (1 + (r->updates - 1) * r->hyper[ADAGRAD_RATE_DECAY])); \
        const int64_t width = r->width, end = r->count, whole = width - width % LANES; \
        for (int64_t row = 0; row < end; row += width, p += width, g += width, s++) { \
            T square[LANES] = { 0 };                                          \
            for (int64_t i = 0; i < whole; i += LANES)                        \
                for (int l = 0; l < LANES; l++) {                             \
                    T d = scale * g[i + l] + decay * p[i + l];                \
                    square[l] += d * d;                                       \
                }                                                             \
            for (int64_t i = whole; i < width; i++) {                         \
                T d = scale * g[i] + decay * p[i];                            \
                square[i - whole] += d * d;                                   \
            }                                                                 \
            for (int l = 1; l < LANES; l++) square[0] += square[l];           \
            *s += square[0] / (T)width;                                       \
            const T factor = rate / (SQRT(*s) + eps);                         \
            for (int64_t i = 0; i < width; i++) p[i] -= factor * (scale * g[i] + decay * p[i]); \
        }                                                                     \
    } while (0)

static void row_wise_cpu(const td_update_range *r)
{
    if (r->dtype == TD_F64) ROW_WISE_LOOP(double, sqrt);
    else ROW_WISE_LOOP(float, sqrtf);
}

static const td_update_rule row_wise_rule = {
    .name = "row_wise_adagrad",
    .moments = 1,
    .moment_name = { "row_sum" },
    .hyper_name = { "decay", "eps", "rate_decay" },
    .cpu = row_wise_cpu,
    .cuda_rows = TD_CUDA_ONLY(opt_row_wise_adagrad_cuda_rows),
    .flops = 9,
    .sparse = true,
    .row_moment = { true },
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
        .call = call, .rule = o.row_wise ? &row_wise_rule : &adagrad_rule,
        .hyper = { [ADAGRAD_DECAY] = o.decay, [ADAGRAD_EPS] = o.eps, [ADAGRAD_RATE_DECAY] = o.rate_decay },
        .decay = ADAGRAD_DECAY, .max_norm = o.max_norm, .clip_inf = o.clip_inf, .track_norm = o.track_norm,
        .groups = o.groups, .group_count = o.group_count, .name = o.name, .scaler = o.scaler,
    });
}
