/* The library of fake_nccl.h. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "parallel/nccl_library.h"
#include "tests/fake_nccl.h"

enum { FAILED = 3, USED_TOO_EARLY = 4 };

struct ncclComm {
    int number, ranks;
    _Atomic int in_progress;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char text[FAKE_NCCL_LOG];
static size_t used;
static _Atomic int made, ids;
static _Atomic int any_aborted; /* where calls hang, whose communicator may be gone */

static void copy_log(char *to)
{
    pthread_mutex_lock(&lock);
    memcpy(to, text, sizeof text);
    pthread_mutex_unlock(&lock);
}

static void reset(void);
#define EXPORT __attribute__((visibility("default")))
EXPORT fake_nccl fake_nccl_state = { .version = 22809, .copy_log = copy_log, .reset = reset };
#define fake fake_nccl_state

static void reset(void)
{
    pthread_mutex_lock(&lock);
    memset(text, 0, sizeof text);
    used = 0;
    made = ids = 0;
    pthread_mutex_unlock(&lock);
    fake.version = 22809;
    fake.on_error = NULL;
    fake.in_progress = fake.fails = fake.async_error = fake.hangs = fake.entered = fake.asked = any_aborted = 0;
}

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    pthread_mutex_lock(&lock);
    if (used < sizeof text - 1) used += (size_t)vsnprintf(text + used, sizeof text - used, format, args);
    if (used < sizeof text - 1) used += (size_t)snprintf(text + used, sizeof text - used, "\n");
    pthread_mutex_unlock(&lock);
    va_end(args);
}

/* What a call on the communicator gives back. */
static int answer(nccl_comm c)
{
    if (fake.fails) return fake.fails;
    if (c->in_progress > 0) return USED_TOO_EARLY;
    c->in_progress = fake.in_progress;
    return c->in_progress ? NCCL_IN_PROGRESS : NCCL_SUCCESS;
}

static int collective(nccl_comm c)
{
    fake.entered++;
    if (!fake.hangs) return answer(c);
    while (!any_aborted) nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    return FAILED;
}

static size_t size_of(int dtype)
{
    static const size_t size[] = { [NCCL_U8] = 1, [NCCL_I32] = 4, [NCCL_I64] = 8, [NCCL_F16] = 2, [NCCL_F32] = 4, [NCCL_F64] = 8, [NCCL_BF16] = 2 };
    return size[dtype];
}

static void alone(nccl_comm c, const void *in, void *out, size_t count, int dtype)
{
    if (c->ranks == 1 && in != out) memmove(out, in, count * size_of(dtype));
}

/* ---- What nccl.h declares */

EXPORT int ncclGetVersion(int *version)
{
    *version = fake.version;
    return NCCL_SUCCESS;
}

EXPORT int ncclGetUniqueId(nccl_unique_id *id)
{
    memset(id, 0, sizeof *id);
    int number = ++ids;
    id->internal[0] = (char)number;
    note("id %d", number);
    return fake.fails;
}

EXPORT int ncclCommInitRankConfig(nccl_comm *comm, int ranks, nccl_unique_id id, int rank, nccl_config *config)
{
    nccl_comm c = calloc(1, sizeof *c);
    bool whole = c && config->magic == 0xcafebeef && config->size == sizeof *config && config->version == 21400;
    if (!whole) {
        free(c);
        return FAILED;
    }
    c->number = made++;
    c->ranks = ranks;
    fake.alive++;
    note("init c%d %d ranks as %d blocking %d id %d", c->number, ranks, rank, config->blocking, id.internal[0]);
    *comm = c;
    return answer(c);
}

EXPORT int ncclCommFinalize(nccl_comm c)
{
    note("finalize c%d", c->number);
    return answer(c);
}

EXPORT int ncclCommDestroy(nccl_comm c)
{
    note("destroy c%d", c->number);
    free(c);
    fake.alive--;
    return NCCL_SUCCESS;
}

EXPORT int ncclCommAbort(nccl_comm c)
{
    note("abort c%d", c->number);
    any_aborted = 1;
    free(c);
    fake.alive--;
    return NCCL_SUCCESS;
}

