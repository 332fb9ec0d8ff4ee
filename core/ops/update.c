/* Optimizer updates: one node a parameter group when recorded, one a unit when run.
 *
 *     gradients[states]                       -> every gradient as one flat value, in order
 *     gradient_norm gradients                 -> sqrt(sum of squares), or the largest magnitude, scalar
 *     update[rule, states] gradients rate scale updates [when]
 *
 * differentiate turns each into work on units, where a group is a list of segments of the flat range:
 *
 *     sum_squares flat                        -> scalar
 *     max_abs flat                            -> the largest magnitude in each of M equal parts (M), as many as ranks may share it
 *     update_unit parameter gradient moments.. [copy] rate scale updates [when] -> parameter moments.. [copy]
 *
 * Where `when` is 0 on the device, parameter and moments keep their values. Tables with row-sparse gradients, and rules with moments of
 * rows, are updated by update_rows.c.
 */
#include "core/ops/update.h"

#include "core/ops/convert.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

TD_CUDA_KERNEL(td_sum_squares_cuda);
TD_CUDA_PREPARE(td_sum_squares_cuda_prepare);
TD_CUDA_KERNEL(td_max_abs_cuda);
TD_CUDA_PREPARE(td_max_abs_cuda_prepare);
TD_CUDA_KERNEL(td_update_unit_cuda);
TD_CUDA_PREPARE(td_update_unit_cuda_prepare);

/* ---- As recorded */

static bool gradients_shape(td_call *call)
{
    const td_gradients_attr *a = call->attr;
    const uint32_t *state = (const uint32_t *)(a + 1);
    int64_t n = 0;
    for (uint32_t i = 0; i < a->count; i++) n += call->td->states[state[i]].elements;
    call->out[0].shape = TD_SHAPE(n);
    call->out[0].dtype = (uint8_t)td_float(call->td);
    return true;
}

static void gradients_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    snprintf(to, room, "%u parameters", ((const td_gradients_attr *)td_node_attr(p, n))->count);
}

const td_op td_op_gradients = { .name = "gradients", .flags = TD_OP_SOURCE | TD_OP_VIRTUAL, .shape = gradients_shape, .print = gradients_print };

/* Checks that the states can be trained; gives a hash of their names. */
static bool check_states(td_context *td, const char *what, const td_state *states, int count, uint64_t *hash, td_here here)
{
    *hash = 0;
    for (int i = 0; i < count; i++) {
        if (states[i].id == TD_NONE) return false;
        const td_state_entry *s = &td->states[states[i].id];
        *hash = td_mix(*hash, s->hash);
        if (!td_may_change(states[i], what, here)) return false;
        if (s->kind == TD_PARAMETER && !s->frozen) continue;
        td_fail(td, TD_ERROR_USAGE, "%s: '%s' is not a parameter that trains", what, s->name);
        return false;
    }
    if (!count) td_fail(td, TD_ERROR_USAGE, "%s: there is no parameter to train", what);
    return count > 0;
}

enum { FEW_STATES = 512 };
_Static_assert(sizeof(td_group_attr) <= TD_STATES_HEAD_BYTES, "the larger of the two heads has room");

td_tensor td_record_states(td_context *td, const td_op *op, td_here here, int n, const td_tensor *in, const void *head, size_t head_bytes,
                           const td_state *states, int count)
{
    char few[TD_STATES_HEAD_BYTES + FEW_STATES * sizeof(uint32_t)];
    size_t bytes = head_bytes + (size_t)count * sizeof(uint32_t);
    char *attr = count <= FEW_STATES ? few : td_alloc(td, bytes, "program");
    if (!attr) return td_no_tensor(td);
    memcpy(attr, head, head_bytes);
    for (int i = 0; i < count; i++) memcpy(attr + head_bytes + (size_t)i * sizeof(uint32_t), &states[i].id, sizeof(uint32_t));
    td_tensor t = td_record_sized(td, op, here, n, in, attr, bytes);
    if (attr != few) td_free(td, attr, bytes, "program");
    return t;
}

td_tensor td_gradients_at(td_context *td, const td_state *states, int count, td_here here)
{
    uint64_t hash;
    if (td->error != TD_OK || !check_states(td, "gradients", states, count, &hash, here)) return td_no_tensor(td);
    td_gradients_attr head = { .names_hash = hash, .count = (uint32_t)count };
    td->gradients_recorded = true;
    return td_record_states(td, &td_op_gradients, here, 0, NULL, &head, sizeof head, states, count);
}

static bool norm_shape(td_call *call)
{
    call->out[0].dtype = (uint8_t)td_float(call->td);
    return true;
}

