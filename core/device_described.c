/* A GPU that is only described: what a step would hold, compute and send on it is known without it.
 *
 * Plans are those of that GPU: kernels are asked for their workspace as they are there. What a library would be asked is bounded: a matrix
 * product has the most that any of cuBLASLt's algorithms is given, attention what cuDNN's plans take; kernels made at run time are not
 * made. There is no memory and nothing runs. Needs no driver and no library.
 */
#include "core/internal.h"

static bool refuse(td_context *td)
{
    td_fail(td, TD_ERROR_USAGE, "this context plans for a GPU that is described, %s, and can run nothing: leave options.gpu out where there is a GPU", td->gpu.name);
    return false;
}

static void *get(td_context *td, int64_t bytes, const char *kind)
{
    (void)bytes, (void)kind;
    refuse(td);
    return NULL;
}

static void put(td_context *td, void *memory, int64_t bytes, const char *kind) { (void)td, (void)memory, (void)bytes, (void)kind; }

static bool copy(td_context *td, void *to, const void *from, int64_t bytes)
{
    (void)to, (void)from, (void)bytes;
    return refuse(td);
}

static bool clear(td_context *td, void *memory, int64_t bytes)
{
    (void)memory, (void)bytes;
    return refuse(td);
}

static bool initialise(td_context *td, const td_initial *of)
{
    (void)of;
    return refuse(td);
}

static bool run(td_context *td, td_planned *plan)
{
    (void)plan;
    return refuse(td);
}

static const uint64_t *landed(td_context *td, int set)
{
    (void)set;
    refuse(td);
    return NULL;
}

static void drop(td_context *td, td_planned *plan) { (void)td, (void)plan; }

static bool measure(td_context *td, td_machine *out)
{
    (void)out;
    return refuse(td);
}

static void close_it(td_context *td) { (void)td; }

static const td_device described = {
    .is_gpu = true, .get = get, .put = put, .write = copy, .read = copy, .clear = clear, .initialise = initialise,
    .run = run, .landed = landed, .drop = drop, .measure = measure, .close = close_it,
};

const td_device *td_described_open(td_context *td)
{
    td->gpu = *td->options.gpu;
    td->options.gpu = &td->gpu;
    td->page_bytes = td->gpu.page_bytes;
    td->host = &described;
    return &described;
}
