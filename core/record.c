/* Recording: checks a call, appends its node, and folds it into the program's fingerprint. Nothing is computed. */
#include "core/internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool td_failed(td_tensor t) { return t.id == TD_NONE; }
td_context *td_tensor_context(td_tensor t) { return t.td; }
bool td_is_pending(td_tensor t) { return t.td && t.generation == t.td->recording.generation && t.id < t.td->recording.value_count; }
td_tensor td_output(td_tensor first, int k) { return td_failed(first) ? first : (td_tensor){ first.td, first.id + (uint32_t)k, first.generation }; }

bool td_call_fail(const td_call *call, const char *format, ...)
{
    char text[640];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    td_fail(call->td, TD_ERROR_USAGE, "%s: %s", call->op->name, text);
    return false;
}

/* The name's hash, kept in a small table by address: names are the same on every rank, addresses are not. */
static uint64_t op_hash(td_context *td, const td_op *op)
{
    uint32_t slot = (uint32_t)((uintptr_t)op >> 5) & 255;
    if (td->op_hashes[slot].op != op) {
        td->op_hashes[slot].op = op;
        td->op_hashes[slot].hash = td_hash_text(op->name);
    }
    return td->op_hashes[slot].hash;
}

static bool check_input(td_context *td, const td_op *op, td_here here, int i, td_tensor t)
{
    const td_program *p = td->program;
    bool known = t.td == td && t.generation == p->generation && t.id < p->value_count;
    bool flat = td->gradients_recorded && known && td_producer(p, t.id)->op == &td_op_gradients && op != &td_op_gradient_norm && op != &td_op_update;
    if (known && !flat) return true;
    const char *why = flat         ? "is what td_gradients gave: only td_gradient_norm, td_gradient_max and td_update read it"
                      : td_failed(t) ? "failed in a step whose error was cleared"
                      : t.td != td   ? "belongs to another context"
                      : t.generation < p->generation ? "was recorded in an earlier step; values live until td_step, keep a state or record it again"
                                                     : "is not a value of this step";
    td_fail(td, TD_ERROR_USAGE, "%s: input %d %s %s", op->name, i, why, td_location(td, td->module, here.file, here.line));
    return false;
}

/* Adds where it happened to an error a shape rule has just made. */
static void locate_error(td_context *td, td_here here)
{
    size_t length = strlen(td->error_text);
    if (length + 1 < sizeof td->error_text)
        snprintf(td->error_text + length, sizeof td->error_text - length, " %s", td_location(td, td->module, here.file, here.line));
}

static void fold(td_program *p, td_node *n)
{
    td_context *td = p->td;
    uint64_t h = td_mix(p->hash, op_hash(td, n->op) + n->phase + ((uint64_t)n->scope << 32));
    h = td_mix(h, td->modules[n->module].hash);
    for (uint32_t i = 0; i < n->inputs; i++) h = td_mix(h, n->output - p->inputs[n->input + i]);
    for (uint32_t a = 0; a < n->attr_bytes; a += 8) {
        uint64_t word;
        memcpy(&word, p->attrs + n->attr + a, 8); /* attributes are zero-padded to eights */
        h = td_mix(h, word);
    }
    if (!n->inputs) { /* a source: its shape follows from nothing before it */
        const td_value *v = p->values + n->output;
        h = td_mix(h, v->dtype);
        for (int64_t d = 0; d < v->shape.rank; d++) h = td_mix(h, (uint64_t)v->shape.dim[d]);
    }
    n->hash = p->hash = h;
}

enum { FEW_INPUTS = 8 };

/* Sizes that cannot be: negative ones, or bytes beyond 63 bits. */
static bool check_outputs(const td_call *call)
{
    for (int k = 0; k < call->outputs; k++) {
        char text[TD_SHAPE_TEXT];
        if (td_shape_possible(call->out[k].shape, (td_dtype)call->out[k].dtype)) continue;
        if (call->out[k].shape.rank < 0) return td_call_fail(call, "has more than %d dimensions", TD_MAX_DIMS);
        return td_call_fail(call, "a value of shape %s cannot be", td_shape_text(call->out[k].shape, text));
    }
    return true;
}