static void norm_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    if (((const td_gradient_norm_attr *)td_node_attr(p, n))->largest) snprintf(to, room, "largest");
}

const td_op td_op_gradient_norm = { .name = "gradient_norm", .inputs = 1, .flags = TD_OP_VIRTUAL, .attr_bytes = sizeof(td_gradient_norm_attr),
                                    .shape = norm_shape, .print = norm_print };

static td_tensor record_norm(td_tensor gradients, td_gradient_norm_attr attr, td_here here)
{
    td_context *td = gradients.td;
    if (!td || td->error != TD_OK) return td_no_tensor(td);
    if (gradients.generation == td->program->generation && td_producer(td->program, gradients.id)->op != &td_op_gradients) {
        td_fail(td, TD_ERROR_USAGE, "gradient_norm: needs what td_gradients gave %s", td_location(td, td->module, here.file, here.line));
        return td_no_tensor(td);
    }
    return td_record_sized(td, &td_op_gradient_norm, here, 1, &gradients, &attr, sizeof attr);
}

td_tensor td_gradient_norm_at(td_tensor gradients, td_here here) { return record_norm(gradients, (td_gradient_norm_attr){ 0 }, here); }
td_tensor td_gradient_max_at(td_tensor gradients, td_here here) { return record_norm(gradients, (td_gradient_norm_attr){ 1 }, here); }

static bool update_shape(td_call *call)
{
    static const char *const scalars[] = { "rate", "scale", "updates", "when" };
    char text[TD_SHAPE_TEXT];
    for (int i = 1; i < call->inputs; i++) {
        const td_value *v = call->in[i];
        if (td_shape_elements(v->shape) != 1 || v->dtype != (uint8_t)td_float(call->td))
            return td_call_fail(call, "%s is %s %s, must be a scalar of %s", scalars[i - 1], td_dtype_name((td_dtype)v->dtype),
                                td_shape_text(v->shape, text), td_dtype_name(td_float(call->td)));
    }
    call->outputs = 0;
    return true;
}

static void update_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_group_attr *a = td_node_attr(p, n);
    snprintf(to, room, "%s, %u parameters", p->td->rules[a->rule]->name, a->count);
}

const td_op td_op_update = { .name = "update", .inputs = -1, .flags = TD_OP_EFFECT | TD_OP_VIRTUAL, .shape = update_shape, .print = update_print };

uint32_t td_rule_number(td_context *td, const td_update_rule *rule)
{
    for (uint32_t r = 0; r < td->rule_count; r++)
        if (td->rules[r] == rule) return r;
    if (!td_grow(td, (void **)&td->rules, &td->rule_room, td->rule_count + 1, sizeof *td->rules, "host")) return TD_NONE;
    td->rules[td->rule_count] = rule;
    return td->rule_count++;
}

void td_update_at(const td_update_call *call, td_here here)
{
    td_context *td = call->gradients.td;
    uint64_t hash;
    if (td->error != TD_OK || !check_states(td, call->rule->name, call->states, call->count, &hash, here)) return;
    if (!td_update_allows(call->rule, call->states, call->count)) return;
    uint32_t rule = td_rule_number(td, call->rule);
    if (rule == TD_NONE) return;
    td_group_attr head = { .names_hash = td_mix(hash, td_hash_text(call->rule->name)), .rule = rule, .count = (uint32_t)call->count };
    memcpy(head.hyper, call->hyper, sizeof head.hyper);
    for (int i = 0; i < call->count; i++) td->states[call->states[i].id].use_generation = 0; /* the next read sees the new value */
    td_tensor in[] = { call->gradients, call->rate, call->scale, call->updates, call->when };
    td_record_states(td, &td_op_update, here, call->when.td && !td_failed(call->when) ? 5 : 4, in, &head, sizeof head, call->states, call->count);
    td->updates_recorded = true;
}

/* ---- As run: sum_squares. Blocks of a fixed size, summed in order: the same on any number of threads. */

enum { BLOCK = 8192 };

#define SUM_BLOCK(T)                                                                                   \
    {                                                                                                  \
        const T *x = (const T *)k->in[0].data + b * BLOCK;                                             \
        int64_t count = n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK;                                 \
        double lane[8] = { 0 };                                                                        \
        int64_t i = 0;                                                                                 \
        for (; i + 8 <= count; i += 8)                                                                 \
            for (int l = 0; l < 8; l++) lane[l] += (double)x[i + l] * (double)x[i + l];                \
        for (; i < count; i++) lane[0] += (double)x[i] * (double)x[i];                                 \
        sums[b] = ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7])); \
    }

