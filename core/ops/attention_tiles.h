/* Attention's arithmetic in the type T over one block of queries; attention_cpu.c includes this for float and for
 * double, attention_avx512.c for float. NAME(x) names it for T; vectors have VECTOR_BYTES; a product's inner block has
 * BLOCK_ROWS rows, 4 or 8, as many as registers hold.
 *
 * A tile of scores is (keys, width): queries are the lanes, so that a maximum, a sum and an exponential over keys run
 * lane by lane, and products read the other operand element by element wherever it lies.
 */

typedef T NAME(vector) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
typedef T NAME(four) __attribute__((vector_size(4 * sizeof(T)), aligned(sizeof(T)), may_alias));
enum { NAME(LANES) = VECTOR_BYTES / sizeof(T) };

/* C (m, n) += A (m, k) B (k, n): element (i, p) of A is at i a_row + p a_column, rows of B lie b_row apart, rows of C
 * c_row. */
typedef struct NAME(product) {
    int64_t m, n, k;
    const T *a;
    int64_t a_row, a_column;
    const T *b;
    int64_t b_row;
    T *c;
    int64_t c_row;
} NAME(product);

/* R rows of C, V vectors of each, at (row, column): constants, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void NAME(block)(const NAME(product) *p, int64_t row, int64_t column,
                                                             const int R, const int V)
{
    NAME(vector) sum[BLOCK_ROWS][2];
    const T *a = p->a + row * p->a_row, *b = p->b + column;
    T *c = p->c + row * p->c_row + column;
    for (int i = 0; i < R; i++)
        for (int v = 0; v < V; v++)
            sum[i][v] = *(const NAME(vector) *)(c + i * p->c_row + v * NAME(LANES));
    for (int64_t d = 0; d < p->k; d++, a += p->a_column, b += p->b_row)
        for (int i = 0; i < R; i++)
            for (int v = 0; v < V; v++)
                sum[i][v] += a[i * p->a_row] * *(const NAME(vector) *)(b + v * NAME(LANES));
    for (int i = 0; i < R; i++)
        for (int v = 0; v < V; v++)
            *(NAME(vector) *)(c + i * p->c_row + v * NAME(LANES)) = sum[i][v];
}

/* V vectors of every row of C from column on. */
static inline __attribute__((always_inline)) void NAME(column)(const NAME(product) *p, int64_t column, const int V)
{
    int64_t i = 0;
    for (; i + BLOCK_ROWS <= p->m; i += BLOCK_ROWS)
        NAME(block)(p, i, column, BLOCK_ROWS, V);
    for (; i + 4 <= p->m; i += 4)
        NAME(block)(p, i, column, 4, V);
    for (; i < p->m; i++)
        NAME(block)(p, i, column, 1, V);
}

static void NAME(multiply)(const NAME(product) *p)
{
    int64_t n = p->n / NAME(LANES) * NAME(LANES), pairs = p->n / (2 * NAME(LANES)) * (2 * NAME(LANES));
    for (int64_t j = 0; j < pairs; j += 2 * NAME(LANES))
        NAME(column)(p, j, 2);
    for (int64_t j = pairs; j < n; j += NAME(LANES))
        NAME(column)(p, j, 1);
    for (int64_t i = 0; n < p->n && i < p->m; i++)
        for (int64_t d = 0; d < p->k; d++)
            for (int64_t j = n; j < p->n; j++)
                p->c[i * p->c_row + j] += p->a[i * p->a_row + d * p->a_column] * p->b[d * p->b_row + j];
}

static T *NAME(take)(char **room, int64_t count)
{
    T *part = (T *)*room;
    *room = (char *)(part + count);
    return part;
}

/* A square of four: y (4, 4) = factor x^T. */
static inline void NAME(turn_four)(const T *x, int64_t x_row, T factor, T *y, int64_t y_row)
{
    NAME(four) a = *(const NAME(four) *)x, b = *(const NAME(four) *)(x + x_row);
    NAME(four) c = *(const NAME(four) *)(x + 2 * x_row), d = *(const NAME(four) *)(x + 3 * x_row);
    NAME(four) ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    NAME(four) ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    *(NAME(four) *)y = __builtin_shufflevector(ab, cd, 0, 1, 4, 5) * factor;
    *(NAME(four) *)(y + y_row) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7) * factor;
    *(NAME(four) *)(y + 2 * y_row) = __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5) * factor;
    *(NAME(four) *)(y + 3 * y_row) = __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7) * factor;
}

