/* One row of a norm in the type T; norm.c includes this for float and for double, norm_avx512.c for float. NAME(x) names it for T.
 *
 *     c = x - mean (layer norm) or x (RMS norm),  r = 1 / sqrt(mean c^2 + eps),  y = c r weight (+ bias)
 *
 * Sums run in T over blocks and in f64 across them.
 */

static T NAME(joined)(const NAME(td_lanes) *lanes)
{
    NAME(td_lanes) all = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    return NAME(td_lanes_total)(&all);
}

static double NAME(sum)(const T *x, int64_t count)
{
    double total = 0;
    for (int64_t done = 0; done < count; done += SUMMED) {
        int64_t end = td_smaller(done + SUMMED, count), i = done;
        NAME(td_lanes) lanes[CHAINS] = { 0 };
        T rest = 0;
        for (; i + CHAINS * NAME(TD_LANES) <= end; i += CHAINS * NAME(TD_LANES))
            for (int c = 0; c < CHAINS; c++)
                lanes[c] += *(const NAME(td_lanes) *)(x + i + c * NAME(TD_LANES));
        for (; i < end; i++)
            rest += x[i];
        total += (double)(NAME(joined)(lanes) + rest);
    }
    return total;
}

static double NAME(squares)(const T *x, int64_t count, T mean)
{
    double total = 0;
    for (int64_t done = 0; done < count; done += SUMMED) {
        int64_t end = td_smaller(done + SUMMED, count), i = done;
        NAME(td_lanes) lanes[CHAINS] = { 0 };
        T rest = 0;
        for (; i + CHAINS * NAME(TD_LANES) <= end; i += CHAINS * NAME(TD_LANES)) {
            for (int c = 0; c < CHAINS; c++) {
                NAME(td_lanes) centered = *(const NAME(td_lanes) *)(x + i + c * NAME(TD_LANES)) - mean;
                lanes[c] += centered * centered;
            }
        }
        for (; i < end; i++)
            rest += (x[i] - mean) * (x[i] - mean);
        total += (double)(NAME(joined)(lanes) + rest);
    }
    return total;
}

static void NAME(moments)(const T *x, int64_t count, const td_norm_attr *a, T *mean, T *scale)
{
    *mean = a->centered ? (T)(NAME(sum)(x, count) / (double)count) : 0;
    *scale = (T)(1 / sqrt(NAME(squares)(x, count, *mean) / (double)count + a->eps));
}

static void NAME(forward)(const td_norm_attr *a, const T *x, const T *weight, const T *bias, T *y, int64_t count)
{
    T mean, scale;
    NAME(moments)(x, count, a, &mean, &scale);
    if (bias) {
        TD_SIMD
        for (int64_t i = 0; i < count; i++)
            y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
        return;
    }
    TD_SIMD
    for (int64_t i = 0; i < count; i++)
        y[i] = (x[i] - mean) * scale * weight[i];
}

/* dx = r (g - mean g - n mean(g n)) with n = c r, g = dy weight; RMS norm has no mean g. dweight += dy n,
 * dbias, unless it is NULL, += dy. */
static void NAME(backward)(const td_norm_attr *a, const T *x, const T *weight, const T *dy, T *dx, T *dweight, T *dbias,
                           int64_t count)
{
    T mean, scale;
    NAME(moments)(x, count, a, &mean, &scale);
    double slope = 0, along = 0; /* sums of g, of g n */
    for (int64_t done = 0; done < count; done += SUMMED) {
        int64_t end = td_smaller(done + SUMMED, count), i = done;
        NAME(td_lanes) g_lanes = { 0 }, gn_lanes = { 0 };
        T g_rest = 0, gn_rest = 0;
        for (; i + NAME(TD_LANES) <= end; i += NAME(TD_LANES)) {
            NAME(td_lanes) n = (*(const NAME(td_lanes) *)(x + i) - mean) * scale, d = *(const NAME(td_lanes) *)(dy + i);
            NAME(td_lanes) g = d * *(const NAME(td_lanes) *)(weight + i);
            g_lanes += g;
            gn_lanes += g * n;
            *(NAME(td_lanes) *)(dweight + i) += d * n;
            if (dbias)
                *(NAME(td_lanes) *)(dbias + i) += d;
        }
        for (; i < end; i++) {
            T n = (x[i] - mean) * scale, g = dy[i] * weight[i];
            g_rest += g;
            gn_rest += g * n;
            dweight[i] += dy[i] * n;
            if (dbias)
                dbias[i] += dy[i];
        }
        slope += (double)(NAME(td_lanes_total)(&g_lanes) + g_rest);
        along += (double)(NAME(td_lanes_total)(&gn_lanes) + gn_rest);
    }
    T g_mean = a->centered ? (T)(slope / (double)count) : 0, gn_mean = (T)(along / (double)count);
    TD_SIMD
    for (int64_t i = 0; i < count; i++)
        dx[i] = scale * (dy[i] * weight[i] - g_mean - (x[i] - mean) * scale * gn_mean);
}