EXPORT int ncclCommGetAsyncError(nccl_comm c, int *result)
{
    fake.asked++;
    *result = fake.async_error ? fake.async_error : c->in_progress ? NCCL_IN_PROGRESS : NCCL_SUCCESS;
    if (c->in_progress > 0) c->in_progress--;
    return NCCL_SUCCESS;
}

EXPORT const char *ncclGetErrorString(int result)
{
    switch (result) {
    case FAILED: return "internal error";
    case USED_TOO_EARLY: return "a communicator in progress was called";
    case 6: return "remote process exited";
    default: return "?";
    }
}

EXPORT const char *ncclGetLastError(nccl_comm c)
{
    (void)c;
    void (*on_error)(void) = fake.on_error;
    if (on_error) on_error();
    return "a wire\nis cut";
}

EXPORT int ncclAllReduce(const void *in, void *out, size_t count, int dtype, int reduction, nccl_comm c, void *queue)
{
    note("all_reduce c%d %zu x %d by %d%s on %zu", c->number, count, dtype, reduction, in == out ? " in place" : "", (size_t)queue);
    return collective(c);
}

EXPORT int ncclReduceScatter(const void *in, void *out, size_t count, int dtype, int reduction, nccl_comm c, void *queue)
{
    note("reduce_scatter c%d %zu x %d by %d on %zu", c->number, count, dtype, reduction, (size_t)queue);
    alone(c, in, out, count, dtype);
    return collective(c);
}

EXPORT int ncclAllGather(const void *in, void *out, size_t count, int dtype, nccl_comm c, void *queue)
{
    note("all_gather c%d %zu x %d on %zu", c->number, count, dtype, (size_t)queue);
    alone(c, in, out, count, dtype);
    return collective(c);
}

EXPORT int ncclAlltoAll(const void *in, void *out, size_t count, int dtype, nccl_comm c, void *queue)
{
    note("all_to_all c%d %zu x %d on %zu", c->number, count, dtype, (size_t)queue);
    alone(c, in, out, count, dtype);
    return collective(c);
}

EXPORT int ncclBroadcast(const void *in, void *out, size_t count, int dtype, int root, nccl_comm c, void *queue)
{
    note("broadcast c%d %zu x %d from %d%s on %zu", c->number, count, dtype, root, in == out ? " in place" : "", (size_t)queue);
    return collective(c);
}

/* By the byte that is there parts of a buffer are known, as is memory. */
EXPORT int ncclSend(const void *at, size_t count, int dtype, int to, nccl_comm c, void *queue)
{
    note("send c%d %zu x %d to %d at %d on %zu", c->number, count, dtype, to, *(const unsigned char *)at, (size_t)queue);
    return answer(c);
}

EXPORT int ncclRecv(void *at, size_t count, int dtype, int from, nccl_comm c, void *queue)
{
    note("receive c%d %zu x %d from %d at %d on %zu", c->number, count, dtype, from, *(const unsigned char *)at, (size_t)queue);
    return answer(c);
}

EXPORT int ncclCommWindowRegister(nccl_comm c, void *memory, size_t bytes, nccl_window *window, int flags)
{
    note("window c%d %zu bytes from %d, flags %d", c->number, bytes, *(const unsigned char *)memory, flags);
    *window = (nccl_window)c;
    int answered = answer(c);
    return answered == NCCL_IN_PROGRESS ? NCCL_SUCCESS : answered; /* as NCCL does (2.28 to 2.30) */
}

EXPORT int ncclCommWindowDeregister(nccl_comm c, nccl_window window)
{
    note("no window c%d%s", c->number, window == (nccl_window)c ? "" : ", which it has not");
    return answer(c);
}

EXPORT int ncclGroupStart(void)
{
    note("group");
    return NCCL_SUCCESS;
}

EXPORT int ncclGroupEnd(void)
{
    note("group end");
    return fake.in_progress ? NCCL_IN_PROGRESS : NCCL_SUCCESS;
}
