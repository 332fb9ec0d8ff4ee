/* One row of a norm in the type T; norm.c includes this for float and for double. NAME(x) names it for T.
 *
 *     c = x - mean (layer norm) or x (RMS norm),  r = 1 / sqrt(mean c^2 + eps),  y = c r weight (+ bias)
 *
 * Sums run in T over blocks and in f64 across them.
 */

static double NAME(sum)(const T *x, int64_t count)
{
    double total = 0;
    for (int64_t done = 0; done < count; done += SUMMED) {
        int64_t n = td_smaller(SUMMED, count - done);
        T part = 0;
        TD_SIMD_SUM(part)
        for (int64_t i = 0; i < n; i++)
            part += x[done + i];
        total += (double)part;
    }
    return total;
}

static double NAME(squares)(const T *x, int64_t count, T mean)
{
    double total = 0;
    for (int64_t done = 0; done < count; done += SUMMED) {
        int64_t n = td_smaller(SUMMED, count - done);
        T part = 0;
        TD_SIMD_SUM(part)
        for (int64_t i = 0; i < n; i++)
            part += (x[done + i] - mean) * (x[done + i] - mean);
        total += (double)part;
    }
    return total;
}

static void NAME(moments)(const T *x, int64_t count, const norm *a, T *mean, T *scale)
{
    *mean = a->centered ? (T)(NAME(sum)(x, count) / (double)count) : 0;
    *scale = (T)(1 / sqrt(NAME(squares)(x, count, *mean) / (double)count + a->eps));
}

static void NAME(forward)(const norm *a, const T *x, const T *weight, const T *bias, T *y, int64_t count)
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
 * dbias += dy. */
static void NAME(backward)(const norm *a, const T *x, const T *weight, const T *dy, T *dx, T *dweight, T *dbias,
                           int64_t count)
{
    T mean, scale;
    NAME(moments)(x, count, a, &mean, &scale);
    double slope = 0, along = 0; /* sums of g, of g n */
    for (int64_t done = 0; done < count; done += SUMMED) {
        int64_t end = td_smaller(done + SUMMED, count);
        T g_part = 0, gn_part = 0;
        TD_SIMD_SUMS(g_part, gn_part)
        for (int64_t i = done; i < end; i++) {
            T n = (x[i] - mean) * scale, g = dy[i] * weight[i];
            g_part += g;
            gn_part += g * n;
            dweight[i] += dy[i] * n;
            dbias[i] += dy[i];
        }
        slope += (double)g_part;
        along += (double)gn_part;
    }
    T g_mean = a->centered ? (T)(slope / (double)count) : 0, gn_mean = (T)(along / (double)count);
    TD_SIMD
    for (int64_t i = 0; i < count; i++)
        dx[i] = scale * (dy[i] * weight[i] - g_mean - (x[i] - mean) * scale * gn_mean);
}