/* y (columns, rows) = factor x (rows, columns)^T. */
static void NAME(turn)(const T *x, int64_t x_row, int64_t rows, int64_t columns, T factor, T *y, int64_t y_row)
{
    int64_t whole_rows = rows / 4 * 4, whole_columns = columns / 4 * 4;
    for (int64_t i = 0; i < whole_rows; i += 4)
        for (int64_t c = 0; c < whole_columns; c += 4)
            NAME(turn_four)(x + i * x_row + c, x_row, factor, y + c * y_row + i, y_row);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = i < whole_rows ? whole_columns : 0; c < columns; c++)
            y[c * y_row + i] = factor * x[i * x_row + c];
}

/* The same into lanes: y (columns, width); those past the queries are 0. */
static void NAME(turn_lanes)(const queries *q, NAME(rows) x, int64_t columns, T factor, T *y)
{
    if (q->count < q->width)
        memset(y, 0, (size_t)(columns * q->width) * sizeof *y);
    NAME(turn)(x.at, x.step, q->count, columns, factor, y, q->width);
}

/* Lanes that do not see their key become `value`. */
static void NAME(hide)(const queries *q, int64_t first, int64_t keys, T *tile, T value)
{
    for (int64_t j = 0; j < keys; j++) {
        lanes l = lanes_of(q, first + j);
        for (int64_t i = 0; i < l.begin; i++)
            tile[j * q->width + i] = value;
        for (int64_t i = l.end; i < q->width; i++)
            tile[j * q->width + i] = value;
    }
}

/* A tile times the mask: 0, or 1 / (1 - p). */
static void NAME(drop)(const queries *q, const kept_bits *kept, int64_t keys, T *tile)
{
    T factor = (T)(1 / (1 - q->work->attr->p));
    for (int64_t j = 0; j < keys; j++) {
        const uint32_t *word = kept->word[j / 32];
        T *x = tile + j * q->width;
        TD_SIMD
        for (int64_t i = 0; i < q->width; i++)
            x[i] = word[i] >> (j % 32) & 1 ? x[i] * factor : 0;
    }
}

/* Scores of `keys` keys: (keys, width) = k (keys, depth) qt (depth, width). */
static void NAME(scores)(const queries *q, NAME(rows) k, int64_t depth, int64_t keys, const T *qt, T *to)
{
    memset(to, 0, (size_t)(keys * q->width) * sizeof *to);
    NAME(multiply)(&(NAME(product)){ .m = keys, .n = q->width, .k = depth, .a = k.at, .a_row = k.step, .a_column = 1,
                                     .b = qt, .b_row = q->width, .c = to, .c_row = q->width });
}

/* to (columns, width) += x (keys, columns)^T s (keys, width). */
static void NAME(gather)(const queries *q, NAME(rows) x, int64_t columns, int64_t keys, const T *s, T *to)
{
    NAME(multiply)(&(NAME(product)){ .m = columns, .n = q->width, .k = keys, .a = x.at, .a_row = 1, .a_column = x.step,
                                     .b = s, .b_row = q->width, .c = to, .c_row = q->width });
}

/* to (keys, columns), rows `step` apart, += s (keys, width) x (queries, columns). */
static void NAME(spread)(const queries *q, const T *s, int64_t keys, NAME(rows) x, int64_t columns, T *to, int64_t step)
{
    NAME(multiply)(&(NAME(product)){ .m = keys, .n = columns, .k = q->count, .a = s, .a_row = q->width, .a_column = 1,
                                     .b = x.at, .b_row = x.step, .c = to, .c_row = step });
}

/* s becomes exp(s - max) with the running maximum of each lane; what was summed before shrinks. */
static void NAME(stream)(const queries *q, int64_t keys, T *s, T *max, T *sum, T *ot, int64_t columns)
{
    T most[QUERIES], shrink[QUERIES], total[QUERIES];
    int64_t width = q->width;
    memcpy(most, max, (size_t)width * sizeof *most);
    for (int64_t j = 0; j < keys; j++) {
        TD_SIMD
        for (int64_t i = 0; i < width; i++)
            most[i] = s[j * width + i] > most[i] ? s[j * width + i] : most[i];
    }
    bool shrinks = false;
    for (int64_t i = 0; i < width; i++) {
        shrinks = shrinks || most[i] != max[i];
        T base = most[i] > -(T)INFINITY ? most[i] : 0; /* nothing seen yet: its exponentials are of -infinity */
        shrink[i] = NAME(power)(max[i] - base);
        max[i] = most[i];
        most[i] = base;
        total[i] = 0;
    }
    for (int64_t j = 0; j < keys; j++) {
        TD_SIMD
        for (int64_t i = 0; i < width; i++) {
            T e = NAME(power)(s[j * width + i] - most[i]);
            s[j * width + i] = e;
            total[i] += e;
        }
    }
    TD_SIMD
    for (int64_t i = 0; i < width; i++)
        sum[i] = sum[i] * shrink[i] + total[i];
    for (int64_t c = 0; shrinks && c < columns; c++) {
        TD_SIMD
        for (int64_t i = 0; i < width; i++)
            ot[c * width + i] *= shrink[i];
    }
}

