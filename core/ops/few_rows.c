/* Products of few rows; see few_rows.h. */
#include "core/ops/few_rows.h"

#include "core/ops/convert.h"
#include "core/ops/op.h"

enum {
    ROWS = 4,                            /* of x, at most */
    COLUMNS = 4,                         /* of y at once: as many streams through W */
    LANES = 8,
    AHEAD = 512,                         /* weights of a row that are fetched early; of a short row, those of the rows to come */
    TILE = 64,                           /* columns of y before they are stored */
    PART = 1 << 15,                      /* weights that are worth a thread */
};

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct few_rows {
    const td_kernel *k;
    const td_onednn_product *p;
    const float *x;                      /* (m, k) */
} few_rows;

bool td_few_rows_fits(const td_onednn_product *p)
{
    bool dense = p->a_column == 1 && p->b_row == 1 && p->b_column == p->k && (p->a_row == p->k || p->m == 1);
    return p->batch == 1 && p->m <= ROWS && dense && (p->dtype == TD_F32 || p->dtype == TD_BF16);
}

int64_t td_few_rows_workspace(const td_onednn_product *p)
{
    return p->dtype == TD_F32 ? 0 : p->m * p->k * (int64_t)sizeof(float);
}

static inline __attribute__((always_inline)) vector load(td_dtype dtype, const void *w, int64_t i)
{
    if (dtype == TD_F32) return *(const vector *)((const float *)w + i);
    return (vector)(__builtin_convertvector(*(const halves *)((const uint16_t *)w + i), words) << 16);
}

static inline float load_one(td_dtype dtype, const void *w, int64_t i)
{
    float x;
    uint32_t bits;
    if (dtype == TD_F32) return ((const float *)w)[i];
    bits = (uint32_t)((const uint16_t *)w)[i] << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float sum_lanes(vector a)
{
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

/* y[c] = x (k) times row c of w, for `count` rows: a constant, as dtype is, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void dots(td_dtype dtype, const float *x, const char *w, int64_t k, const int count, float *y)
{
    int64_t stride = k * (dtype == TD_F32 ? 4 : 2), whole = k / (2 * LANES) * (2 * LANES);
    int64_t ahead = (k > AHEAD ? AHEAD : count * k) * (dtype == TD_F32 ? 4 : 2);
    vector even[COLUMNS] = { 0 }, odd[COLUMNS] = { 0 };
    for (int64_t i = 0; i < whole; i += 2 * LANES) {
        vector x0 = *(const vector *)(x + i), x1 = *(const vector *)(x + i + LANES);
        for (int c = 0; c < count; c++) {
            __builtin_prefetch(w + c * stride + i * (dtype == TD_F32 ? 4 : 2) + ahead);
            even[c] += x0 * load(dtype, w + c * stride, i);
            odd[c] += x1 * load(dtype, w + c * stride, i + LANES);
        }
    }
    for (int c = 0; c < count; c++) {
        y[c] = sum_lanes(even[c] + odd[c]);
        for (int64_t i = whole; i < k; i++) y[c] += x[i] * load_one(dtype, w + c * stride, i);
    }
}

static inline __attribute__((always_inline)) void row_of_tile(td_dtype dtype, const float *x, const char *w, int64_t k, int64_t columns, float *y)
{
    int64_t j = 0, stride = k * (dtype == TD_F32 ? 4 : 2);
    for (; j + COLUMNS <= columns; j += COLUMNS) dots(dtype, x, w + j * stride, k, COLUMNS, y + j);
    for (; j < columns; j++) dots(dtype, x, w + j * stride, k, 1, y + j);
}

/* Columns [j, j + columns) of y, columns <= TILE. */
static void tile(const few_rows *f, int64_t j, int64_t columns)
{
    const td_kernel *k = f->k;
    const td_arg *y = &k->out[0];
    float sums[TILE], bias[TILE];
    if (k->inputs > 2) td_load_f32(bias, k->in[2].dtype, td_arg_at(&k->in[2], j), columns);
    for (int64_t row = 0; row < f->p->m; row++) {
        const float *x = f->x + row * f->p->k;
        const char *w = td_arg_at(&k->in[1], j * f->p->k);
        if (f->p->dtype == TD_F32) row_of_tile(TD_F32, x, w, f->p->k, columns, sums);
        else row_of_tile(TD_BF16, x, w, f->p->k, columns, sums);
        for (int64_t c = 0; k->inputs > 2 && c < columns; c++) sums[c] += bias[c];
        td_store_f32(td_arg_at(y, row * f->p->n + j), y->dtype, sums, columns);
    }
}

static void range(void *user, int64_t begin, int64_t end)
{
    const few_rows *f = user;
    for (int64_t j = begin; j < end; j += TILE) tile(f, j, td_smaller(TILE, end - j));
}

void td_few_rows(const td_kernel *k, const td_onednn_product *p)
{
    few_rows f = { .k = k, .p = p, .x = k->in[0].data };
    if (p->dtype != TD_F32) {
        td_load_f32(k->workspace, p->dtype, k->in[0].data, p->m * p->k);
        f.x = k->workspace;
    }
    td_parallel_for(k->run, p->n, PART / p->k + 1, range, &f);
}
