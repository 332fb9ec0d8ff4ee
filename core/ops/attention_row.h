/* Attention of a single query in the type T, as decoding asks for: keys are its lanes' only work, so it reads their rows as they lie.
 * attention_tiles.h includes this. */

/* to[j] = x (n) times row j of `rows`. */
static void NAME(row_scores)(const T *x, NAME(rows) rows, int64_t count, int64_t n, T *to)
{
    for (int64_t j = 0; j < count; j++) {
        const T *row = rows.at + j * rows.step;
        T sum = 0;
        TD_SIMD_SUM(sum)
        for (int64_t i = 0; i < n; i++)
            sum += x[i] * row[i];
        to[j] = sum;
    }
}

/* to (n) += the rows times their weights. */
static void NAME(row_gather)(const T *weight, NAME(rows) rows, int64_t count, int64_t n, T *to)
{
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
        const T *a = rows.at + j * rows.step, *b = a + rows.step, *c = b + rows.step, *d = c + rows.step;
        T wa = weight[j], wb = weight[j + 1], wc = weight[j + 2], wd = weight[j + 3];
        TD_SIMD
        for (int64_t i = 0; i < n; i++)
            to[i] += wa * a[i] + wb * b[i] + (wc * c[i] + wd * d[i]);
    }
    for (; j < count; j++) {
        const T *a = rows.at + j * rows.step, wa = weight[j];
        TD_SIMD
        for (int64_t i = 0; i < n; i++)
            to[i] += wa * a[i];
    }
}

/* As forward, without dropout: the running maximum and sum of one query. */
static void NAME(forward_row)(const queries *q, char *room)
{
    const attention *w = q->work;
    T *x = NAME(take)(&room, w->depth), *o = NAME(take)(&room, w->values), *s = NAME(take)(&room, KEYS);
    T *k_room = NAME(take)(&room, KEYS * w->depth), *v_room = NAME(take)(&room, KEYS * w->values);
    T max = -(T)INFINITY, sum = 0;
    const T *row = NAME(view)(&w->q, row_at(&w->q, q->sequence, q->head, q->first), 1, w->depth, x).at;
    for (int64_t i = 0; i < w->depth; i++)
        x[i] = row[i] * (T)w->attr->scale;
    memset(o, 0, (size_t)w->values * sizeof *o);
    int64_t begin = w->attr->window ? clipped(q->position - w->attr->window + 1, q->begin, q->end) : q->begin;
    for (int64_t first = begin; first < q->end; first += KEYS) {
        int64_t keys = td_smaller(KEYS, q->end - first);
        NAME(rows) k = NAME(view)(&w->key, row_at(&w->key, q->sequence, q->shared, first), keys, w->depth, k_room);
        NAME(rows) v = NAME(view)(&w->value, row_at(&w->value, q->sequence, q->shared, first), keys, w->values, v_room);
        NAME(row_scores)(x, k, keys, w->depth, s);
        T most = max, total = 0;
        for (int64_t j = 0; j < keys; j++)
            most = s[j] > most ? s[j] : most;
        T base = most > -(T)INFINITY ? most : 0, shrink = NAME(power)(max - base); /* nothing seen: exponentials of -infinity */
        TD_SIMD_SUM(total)
        for (int64_t j = 0; j < keys; j++) {
            s[j] = NAME(power)(s[j] - base);
            total += s[j];
        }
        sum = sum * shrink + total;
        for (int64_t i = 0; shrink != 1 && i < w->values; i++)
            o[i] *= shrink;
        max = most;
        NAME(row_gather)(s, v, keys, w->values, o);
    }
    T factor = sum == 0 ? 0 : 1 / sum;
    for (int64_t i = 0; i < w->values; i++)
        o[i] *= factor;
    ((T *)w->log_sums->data)[(q->sequence * w->heads + q->head) * w->rows + q->first] = sum == 0 ? 0 : max + (T)log((double)sum);
    NAME(store)(&w->o, row_at(&w->o, q->sequence, q->head, q->first), 1, w->values, o);
}
