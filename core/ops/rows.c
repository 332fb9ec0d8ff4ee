/* Sums of exponentials and softmax of one row, block by block; see rows.h. */
#include "core/ops/rows.h"

#include "core/ops/convert.h"
#include "core/ops/math.h"
#include "core/ops/simd.h"

#include <math.h>

enum { BLOCK = 512, LANES = 16, TASK_ELEMENTS = 8 << 10 };

void td_for_each_row(const td_kernel *k, td_range_function body)
{
    td_shape shape = k->in[0].shape;
    int64_t columns = td_arg_last(&k->in[0]);
    td_parallel_for(k->run, td_shape_product(shape, 0, (int)shape.rank - 1), TASK_ELEMENTS / (columns > 0 ? columns : 1) + 1, body, (void *)k);
}

td_cost td_row_sum_cost(const td_kernel *k)
{
    td_cost cost = td_cost_of(k, 0);
    cost.flops = 4 * td_arg_elements(&k->in[0]);
    return cost;
}

/* A NaN is passed over: it makes the sum NaN. */
static float max_f32(const float *x, int64_t count)
{
    float lane[LANES], most = -INFINITY;
    int64_t whole = count / LANES * LANES;
    for (int j = 0; j < LANES; j++)
        lane[j] = -INFINITY;
    for (int64_t i = 0; i < whole; i += LANES) {
        TD_SIMD
        for (int j = 0; j < LANES; j++)
            lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    }
    for (int64_t i = whole; i < count; i++)
        most = x[i] > most ? x[i] : most;
    for (int j = 0; j < LANES; j++)
        most = lane[j] > most ? lane[j] : most;
    return most;
}

static float sum_exp_f32(const float *x, int64_t count, float max)
{
    float sum = 0;
    TD_SIMD_SUM(sum)
    for (int64_t i = 0; i < count; i++)
        sum += td_exp_f32(x[i] - max);
    return sum;
}

/* What exponentials are taken beside: -infinities have no distance from their max, and are 0 beside any number. */
static double pivot_of(double max)
{
    return max > -INFINITY ? max : 0;
}

static td_row_sum sum_exp_f64(const double *x, int64_t count)
{
    td_row_sum s = { .max = -INFINITY };
    for (int64_t i = 0; i < count; i++)
        s.max = x[i] > s.max ? x[i] : s.max;
    for (int64_t i = 0; i < count; i++)
        s.sum += exp(x[i] - pivot_of(s.max));
    return s;
}

/* A block with a larger max than those before rescales their sum. A block of -infinities adds nothing, one of NaN NaN. */
td_row_sum td_row_sum_exp(const td_arg *x, int64_t at, int64_t count)
{
    if (x->dtype == TD_F64)
        return sum_exp_f64(td_arg_at(x, at), count);
    td_row_sum s = { .max = -INFINITY };
    float tile[BLOCK];
    for (int64_t done = 0; done < count; done += BLOCK) {
        int64_t n = td_smaller(BLOCK, count - done);
        const float *values = td_view_f32(x->dtype, td_arg_at(x, at + done), n, tile);
        double block = max_f32(values, n), max = block > s.max ? block : s.max;
        s.sum = s.sum * exp(s.max - pivot_of(max)) + sum_exp_f32(values, n, (float)pivot_of(max));
        s.max = max;
    }
    return s;
}

static void softmax_f64(const double *x, double *y, int64_t count, td_row_sum s, double scale)
{
    for (int64_t i = 0; i < count; i++)
        y[i] = exp(x[i] - s.max) / s.sum * scale;
}

void td_row_softmax(const td_arg *x, const td_arg *y, int64_t at, int64_t count, td_row_sum s, double scale)
{
    if (x->dtype == TD_F64) {
        softmax_f64(td_arg_at(x, at), td_arg_at(y, at), count, s, scale);
        return;
    }
    float tile[BLOCK], max = (float)s.max, factor = (float)(scale / s.sum);
    for (int64_t done = 0; done < count; done += BLOCK) {
        int64_t n = td_smaller(BLOCK, count - done);
        const float *values = td_view_f32(x->dtype, td_arg_at(x, at + done), n, tile);
        float *to = y->dtype == TD_F32 ? td_arg_at(y, at + done) : tile;
        TD_SIMD
        for (int64_t i = 0; i < n; i++)
            to[i] = td_exp_f32(values[i] - max) * factor;
        if (to == tile)
            td_store_f32(td_arg_at(y, at + done), y->dtype, tile, n);
    }
}
