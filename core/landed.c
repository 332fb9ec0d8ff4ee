/* Kept values of one element, which come to the host with their step: found and read without waiting for what ran since.
 *
 * There is a set of them for each of the last runs. What td_item_later asked for is taken aside before its set serves another run, by
 * when a GPU has long been given more to do.
 */
#include "core/internal.h"

#include <string.h>

static bool find(td_tensor t, int *set, uint32_t *at)
{
    const td_context *td = t.td;
    if (!td || td_failed(t) || t.generation == td->recording.generation) return false;
    for (*set = 0; *set < TD_INPUT_SETS; ++*set)
        for (*at = 0; *at < td->landed[*set].count; ++*at)
            if (td->landed[*set].generation == t.generation && td->landed[*set].recorded[*at] == t.id) return true;
    return false;
}

/* Those of a set, when its run is done. NULL: an error. */
static const uint64_t *values_of(td_context *td, int set)
{
    const uint64_t *values = td->device->landed ? td->device->landed(td, set) : td->landed[set].values;
    return td_is_sound(td) ? values : NULL;
}

void td_landed_note(td_context *td, const td_planned *plan)
{
    uint32_t outputs[TD_LANDED];
    td_landed *to = &td->landed[td->runs % TD_INPUT_SETS];
    to->generation = td->recording.generation;
    to->count = td_plan_landing(plan, outputs);
    for (uint32_t i = 0; i < to->count; i++) {
        const td_plan_output *o = &plan->outputs[outputs[i]];
        to->recorded[i] = o->recorded;
        to->dtype[i] = o->dtype;
        to->later[i] = 0;
        if (!td->device->landed) memcpy(&to->values[i], td_plan_output_at(td, plan, o), (size_t)td_dtype_size(o->dtype));
    }
}

/* ---- Values that are read later than their set lasts */

bool td_item_later(td_tensor t)
{
    uint32_t at;
    int set;
    if (!find(t, &set, &at) || t.td->error != TD_OK || !t.td->device->landed) return false;
    t.td->landed[set].later[at]++;
    return true;
}

static bool aside_room(td_context *td, uint32_t more)
{
    return td_room(td, (void **)&td->aside, &td->aside_room, td->aside_count + more, sizeof *td->aside, "host");
}

bool td_landed_empty(td_context *td, int set)
{
    td_landed *l = &td->landed[set];
    uint32_t wanted = 0;
    for (uint32_t at = 0; at < l->count; at++) wanted += l->later[at] > 0;
    const uint64_t *values = wanted ? values_of(td, set) : NULL;
    if (wanted && (!values || !aside_room(td, wanted))) return false;
    for (uint32_t at = 0; at < l->count; at++) {
        td_aside a = { l->generation, l->recorded[at], l->dtype[at], l->later[at], values ? values[at] : 0 };
        if (a.later) td->aside[td->aside_count++] = a;
    }
    l->count = 0;
    return true;
}

static bool read_aside(td_tensor t, void *value, td_dtype *dtype)
{
    td_context *td = t.td;
    for (uint32_t i = 0; td && i < td->aside_count; i++) {
        td_aside a = td->aside[i];
        if (a.generation != t.generation || a.recorded != t.id) continue;
        memcpy(value, &a.value, sizeof a.value);
        *dtype = a.dtype;
        if (!--td->aside[i].later) td->aside[i] = td->aside[--td->aside_count];
        return true;
    }
    return false;
}

bool td_landed_read(td_tensor t, void *value, td_dtype *dtype)
{
    uint32_t at;
    int set;
    if (!find(t, &set, &at)) return read_aside(t, value, dtype);
    td_landed *l = &t.td->landed[set];
    if (t.td->error != TD_OK && !l->later[at]) return false;
    if (l->later[at]) l->later[at]--;
    const uint64_t *values = values_of(t.td, set);
    if (!values) return false;
    memcpy(value, &values[at], sizeof values[at]);
    *dtype = l->dtype[at];
    return true;
}
