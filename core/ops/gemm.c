/* The f64 matrix product, blocked for the caches and the registers as in Goto and van de Geijn ("Anatomy of
 * high-performance matrix multiplication", 2008).
 *
 * A block of B (DEPTH x WIDTH) and one of A (HEIGHT x DEPTH) are packed so that the kernel reads both in order: A in
 * panels of 6 rows, B in panels of 8 columns, edges filled with zeros. The kernel keeps 6 x 8 sums in registers.
 */
#include "core/ops/gemm.h"

#include "core/ops/op.h"

enum {
    ROWS = 6, COLUMNS = 8,           /* of the kernel */
    DEPTH = 256,                     /* of k at a time: a panel of B fits in L1 */
    HEIGHT = 768, WIDTH = 1024,      /* of C for one packed block of A, of B */
    TASK_ROWS = 72, TASK_COLUMNS = 64,
};

typedef double vector __attribute__((vector_size(32)));

int64_t td_gemm_workspace(int64_t m, int64_t n, int64_t k)
{
    int64_t rows = td_round_up(td_smaller(m, HEIGHT), ROWS), columns = td_round_up(td_smaller(n, WIDTH), COLUMNS);
    return (rows + columns) * td_smaller(k, DEPTH) * (int64_t)sizeof(double);
}

/* sums (6, 8) = a panel of A (depth, 6) times a panel of B (depth, 8). */
static void kernel(int64_t depth, const double *a, const double *b, vector sums[ROWS][2])
{
#define SUM(i) vector s##i##0 = { 0 }, s##i##1 = { 0 };
#define ADD(i) s##i##0 += a[i] * b0, s##i##1 += a[i] * b1;
#define PUT(i) sums[i][0] = s##i##0, sums[i][1] = s##i##1;
#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5)
    EACH_ROW(SUM)
    for (int64_t p = 0; p < depth; p++, a += ROWS, b += COLUMNS) {
        vector b0 = *(const vector *)b, b1 = *(const vector *)(b + 4);
        EACH_ROW(ADD)
    }
    EACH_ROW(PUT)
}

typedef struct gemm_block {
    const td_gemm *g;
    int64_t row, column, first;      /* of C, of C, of k */
    int64_t rows, columns, depth;
    double *a, *b;                   /* packed */
} gemm_block;

static void pack_a(void *user, int64_t begin, int64_t end)
{
    const gemm_block *t = user;
    for (int64_t panel = begin; panel < end; panel++) {
        double *to = t->a + panel * ROWS * t->depth;
        int64_t row = panel * ROWS, rows = td_smaller(ROWS, t->rows - row);
        const double *from = t->g->a + (t->row + row) * t->g->a_row + t->first * t->g->a_column;
        for (int64_t p = 0; p < t->depth; p++, from += t->g->a_column)
            for (int64_t i = 0; i < ROWS; i++)
                *to++ = i < rows ? from[i * t->g->a_row] : 0;
    }
}

static void pack_b(void *user, int64_t begin, int64_t end)
{
    const gemm_block *t = user;
    for (int64_t panel = begin; panel < end; panel++) {
        double *to = t->b + panel * COLUMNS * t->depth;
        int64_t column = panel * COLUMNS, columns = td_smaller(COLUMNS, t->columns - column);
        const double *from = t->g->b + (t->column + column) * t->g->b_column + t->first * t->g->b_row;
        for (int64_t p = 0; p < t->depth; p++, from += t->g->b_row)
            for (int64_t j = 0; j < COLUMNS; j++)
                *to++ = j < columns ? from[j * t->g->b_column] : 0;
    }
}

/* C's tile at (row, column) of the block gets the sums: the first block of k sets it, the others add. */
static void put_tile(const gemm_block *t, int64_t row, int64_t column, const vector sums[ROWS][2])
{
    const td_gemm *g = t->g;
    int64_t rows = td_smaller(ROWS, t->rows - row), columns = td_smaller(COLUMNS, t->columns - column);
    for (int64_t i = 0; i < rows; i++) {
        const double *sum = (const double *)sums[i];
        double *c = g->c + (t->row + row + i) * g->c_row + t->column + column;
        const double *bias = g->bias ? g->bias + t->column + column : NULL;
        for (int64_t j = 0; j < columns; j++)
            c[j] = sum[j] + (t->first ? c[j] : bias ? bias[j] : 0);
    }
}

/* Tasks are TASK_ROWS x TASK_COLUMNS parts of the block. */
static void multiply(void *user, int64_t begin, int64_t end)
{
    const gemm_block *t = user;
    int64_t across = (t->columns + TASK_COLUMNS - 1) / TASK_COLUMNS;
    for (int64_t task = begin; task < end; task++) {
        int64_t row_begin = task / across * TASK_ROWS, row_end = td_smaller(row_begin + TASK_ROWS, t->rows);
        int64_t column_begin = task % across * TASK_COLUMNS,
                column_end = td_smaller(column_begin + TASK_COLUMNS, t->columns);
        for (int64_t column = column_begin; column < column_end; column += COLUMNS) {
            for (int64_t row = row_begin; row < row_end; row += ROWS) {
                vector sums[ROWS][2];
                kernel(t->depth, t->a + row * t->depth, t->b + column * t->depth, sums);
                put_tile(t, row, column, sums);
            }
        }
    }
}

static void multiply_block(const td_run *run, gemm_block *t)
{
    int64_t down = (t->rows + TASK_ROWS - 1) / TASK_ROWS, across = (t->columns + TASK_COLUMNS - 1) / TASK_COLUMNS;
    td_parallel_for(run, (t->rows + ROWS - 1) / ROWS, 32, pack_a, t);
    td_parallel_for(run, down * across, 1, multiply, t);
}

/* C = bias: what is left of the product when k is 0. */
static void set_bias(const td_gemm *g)
{
    for (int64_t i = 0; i < g->m; i++)
        for (int64_t j = 0; j < g->n; j++)
            g->c[i * g->c_row + j] = g->bias ? g->bias[j] : 0;
}

void td_gemm_f64(const td_run *run, const td_gemm *g, void *workspace)
{
    if (g->k == 0)
        set_bias(g);
    for (int64_t column = 0; column < g->n; column += WIDTH) {
        for (int64_t first = 0; first < g->k; first += DEPTH) {
            gemm_block t = { .g = g, .column = column, .columns = td_smaller(WIDTH, g->n - column), .first = first,
                             .depth = td_smaller(DEPTH, g->k - first), .b = workspace };
            t.a = t.b + td_round_up(t.columns, COLUMNS) * t.depth;
            td_parallel_for(run, (t.columns + COLUMNS - 1) / COLUMNS, 16, pack_b, &t);
            for (int64_t row = 0; row < g->m; row += HEIGHT) {
                t.row = row;
                t.rows = td_smaller(HEIGHT, g->m - row);
                multiply_block(run, &t);
            }
        }
    }
}
