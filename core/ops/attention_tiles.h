/* Attention's arithmetic in the type T over one block of queries; attention_cpu.c includes this for float and for
 * double. NAME(x) names it for T.
 *
 * A tile of scores is (keys, width): queries are the lanes, so that a maximum, a sum and an exponential over keys run
 * lane by lane, and products read the other operand element by element wherever it lies.
 */

typedef T NAME(vector) __attribute__((vector_size(32), aligned(sizeof(T)), may_alias));
enum { NAME(LANES) = 32 / sizeof(T) };

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
    NAME(vector) sum[4][2];
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

static void NAME(multiply)(const NAME(product) *p)
{
    int64_t n = p->n / NAME(LANES) * NAME(LANES), pairs = p->n / (2 * NAME(LANES)) * (2 * NAME(LANES));
    int64_t rows = p->m / 4 * 4;
    for (int64_t j = 0; j < pairs; j += 2 * NAME(LANES)) {
        for (int64_t i = 0; i < rows; i += 4)
            NAME(block)(p, i, j, 4, 2);
        for (int64_t i = rows; i < p->m; i++)
            NAME(block)(p, i, j, 1, 2);
    }
    for (int64_t j = pairs; j < n; j += NAME(LANES)) {
        for (int64_t i = 0; i < rows; i += 4)
            NAME(block)(p, i, j, 4, 1);
        for (int64_t i = rows; i < p->m; i++)
            NAME(block)(p, i, j, 1, 1);
    }
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

/* x (rows, columns) times factor -> y (columns, width); lanes past rows are 0. */
static void NAME(turn)(const T *x, int64_t rows, int64_t columns, T factor, T *y, int64_t width)
{
    memset(y, 0, (size_t)(columns * width) * sizeof *y);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < columns; c++)
            y[c * width + i] = x[i * columns + c] * factor;
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

/* The dropout mask of a tile: 0 or 1 / (1 - p). */
static void NAME(draw)(const queries *q, int64_t first, int64_t keys, T *mask)
{
    T kept = (T)(1 / (1 - q->work->attr->p));
    uint32_t below = (uint32_t)(q->work->attr->p * 0x1p32), bits[KEYS];
    for (int64_t i = 0; i < q->count; i++) {
        td_random_bits(q->work->random, q->draw + (uint64_t)(i * q->work->keys + first), keys, bits);
        for (int64_t j = 0; j < keys; j++)
            mask[j * q->width + i] = bits[j] < below ? 0 : kept;
    }
    for (int64_t j = 0; j < keys; j++)
        for (int64_t i = q->count; i < q->width; i++)
            mask[j * q->width + i] = 0;
}

static void NAME(scale_by)(T *x, const T *factor, int64_t count)
{
    TD_SIMD
    for (int64_t i = 0; i < count; i++)
        x[i] *= factor[i];
}

/* Scores of `keys` keys: (keys, width) = k (keys, d) qt (d, width). */
static void NAME(scores)(const queries *q, const T *k, int64_t depth, int64_t keys, const T *qt, T *to)
{
    memset(to, 0, (size_t)(keys * q->width) * sizeof *to);
    NAME(multiply)(&(NAME(product)){ .m = keys, .n = q->width, .k = depth, .a = k, .a_row = depth, .a_column = 1,
                                     .b = qt, .b_row = q->width, .c = to, .c_row = q->width });
}

/* to (columns, width) += x (keys, columns)^T s (keys, width). */
static void NAME(gather)(const queries *q, const T *x, int64_t columns, int64_t keys, const T *s, T *to)
{
    NAME(multiply)(&(NAME(product)){ .m = columns, .n = q->width, .k = keys, .a = x, .a_row = 1, .a_column = columns,
                                     .b = s, .b_row = q->width, .c = to, .c_row = q->width });
}

/* to (keys, columns) += s (keys, width) x (queries, columns). */
static void NAME(spread)(const queries *q, const T *s, int64_t keys, const T *x, int64_t columns, T *to)
{
    NAME(multiply)(&(NAME(product)){ .m = keys, .n = columns, .k = q->count, .a = s, .a_row = q->width, .a_column = 1,
                                     .b = x, .b_row = columns, .c = to, .c_row = columns });
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

/* o and the logsumexp of one block of queries. */
static void NAME(forward)(const queries *q, char *room)
{
    const attention *w = q->work;
    T *qt = NAME(take)(&room, w->depth * QUERIES), *ot = NAME(take)(&room, w->values * QUERIES);
    T *s = NAME(take)(&room, KEYS * QUERIES), *mask = NAME(take)(&room, KEYS * QUERIES);
    T *k_room = NAME(take)(&room, KEYS * w->depth);
    T *v_room = NAME(take)(&room, KEYS * w->values);
    T *rows = NAME(take)(&room, QUERIES * (w->depth + w->values)), max[QUERIES], sum[QUERIES] = { 0 };
    NAME(turn)(NAME(view)(&w->k->in[0], q->row * w->depth, q->count * w->depth, rows), q->count, w->depth,
               (T)w->attr->scale, qt, q->width);
    memset(ot, 0, (size_t)(w->values * q->width) * sizeof *ot);
    for (int64_t i = 0; i < QUERIES; i++)
        max[i] = -(T)INFINITY;
    for (int64_t first = q->begin; first < q->end; first += KEYS) {
        int64_t keys = td_smaller(KEYS, q->end - first), at = q->key_row + first;
        const T *k = NAME(view)(&w->k->in[1], at * w->depth, keys * w->depth, k_room);
        const T *v = NAME(view)(&w->k->in[2], at * w->values, keys * w->values, v_room);
        NAME(scores)(q, k, w->depth, keys, qt, s);
        NAME(hide)(q, first, keys, s, -(T)INFINITY);
        NAME(stream)(q, keys, s, max, sum, ot, w->values);
        if (w->attr->p > 0) {
            NAME(draw)(q, first, keys, mask);
            NAME(scale_by)(s, mask, keys * q->width);
        }
        NAME(gather)(q, v, w->values, keys, s, ot);
    }
    for (int64_t i = 0; i < q->count; i++) {
        bool empty = sum[i] == 0;
        T factor = empty ? 0 : 1 / sum[i], log_sum = empty ? 0 : max[i] + (T)log((double)sum[i]);
        for (int64_t c = 0; c < w->values; c++)
            rows[i * w->values + c] = ot[c * q->width + i] * factor;
        ((T *)w->k->out[1].data)[q->row + i] = log_sum;
    }
    NAME(store)(&w->k->out[0], q->row * w->values, q->count * w->values, rows);
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

/* dq of one block of queries, and its part of dk and dv. */
static void NAME(backward)(const queries *q, char *room)
{
    const attention *w = q->work;
    const td_arg *in = w->k->in;
    T *qt = NAME(take)(&room, w->depth * QUERIES), *dqt = NAME(take)(&room, w->depth * QUERIES);
    T *dot = NAME(take)(&room, w->values * QUERIES);
    T *s = NAME(take)(&room, KEYS * QUERIES), *ds = NAME(take)(&room, KEYS * QUERIES);
    T *mask = NAME(take)(&room, KEYS * QUERIES);
    T *k_room = NAME(take)(&room, KEYS * w->depth), *v_room = NAME(take)(&room, KEYS * w->values);
    T *q_room = NAME(take)(&room, QUERIES * w->depth), *o_room = NAME(take)(&room, QUERIES * w->values),
      *do_room = NAME(take)(&room, QUERIES * w->values);
    T log_sum[QUERIES] = { 0 }, mean[QUERIES] = { 0 };
    const T *rows = NAME(view)(&in[0], q->row * w->depth, q->count * w->depth, q_room);
    const T *o = NAME(view)(&in[3], q->row * w->values, q->count * w->values, o_room);
    const T *dy = NAME(view)(&in[5], q->row * w->values, q->count * w->values, do_room);
    NAME(turn)(rows, q->count, w->depth, (T)w->attr->scale, qt, q->width);
    NAME(turn)(dy, q->count, w->values, 1, dot, q->width);
    memset(dqt, 0, (size_t)(w->depth * q->width) * sizeof *dqt);
    for (int64_t i = 0; i < q->count; i++) {
        log_sum[i] = ((const T *)in[4].data)[q->row + i];
        for (int64_t c = 0; c < w->values; c++)
            mean[i] += dy[i * w->values + c] * o[i * w->values + c];
    }
    for (int64_t first = q->begin; first < q->end; first += KEYS) {
        int64_t keys = td_smaller(KEYS, q->end - first), at = q->key_row + first;
        const T *k = NAME(view)(&in[1], at * w->depth, keys * w->depth, k_room);
        const T *v = NAME(view)(&in[2], at * w->values, keys * w->values, v_room);
        NAME(scores)(q, k, w->depth, keys, qt, s);
        NAME(scores)(q, v, w->values, keys, dot, ds);
        NAME(probabilities)(q, first, keys, s, log_sum);
        if (w->attr->p > 0) {
            NAME(draw)(q, first, keys, mask);
            NAME(scale_by)(ds, mask, keys * q->width);
        }
        NAME(slope)(q, keys, s, ds, mean);
        if (w->attr->p > 0)
            NAME(scale_by)(s, mask, keys * q->width);
        NAME(spread)(q, s, keys, dy, w->values, (T *)w->k->out[2].data + at * w->values);
        NAME(spread)(q, ds, keys, rows, w->depth, (T *)w->k->out[1].data + at * w->depth);
        NAME(gather)(q, k, w->depth, keys, ds, dqt);
    }
    T *dq = (T *)w->k->out[0].data + q->row * w->depth;
    for (int64_t i = 0; i < q->count; i++)
        for (int64_t c = 0; c < w->depth; c++)
            dq[i * w->depth + c] = dqt[c * q->width + i];
}
