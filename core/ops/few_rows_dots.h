/* Some elements of one row of a product of few rows, in vectors of LANES: few_rows.c includes this for 8, few_rows_avx512.c for 16.
 *
 * AddressSanitizer's frames keep no alignment above 32 bytes, so the wider vectors are not its to check: the same code in narrow ones is, where the processor has no wider.
 */
#if LANES > 8
#define CHECKED no_sanitize_address
#else
#define CHECKED unused
#endif
#define INLINED static inline __attribute__((always_inline, CHECKED))

enum {
    COLUMNS = 4,                         /* of y at once: as many streams through W */
    AHEAD = 512,                         /* weights of a row that are fetched early; of a short row, those of the rows to come */
};

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINED vector load(td_dtype dtype, const void *w, int64_t i)
{
    if (dtype == TD_F32) return *(const vector *)((const float *)w + i);
    return (vector)(__builtin_convertvector(*(const halves *)((const uint16_t *)w + i), words) << 16);
}

INLINED float load_one(td_dtype dtype, const void *w, int64_t i)
{
    float x;
    uint32_t bits;
    if (dtype == TD_F32) return ((const float *)w)[i];
    bits = (uint32_t)((const uint16_t *)w)[i] << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINED float sum_lanes(vector a)
{
    float sum[LANES];
    memcpy(sum, &a, sizeof sum);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) sum[l] += sum[l + half];
    return sum[0];
}

/* y[c] = x (k) times row c of w, for `count` rows: a constant, as dtype is, so that the sums stay in registers. */
INLINED void dots(td_dtype dtype, const float *x, const char *w, int64_t k, const int count, float *y)
{
    const int size = dtype == TD_F32 ? 4 : 2;
    int64_t stride = k * size, whole = k / (2 * LANES) * (2 * LANES), ahead = (k > AHEAD ? AHEAD : count * k) * size;
    vector even[COLUMNS] = { 0 }, odd[COLUMNS] = { 0 };
    for (int64_t i = 0; i < whole; i += 2 * LANES) {
        vector x0 = *(const vector *)(x + i), x1 = *(const vector *)(x + i + LANES);
        for (int c = 0; c < count; c++) {
            __builtin_prefetch(w + c * stride + i * size + ahead);
            even[c] += x0 * load(dtype, w + c * stride, i);
            odd[c] += x1 * load(dtype, w + c * stride, i + LANES);
        }
    }
    for (int c = 0; c < count; c++) {
        y[c] = sum_lanes(even[c] + odd[c]);
        for (int64_t i = whole; i < k; i++) y[c] += x[i] * load_one(dtype, w + c * stride, i);
    }
}

INLINED void row_of_dtype(td_dtype dtype, const float *x, const char *w, int64_t k, int64_t columns, float *y)
{
    int64_t j = 0, stride = k * (dtype == TD_F32 ? 4 : 2);
    for (; j + COLUMNS <= columns; j += COLUMNS) dots(dtype, x, w + j * stride, k, COLUMNS, y + j);
    for (; j < columns; j++) dots(dtype, x, w + j * stride, k, 1, y + j);
}

static __attribute__((CHECKED)) void row_of_tile(td_dtype dtype, const float *x, const char *w, int64_t k, int64_t columns, float *y)
{
    if (dtype == TD_F32) row_of_dtype(TD_F32, x, w, k, columns, y);
    else row_of_dtype(TD_BF16, x, w, k, columns, y);
}