static void sum_blocks(void *user, int64_t begin, int64_t end)
{
    const td_kernel *k = user;
    double *sums = k->workspace;
    int64_t n = td_shape_elements(k->in[0].shape);
    for (int64_t b = begin; b < end; b++) {
        if (k->in[0].dtype == TD_F64)
            SUM_BLOCK(double)
        else
            SUM_BLOCK(float)
    }
}

static int64_t blocks_of(const td_kernel *k) { return (td_shape_elements(k->in[0].shape) + BLOCK - 1) / BLOCK; }

static bool sum_squares_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    out->workspace_bytes = blocks_of(k) * (int64_t)sizeof(double);
    return true;
}

static void sum_squares_cpu(const td_kernel *k)
{
    int64_t blocks = blocks_of(k);
    td_parallel_for(k->run, blocks, 4, sum_blocks, (void *)k);
    double total = 0;
    for (int64_t b = 0; b < blocks; b++) total += ((const double *)k->workspace)[b];
    if (k->out[0].dtype == TD_F64)
        *(double *)k->out[0].data = total;
    else
        *(float *)k->out[0].data = (float)total;
}

static bool sum_squares_shape(td_call *call)
{
    call->out[0].dtype = call->in[0]->dtype;
    return true;
}

static void contracted_rule(const td_program *p, const td_node *n, td_place_rule *rule)
{
    (void)p, (void)n;
    memset(rule, 0, sizeof *rule);
    rule->in[0][0] = 1;
    rule->in[0][1] = 2;
}

static td_cost sum_squares_cost(const td_kernel *k)
{
    int64_t n = td_shape_elements(k->in[0].shape);
    return (td_cost){ .flops = 2 * n, .bytes = n * td_dtype_size(k->in[0].dtype) };
}

const td_op td_op_sum_squares = {
    .name = "sum_squares", .inputs = 1, .shape = sum_squares_shape, .place = contracted_rule, .cost = sum_squares_cost,
    .prepare = sum_squares_prepare, .cpu = sum_squares_cpu, .cuda = TD_CUDA(td_sum_squares_cuda, td_sum_squares_cuda_prepare),
};

/* ---- As run: max_abs. A NaN is the largest. */

static double magnitude(const td_arg *x, int64_t i)
{
    return x->dtype == TD_F64 ? fabs(((const double *)x->data)[i]) : fabs((double)((const float *)x->data)[i]);
}

typedef struct max_work {
    const td_kernel *k;
    int64_t begin, end;                       /* elements that are looked through */
    double *largest;                          /* of each block */
} max_work;

static void max_blocks(void *user, int64_t first, int64_t last)
{
    const max_work *w = user;
    for (int64_t b = first; b < last; b++) {
        int64_t begin = w->begin + b * BLOCK, end = begin + BLOCK < w->end ? begin + BLOCK : w->end;
        double largest = 0;
        for (int64_t i = begin; i < end; i++) {
            double m = magnitude(&w->k->in[0], i);
            largest = m > largest || m != m ? m : largest; /* past a NaN nothing is larger */
            if (m != m) break;
        }
        w->largest[b] = largest;
    }
}

static void max_abs_cpu(const td_kernel *k)
{
    int64_t n = td_shape_elements(k->in[0].shape), parts = td_shape_elements(k->out[0].shape), part = parts ? (n + parts - 1) / parts : 0;
    for (int64_t p = 0; p < parts; p++) {
        int64_t begin = p * part, end = begin + part;
        max_work w = { .k = k, .begin = begin < n ? begin : n, .end = end < n ? end : n, .largest = k->workspace };
        int64_t blocks = (w.end - w.begin + BLOCK - 1) / BLOCK;
        td_parallel_for(k->run, blocks, 4, max_blocks, &w);
        double largest = 0;
        for (int64_t b = 0; b < blocks && largest == largest; b++) largest = w.largest[b] <= largest ? largest : w.largest[b];
        if (k->out[0].dtype == TD_F64)
            ((double *)k->out[0].data)[p] = largest;
        else
            ((float *)k->out[0].data)[p] = (float)largest;
    }
}

/* Parts of a unit's value and of its maxima are the same ranks'; merged rows (N, D), whose maxima are flat, are everyone's. */
static void max_abs_rule(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    int64_t rank = p->values[td_node_inputs(p, n)[0]].shape.rank;
    for (int d = 0; d < rank && p->values[n->output].shape.rank == rank; d++) rule->in[0][d] = rule->out[0][d] = (int8_t)(d + 1);
}

const td_op td_op_max_abs = {
    .name = "max_abs", .inputs = 1, .place = max_abs_rule, .cost = sum_squares_cost, .prepare = sum_squares_prepare, .cpu = max_abs_cpu,
    .cuda = TD_CUDA(td_max_abs_cuda, td_max_abs_cuda_prepare),
};

