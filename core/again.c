/* again: what is cheap to make is made twice where keeping it in between is what the peak consists of.
 *
 * Such a value is pointwise, was last read before the moment at which most is alive, is read after it, and its operands are there by then
 * anyway: gelu(x) of a large layer, say, which a product reads in the forward and its gradient in the backward, where x is read too. Behind
 * the peak it is made again, by the same operation of the same operands, to the same bits. Of several the largest for what they move
 * come first, the latest of equal ones. A product that gives gelu and what gelu is of (linear_gelu) is taken apart for it.
 *
 * How much may be moved for it is the caller's to say; on a GPU a call takes its time however little it moves. Nothing else of the program
 * changes, and collectives keep their order.
 */
#include "core/ops/fused.h"
#include "core/peak.h"

#include <string.h>

enum {
    LEAST_SHARE = 100,                        /* smaller parts of what is alive are not worth a call */
    GPU_CALL_BYTES = 8 << 20,                 /* what a GPU moves in the 2 us that a call takes it at the least */
};

typedef struct search {
    const td_planned *plan;
    const td_program *p;
    td_id *shown;                             /* value -> the value that it shows through views, or itself */
    int32_t *task;                            /* node -> its task; -1: it has none */
    int32_t *before, *behind, *last;          /* value shown -> its last reader up to the peak, its first behind it, its last; -1: none */
    td_id *again;                             /* value of p -> what stands for it behind the peak, in the new program, or TD_NONE */
    char *chosen;                             /* value: 1 it is made again, 2 it must stay */
    int32_t peak;
    void *memory;
    size_t bytes;
} search;

static void note_read(search *s, td_id v, int32_t task)
{
    td_id shown = s->shown[v];
    if (task <= s->peak && task > s->before[shown]) s->before[shown] = task;
    if (task > s->peak && (s->behind[shown] < 0 || task < s->behind[shown])) s->behind[shown] = task;
    if (task > s->last[shown]) s->last[shown] = task;
}

static void note_node(search *s, uint32_t index)
{
    const td_node *n = &s->p->nodes[index];
    for (uint32_t k = 0; k < n->outputs; k++) {
        bool view = (n->op->flags & TD_OP_VIEW) && n->inputs;
        s->shown[n->output + k] = view ? s->shown[s->p->inputs[n->input]] : n->output + k;
    }
    for (uint32_t i = 0; i < n->inputs; i++) {
        td_id v = s->p->inputs[n->input + i];
        if (n->op->flags & TD_OP_EFFECT) s->chosen[s->shown[v]] = 2;
        else if (s->task[index] >= 0) note_read(s, v, s->task[index]);
    }
    if (n->after != TD_NONE) s->chosen[s->shown[n->after]] = 2;
}

static bool open_search(search *s)
{
    uint32_t nodes = s->p->node_count, values = s->p->value_count;
    s->bytes = values * (2 * sizeof(td_id) + 3 * sizeof(int32_t) + 1) + nodes * sizeof(int32_t);
    s->memory = td_alloc(s->p->td, s->bytes, "program");
    if (!s->memory) return false;
    memset(s->memory, 0xFF, s->bytes);
    s->shown = s->memory;
    s->again = s->shown + values;
    s->before = (int32_t *)(s->again + values);
    s->behind = s->before + values;
    s->last = s->behind + values;
    s->task = s->last + values;
    s->chosen = (char *)(s->task + nodes);
    memset(s->chosen, 0, values);
    int64_t alive;
    s->peak = td_plan_peak(s->plan, &alive);
    for (uint32_t t = s->plan->task_count; t-- > 0;) s->task[s->plan->tasks[t].node] = (int32_t)t; /* copies of a node come after it */
    for (uint32_t n = 0; n < nodes; n++) note_node(s, n);
    return true;
}

/* ---- Which */

static bool is_kept_gelu(const td_node *n) { return n->op == &td_op_linear_gelu && n->outputs == 2 && n->after == TD_NONE; }

/* Operands are read then or later, or lie in no arena; none of them is made again itself. */
static bool operands_stay(const search *s, const td_node *n, int32_t until)
{
    if (is_kept_gelu(n)) return s->chosen[n->output + 1] != 1 && s->last[n->output + 1] > s->peak; /* then it stays on in gelu's place */
    for (uint32_t i = 0; i < n->inputs; i++) {
        td_id v = s->shown[s->p->inputs[n->input + i]];
        bool source = td_producer(s->p, v)->op->flags & TD_OP_SOURCE;
        if (s->chosen[v] == 1 || (!source && s->last[v] < until)) return false;
    }
    return true;
}

static bool may_be_made_again(const search *s, const td_task *task)
{
    const td_node *n = &s->p->nodes[task->node];
    bool cheap = is_kept_gelu(n) ||
                 ((n->op->flags & TD_OP_POINTWISE) && !(n->op->flags & TD_OP_RANDOM) && n->outputs == 1 && n->after == TD_NONE);
    if (!n->inputs || n->inputs > TD_FUSED_INPUTS) return false;
    if (!cheap || task->kernel.op != n->op || s->chosen[n->output] || s->p->values[n->output].place.memory == TD_HOST) return false;
    bool spans = s->task[task->node] < s->peak && s->before[n->output] < s->peak && s->behind[n->output] > s->peak;
    return spans && operands_stay(s, n, s->behind[n->output]);
}

