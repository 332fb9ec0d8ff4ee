/* precision: under bf16 and f16, matrix products read 16 bits; everything else keeps what it is given.
 *
 * A recorded program is in f32. An operation of class TD_PRODUCT gets its f32 inputs cast to the context's 16-bit dtype and so gives that;
 * one of class TD_WIDE reads any float dtype and gives f32; the others compute in the dtype of their inputs, widened
 * to f32 where these differ. Outputs and everything about gradients, updates and state see f32 again.
 * A module may have a dtype of its own (td_set_dtype): its products get their inputs in that one.
 */
#include "core/internal.h"

#include <string.h>

typedef struct precision {
    td_context *td;
    const td_program *in;
    td_program *out;
    td_id *map;                               /* value of in -> of out */
    td_id *narrow;                            /* its copy in 16 bits, by value of in */
    td_id *wide;
} precision;

static td_here here_of(const td_node *n) { return (td_here){ n->file, n->line }; }

/* Value v of `in`, in dtype `to` where it is a float. */
static td_id in_dtype(precision *p, td_id v, td_dtype to, const td_node *reader)
{
    td_id now = p->map[v];
    td_dtype have = (td_dtype)p->out->values[now].dtype;
    if (have == to || (have != TD_F32 && !td_is_narrow(have))) return now;
    td_id *memo = td_is_narrow(to) ? &p->narrow[v] : &p->wide[v];
    if (*memo != TD_NONE && p->out->values[*memo].dtype == to) return *memo;
    *memo = td_handle_id(td_cast_at(td_handle(p->out, now), to, here_of(reader)));
    if (*memo != TD_NONE) p->out->nodes[p->out->values[*memo].node].scope = reader->scope; /* computed again where its reader is */
    return *memo;
}

static td_dtype dtype_wanted(const precision *p, const td_node *n)
{
    if (n->op->precision == TD_PRODUCT) return td_get_dtype((td_module){ p->td, n->module });
    if (n->op == &td_op_gradient) return TD_DTYPES;
    bool as_recorded = n->op == &td_op_output || n->op == &td_op_assign;
    td_dtype recorded = (td_dtype)p->in->values[p->in->inputs[n->input]].dtype;
    if (as_recorded && td_is_narrow(recorded)) return recorded;
    if (n->op->flags & (TD_OP_VIRTUAL | TD_OP_EFFECT)) return TD_F32;
    td_dtype narrow = TD_DTYPES;
    bool wide = false;
    for (uint32_t i = 0; i < n->inputs; i++) {
        uint8_t dtype = p->out->values[p->map[p->in->inputs[n->input + i]]].dtype;
        wide = wide || dtype == TD_F32 || (td_is_narrow(dtype) && narrow != TD_DTYPES && dtype != narrow);
        if (td_is_narrow(dtype)) narrow = (td_dtype)dtype;
    }
    if (n->op->precision == TD_WIDE || narrow == TD_DTYPES) return TD_DTYPES; /* as they are */
    return wide ? TD_F32 : narrow;
}

enum { FEW = 16 };

static bool convert_node(precision *p, uint32_t index)
{
    td_node n = p->in->nodes[index];
    td_dtype wanted = n.inputs ? dtype_wanted(p, &n) : TD_DTYPES;
    if (wanted == TD_DTYPES && n.op->precision != TD_WIDE) return td_copy_node(p->out, p->in, index, p->map);
    td_tensor few[FEW], *in = few;
    if (n.inputs > FEW && !(in = td_alloc(p->td, n.inputs * sizeof *in, "program"))) return false;
    for (uint32_t i = 0; i < n.inputs; i++) {
        td_id v = p->in->inputs[n.input + i];
        in[i] = td_handle(p->out, wanted == TD_DTYPES ? p->map[v] : in_dtype(p, v, wanted, &n));
    }
    td_tensor t = td_record_sized(p->td, n.op, here_of(&n), (int)n.inputs, in, td_node_attr(p->in, &n), n.attr_bytes);
    if (in != few) td_free(p->td, in, n.inputs * sizeof *in, "program");
    if (p->td->error != TD_OK) return false;
    for (uint32_t k = 0; k < n.outputs; k++) p->map[n.output + k] = t.id + k;
    p->out->nodes[p->out->node_count - 1].scope = n.scope;
    return true;
}

td_program *td_precision_pass(const td_program *in)
{
    td_context *td = in->td;
    precision p = { .td = td, .in = in };
    size_t bytes = 3 * in->value_count * sizeof(td_id);
    p.map = td_alloc(td, bytes, "program");
    if (!p.map) return NULL;
    memset(p.map, 0xFF, bytes);
    p.narrow = p.map + in->value_count;
    p.wide = p.narrow + in->value_count;
    p.out = td_pass_begin(td);
    if (p.out) {
        td_scope outer = { td->module, td->phase };
        for (uint32_t n = 0; n < in->node_count; n++) {
            td_scope_of(td, &in->nodes[n], in->nodes[n].phase);
            if (!convert_node(&p, n)) break;
        }
        td_scope_restore(td, outer);
        p.out = td_pass_end(p.out);
    }
    td_free(td, p.map, bytes, "program");
    return p.out;
}
