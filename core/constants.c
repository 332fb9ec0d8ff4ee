/* constants: on a GPU small values that are the same in every step are no calls. A fill of few bytes, and what broadcasts and reshapes make
 * of one, is a constant: the host writes it among the step's inputs (device_exchange.h), which come in one copy anyway.
 *
 * What is stored or kept as an output stays a call, which writes it where it has to be.
 *
 * Small chains of what is there when the step begins, a count of updates and one more, say, come first: then they need not be waited for
 * (queues.c).
 */
#include "core/internal.h"
#include "core/ops/list.h"
#include "core/ops/op.h"

#include <stdio.h>
#include <string.h>

enum { MOST_BYTES = 4096 };                   /* what the host writes in less time than a call takes */

static void constant_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    snprintf(to, room, "%g", ((const td_constant_attr *)td_node_attr(p, n))->value);
}

const td_op td_op_constant = { .name = "constant", .flags = TD_OP_SOURCE, .attr_bytes = sizeof(td_constant_attr), .print = constant_print };

typedef struct constants {
    const td_program *in;
    td_program *out;
    td_id *map;
    td_id *from;                              /* value of in -> the fill that it is made of, if it can be a constant; else TD_NONE */
    char *live;
    char *done;                               /* node of in: it is in `out`, or needs not be */
    char *read;                               /* value of in: by something that is no constant itself */
    void *memory;
    size_t bytes;
} constants;

/* Whether v is small and on the device. */
static bool is_small(const td_program *p, td_id v)
{
    const td_value *value = &p->values[v];
    td_shape local = td_local_shape(&p->td->mesh, value->shape, value->place);
    return value->place.memory == TD_DEVICE && td_shape_elements(local) * td_dtype_size((td_dtype)value->dtype) <= MOST_BYTES;
}

/* The fill that node n gives the value of; TD_NONE: it computes something, or is too large. */
static td_id fill_behind(const constants *c, const td_node *n)
{
    if (n->after != TD_NONE || n->outputs != 1 || !is_small(c->in, n->output)) return TD_NONE;
    if (n->op == &td_op_fill) return n->output;
    return n->op == &td_op_broadcast || n->op == &td_op_reshape ? c->from[td_node_inputs(c->in, n)[0]] : TD_NONE;
}

static bool open_tables(constants *c)
{
    uint32_t values = c->in->value_count;
    c->bytes = values * (2 * sizeof(td_id) + 1) + c->in->node_count;
    c->memory = td_alloc(c->in->td, c->bytes, "program");
    c->live = td_live_nodes(c->in);
    if (!c->memory || !c->live) return false;
    memset(c->memory, 0xFF, c->bytes);
    c->map = c->memory;
    c->from = c->map + values;
    c->read = (char *)(c->from + values);
    c->done = c->read + values;
    memset(c->read, 0, values + c->in->node_count);
    return true;
}

/* Which values are constants, and which of them are read by what is none. What an effect reads, through views too, is none. */
static void find(constants *c)
{
    for (uint32_t i = 0; i < c->in->node_count; i++) {
        const td_node *n = &c->in->nodes[i];
        if (c->live[i] && n->outputs) c->from[n->output] = fill_behind(c, n);
    }
    for (uint32_t i = c->in->node_count; i-- > 0;) {
        const td_node *n = &c->in->nodes[i];
        bool folds = n->outputs && c->from[n->output] != TD_NONE;
        bool shows = n->op->flags & (TD_OP_EFFECT | TD_OP_VIEW);
        for (uint32_t k = 0; c->live[i] && !folds && k < n->inputs; k++) {
            td_id v = td_node_inputs(c->in, n)[k];
            if (shows) c->from[v] = TD_NONE;
            else c->read[v] = 1;
        }
    }
}

static bool take(constants *c, uint32_t index)
{
    const td_node *n = &c->in->nodes[index];
    if (c->done[index]) return true;
    c->done[index] = 1;
    td_id fill = n->outputs ? c->from[n->output] : TD_NONE;
    if (fill == TD_NONE) return td_copy_node(c->out, c->in, index, c->map);
    if (!c->read[n->output]) return true;
    td_constant_attr attr = { .value = op_fill_value(td_node_attr(c->in, td_producer(c->in, fill))) };
    c->map[n->output] = td_emit(c->out, &(td_emission){ .op = &td_op_constant, .like = n, .attr = &attr, .attr_bytes = sizeof attr,
                                                        .outputs = &c->in->values[n->output], .output_count = 1, .after = TD_NONE });
    return c->in->td->error == TD_OK;
}

/* Whether node n is a small computation of what is there when the step begins, through views and other such. */
static bool is_early(const constants *c, const td_node *n)
{
    bool early = n->after == TD_NONE && n->outputs == 1 && is_small(c->in, n->output) && (n->op->flags & TD_OP_POINTWISE);
    for (uint32_t i = 0; i < n->inputs && early; i++) {
        td_id v = td_node_inputs(c->in, n)[i];
        while (td_producer(c->in, v)->op->flags & TD_OP_VIEW) v = td_node_inputs(c->in, td_producer(c->in, v))[0];
        early = (td_producer(c->in, v)->op->flags & TD_OP_SOURCE) || c->from[v] != TD_NONE || c->done[c->in->values[v].node];
    }
    return early;
}

/* Node number `index` behind what it reads, of which none but views and sources are missing. */
static bool take_early(constants *c, uint32_t index)
{
    const td_node *n = &c->in->nodes[index];
    if (c->done[index]) return true;
    for (uint32_t i = 0; i < n->inputs; i++)
        if (!take_early(c, c->in->values[td_node_inputs(c->in, n)[i]].node)) return false;
    return take(c, index);
}

td_program *td_constants_pass(const td_program *in)
{
    constants c = { .in = in };
    td_program *out = NULL;
    if (open_tables(&c) && (c.out = td_pass_begin(in->td))) {
        find(&c);
        for (uint32_t n = 0; n < in->node_count; n++)
            if (c.live[n] && is_early(&c, &in->nodes[n]) && !take_early(&c, n)) break;
        for (uint32_t n = 0; n < in->node_count; n++)
            if (c.live[n] && !take(&c, n)) break;
        out = td_pass_end(c.out);
    }
    td_free(in->td, c.live, in->node_count, "program");
    td_free(in->td, c.memory, c.bytes, "program");
    return out;
}