static int64_t bytes_of(const td_task *task)
{
    const td_arg *out = &task->kernel.out[0];
    return td_shape_elements(out->shape) * td_dtype_size(out->dtype);
}

/* What making it again moves, or could be moved meanwhile: what a product gave along is read once more in the forward too. */
static int64_t moved_for(const search *s, const td_task *task)
{
    int64_t moved = is_kept_gelu(&s->p->nodes[task->node]) ? 3 * bytes_of(task) : task->cost.bytes;
    return s->p->td->device->is_gpu && moved < GPU_CALL_BYTES ? GPU_CALL_BYTES : moved;
}

/* The next to be chosen; NULL: nothing is left that is worth it and moves at most `most` bytes. */
static const td_task *best_task(const search *s, int64_t most)
{
    const td_task *best = NULL;
    for (uint32_t t = 0; t < s->plan->task_count && (int32_t)t < s->peak; t++) {
        const td_task *task = &s->plan->tasks[t];
        if (moved_for(s, task) > most || bytes_of(task) < s->plan->live_bytes / LEAST_SHARE || !may_be_made_again(s, task)) continue;
        bool better = !best || (double)bytes_of(task) * (double)moved_for(s, best) >= (double)bytes_of(best) * (double)moved_for(s, task);
        if (better) best = task;
    }
    return best;
}

/* How many bytes less are alive at the peak. */
static int64_t choose(search *s, int64_t wanted, int64_t *budget)
{
    int64_t spared = 0;
    for (const td_task *task; spared < wanted && (task = best_task(s, *budget));) {
        const td_node *n = &s->p->nodes[task->node];
        s->chosen[n->output] = 1;
        /* What it is made of is read longer. */
        if (is_kept_gelu(n)) s->chosen[n->output + 1] = 2;
        else for (uint32_t i = 0; i < n->inputs; i++) s->chosen[s->shown[s->p->inputs[n->input + i]]] = 2;
        *budget -= moved_for(s, task);
        spared += bytes_of(task);
    }
    return spared;
}

/* ---- The new program */

static td_id emit(search *s, td_program *out, const td_op *op, const td_node *like, const td_id *in, int count, td_id as)
{
    return td_emit(out, &(td_emission){ .op = op, .like = like, .inputs = in, .input_count = count, .outputs = &s->p->values[as],
                                        .output_count = 1, .after = TD_NONE });
}

/* A layer with gelu as the layer and gelu. */
static bool take_apart(search *s, td_program *out, const td_node *n, td_id *map)
{
    td_id in[3];
    for (uint32_t i = 0; i < n->inputs; i++) in[i] = map[s->p->inputs[n->input + i]];
    map[n->output + 1] = emit(s, out, &td_op_linear, n, in, (int)n->inputs, n->output + 1);
    map[n->output] = emit(s, out, &td_op_gelu_tanh, n, &map[n->output + 1], 1, n->output);
    return s->p->td->error == TD_OK;
}

/* What stands for v behind the peak: the value made again, as it was shown. */
static td_id seen_behind(search *s, td_program *out, td_id v, td_id *map)
{
    if (s->again[v] != TD_NONE) return s->again[v];
    const td_node *n = td_producer(s->p, v);
    td_id in[TD_FUSED_INPUTS], shown = s->shown[v];
    td_node like = *n;
    like.phase |= TD_BACKWARD_PHASE;
    if (is_kept_gelu(n)) return s->again[v] = emit(s, out, &td_op_gelu_tanh, &like, &map[v + 1], 1, v);
    for (uint32_t i = 0; i < n->inputs; i++) {
        td_id from = s->p->inputs[n->input + i];
        in[i] = v == shown ? map[from] : seen_behind(s, out, from, map);
    }
    return s->again[v] = td_emit(out, &(td_emission){ .op = n->op, .like = &like, .inputs = in, .input_count = (int)n->inputs,
                                                      .attr = td_node_attr(s->p, n), .attr_bytes = n->attr_bytes,
                                                      .outputs = &s->p->values[v], .output_count = 1, .after = TD_NONE });
}

static bool copy_node(search *s, td_program *out, uint32_t index, td_id *map)
{
    const td_node *n = &s->p->nodes[index];
    for (uint32_t i = 0; s->task[index] > s->peak && i < n->inputs; i++) {
        td_id v = s->p->inputs[n->input + i];
        if (s->chosen[s->shown[v]] == 1) map[v] = seen_behind(s, out, v, map);
    }
    if (is_kept_gelu(n) && s->chosen[n->output] == 1) return take_apart(s, out, n, map);
    return td_copy_node(out, s->p, index, map);
}

static td_program *rewritten(search *s)
{
    td_context *td = s->p->td;
    size_t bytes = s->p->value_count * sizeof(td_id);
    td_id *map = td_alloc(td, bytes, "program");
    td_program *out = map ? td_pass_begin(td) : NULL;
    for (uint32_t n = 0; out && n < s->p->node_count; n++)
        if (!copy_node(s, out, n, map)) break;
    td_free(td, map, bytes, "program");
    return out ? td_pass_end(out) : NULL;
}

td_program *td_again_pass(const td_planned *plan, int64_t wanted, int64_t *budget)
{
    search s = { .plan = plan, .p = plan->program };
    td_program *out = NULL;
    if (plan->task_count && open_search(&s) && choose(&s, wanted, budget) > 0) out = rewritten(&s);
    td_free(s.p->td, s.memory, s.bytes, "program");
    return out;
}
