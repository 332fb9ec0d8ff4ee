/* The sets of device_exchange.h. */
#include "core/device_exchange.h"

#include <string.h>

#include "core/device_pool.h"
#include "core/ops/convert.h"

_Static_assert(sizeof(td_cuda_run) <= TD_GPU_ALIGN, "slots follow the numbers of the run");

static int64_t set_bytes(int64_t slot_bytes) { return TD_GPU_ALIGN + slot_bytes; }
static td_exchange_set *current(td_context *td, td_exchange *x) { return &x->set[td->runs % TD_INPUT_SETS]; }

/* ---- Memory: that of inputs grows; what steps gave the host stays, to be read late */

static void drop_inputs(td_context *td, td_exchange *x)
{
    for (int i = 0; i < TD_INPUT_SETS; i++) {
        if (x->set[i].pinned) cudaFreeHost(x->set[i].pinned);
        x->set[i].pinned = x->set[i].inputs = NULL;
        x->set[i].filled_for = 0;
    }
    td_cuda_put(td, x->memory, TD_INPUT_SETS * set_bytes(x->slot_bytes), "inputs");
    x->memory = NULL;
    x->slot_bytes = -1;
}

static bool make_set(td_context *td, td_exchange_set *s)
{
    return td_cuda_ok(td, cudaHostAlloc((void **)&s->outputs, TD_LANDED * sizeof *s->outputs, cudaHostAllocMapped), "allocating pinned memory") &&
           td_cuda_ok(td, cudaEventCreateWithFlags(&s->copied, cudaEventDisableTiming), "making an event") &&
           td_cuda_ok(td, cudaEventCreateWithFlags(&s->done, cudaEventDisableTiming), "making an event");
}

bool td_exchange_open(td_context *td, td_exchange *x)
{
    x->slot_bytes = -1;
    bool made = td_cuda_ok(td, cudaStreamCreateWithFlags(&x->copies, cudaStreamNonBlocking), "making a queue");
    for (int i = 0; i < TD_INPUT_SETS && made; i++) made = make_set(td, &x->set[i]);
    return made;
}

bool td_exchange_ensure(td_context *td, td_exchange *x, cudaStream_t stream, int64_t slot_bytes)
{
    if (slot_bytes <= x->slot_bytes) return true;
    if (!td_cuda_ok(td, cudaStreamSynchronize(x->copies), "copying inputs") || !td_cuda_ok(td, cudaStreamSynchronize(stream), "running the step"))
        return false;
    td->device_counts.waits++;
    td->device_counts.stalls++;
    drop_inputs(td, x);
    x->epoch++;
    x->memory = td_cuda_get(td, TD_INPUT_SETS * set_bytes(slot_bytes), "inputs");
    x->slot_bytes = slot_bytes;
    for (int i = 0; i < TD_INPUT_SETS && td->error == TD_OK; i++) {
        x->set[i].inputs = x->memory + i * set_bytes(slot_bytes);
        td_cuda_ok(td, cudaHostAlloc((void **)&x->set[i].pinned, (size_t)set_bytes(slot_bytes), cudaHostAllocDefault), "allocating pinned memory");
    }
    if (td->error != TD_OK) drop_inputs(td, x);
    return td->error == TD_OK;
}

void td_exchange_close(td_context *td, td_exchange *x)
{
    if (!x->copies) return;
    drop_inputs(td, x);
    for (int i = 0; i < TD_INPUT_SETS; i++) {
        td_exchange_set *s = &x->set[i];
        if (s->outputs) cudaFreeHost(s->outputs);
        if (s->copied) cudaEventDestroy(s->copied);
        if (s->done) cudaEventDestroy(s->done);
        *s = (td_exchange_set){ 0 };
    }
    cudaStreamDestroy(x->copies);
    x->copies = NULL;
}

/* ---- To the device */

/* A core copies some 10 GB/s, a link ten times that: what is long is copied by a few, unless they sleep by now: waking them takes longer. */
enum { PART_BYTES = 64 << 10, PARTS = 4, AWAKE_NS = 1000000 };
typedef struct copying {
    char *to;
    const char *from;
} copying;

