/* Updates by rows: of the rows of a table that a step's ids name, and by rules whose moments have one element a row.
 *
 *     merge_rows   ids, rows, ids, rows ..                                 -> ids (N), rows (N, D)
 *     update_rows  parameter moments.. rate scale updates [when]  ids rows -> parameter moments..
 *     update_rows  parameter moments.. rate scale updates [when]  gradient -> parameter moments..
 *
 * The ids and rows of all uses of a table, ids (...) and rows (..., D), are merged once: ids in rising order, each once,
 * with the sum of its rows, taken in the order of the inputs whatever the threads; ids outside the table are left out.
 * What remains of N, the number of ids given, is filled with -1 and zeros. So the gradient's norm is that of the sums,
 * and an update touches each row once. Memory and time depend on N and D, not on the rows of the table.
 *
 * Without ids every row of the member is updated. On several ranks all operands are replicated: ids and rows are
 * gathered before they are merged, and each rank makes the same update.
 */
#include "core/ops/op.h"

#include <stdio.h>

TD_CUDA_KERNEL(td_merge_rows_cuda);
TD_CUDA_PREPARE(td_merge_rows_cuda_prepare);
TD_CUDA_KERNEL(td_update_rows_cuda);
TD_CUDA_PREPARE(td_update_rows_cuda_prepare);

