/* Programs: arrays of nodes and values that grow, are copied, compared and printed. */
#include "core/internal.h"

#include <string.h>

void td_program_reset(td_program *p, uint32_t generation)
{
    p->node_count = p->value_count = p->input_count = p->attr_count = 0;
    p->generation = generation;
    p->hash = 0;
}

void td_program_drop(td_program *p)
{
    td_context *td = p->td;
    td_free(td, p->nodes, p->node_room * sizeof *p->nodes, "program");
    td_free(td, p->values, p->value_room * sizeof *p->values, "program");
    td_free(td, p->inputs, p->input_room * sizeof *p->inputs, "program");
    td_free(td, p->attrs, p->attr_room, "program");
    *p = (td_program){ .td = td };
}

void td_program_free(td_program *p)
{
    if (!p) return;
    td_context *td = p->td;
    td_program_drop(p);
    td_free(td, p, sizeof *p, "program");
}

bool td_program_copy(td_program *to, const td_program *from)
{
    *to = *from;
    to->nodes = NULL, to->values = NULL, to->inputs = NULL, to->attrs = NULL;
    to->node_room = to->value_room = to->input_room = to->attr_room = 0;
    td_context *td = from->td;
    bool room = td_grow(td, (void **)&to->nodes, &to->node_room, from->node_count, sizeof *to->nodes, "program") &&
                td_grow(td, (void **)&to->values, &to->value_room, from->value_count, sizeof *to->values, "program") &&
                td_grow(td, (void **)&to->inputs, &to->input_room, from->input_count, sizeof *to->inputs, "program") &&
                td_grow(td, (void **)&to->attrs, &to->attr_room, from->attr_count, 1, "program");
    if (!room) {
        td_program_drop(to);
        return false;
    }
    if (from->node_count) memcpy(to->nodes, from->nodes, from->node_count * sizeof *to->nodes);
    if (from->value_count) memcpy(to->values, from->values, from->value_count * sizeof *to->values);
    if (from->input_count) memcpy(to->inputs, from->inputs, from->input_count * sizeof *to->inputs);
    if (from->attr_count) memcpy(to->attrs, from->attrs, from->attr_count);
    return true;
}

static bool same_node(const td_node *x, const td_node *y)
{
    return x->op == y->op && x->module == y->module && x->phase == y->phase && x->scope == y->scope && x->input == y->input &&
           x->output == y->output && x->attr == y->attr && x->attr_bytes == y->attr_bytes && x->inputs == y->inputs && x->outputs == y->outputs;
}

static bool same_value(const td_value *x, const td_value *y) { return x->dtype == y->dtype && td_shape_equal(x->shape, y->shape); }

/* Whether two recordings compute the same; where they were recorded does not matter. Shapes and dtypes follow from the nodes, except for those
 * of sources. A replayed step has the older one far away: what follows is not fetched. */
bool td_program_same(const td_program *a, const td_program *b)
{
    bool same = a->node_count == b->node_count && a->value_count == b->value_count && a->input_count == b->input_count &&
                a->attr_count == b->attr_count;
    for (uint32_t n = 0; n < a->node_count && same; n++) {
        const td_node *x = &a->nodes[n];
        same = same_node(x, &b->nodes[n]);
        for (uint32_t k = 0; k < x->outputs && !x->inputs && same; k++) same = same_value(&a->values[x->output + k], &b->values[x->output + k]);
    }
    return same && (!a->input_count || !memcmp(a->inputs, b->inputs, a->input_count * sizeof *a->inputs)) &&
           (!a->attr_count || !memcmp(a->attrs, b->attrs, a->attr_count));
}

/* ---- Building */