#include "core/ops/attention_row.h"

/* o and the logsumexp of one block of queries. */
static void NAME(forward)(const queries *q, char *room)
{
    const attention *w = q->work;
    if (w->rows == 1 && w->attr->p == 0) {
        NAME(forward_row)(q, room);
        return;
    }
    T *qt = NAME(take)(&room, w->depth * QUERIES), *ot = NAME(take)(&room, w->values * QUERIES);
    T *s = NAME(take)(&room, KEYS * QUERIES);
    T *k_room = NAME(take)(&room, KEYS * w->depth), *v_room = NAME(take)(&room, KEYS * w->values);
    T *q_room = NAME(take)(&room, QUERIES * w->depth), *rows = NAME(take)(&room, QUERIES * w->values);
    T max[QUERIES], sum[QUERIES] = { 0 }, factor[QUERIES];
    kept_bits kept;
    int64_t at = row_at(&w->q, q->sequence, q->head, q->first);
    NAME(turn_lanes)(q, NAME(view)(&w->q, at, q->count, w->depth, q_room), w->depth, (T)w->attr->scale, qt);
    memset(ot, 0, (size_t)(w->values * q->width) * sizeof *ot);
    for (int64_t i = 0; i < QUERIES; i++)
        max[i] = -(T)INFINITY;
    for (int64_t first = q->begin; first < q->end; first += KEYS) {
        int64_t keys = td_smaller(KEYS, q->end - first);
        NAME(rows) k = NAME(view)(&w->key, row_at(&w->key, q->sequence, q->shared, first), keys, w->depth, k_room);
        NAME(rows) v = NAME(view)(&w->value, row_at(&w->value, q->sequence, q->shared, first), keys, w->values, v_room);
        NAME(scores)(q, k, w->depth, keys, qt, s);
        NAME(hide)(q, first, keys, s, -(T)INFINITY);
        NAME(stream)(q, keys, s, max, sum, ot, w->values);
        if (w->attr->p > 0) {
            draw_kept(q, first, keys, &kept);
            NAME(drop)(q, &kept, keys, s);
        }
        NAME(gather)(q, v, w->values, keys, s, ot);
    }
    T *log_sum = (T *)w->log_sums->data + (q->sequence * w->heads + q->head) * w->rows + q->first;
    for (int64_t i = 0; i < q->width; i++)
        factor[i] = sum[i] == 0 ? 0 : 1 / sum[i];
    for (int64_t i = 0; i < q->count; i++)
        log_sum[i] = sum[i] == 0 ? 0 : max[i] + (T)log((double)sum[i]);
    for (int64_t c = 0; c < w->values; c++) {
        TD_SIMD
        for (int64_t i = 0; i < q->width; i++)
            ot[c * q->width + i] *= factor[i];
    }
    NAME(turn)(ot, q->width, w->values, q->count, 1, rows, w->values);
    NAME(store)(&w->o, row_at(&w->o, q->sequence, q->head, q->first), q->count, w->values, rows);
}

/* From probabilities s and ds = mask (do v^T): ds becomes scale s (ds - mean). */
static void NAME(slope)(const queries *q, int64_t keys, const T *s, T *ds, const T *mean)
{
    T scale = (T)q->work->attr->scale;
    for (int64_t j = 0; j < keys; j++) {
        TD_SIMD
        for (int64_t i = 0; i < q->width; i++)
            ds[j * q->width + i] = scale * s[j * q->width + i] * (ds[j * q->width + i] - mean[i]);
    }
}

