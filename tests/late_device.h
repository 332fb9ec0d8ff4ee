/* A GPU's way of giving the host values, without one: a CPU whose kept values of one element come to sets of memory, which runs use in turn, and
 * which is told when the host asks for them. On a GPU it would wait for that run then.
 */
#ifndef TANDEM_TESTS_LATE_DEVICE_H
#define TANDEM_TESTS_LATE_DEVICE_H

#include "core/internal.h"
#include "tests/check.h"

/* The host asks for a run's values the first time; the first LATE_LOOKS of them are noted. */
typedef struct late_look {
    int64_t step;                 /* td_updates when it ran, and one for its own update */
    td_mode mode;
    int64_t behind;               /* runs that had been handed over since: with none a GPU has nothing to do while the host waits */
} late_look;

enum { LATE_LOOKS = 256 };
static struct {
    struct {
        int64_t run, step;
        td_mode mode;
        bool seen;
        uint64_t values[TD_LANDED];
    } set[TD_INPUT_SETS];
    late_look look[LATE_LOOKS];
    int looks;
    int64_t reads;                /* of memory: each waits for all there is to do */
} late;

static bool late_run(td_context *td, td_planned *plan)
{
    uint32_t outputs[TD_LANDED];
    int set = (int)(td->runs % TD_INPUT_SETS);
    if (!td_cpu.run(td, plan)) return false;
    memset(&late.set[set], 0xFF, sizeof late.set[set]);
    for (uint32_t i = 0, count = td_plan_landing(plan, outputs); i < count; i++) {
        const td_plan_output *o = &plan->outputs[outputs[i]];
        memcpy(&late.set[set].values[i], td_plan_output_at(td, plan, o), (size_t)td_dtype_size(o->dtype));
    }
    late.set[set].run = td->runs;
    late.set[set].step = td->run.update + 1;
    late.set[set].mode = td->mode;
    late.set[set].seen = false;
    return true;
}

static const uint64_t *late_landed(td_context *td, int set)
{
    if (!late.set[set].seen && late.looks < LATE_LOOKS)
        late.look[late.looks++] = (late_look){ late.set[set].step, late.set[set].mode, td->runs - late.set[set].run };
    late.set[set].seen = true;
    return late.set[set].values;
}

static bool late_read(td_context *td, void *to, const void *from, int64_t bytes)
{
    late.reads++;
    return td_cpu.read(td, to, from, bytes);
}

/* The context has such a device from now on. */
static inline CHECK_UNUSED void late_open(td_context *td)
{
    static td_device device;
    memset(&late, 0, sizeof late);
    device = td_cpu;
    device.run = late_run;
    device.landed = late_landed;
    device.read = late_read;
    td->device = &device;
}

#endif