td_node *td_append(td_program *p, int inputs, int outputs, size_t attr_bytes)
{
    td_context *td = p->td;
    uint32_t attrs = (uint32_t)((attr_bytes + 7) & ~(size_t)7);
    bool room = td_room(td, (void **)&p->nodes, &p->node_room, p->node_count + 1, sizeof *p->nodes, "program") &&
                td_room(td, (void **)&p->values, &p->value_room, p->value_count + (uint32_t)outputs, sizeof *p->values, "program") &&
                td_room(td, (void **)&p->inputs, &p->input_room, p->input_count + (uint32_t)inputs, sizeof *p->inputs, "program") &&
                td_room(td, (void **)&p->attrs, &p->attr_room, p->attr_count + attrs, 1, "program");
    if (!room) return NULL;
    td_node *n = &p->nodes[p->node_count++];
    n->input = p->input_count, n->inputs = (uint32_t)inputs;
    n->output = p->value_count, n->outputs = (uint32_t)outputs;
    n->attr = p->attr_count, n->attr_bytes = (uint32_t)attr_bytes;
    n->hash = 0;
    n->after = TD_NONE;
    n->scope = 0;
    p->input_count += (uint32_t)inputs;
    p->value_count += (uint32_t)outputs;
    p->attr_count += attrs;
    if (attrs) memset(p->attrs + n->attr + attrs - 8, 0, 8);
    return n;
}

td_id td_emit(td_program *p, const td_emission *e)
{
    if (p->td->error != TD_OK) return TD_NONE;
    td_node *n = td_append(p, e->input_count, e->output_count, e->attr_bytes);
    if (!n) return TD_NONE;
    n->op = e->op;
    n->file = e->like ? e->like->file : NULL;
    n->line = e->like ? e->like->line : 0;
    n->module = e->like ? e->like->module : 0;
    n->phase = e->like ? e->like->phase : e->phase;
    n->scope = e->like ? e->like->scope : 0;
    n->after = e->after;
    if (e->input_count) memcpy(p->inputs + n->input, e->inputs, (size_t)e->input_count * sizeof *e->inputs);
    if (e->attr_bytes) memcpy(p->attrs + n->attr, e->attr, e->attr_bytes);
    for (int k = 0; k < e->output_count; k++) {
        td_value *v = &p->values[n->output + (uint32_t)k];
        *v = e->outputs[k];
        v->node = p->node_count - 1;
        v->output = (uint16_t)k;
    }
    return e->output_count ? n->output : TD_NONE;
}

bool td_copy_node(td_program *to, const td_program *from, uint32_t index, td_id *map)
{
    const td_node *n = &from->nodes[index];
    td_id few[16], *inputs = few;
    if (n->inputs > 16 && !(inputs = td_alloc(to->td, n->inputs * sizeof *inputs, "program"))) return false;
    for (uint32_t i = 0; i < n->inputs; i++) inputs[i] = map[from->inputs[n->input + i]];
    td_id first = td_emit(to, &(td_emission){
        .op = n->op, .like = n, .inputs = inputs, .input_count = (int)n->inputs,
        .attr = td_node_attr(from, n), .attr_bytes = n->attr_bytes,
        .outputs = n->outputs ? from->values + n->output : NULL, .output_count = (int)n->outputs,
        .after = n->after == TD_NONE ? TD_NONE : map[n->after],
    });
    if (inputs != few) td_free(to->td, inputs, n->inputs * sizeof *inputs, "program");
    for (uint32_t k = 0; k < n->outputs; k++) map[n->output + k] = first + k;
    return to->td->error == TD_OK;
}

td_program *td_pass_begin(td_context *td)
{
    td_program *p = td->error == TD_OK ? td_alloc(td, sizeof *p, "program") : NULL;
    if (!p) return NULL;
    *p = (td_program){ .td = td };
    td_program_reset(p, ++td->generation);
    td->program = p;
    return p;
}

td_program *td_pass_end(td_program *p)
{
    td_context *td = p->td;
    td->program = &td->recording;
    if (td->error == TD_OK) return p;
    td_program_free(p);
    return NULL;
}

td_tensor td_handle(const td_program *p, td_id id) { return (td_tensor){ .td = p->td, .id = id, .generation = p->generation }; }
td_id td_handle_id(td_tensor t) { return t.id; }

td_scope td_scope_of(td_context *td, const td_node *n, uint32_t phase)
{
    td_scope before = { td->module, td->phase };
    td->module = n->module;
    td->phase = phase;
    return before;
}

void td_scope_restore(td_context *td, td_scope scope)
{
    td->module = scope.module;
    td->phase = scope.phase;
}

char *td_live_nodes(const td_program *p)
{
    char *live = td_alloc(p->td, p->node_count, "program");
    if (!live) return NULL;
    for (uint32_t n = p->node_count; n-- > 0;) live[n] = (p->nodes[n].op->flags & TD_OP_EFFECT) != 0;
    for (uint32_t n = p->node_count; n-- > 0;) {
        if (!live[n]) continue;
        const td_node *node = &p->nodes[n];
        for (uint32_t i = 0; i < node->inputs; i++) live[p->values[p->inputs[node->input + i]].node] = 1;
        if (node->after != TD_NONE) live[p->values[node->after].node] = 1;
    }
    return live;
}