enum { TASK_ELEMENTS = 16 << 10, DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

/* ---- Rules ---------------------------------------------------------------------------------------------- */

bool td_rule_has_row_moments(const td_update_rule *rule)
{
    bool has = false;
    for (int m = 0; m < rule->moments; m++)
        has = has || rule->row_moment[m];
    return has;
}

td_state td_update_moment(const td_update_rule *rule, td_state of, int m)
{
    return rule->row_moment[m] ? td_moment_rows(of, rule->moment_name[m]) : td_moment(of, rule->moment_name[m]);
}

bool td_update_allows(const td_update_rule *rule, const td_state *states, int count)
{
    for (int i = 0; i < count && !rule->sparse; i++) {
        if (!td_state_sparse(states[i]))
            continue;
        td_fail(states[i].td, TD_ERROR_UNSUPPORTED, "%s: '%s' has row-sparse gradients, and this rule moves rows without a "
                "gradient too; use opt_adagrad, or opt_sgd without momentum, or let the table be dense", rule->name,
                td_state_name(states[i]));
        return false;
    }
    return true;
}

/* All operands replicated: labels of 0. */
static void whole_rule(const td_program *p, const td_node *n, td_place_rule *rule)
{
    (void)p, (void)n;
    memset(rule, 0, sizeof *rule);
}

/* ---- merge_rows ----------------------------------------------------------------------------------------- */

/* An id and where its row is among all that were given, in one number that sorts by id. */
typedef uint64_t numbered;

static uint32_t id_of(numbered x) { return (uint32_t)(x >> 32); }
static int64_t place_of(numbered x) { return (int64_t)(x & UINT32_MAX); }

/* The ids inside the table, in the order given; how many. */
static int64_t number_ids(const td_kernel *k, int64_t table_rows, numbered *out)
{
    int64_t count = 0, place = 0;
    for (int i = 0; i < k->inputs; i += 2) {
        const int32_t *ids = k->in[i].data;
        int64_t n = td_arg_elements(&k->in[i]);
        for (int64_t at = 0; at < n; at++, place++)
            if (ids[at] >= 0 && ids[at] < table_rows)
                out[count++] = (numbered)(uint32_t)ids[at] << 32 | (numbered)place;
    }
    return count;
}

/* Sorts by id, keeping the order of equal ones: the digits of the largest id there can be, lowest first. Gives which of
 * the two arrays holds the result. */
static numbered *sort_by_id(numbered *from, numbered *to, int64_t count, int64_t table_rows)
{
    int64_t first[DIGITS];
    for (int shift = 0; shift < 32 && (table_rows - 1) >> shift > 0; shift += DIGIT_BITS) {
        memset(first, 0, sizeof first);
        for (int64_t i = 0; i < count; i++)
            first[id_of(from[i]) >> shift & (DIGITS - 1)]++;
        for (int64_t d = 0, at = 0; d < DIGITS; d++) {
            int64_t here = first[d];
            first[d] = at;
            at += here;
        }
        for (int64_t i = 0; i < count; i++)
            to[first[id_of(from[i]) >> shift & (DIGITS - 1)]++] = from[i];
        numbered *sorted = to;
        to = from;
        from = sorted;
    }
    return from;
}

/* The row given at `place`, counted through all inputs. */
static const void *row_at(const td_kernel *k, int64_t place)
{
    int i = 0;
    for (; place >= td_arg_elements(&k->in[i]); i += 2)
        place -= td_arg_elements(&k->in[i]);
    return td_arg_at(&k->in[i + 1], place * td_arg_last(&k->in[i + 1]));
}

typedef struct merge_work {
    const td_kernel *k;
    const numbered *sorted;
    const uint32_t *first;                    /* of each id, in sorted; one more ends the last */
} merge_work;

#define SUM_ROWS(T)                                                                     \
    do {                                                                                \
        T *restrict sum = td_arg_at(out, u * width);                                    \
        memcpy(sum, row_at(w->k, place_of(w->sorted[at])), (size_t)width * sizeof *sum); \
        while (++at < w->first[u + 1]) {                                                \
            const T *restrict row = row_at(w->k, place_of(w->sorted[at]));              \
            for (int64_t c = 0; c < width; c++)                                         \
                sum[c] += row[c];                                                       \
        }                                                                               \
    } while (0)

static void merge_ids(void *user, int64_t begin, int64_t end)
{
    const merge_work *w = user;
    const td_arg *out = &w->k->out[1];
    int64_t width = td_arg_last(out);
    for (int64_t u = begin; u < end; u++) {
        int64_t at = w->first[u];
        ((int32_t *)w->k->out[0].data)[u] = (int32_t)id_of(w->sorted[at]);
        if (!width)
            continue;
        if (out->dtype == TD_F64)
            SUM_ROWS(double);
        else
            SUM_ROWS(float);
    }
}

static void merge_rows_cpu(const td_kernel *k)
{
    const td_merge_rows_attr *a = k->attr;
    int64_t room = td_arg_elements(&k->out[0]), width = td_arg_last(&k->out[1]), unique = 0;
    int32_t *ids = k->out[0].data;
    numbered *given = k->workspace;
    int64_t count = number_ids(k, a->table_rows, given);
    numbered *sorted = sort_by_id(given, given + room, count, a->table_rows);
    uint32_t *first = (uint32_t *)(sorted == given ? given + room : given); /* what the sort no longer needs */
    for (int64_t i = 0; i < count; i++)
        if (!i || id_of(sorted[i]) != id_of(sorted[i - 1]))
            first[unique++] = (uint32_t)i;
    first[unique] = (uint32_t)count;
    td_parallel_for(k->run, unique, TASK_ELEMENTS / (width + 1) + 1, merge_ids, &(merge_work){ k, sorted, first });
    for (int64_t u = unique; u < room; u++)
        ids[u] = -1;
    if (unique < room)
        memset(td_arg_at(&k->out[1], unique * width), 0, (size_t)((room - unique) * width * td_dtype_size(k->out[1].dtype)));
}

static bool merge_rows_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    int64_t room = td_arg_elements(&k->out[0]);
    if (room >= UINT32_MAX) {
        td_fail(td, TD_ERROR_UNSUPPORTED, "merge_rows: a table got %lld ids in one step, must be less than 2^32 - 1", (long long)room);
        return false;
    }
    out->workspace_bytes = (2 * room + 1) * (int64_t)sizeof(numbered);
    return true;
}

static td_cost merge_rows_cost(const td_kernel *k)
{
    int64_t ids = td_arg_elements(&k->out[0]);
    return (td_cost){ .flops = td_arg_elements(&k->out[1]), .bytes = 2 * td_arg_bytes(&k->out[1]) + 8 * ids * (int64_t)sizeof(numbered) };
}

static void merge_rows_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_merge_rows_attr *a = td_node_attr(p, n);
    snprintf(to, room, "table (%lld, %lld)", (long long)a->table_rows, (long long)a->width);
}

const td_op td_op_merge_rows = {
    .name       = "merge_rows",
    .inputs     = -1,
    .attr_bytes = sizeof(td_merge_rows_attr),
    .place      = whole_rule,
    .cost       = merge_rows_cost,
    .prepare    = merge_rows_prepare,
    .cpu        = merge_rows_cpu,
    .cuda       = TD_CUDA(td_merge_rows_cuda, td_merge_rows_cuda_prepare),
    .print      = merge_rows_print,
};

/* ---- update_rows ---------------------------------------------------------------------------------------- */

typedef struct update_work {
    const td_kernel *k;
    const td_update_rule *rule;
    td_update_range like;                     /* what all ranges have alike */
    const td_arg *ids, *rows;                 /* NULL and the flat gradient: every row */
} update_work;