static void copy_part(void *user, int64_t begin, int64_t end)
{
    const copying *c = user;
    memcpy(c->to + begin, c->from + begin, (size_t)(end - begin));
}

static void copy_input(td_context *td, td_exchange *x, char *to, const void *from, int64_t bytes)
{
    copying c = { to, from };
    bool awake = td_profile_now() - x->copied_ns < AWAKE_NS;
    int64_t parts = awake ? PARTS : 1;
    td_parallel_for(&td->run, bytes, bytes / parts > PART_BYTES ? bytes / parts : PART_BYTES, copy_part, &c);
    x->copied_ns = td_profile_now();
}

static void write_constant(const td_planned *plan, const td_block *block, char *to)
{
    const td_node *n = &plan->program->nodes[block->index];
    const td_constant_attr *attr = td_node_attr(plan->program, n);
    td_dtype dtype = (td_dtype)plan->program->values[n->output].dtype;
    int64_t item = td_dtype_size(dtype);
    for (int64_t at = 0; at < block->bytes; at += item) td_store_f64(to + at, dtype, &attr->value, 1);
}

/* Of what a copy brings. */
typedef struct piece {
    char *to;
    const char *from;
    int64_t bytes;
} piece;

static bool copy(td_context *td, td_exchange *x, const piece *p)
{
    return td_cuda_ok(td, cudaMemcpyAsync(p->to, p->from, (size_t)p->bytes, cudaMemcpyHostToDevice, x->copies), "copying inputs");
}

static bool is_pinned(const td_exchange_set *s, const piece *p)
{
    return (uintptr_t)p->from - (uintptr_t)s->pinned == (uintptr_t)(p->to - s->inputs);
}

/* Whether one copy does both: they are next to one another on the device, and so in one memory of the host's, as the inputs of a loader's
 * batch are. */
static bool follows(const td_context *td, const td_exchange_set *s, const piece *before, const piece *next)
{
    int64_t further = td_round_up(before->bytes, TD_GPU_ALIGN);
    bool beside = next->to == before->to + further && (uintptr_t)next->from == (uintptr_t)before->from + (uintptr_t)further;
    bool pinned = is_pinned(s, before) && is_pinned(s, next);
    return beside && (pinned || td_is_input_memory(td, before->from, further + next->bytes));
}

/* *now is copied, and next is what comes now; or that with what it follows. */
static bool go_on(td_context *td, td_exchange *x, const td_exchange_set *s, piece *now, piece next)
{
    bool joined = follows(td, s, now, &next), good = joined || copy(td, x, now);
    *now = joined ? (piece){ now->to, now->from, next.to + next.bytes - now->to } : next;
    return good;
}

static void note_read(td_exchange_set *s, const char *from, int64_t bytes)
{
    uintptr_t begin = (uintptr_t)from, end = begin + (uintptr_t)bytes;
    s->read = (td_span){ begin < s->read.begin ? begin : s->read.begin, end > s->read.end ? end : s->read.end };
}

/* An input, which the GPU reads from where the caller has it, or the host writes to `pinned` first. What calls of the host may read is there. */
static bool send_input(td_context *td, td_exchange *x, const td_planned *plan, td_exchange_set *s, const td_block *block, piece *now)
{
    const char *data = td->slots[block->index].data;
    int64_t at = TD_GPU_ALIGN + block->offset;
    bool is_read = !plan->host_tasks && td_is_input_memory(td, data, block->bytes);
    if (is_read) note_read(s, data, block->bytes);
    else copy_input(td, x, s->pinned + at, data, block->bytes);
    return go_on(td, x, s, now, (piece){ s->inputs + at, is_read ? data : s->pinned + at, block->bytes });
}