void td_only_readers(const td_program *p, const char *live, uint32_t *reader)
{
    for (uint32_t v = 0; v < p->value_count; v++) reader[v] = TD_NONE;
    for (uint32_t n = 0; n < p->node_count; n++) {
        const td_node *node = &p->nodes[n];
        for (uint32_t i = 0; live[n] && i < node->inputs; i++) {
            uint32_t *of = &reader[p->inputs[node->input + i]];
            *of = *of == TD_NONE ? n : TD_MANY;
        }
        if (live[n] && node->after != TD_NONE) reader[node->after] = TD_MANY;
    }
}

/* ---- Printing: "%3 = linear %0 %1 %2  f32 (144, 1024) S0  hidden" */

static void print_placement(td_text *b, const td_mesh *mesh, td_placement place)
{
    static const char letters[] = "RSPF";
    for (int a = 0; a < mesh->axes; a++) {
        td_text_add(b, "%s%c", a ? "," : " ", letters[(int)place.kind[a]]);
        if (place.kind[a] == TD_SHARDED) td_text_add(b, "%d", place.dim[a]);
    }
    if (place.memory == TD_HOST) td_text_add(b, " host");
}

static void print_node(td_text *b, const td_program *p, const td_node *n)
{
    const td_context *td = p->td;
    char shape[TD_SHAPE_TEXT], attributes[256] = "";
    for (uint32_t k = 0; k < n->outputs; k++) td_text_add(b, k ? ", %%%u" : "%%%u", n->output + k);
    td_text_add(b, n->outputs ? " = %s" : "%s", n->op->name);
    if (n->op->print) n->op->print(p, n, attributes, sizeof attributes);
    if (*attributes) td_text_add(b, "[%s]", attributes);
    for (uint32_t i = 0; i < n->inputs; i++) td_text_add(b, " %%%u", p->inputs[n->input + i]);
    for (uint32_t k = 0; k < n->outputs; k++) {
        const td_value *v = &p->values[n->output + k];
        td_text_add(b, "%s%s %s", k ? ", " : "  ", td_dtype_name((td_dtype)v->dtype), td_shape_text(v->shape, shape));
        print_placement(b, &td->mesh, v->place);
    }
    const char *path = td_module_path(td, n->module);
    if (*path || n->phase) td_text_add(b, " ");
    if (*path) td_text_add(b, " %s", path);
    if (n->phase & TD_BACKWARD_PHASE) td_text_add(b, " backward");
    if (n->phase >> 1) td_text_add(b, " micro %u", n->phase >> 1);
    td_text_add(b, "\n");
}

char *td_program_text(const td_program *p)
{
    td_text b = { .td = p->td };
    td_text_add(&b, "%s", "");
    for (uint32_t n = 0; n < p->node_count; n++) print_node(&b, p, &p->nodes[n]);
    if (!b.text) return NULL;
    char *text = td_copy_text(p->td, b.text, "host");
    td_free(p->td, b.text, b.room, "host");
    return text;
}

void td_program_log(const td_program *p, td_stage stage)
{
    static const char *const titles[TD_STAGES] = { "record", "precision", "grad", "simplify", "place", "schedule", "fuse", "plan" };
    if (!td_stage_printed(p->td, stage)) return;
    char *text = td_program_text(p);
    if (!text) return;
    td_text b = { .td = p->td };
    td_text_add(&b, "-- %s: %u nodes\n%s", titles[stage], p->node_count, text);
    if (b.text) p->td->options.log(p->td->options.log_user, TD_LOG_PROGRAM, b.text);
    td_free(p->td, b.text, b.room, "host");
    td_free(p->td, text, strlen(text) + 1, "host");
}

td_id td_stored_value(const td_program *p, uint32_t unit)
{
    for (uint32_t n = 0; n < p->node_count; n++)
        if (p->nodes[n].op == &td_op_store && ((const td_unit_attr *)td_node_attr(p, &p->nodes[n]))->unit == unit)
            return td_node_inputs(p, &p->nodes[n])[0];
    return TD_NONE;
}