/* exp(s - logsumexp) where a key is seen, else 0. */
static void NAME(probabilities)(const queries *q, int64_t first, int64_t keys, T *s, const T *log_sum)
{
    for (int64_t j = 0; j < keys; j++) {
        TD_SIMD
        for (int64_t i = 0; i < q->width; i++)
            s[j * q->width + i] = NAME(power)(s[j * q->width + i] - log_sum[i]);
    }
    NAME(hide)(q, first, keys, s, 0);
}

static T NAME(dot)(const T *a, const T *b, int64_t count)
{
    NAME(td_lanes) lanes = { 0 };
    T rest = 0;
    int64_t i = 0;
    for (; i + NAME(TD_LANES) <= count; i += NAME(TD_LANES))
        lanes += *(const NAME(td_lanes) *)(a + i) * *(const NAME(td_lanes) *)(b + i);
    for (; i < count; i++)
        rest += a[i] * b[i];
    return NAME(td_lanes_total)(&lanes) + rest;
}

/* dq of one block of queries, and its part of dk and dv. */
static void NAME(backward)(const queries *q, char *room)
{
    const attention *w = q->work;
    T *qt = NAME(take)(&room, w->depth * QUERIES), *dqt = NAME(take)(&room, w->depth * QUERIES);
    T *dot = NAME(take)(&room, w->values * QUERIES);
    T *s = NAME(take)(&room, KEYS * QUERIES), *ds = NAME(take)(&room, KEYS * QUERIES);
    T *k_room = NAME(take)(&room, KEYS * w->depth), *v_room = NAME(take)(&room, KEYS * w->values);
    T *q_room = NAME(take)(&room, QUERIES * w->depth), *o_room = NAME(take)(&room, QUERIES * w->values),
      *do_room = NAME(take)(&room, QUERIES * w->values);
    T log_sum[QUERIES] = { 0 }, mean[QUERIES] = { 0 };
    kept_bits kept;
    NAME(rows) rows = NAME(view)(&w->q, row_at(&w->q, q->sequence, q->head, q->first), q->count, w->depth, q_room);
    NAME(rows) o = NAME(view)(&w->o, row_at(&w->o, q->sequence, q->head, q->first), q->count, w->values, o_room);
    NAME(rows) dy = NAME(view)(&w->dy, row_at(&w->dy, q->sequence, q->head, q->first), q->count, w->values, do_room);
    NAME(turn_lanes)(q, rows, w->depth, (T)w->attr->scale, qt);
    NAME(turn_lanes)(q, dy, w->values, 1, dot);
    memset(dqt, 0, (size_t)(w->depth * q->width) * sizeof *dqt);
    const T *log_sums = (const T *)w->log_sums->data + (q->sequence * w->heads + q->head) * w->rows + q->first;
    for (int64_t i = 0; i < q->count; i++) {
        mean[i] = NAME(dot)(dy.at + i * dy.step, o.at + i * o.step, w->values);
        log_sum[i] = log_sums[i];
    }
    for (int64_t first = q->begin; first < q->end; first += KEYS) {
        int64_t keys = td_smaller(KEYS, q->end - first);
        NAME(rows) k = NAME(view)(&w->key, row_at(&w->key, q->sequence, q->shared, first), keys, w->depth, k_room);
        NAME(rows) v = NAME(view)(&w->value, row_at(&w->value, q->sequence, q->shared, first), keys, w->values, v_room);
        NAME(scores)(q, k, w->depth, keys, qt, s);
        NAME(scores)(q, v, w->values, keys, dot, ds);
        NAME(probabilities)(q, first, keys, s, log_sum);
        if (w->attr->p > 0) {
            draw_kept(q, first, keys, &kept);
            NAME(drop)(q, &kept, keys, ds);
        }
        NAME(slope)(q, keys, s, ds, mean);
        if (w->attr->p > 0)
            NAME(drop)(q, &kept, keys, s);
        T *dk = td_arg_at(w->dk.arg, row_at(&w->dk, q->sequence, q->shared, first));
        T *dv = td_arg_at(w->dv.arg, row_at(&w->dv, q->sequence, q->shared, first));
        NAME(spread)(q, s, keys, dy, w->values, dv, w->dv.row);
        NAME(spread)(q, ds, keys, rows, w->depth, dk, w->dk.row);
        NAME(gather)(q, k, w->depth, keys, ds, dqt);
    }
    T *dq = td_arg_at(w->dq.arg, row_at(&w->dq, q->sequence, q->head, q->first));
    NAME(turn)(dqt, q->width, w->depth, q->count, 1, dq, w->dq.row);
}