/* The numbers of the run, scalars and constants, then inputs: as they lie on the device. */
static bool send_all(td_context *td, td_exchange *x, const td_planned *plan, td_exchange_set *s)
{
    piece now = { s->inputs, s->pinned, set_bytes(plan->scalar_bytes) };
    bool good = true;
    s->read = (td_span){ UINTPTR_MAX, 0 };
    *(td_cuda_run *)s->pinned = (td_cuda_run){ .seed = td->run.seed, .update = td->run.update, .micro = td->run.micro };
    for (uint32_t i = 0; i < plan->given_count && good; i++) {
        const td_block *block = &plan->blocks[plan->given[i]];
        const td_slot *slot = block->kind == TD_BLOCK_SLOT ? &td->slots[block->index] : NULL;
        char *to = s->pinned + TD_GPU_ALIGN + block->offset;
        if (!slot && s->filled_for != plan->number) write_constant(plan, block, to);
        if (slot && !slot->data) memcpy(to, &slot->f32, sizeof slot->f32);
        if (slot && slot->data && block->bytes) good = send_input(td, x, plan, s, block, &now);
    }
    if (good) s->filled_for = plan->number;
    return good && copy(td, x, &now);
}

/* The host is as far ahead as it may be, or needs memory again, until the event has come. */
static bool wait_for(td_context *td, cudaEvent_t event)
{
    cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady) {
        cudaGetLastError(); /* it counts as an error, which the next launch would be taken for */
        int64_t begin_ns = td_profile_now();
        td->device_counts.waits++;
        status = cudaEventSynchronize(event);
        td->device_counts.waited_ns += td_profile_now() - begin_ns;
    }
    return td_cuda_ok(td, status, "waiting for an earlier step");
}

bool td_exchange_read(td_context *td, td_exchange *x, td_span of)
{
    bool good = true;
    for (int i = 0; i < TD_INPUT_SETS && good; i++) {
        td_exchange_set *s = &x->set[i];
        if (s->read.begin >= of.end || of.begin >= s->read.end) continue;
        good = wait_for(td, s->copied);
        s->read = (td_span){ 0 };
    }
    return good;
}

/* Waits until nothing reads the host's side of the set any more. *done: nothing on the device does either, as is known. */
static bool take(td_context *td, td_exchange *x, td_exchange_set *s, bool *done)
{
    *done = s->used_by <= x->done_by;
    s->used_by = td->runs;
    return *done || wait_for(td, s->read_late ? s->done : s->copied);
}

bool td_exchange_send(td_context *td, td_exchange *x, cudaStream_t stream, const td_planned *plan)
{
    td_exchange_set *s = current(td, x);
    bool done;
    if (!take(td, x, s, &done)) return false;
    s->read_late = plan->host_tasks;
    return (done || td_cuda_ok(td, cudaStreamWaitEvent(x->copies, s->done, 0), "waiting for an earlier step")) && send_all(td, x, plan, s) &&
           td_cuda_ok(td, cudaEventRecord(s->copied, x->copies), "recording an event") &&
           td_cuda_ok(td, cudaStreamWaitEvent(stream, s->copied, 0), "waiting for inputs");
}

/* ---- To the host */

bool td_exchange_land(td_context *td, td_exchange *x, cudaStream_t stream, const td_planned *plan)
{
    uint32_t outputs[TD_LANDED];
    td_landing landing = { .to = current(td, x)->outputs, .count = (int)td_plan_landing(plan, outputs) };
    for (int i = 0; i < landing.count; i++) {
        const td_plan_output *o = &plan->outputs[outputs[i]];
        landing.from[i] = td_plan_output_at(td, plan, o);
        landing.bytes[i] = (int)td_dtype_size(o->dtype);
    }
    if (!landing.count) return true;
    td_land_cuda(&landing, stream);
    return td_cuda_ok(td, cudaGetLastError(), "giving the host a step's values");
}

bool td_exchange_done(td_context *td, td_exchange *x, cudaStream_t stream)
{
    return td_cuda_ok(td, cudaEventRecord(current(td, x)->done, stream), "recording an event");
}

const uint64_t *td_exchange_landed(td_context *td, td_exchange *x, int set)
{
    td_exchange_set *s = &x->set[set];
    if (s->used_by <= x->done_by) return s->outputs;
    td->device_counts.waits++;
    td->device_counts.stalls += s == current(td, x);
    if (!td_cuda_ok(td, cudaEventSynchronize(s->done), "running the step")) return NULL;
    x->done_by = s->used_by;
    return s->outputs;
}
