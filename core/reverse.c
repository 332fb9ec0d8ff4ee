/* The reverse sweep of reverse.h. */
#include "core/reverse.h"

#include "core/ops/op.h"

#include <string.h>

bool td_sweep_open(td_sweep *s, td_program *p)
{
    *s = (td_sweep){ .p = p, .nodes = p->node_count, .values = p->value_count };
    s->bytes = s->values * (2 * sizeof(td_id) + 2);
    s->memory = td_alloc(p->td, s->bytes, "program");
    if (!s->memory) return false;
    s->gradient = s->memory;
    s->again = s->gradient + s->values;
    s->active = (char *)(s->again + s->values);
    s->source = (bool *)(s->active + s->values);
    memset(s->gradient, 0xFF, 2 * s->values * sizeof(td_id));
    memset(s->active, 0, s->values * 2);
    return true;
}

void td_sweep_close(td_sweep *s) { td_free(s->p->td, s->memory, s->bytes, "program"); }

td_id td_gradient_sum(td_program *p, td_id a, td_id b, td_here here)
{
    return a == TD_NONE ? b : td_handle_id(td_add_at(td_handle(p, a), td_handle(p, b), here));
}

/* A value is active if it depends on a source; one with a rule of its own, if an input of the rule does. */
static void find_active(td_sweep *s)
{
    const td_program *p = s->p;
    for (uint32_t n = 0; n < s->nodes; n++) {
        const td_node *node = &p->nodes[n];
        char any = 0;
        for (uint32_t i = node->op == &td_op_with_gradient; i < node->inputs && !any; i++) any = s->active[p->inputs[node->input + i]];
        for (uint32_t k = 0; k < node->outputs; k++) {
            uint32_t v = node->output + k;
            s->active[v] = (any || s->source[v]) && td_is_float((td_dtype)p->values[v].dtype);
        }
    }
}

enum { FEW = 16 };

/* Value v of a scope of recomputation, computed again in the backward: its node once more, from what the scope reads. Nodes that read
 * nothing of the scope wait for `after`, the gradient that asked: else they would be what they are copies of. */
static td_id computed_again(td_sweep *s, td_id v, uint32_t scope, td_id after)
{
    td_program *p = s->p;
    td_context *td = p->td;
    td_node n = p->nodes[p->values[v].node];
    bool stays = n.scope != scope || (n.op->flags & (TD_OP_SOURCE | TD_OP_EFFECT)) || n.op == &td_op_part || s->source[v];
    if (stays || td->error != TD_OK) return v;
    if (s->again[v] != TD_NONE) return s->again[v];
    size_t bytes = n.inputs * sizeof(td_id) + n.outputs * sizeof(td_value) + n.attr_bytes + 8;
    td_value *outputs = td_alloc(td, bytes, "program"); /* copies: the program grows under what it holds */
    if (!outputs) return v;
    char *attr = (char *)(outputs + n.outputs);
    td_id *inputs = (td_id *)(attr + td_round_up(n.attr_bytes, 8));
    memcpy(outputs, p->values + n.output, n.outputs * sizeof *outputs);
    if (n.attr_bytes) memcpy(attr, p->attrs + n.attr, n.attr_bytes);
    bool first = true;
    for (uint32_t i = 0; i < n.inputs; i++) {
        td_id in = p->inputs[n.input + i];
        inputs[i] = computed_again(s, in, scope, after);
        first = first && inputs[i] == in;
    }
    td_node like = n;
    like.phase |= TD_BACKWARD_PHASE;
    td_id made = td_emit(p, &(td_emission){ .op = n.op, .like = &like, .inputs = inputs, .input_count = (int)n.inputs, .attr = attr,
                                            .attr_bytes = n.attr_bytes, .outputs = outputs, .output_count = (int)n.outputs,
                                            .after = first ? after : TD_NONE });
    td_free(td, outputs, bytes, "program");
    if (made == TD_NONE) return v;
    for (uint32_t k = 0; k < n.outputs; k++) s->again[n.output + k] = made + k;
    return s->again[v];
}

