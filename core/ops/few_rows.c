/* Products of few rows; see few_rows.h. */
#include "core/ops/few_rows.h"

#include "core/cpu.h"
#include "core/ops/convert.h"
#include "core/ops/op.h"

enum {
    ROWS = 4,                            /* of x, at most */
    TILE = 64,                           /* columns of y before they are stored */
    PART = 1 << 15,                      /* weights that are worth a thread */
};

#define LANES 8
#include "core/ops/few_rows_dots.h"

typedef struct few_rows {
    const td_kernel *k;
    const td_onednn_product *p;
    const float *x;                      /* (m, k) */
    td_few_rows_kernel *row;
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

/* Columns [j, j + columns) of y, columns <= TILE. */
static void tile(const few_rows *f, int64_t j, int64_t columns)
{
    const td_kernel *k = f->k;
    const td_arg *y = &k->out[0];
    float sums[TILE], bias[TILE];
    if (f->p->has_bias) td_load_f32(bias, k->in[2].dtype, td_arg_at(&k->in[2], j), columns);
    for (int64_t row = 0; row < f->p->m; row++) {
        const float *x = f->x + row * f->p->k;
        const char *w = td_arg_at(&k->in[1], j * f->p->k);
        f->row(f->p->dtype, x, w, f->p->k, columns, sums);
        for (int64_t c = 0; f->p->has_bias && c < columns; c++) sums[c] += bias[c];
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
    few_rows f = { .k = k, .p = p, .x = k->in[0].data, .row = row_of_tile };
    if (td_cpu_has_avx512()) f.row = td_few_rows_avx512;
    if (p->dtype != TD_F32) {
        td_load_f32(k->workspace, p->dtype, k->in[0].data, p->m * p->k);
        f.x = k->workspace;
    }
    td_parallel_for(k->run, p->n, PART / p->k + 1, range, &f);
}
