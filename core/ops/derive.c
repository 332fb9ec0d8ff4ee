/* Reverse mode over a decomposition that was just recorded; see derive.h.
 *
 * Values are the call's inputs and what the decomposition made, which are consecutive in the program: a table of both,
 * inputs first.
 */
#include "core/ops/derive.h"

#include "core/ops/op.h"

enum { FEW = 8 }; /* inputs of a primitive, outputs of one */

typedef struct derivation {
    const td_gradient_call *g;
    td_program *p;
    uint32_t first_node, end_node;
    td_id first, end;                         /* values made by the decomposition */
    td_id *gradient;                          /* of each value of the table, or TD_NONE */
    bool *active;                             /* depends on an input that is wanted */
} derivation;

/* Place of value v in the table; -1: it is from before the decomposition and not an input. */
static int64_t place_of(const derivation *d, td_id v)
{
    if (v >= d->first)
        return d->g->inputs + (int64_t)(v - d->first);
    for (int i = 0; i < d->g->inputs; i++)
        if (d->g->in[i].id == v)
            return i;
    return -1;
}

static void find_active(derivation *d)
{
    for (int i = 0; i < d->g->inputs; i++)
        d->active[i] = d->g->wanted[i];
    for (uint32_t n = d->first_node; n < d->end_node; n++) {
        const td_node *node = td_node_at(d->p, n);
        bool any = false;
        for (uint32_t i = 0; i < node->inputs; i++) {
            int64_t at = place_of(d, td_node_inputs(d->p, node)[i]);
            any = any || (at >= 0 && d->active[at]);
        }
        for (uint32_t k = 0; k < node->outputs; k++) {
            td_id v = node->output + k;
            d->active[place_of(d, v)] = any && td_is_float((td_dtype)td_value_at(d->p, v)->dtype);
        }
    }
}

static void add_gradient(derivation *d, td_id v, td_tensor dv)
{
    int64_t at = place_of(d, v);
    if (at < 0 || !d->active[at] || td_failed(dv))
        return;
    if (d->gradient[at] != TD_NONE)
        dv = td_add_at(td_handle(d->p, d->gradient[at]), dv, d->g->here);
    d->gradient[at] = td_handle_id(dv);
}

static bool has_gradient(const derivation *d, const td_node *n)
{
    bool arrived = false;
    for (uint32_t k = 0; k < n->outputs; k++) {
        int64_t at = place_of(d, n->output + k);
        arrived = arrived || (d->active[at] && d->gradient[at] != TD_NONE);
    }
    return arrived;
}

static bool reverse_node(derivation *d, const td_node *n)
{
    td_context *td = d->g->td;
    if (n->inputs > FEW || n->outputs > FEW || !n->op->gradient) {
        td_fail(td, TD_ERROR_UNSUPPORTED, "%s: cannot be differentiated as a part of another operation", n->op->name);
        return false;
    }
    td_id from[FEW];
    td_tensor in[FEW], din[FEW], out[FEW], dout[FEW];
    bool wanted[FEW];
    for (uint32_t i = 0; i < n->inputs; i++) {
        from[i] = td_node_inputs(d->p, n)[i];
        int64_t at = place_of(d, from[i]);
        in[i] = td_handle(d->p, from[i]);
        din[i] = td_no_tensor(td);
        wanted[i] = at >= 0 && d->active[at];
    }
    for (uint32_t k = 0; k < n->outputs; k++) {
        td_id dy = d->gradient[place_of(d, n->output + k)];
        out[k] = td_handle(d->p, n->output + k);
        dout[k] = dy == TD_NONE ? td_no_tensor(td) : td_handle(d->p, dy);
    }
    char *attr = n->attr_bytes ? td_alloc(td, n->attr_bytes, "program") : NULL; /* the program may grow under it */
    if (n->attr_bytes && !attr)
        return false;
    if (attr)
        memcpy(attr, td_node_attr(d->p, n), n->attr_bytes);
    n->op->gradient(&(td_gradient_call){ .td = td, .here = d->g->here, .attr = attr, .inputs = (int)n->inputs,
                                         .outputs = (int)n->outputs, .in = in, .out = out, .dout = dout,
                                         .wanted = wanted, .din = din });
    td_free(td, attr, n->attr_bytes, "program");
    for (uint32_t i = 0; i < n->inputs; i++)
        add_gradient(d, from[i], din[i]);
    return td_error(td) == TD_OK;
}

static void reverse(derivation *d, const td_tensor *out)
{
    find_active(d);
    for (int k = 0; k < d->g->outputs; k++)
        if (!td_failed(out[k]) && !td_failed(d->g->dout[k]))
            add_gradient(d, td_handle_id(out[k]), td_as(d->g->dout[k], td_dtype_at(out[k]), d->g->here));
    for (uint32_t n = d->end_node; n-- > d->first_node;) {
        td_node node = *td_node_at(d->p, n);
        if (has_gradient(d, &node) && !reverse_node(d, &node))
            return;
    }
    for (int i = 0; i < d->g->inputs; i++)
        if (d->g->wanted[i] && d->gradient[i] != TD_NONE)
            td_gradient_set(d->g, i, td_handle(d->p, d->gradient[i]));
}

void td_gradient_by_parts(const td_gradient_call *g, td_decomposition parts)
{
    td_program *p = g->td->program;
    derivation d = { .g = g, .p = p, .first_node = p->node_count, .first = p->value_count };
    td_tensor out[TD_CALL_OUTPUTS];
    for (int k = 0; k < TD_CALL_OUTPUTS; k++)
        out[k] = td_no_tensor(g->td);
    parts(g, out);
    d.end_node = p->node_count;
    d.end = p->value_count;
    size_t count = (size_t)g->inputs + (d.end - d.first), bytes = count * (sizeof *d.gradient + sizeof *d.active);
    if (td_error(g->td) != TD_OK || !(d.gradient = td_alloc(g->td, bytes, "program")))
        return;
    d.active = (bool *)(d.gradient + count);
    memset(d.gradient, 0xFF, count * sizeof *d.gradient);
    memset(d.active, 0, count * sizeof *d.active);
    reverse(&d, out);
    td_free(g->td, d.gradient, bytes, "program");
}
