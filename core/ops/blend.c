/* Moments that follow their parameters: recorded as one node, which differentiate turns into plain arithmetic on whole units, so that
 * each rank does its own part and nothing is gathered.
 *
 *     blend[moments] keep                     moment = keep moment + (1 - keep) parameter
 */
#include "core/ops/update.h"

#include <stdio.h>

static bool blend_shape(td_call *call)
{
    char text[TD_SHAPE_TEXT];
    const td_value *keep = call->in[0];
    if (td_shape_elements(keep->shape) != 1 || keep->dtype != (uint8_t)td_float(call->td))
        return td_call_fail(call, "keep is %s %s, must be a scalar of %s", td_dtype_name((td_dtype)keep->dtype),
                            td_shape_text(keep->shape, text), td_dtype_name(td_float(call->td)));
    call->outputs = 0;
    return true;
}

static void blend_print(const td_program *p, const td_node *n, char *to, size_t room)
{
    snprintf(to, room, "%u moments", ((const td_gradients_attr *)td_node_attr(p, n))->count);
}

const td_op td_op_blend = { .name = "blend", .inputs = 1, .flags = TD_OP_EFFECT | TD_OP_VIRTUAL, .shape = blend_shape, .print = blend_print };

void td_blend_at(const td_state *moments, int count, td_tensor keep, td_here here)
{
    td_context *td = keep.td;
    if (!td || td->error != TD_OK || !count) return;
    td_gradients_attr head = { .count = (uint32_t)count };
    for (int i = 0; i < count; i++) {
        const td_state_entry *s = moments[i].id < td->state_count ? &td->states[moments[i].id] : NULL;
        if (!s || s->kind != TD_MOMENT) {
            td_fail(td, TD_ERROR_USAGE, "blend: '%s' is no moment %s", s ? s->name : "?",
                    td_location(td, td->module, here.file, here.line));
            return;
        }
        head.names_hash = td_mix(head.names_hash, s->hash);
    }
    td_record_states(td, &td_op_blend, here, 1, &keep, &head, sizeof head, moments, count);
}
