/* with_gradient: a value whose gradient is a rule of the user's.
 *
 *     y, x_1 ... x_n   ->   y, and dx_i as the rule records them
 *
 * The node carries the hash of the rule's name and the user's attributes: addresses differ between ranks. The context knows the rule by
 * its name. The node computes nothing; simplify takes it out once the program is differentiated.
 */
#include "core/ops/op.h"

#include <stdio.h>

typedef struct own_attr {
    uint64_t name_hash;
    uint64_t bytes;                           /* of the user's attributes, which follow */
} own_attr;

static const td_own_gradient *rule_of(const td_context *td, const own_attr *a)
{
    const td_own_gradient *rule = td->own_gradients;
    while (rule->hash != a->name_hash) rule++;
    return rule;
}

/* Makes the rule known under its name; false: another one is. */
static bool enter_rule(td_context *td, const td_gradient_rule *rule, uint64_t hash, td_here here)
{
    for (uint32_t r = 0; r < td->own_gradient_count; r++) {
        const td_own_gradient *known = &td->own_gradients[r];
        if (known->hash != hash) continue;
        if (known->gradient == rule->gradient && strcmp(known->name, rule->name) == 0) return true;
        td_refuse(td, "with_gradient", here, "two rules are called '%s'; each needs its own name", rule->name);
        return false;
    }
    if (!td_grow(td, (void **)&td->own_gradients, &td->own_gradient_room, td->own_gradient_count + 1, sizeof *td->own_gradients, "host"))
        return false;
    char *name = td_copy_text(td, rule->name, "host");
    if (!name) return false;
    td->own_gradients[td->own_gradient_count++] = (td_own_gradient){ name, hash, rule->gradient };
    return true;
}

static bool own_shape(td_call *call)
{
    td_dtype dtype = (td_dtype)call->in[0]->dtype;
    if (!td_is_float(dtype)) return td_call_fail(call, "y is %s, which has no gradient", td_dtype_name(dtype));
    return td_call_like(call, 0);
}

static void own_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    snprintf(to, room, "%s", rule_of(p->td, td_node_attr(p, n))->name);
}

/* y and the result are cut alike; the rule's inputs are not read. */
static void own_place(const td_program *p, const td_node *n, td_place_rule *rule)
{
    memset(rule, 0, sizeof *rule);
    for (int i = 0; i < p->values[n->output].shape.rank; i++) rule->in[0][i] = rule->out[0][i] = (int8_t)(i + 1);
}

static void own_cpu(const td_kernel *k)
{
    if (k->out[0].data != k->in[0].data) memcpy(k->out[0].data, k->in[0].data, (size_t)td_arg_bytes(&k->out[0]));
}

/* ---- Calling the rule */

static td_tensor wide(td_tensor x, td_here here) { return td_as(x, td_wide_dtype(td_dtype_at(x)), here); }

static void complain(const td_gradient_call *g, const char *rule, const char *why)
{
    const td_context *td = g->td;
    td_fail(g->td, TD_ERROR_USAGE, "with_gradient: rule '%s' %s %s", rule, why, td_location(g->td, td->module, g->here.file, g->here.line));
}

/* What was recorded from node `first` on follows from the program alone. */
static bool check_recorded(const td_gradient_call *g, const char *rule, uint32_t first)
{
    const td_program *p = g->td->program;
    char why[160];
    for (uint32_t n = first; n < p->node_count; n++) {
        if (!(p->nodes[n].op->flags & (TD_OP_VIRTUAL | TD_OP_EFFECT | TD_OP_SOURCE | TD_OP_RANDOM))) continue;
        snprintf(why, sizeof why, "records '%s', which belongs to the step: it is called when a plan is made; make it an input", p->nodes[n].op->name);
        complain(g, rule, why);
        return false;
    }
    return true;
}