/* ---- As run: update_unit */

static void flat_rule(const td_program *p, const td_node *n, td_place_rule *rule)
{
    (void)p, (void)n;
    memset(rule, 0, sizeof *rule);
    for (int8_t d = 0; d < 2; d++) { /* scalars have no dimensions */
        for (int i = 0; i < TD_RULE_INPUTS; i++) rule->in[i][d] = (int8_t)(d + 1);
        for (int i = 0; i < TD_RULE_OUTPUTS; i++) rule->out[i][d] = (int8_t)(d + 1);
    }
}

typedef struct update_work {
    const td_kernel *k;
    const td_update_rule *rule;
    const td_update_segment *segment;
    int64_t begin, end;                       /* of the segment, in this rank's range */
} update_work;

/* rate, scale, updates and, where the update has one, when. */
static const td_arg *scalars_of(const td_kernel *k)
{
    const td_update_attr *a = k->attr;
    return k->in + 2 + a->moments + a->copied;
}

static bool is_skipped(const td_kernel *k)
{
    const td_arg *when = scalars_of(k) + 3;
    return when < k->in + k->inputs && td_read_scalar(when) == 0;
}

static void update_rows(void *user, int64_t begin, int64_t end)
{
    const update_work *w = user;
    const td_kernel *k = w->k;
    const td_arg *scalars = scalars_of(k);
    int64_t item = td_dtype_size(k->in[0].dtype), at = w->begin + begin;
    td_update_range range = {
        .count = end - begin, .dtype = k->in[0].dtype,
        .parameter = (char *)k->out[0].data + at * item, .gradient = (const char *)k->in[1].data + at * item,
        .rate = td_read_scalar(&scalars[0]), .gradient_scale = td_read_scalar(&scalars[1]), .updates = td_read_scalar(&scalars[2]),
    };
    for (int m = 0; m < w->rule->moments; m++) range.moment[m] = (char *)k->out[1 + m].data + at * item;
    memcpy(range.hyper, w->segment->hyper, sizeof range.hyper);
    w->rule->cpu(&range);
    const td_arg *copy = ((const td_update_attr *)k->attr)->copied ? &k->out[k->outputs - 1] : NULL;
    if (copy) td_convert(copy->dtype, td_arg_at(copy, at), k->out[0].dtype, range.parameter, range.count);
}

static void update_unit_cpu(const td_kernel *k)
{
    const td_update_attr *a = k->attr;
    const td_update_segment *segments = (const td_update_segment *)(a + 1);
    const td_update_rule *rule = k->run->td->rules[a->rule];
    int64_t count = td_shape_elements(k->in[0].shape), first = td_arg_extent(k->run->mesh, &k->in[0], (int)k->in[0].shape.rank - 1).begin;
    for (int o = 0; o < k->outputs; o++) { /* the kernels work in place */
        const td_arg *from = &k->in[o ? 1 + o : 0];
        if (from->data != k->out[o].data) memcpy(k->out[o].data, from->data, (size_t)(count * td_dtype_size(from->dtype)));
    }
    if (is_skipped(k)) return;
    for (uint32_t s = 0; s < a->count; s++) {
        int64_t begin = segments[s].begin - first, end = segments[s].end - first;
        update_work w = { k, rule, &segments[s], begin > 0 ? begin : 0, end < count ? end : count };
        if (w.end > w.begin) td_parallel_for(k->run, w.end - w.begin, 16384, update_rows, &w);
    }
}

static void update_unit_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    const td_update_attr *a = td_node_attr(p, n);
    snprintf(to, room, "%s, unit %u%s", p->td->rules[a->rule]->name, a->unit, a->copied ? " and its copy" : "");
}

static td_cost update_unit_cost(const td_kernel *k)
{
    const td_update_attr *a = k->attr;
    const td_update_rule *rule = k->run->td->rules[a->rule];
    int64_t n = td_shape_elements(k->in[0].shape);
    int64_t copied = a->copied ? td_dtype_size(k->out[k->outputs - 1].dtype) : 0;
    return (td_cost){ .flops = rule->flops * n, .bytes = ((3 + 2 * rule->moments) * td_dtype_size(k->in[0].dtype) + copied) * n };
}

const td_op td_op_update_unit = {
    .name = "update_unit", .inputs = -1, .flags = TD_OP_INPLACE, .place = flat_rule, .cost = update_unit_cost,
    .cpu = update_unit_cpu, .cuda = TD_CUDA(td_update_unit_cuda, td_update_unit_cuda_prepare), .print = update_unit_print, .inplace = { 0, 2 },
};