static const td_update_rows_attr *attr_of(const td_kernel *k) { return k->attr; }

/* Rows [row, row + count) of the member. */
static void update_range(const update_work *w, int64_t row, int64_t count, const void *gradient)
{
    const td_update_rows_attr *a = attr_of(w->k);
    td_update_range range = w->like;
    range.count = count * a->width;
    range.parameter = td_arg_at(&w->k->out[0], a->begin + row * a->width);
    range.gradient = gradient;
    for (int m = 0; m < w->rule->moments; m++)
        range.moment[m] = td_arg_at(&w->k->out[1 + m], a->moment[m] + row * (w->rule->row_moment[m] ? 1 : a->width));
    w->rule->cpu(&range);
}

static void update_all(void *user, int64_t begin, int64_t end)
{
    const update_work *w = user;
    const td_update_rows_attr *a = attr_of(w->k);
    update_range(w, begin, end - begin, td_arg_at(w->rows, a->begin + begin * a->width));
}

static void update_named(void *user, int64_t begin, int64_t end)
{
    const update_work *w = user;
    for (int64_t u = begin; u < end; u++)
        update_range(w, ((const int32_t *)w->ids->data)[u], 1, td_arg_at(w->rows, u * attr_of(w->k)->width));
}

/* Merged ids end where the first -1 is. */
static int64_t named_rows(const td_arg *ids)
{
    int64_t low = 0, high = td_arg_elements(ids);
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (((const int32_t *)ids->data)[middle] >= 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool has_ids(const td_kernel *k) { return k->in[k->inputs - 2].dtype == TD_I32; }

static bool is_skipped(const td_kernel *k, const td_arg *when)
{
    return when < k->in + k->inputs - (has_ids(k) ? 2 : 1) && td_read_scalar(when) == 0;
}

static void update_rows_cpu(const td_kernel *k)
{
    const td_update_rows_attr *a = attr_of(k);
    const td_update_rule *rule = k->run->td->rules[a->rule];
    const td_arg *scalars = k->in + 1 + rule->moments;
    for (int o = 0; o < k->outputs; o++) /* the rules work in place */
        if (k->in[o].data != k->out[o].data)
            memcpy(k->out[o].data, k->in[o].data, (size_t)td_arg_bytes(&k->in[o]));
    if (is_skipped(k, scalars + 3))
        return;
    update_work w = {
        .k = k, .rule = rule, .ids = has_ids(k) ? &k->in[k->inputs - 2] : NULL, .rows = &k->in[k->inputs - 1],
        .like = { .width = a->width, .dtype = k->in[0].dtype, .rate = td_read_scalar(&scalars[0]),
                  .gradient_scale = td_read_scalar(&scalars[1]), .updates = td_read_scalar(&scalars[2]) },
    };
    memcpy(w.like.hyper, a->hyper, sizeof a->hyper);
    td_parallel_for(k->run, w.ids ? named_rows(w.ids) : a->rows, TASK_ELEMENTS / (a->width + 1) + 1, w.ids ? update_named : update_all, &w);
}

/* A bound where there are ids: as if each were another. */
static td_cost update_rows_cost(const td_kernel *k)
{
    const td_update_rows_attr *a = attr_of(k);
    const td_update_rule *rule = k->run->td->rules[a->rule];
    int64_t rows = has_ids(k) ? td_arg_elements(&k->in[k->inputs - 2]) : a->rows, each = 3 * a->width;
    for (int m = 0; m < rule->moments; m++)
        each += 2 * (rule->row_moment[m] ? 1 : a->width);
    return (td_cost){ .flops = rule->flops * rows * a->width, .bytes = rows * each * td_dtype_size(k->in[0].dtype) };
}

static void update_rows_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_update_rows_attr *a = td_node_attr(p, n);
    snprintf(to, room, "%s, (%lld, %lld) at %lld of unit %u", p->td->rules[a->rule]->name, (long long)a->rows, (long long)a->width,
             (long long)a->begin, a->unit);
}

const td_op td_op_update_rows = {
    .name       = "update_rows",
    .inputs     = -1,
    .flags      = TD_OP_INPLACE,
    .attr_bytes = sizeof(td_update_rows_attr),
    .place      = whole_rule,
    .cost       = update_rows_cost,
    .cpu        = update_rows_cpu,
    .cuda       = TD_CUDA(td_update_rows_cuda, td_update_rows_cuda_prepare),
    .print      = update_rows_print,
    .inplace    = { 0, 1 },
};