static bool check_given(const td_gradient_call *g, const char *rule, int i, td_tensor dx)
{
    char why[512], shapes[2][TD_SHAPE_TEXT];
    const td_program *p = g->td->program;
    td_shape given = td_shape_at(dx), wanted = td_shape_at(g->in[i + 1]);
    bool known = dx.td == g->td && dx.generation == p->generation && dx.id < p->value_count;
    if (known && td_shape_equal(given, wanted) && td_is_float(td_dtype_at(dx))) return true;
    if (!known)
        snprintf(why, sizeof why, "gives input %d a gradient that it neither recorded nor saw", i);
    else
        snprintf(why, sizeof why, "gives input %d, %s %s, a gradient %s %s", i, td_dtype_name(td_dtype_at(g->in[i + 1])),
                 td_shape_text(wanted, shapes[0]), td_dtype_name(td_dtype_at(dx)), td_shape_text(given, shapes[1]));
    complain(g, rule, why);
    return false;
}

static void own_gradient(const td_gradient_call *g)
{
    const own_attr *a = g->attr;
    td_own_gradient rule = *rule_of(g->td, a);
    td_tensor in[TD_GRADIENT_INPUTS], din[TD_GRADIENT_INPUTS];
    int n = g->inputs - 1;
    for (int i = 0; i < n; i++) {
        in[i] = wide(g->in[i + 1], g->here);
        din[i] = td_no_tensor(g->td);
    }
    td_tensor out = wide(g->out[0], g->here), dout = wide(g->dout[0], g->here);
    uint32_t first = g->td->program->node_count;
    rule.gradient(&(td_gradient_call){ .td = g->td, .here = g->here, .attr = a->bytes ? a + 1 : NULL, .inputs = n, .outputs = 1, .in = in,
                                       .out = &out, .dout = &dout, .wanted = g->wanted + 1, .din = din });
    if (td_error(g->td) != TD_OK || !check_recorded(g, rule.name, first)) return;
    for (int i = 0; i < n; i++) {
        if (td_failed(din[i]) || !g->wanted[i + 1]) continue;
        if (!check_given(g, rule.name, i, din[i])) return;
        td_gradient_set(g, i + 1, td_as(din[i], td_dtype_at(g->in[i + 1]), g->here));
    }
}

const td_op td_op_with_gradient = {
    .name      = "with_gradient",
    .inputs    = -1,
    .flags     = TD_OP_VIEW,
    .shape     = own_shape,
    .gradient  = own_gradient,
    .place     = own_place,
    .precision = TD_WIDE, /* operands as they come; the result is what y is */
    .cpu       = own_cpu,
    .print     = own_print,
};

/* ---- Recording */

td_tensor td_with_gradient_at(td_tensor y, const td_tensor *inputs, int n, const td_gradient_rule *rule, const void *attr, size_t attr_bytes,
                              td_here here)
{
    td_context *td = y.td;
    if (!td || td_error(td) != TD_OK) return td_no_tensor(td);
    if (!rule || !rule->gradient || !rule->name || !*rule->name) return td_refuse(td, "with_gradient", here, "a rule needs a name and a function");
    if (n < 1 || n > TD_GRADIENT_INPUTS)
        return td_refuse(td, "with_gradient", here, "'%s' has %d inputs, must be from 1 to %d", rule->name, n, TD_GRADIENT_INPUTS);
    if (attr_bytes > TD_GRADIENT_ATTR_BYTES)
        return td_refuse(td, "with_gradient", here, "'%s' has %zu bytes of attributes, at most %d are kept", rule->name, attr_bytes,
                         TD_GRADIENT_ATTR_BYTES);
    own_attr own = { .name_hash = td_hash_text(rule->name), .bytes = attr ? attr_bytes : 0 };
    if (!enter_rule(td, rule, own.name_hash, here)) return td_no_tensor(td);
    _Alignas(8) char bytes[sizeof own + TD_GRADIENT_ATTR_BYTES];
    td_tensor in[1 + TD_GRADIENT_INPUTS] = { y };
    memcpy(bytes, &own, sizeof own);
    if (own.bytes) memcpy(bytes + sizeof own, attr, own.bytes);
    memcpy(in + 1, inputs, (size_t)n * sizeof *in);
    return td_record_sized(td, &td_op_with_gradient, here, n + 1, in, bytes, sizeof own + own.bytes);
}