/* What the gradient rule of a node sees as value v. */
static td_id seen_by(td_sweep *s, td_id v, uint32_t scope, td_id after)
{
    return scope ? computed_again(s, v, scope, after) : v;
}

/* Records the reverse of node n, whose outputs' gradients are partly known. */
static bool reverse_node(td_sweep *s, uint32_t index, td_here here)
{
    td_program *p = s->p;
    td_context *td = p->td;
    td_node n = p->nodes[index];
    td_tensor few[4 * FEW], *handles = few;
    bool few_wanted[FEW], *wanted = few_wanted;
    size_t count = 2 * (size_t)n.inputs + 2 * (size_t)n.outputs, bytes = count * sizeof *handles + n.inputs;
    bool large = n.inputs > FEW || n.outputs > FEW;
    if (large) {
        handles = td_alloc(td, bytes, "program");
        if (!handles) return false;
        wanted = (bool *)(handles + count);
    }
    td_tensor none = td_no_tensor(td);
    td_id after = TD_NONE;
    for (uint32_t k = 0; k < n.outputs && after == TD_NONE; k++) after = s->gradient[n.output + k];
    td_tensor *in = handles, *din = in + n.inputs, *out = din + n.inputs, *dout = out + n.outputs;
    for (uint32_t i = 0; i < n.inputs; i++) {
        td_id v = p->inputs[n.input + i];
        in[i] = td_handle(p, seen_by(s, v, n.scope, after));
        din[i] = none;
        wanted[i] = s->active[v];
    }
    for (uint32_t k = 0; k < n.outputs; k++) {
        td_id v = n.output + k;
        out[k] = td_handle(p, seen_by(s, v, n.scope, after));
        dout[k] = s->gradient[v] == TD_NONE ? none : td_handle(p, s->gradient[v]);
    }
    if (!n.op->gradient) {
        td_fail(td, TD_ERROR_UNSUPPORTED, "%s: has no gradient %s", n.op->name, td_location(td, n.module, n.file, n.line));
    } else {
        td_scope before = td_scope_of(td, &n, n.phase | TD_BACKWARD_PHASE);
        char *attr = n.attr_bytes ? td_alloc(td, n.attr_bytes, "program") : NULL; /* the program may grow under it */
        if (attr) memcpy(attr, p->attrs + n.attr, n.attr_bytes);
        if (attr || !n.attr_bytes)
            n.op->gradient(&(td_gradient_call){ .td = td, .here = { n.file, n.line }, .attr = attr, .inputs = (int)n.inputs,
                                                .outputs = (int)n.outputs, .in = in, .out = out, .dout = dout, .wanted = wanted, .din = din });
        td_free(td, attr, n.attr_bytes, "program");
        for (uint32_t i = 0; i < n.inputs && td->error == TD_OK; i++) {
            td_id v = p->inputs[n.input + i];
            if (!td_failed(din[i]) && wanted[i]) s->gradient[v] = td_gradient_sum(p, s->gradient[v], din[i].id, here);
        }
        td_scope_restore(td, before);
    }
    if (large) td_free(td, handles, bytes, "program");
    return td->error == TD_OK;
}

bool td_sweep_run(td_sweep *s, td_id y, td_here here)
{
    td_program *p = s->p;
    td_context *td = p->td;
    find_active(s);
    if (!s->active[y]) return true;
    td_node top = p->nodes[p->values[y].node];
    td_value v = p->values[y];
    td_scope before = td_scope_of(td, &top, top.phase | TD_BACKWARD_PHASE);
    td_tensor ones = td_fill_at(td, (td_dtype)v.dtype, v.shape, 1, here);
    td_scope_restore(td, before);
    s->gradient[y] = td_handle_id(ones);
    for (uint32_t n = v.node + 1; n-- > 0 && td->error == TD_OK;) {
        td_node node = p->nodes[n];
        bool arrived = false, is_source = false;
        for (uint32_t k = 0; k < node.outputs; k++) {
            arrived = arrived || (s->active[node.output + k] && s->gradient[node.output + k] != TD_NONE);
            is_source = is_source || s->source[node.output + k];
        }
        if (arrived && !is_source && !reverse_node(s, n, here)) return false;
    }
    return td->error == TD_OK;
}