static td_tensor append_call(td_program *p, const td_call *call, td_here here, const td_tensor *in)
{
    td_context *td = p->td;
    td_node *n = td_append(p, call->inputs, call->outputs, call->attr_bytes);
    if (!n) return td_no_tensor(td);
    n->op = call->op;
    n->file = here.file;
    n->line = here.line;
    n->module = td->module;
    n->phase = td->phase;
    n->scope = p == &td->recording ? td->scope : 0;
    for (int i = 0; i < call->inputs; i++) p->inputs[n->input + (uint32_t)i] = in[i].id;
    if (call->attr_bytes) memcpy(p->attrs + n->attr, call->attr, call->attr_bytes);
    for (int k = 0; k < call->outputs; k++) { /* size by size: what the rule has just written is slow to read as a whole */
        td_value *v = &p->values[n->output + (uint32_t)k];
        const td_value *out = &call->out[k];
        *v = (td_value){ .shape.rank = out->shape.rank, .node = p->node_count - 1, .output = (uint16_t)k, .dtype = out->dtype };
        for (int64_t d = 0; d < out->shape.rank; d++) v->shape.dim[d] = out->shape.dim[d];
    }
    if (p == &td->recording) fold(p, n);
    return call->outputs ? (td_tensor){ .td = td, .id = n->output, .generation = p->generation } : td_no_tensor(td);
}

td_tensor td_record_sized(td_context *td, const td_op *op, td_here here, int n, const td_tensor *in, const void *attr, size_t attr_bytes)
{
    if (td->error != TD_OK) return td_no_tensor(td);
    td_program *p = td->program;
    const td_value *few[FEW_INPUTS], **values = few;
    if (n > FEW_INPUTS && !(values = td_alloc(td, (size_t)n * sizeof *values, "program"))) return td_no_tensor(td);
    td_tensor result = td_no_tensor(td);
    bool good = true;
    for (int i = 0; i < n && good; i++) {
        good = check_input(td, op, here, i, in[i]);
        if (good) values[i] = &p->values[in[i].id];
    }
    td_value out[TD_CALL_OUTPUTS];
    out[0] = (td_value){ 0 };
    td_call call = { .td = td, .op = op, .attr = attr, .attr_bytes = attr_bytes, .inputs = n, .in = values, .outputs = 1, .out = out };
    if (good && !(op->shape(&call) && check_outputs(&call)))
        locate_error(td, here);
    else if (good)
        result = append_call(p, &call, here, in);
    if (td->options.eager && p == &td->recording && !td_failed(result) && op != &td_op_gradients) td_compute_now(result);
    if (values != few) td_free(td, (void *)values, (size_t)n * sizeof *values, "program");
    return result;
}

td_tensor td_record(const td_op *op, td_here here, int n, const td_tensor *in, const void *attr)
{
    return in[0].td ? td_record_sized(in[0].td, op, here, n, in, attr, op->attr_bytes) : td_no_tensor(NULL);
}

void td_recompute_begin(td_context *td)
{
    if (td->error == TD_OK && td->scope_depth++ == 0) td->scope = ++td->scopes;
}

void td_recompute_end(td_context *td)
{
    if (td->error != TD_OK) return;
    if (!td->scope_depth)
        td_fail(td, TD_ERROR_USAGE, "td_recompute_end: no td_recompute_begin came before it");
    else if (--td->scope_depth == 0)
        td->scope = 0;
}

td_shape td_shape_at(td_tensor t)
{
    const td_program *p = t.td ? t.td->program : NULL;
    if (p && t.generation == p->generation && t.id < p->value_count) return p->values[t.id].shape;
    const td_plan_output *kept = td_kept_output(t);
    return kept ? kept->shape : (td_shape){ 0 };
}

td_dtype td_dtype_at(td_tensor t)
{
    const td_program *p = t.td ? t.td->program : NULL;
    if (p && t.generation == p->generation && t.id < p->value_count) return (td_dtype)p->values[t.id].dtype;
    const td_plan_output *kept = td_kept_output(t);
    return kept ? kept->dtype : TD_F32;
}
