/* A kernel's blocks on the host; see include/on_host.h. */
#include <on_host.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/on_host/fiber.h"

enum { THREADS = 1024, WARP = 32, WARPS = THREADS / WARP, COPIES = 256, SHARED_BYTES = 227 << 10 };

typedef struct copy {
    void *to;
    const void *from;
    int bytes, valid_bytes;
} copy;

/* Copies that a thread waits for: those of its groups one after the other. */
typedef struct copies {
    copy at[COPIES];
    int count, ends[COPIES], groups;          /* ends: of each group, in `at` */
} copies;

typedef struct thread {
    fiber *on;
    uint3 index;
    enum { RUNS, AT_BARRIER, AT_WARP, ENDED } state;
    const char *operation;                    /* of a warp, where it waits */
    unsigned mask;
    void *own;
    copies *copies;
} thread;

/* The launch that runs. */
static struct {
    const on_host_launch *launch;
    fiber host, fibers[THREADS];
    fiber *idle[THREADS], *next;              /* those without a thread, and the one of them that takes threads now */
    int idle_count;
    bool made;                                /* the fibers stand where they begin, or between threads */
    thread threads[THREADS], *now;
    int count, started, ended, at_barrier;    /* threads of the block */
    thread *ready[THREADS];
    int ready_begin, ready_count;                /* of those that may go on, in their order */
    unsigned waiting[WARPS];                  /* lanes of each warp that wait for others of it */
    char *shared;
    bool failed;
    char reason[400];
} block;

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

/* The kernels' own shared memory (cuda_runtime.h); there is none in a program without kernels. */
extern char __start_on_host_static[] __attribute__((weak)), __stop_on_host_static[] __attribute__((weak));

const char *on_host_reason(void) { return block.reason; }
void *on_host_shared(void) { return block.shared; }

static int number_of(const thread *t) { return (int)(t - block.threads); }
int on_host_lane_number(void) { return number_of(block.now) % WARP; }

/* ---- Errors */

static void note(const char *format, va_list list)
{
    char what[300];
    if (block.failed) return;
    vsnprintf(what, sizeof what, format, list);
    snprintf(block.reason, sizeof block.reason, "%s, block (%u, %u, %u): %s", block.launch->kernel, blockIdx.x, blockIdx.y, blockIdx.z, what);
    block.failed = true;
}

static void leave(void) { fiber_switch(block.now->on, &block.host); }

void on_host_fail(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    note(format, list);
    va_end(list);
    leave();
}

static void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void fail(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    note(format, list);
    va_end(list);
}

/* Nobody can go on: of those that wait for a warp, the first. */
static void fail_stuck(void)
{
    for (int i = 0; i < block.count; i++) {
        const thread *t = &block.threads[i];
        if (t->state != AT_WARP) continue;
        for (int lane = 0; lane < WARP; lane++) {
            int other = i / WARP * WARP + lane;
            if (!(t->mask >> lane & 1)) continue;
            if (other >= block.count) fail("thread %d waits in %s for lane %d, which does not exist", i, t->operation, lane);
            else if (block.threads[other].state == ENDED) fail("thread %d waits in %s for thread %d, which has ended", i, t->operation, other);
            else if (block.threads[other].state == AT_BARRIER)
                fail("thread %d waits in %s for thread %d, which waits at __syncthreads", i, t->operation, other);
            else if (block.threads[other].mask != t->mask)
                fail("thread %d waits in %s of lanes %08x, thread %d in %s of lanes %08x", i, t->operation, t->mask, other,
                     block.threads[other].operation, block.threads[other].mask);
        }
    }
    fail("its threads wait for each other");
}

/* ---- Turns */

static void set_ready(thread *t)
{
    t->state = RUNS;
    block.ready[(block.ready_begin + block.ready_count++) % THREADS] = t;
}

static fiber *next_ready(void)
{
    fiber *on = block.ready[block.ready_begin]->on;
    block.ready_begin = (block.ready_begin + 1) % THREADS;
    block.ready_count--;
    return on;
}

/* Until somebody makes it ready. */
static void wait(void)
{
    thread *self = block.now;
    fiber *next = block.ready_count ? next_ready() : &block.host;
    if (next != self->on) fiber_switch(self->on, next);
    block.now = self;
    threadIdx = self->index;
}

static void begin_thread(thread *t, fiber *on)
{
    unsigned i = (unsigned)number_of(t);
    *t = (thread){ .on = on, .index = { i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y }, .copies = t->copies };
    if (t->copies) t->copies->count = t->copies->groups = 0;
    block.now = t;
    threadIdx = t->index;
}

static void pass_barrier(void)
{
    if (!block.at_barrier || block.at_barrier + block.ended < block.count) return;
    if (block.ended) fail("%d threads wait at __syncthreads for %d that have ended", block.at_barrier, block.ended);
    for (int i = 0; i < block.count; i++)
        if (block.threads[i].state == AT_BARRIER) set_ready(&block.threads[i]);
    block.at_barrier = 0;
}

/* Of one fiber: threads that have not begun, until one that has can go on. */
static void run_threads(void)
{
    fiber *own = block.next;
    for (;;) {
        do {
            begin_thread(&block.threads[block.started++], own);
            block.launch->thread(block.launch->arguments);
            block.now->state = ENDED;
            block.ended++;
            pass_barrier();
        } while (block.started < block.count && !block.ready_count && !block.failed);
        block.idle[block.idle_count++] = own;
        fiber_switch(own, &block.host);
    }
}

static void run_block(void)
{
    block.started = block.ended = block.at_barrier = block.ready_count = 0;
    memset(block.waiting, 0, sizeof block.waiting);
    while (block.ended < block.count && !block.failed) {
        if (block.ready_count) {
            fiber_switch(&block.host, next_ready());
        } else if (block.started < block.count) {
            block.next = block.idle[--block.idle_count];
            fiber_switch(&block.host, block.next);
        } else {
            fail_stuck();
        }
    }
}

/* ---- What threads do together */

void __syncthreads(void)
{
    block.now->state = AT_BARRIER;
    block.at_barrier++;
    pass_barrier();
    wait();
}

/* All lanes of the mask wait: they must wait for the same. */
static void finish_together(const thread *self, thread *warp, on_host_finish finish)
{
    void *lanes[WARP] = { NULL };
    for (int lane = 0; lane < WARP; lane++) {
        const thread *other = &warp[lane];
        if (!(self->mask >> lane & 1)) continue;
        if (other->mask != self->mask || (other->operation != self->operation && strcmp(other->operation, self->operation)))
            on_host_fail("thread %d is in %s of lanes %08x, thread %d in %s of lanes %08x", number_of(self), self->operation, self->mask,
                         number_of(other), other->operation, other->mask);
        lanes[lane] = other->own;
    }
    finish(lanes);
    for (int lane = 0; lane < WARP; lane++)
        if (self->mask >> lane & 1) set_ready(&warp[lane]);
    block.waiting[number_of(self) / WARP] &= ~self->mask;
}

void on_host_together(const char *name, unsigned mask, on_host_finish finish, void *own)
{
    thread *self = block.now;
    int lane = number_of(self) % WARP, warp = number_of(self) / WARP;
    if (!(mask >> lane & 1)) on_host_fail("thread %d comes to %s, whose mask %08x has not its lane", number_of(self), name, mask);
    self->state = AT_WARP;
    self->operation = name;
    self->mask = mask;
    self->own = own;
    block.waiting[warp] |= 1u << lane;
    if ((block.waiting[warp] & mask) == mask) finish_together(self, block.threads + warp * WARP, finish);
    wait();
}

/* ---- Copies */

void on_host_copy(void *to, const void *from, int bytes, int valid_bytes)
{
    thread *t = block.now;
    if (!t->copies && !(t->copies = calloc(1, sizeof *t->copies))) on_host_fail("no memory for its copies");
    if (t->copies->count == COPIES) on_host_fail("thread %d has more than %d copies under way", number_of(t), COPIES);
    t->copies->at[t->copies->count++] = (copy){ to, from, bytes, valid_bytes };
}

void on_host_copies_end(void)
{
    thread *t = block.now;
    if (!t->copies && !(t->copies = calloc(1, sizeof *t->copies))) on_host_fail("no memory for its copies");
    if (t->copies->groups == COPIES) on_host_fail("thread %d has more than %d groups of copies under way", number_of(t), COPIES);
    t->copies->ends[t->copies->groups++] = t->copies->count;
}

void on_host_copies_wait(int newer)
{
    copies *c = block.now->copies;
    if (!c || c->groups <= newer) return;
    int whole = c->groups - newer, end = c->ends[whole - 1];
    for (int i = 0; i < end; i++) {
        memcpy(c->at[i].to, c->at[i].from, (size_t)c->at[i].valid_bytes);
        memset((char *)c->at[i].to + c->at[i].valid_bytes, 0, (size_t)(c->at[i].bytes - c->at[i].valid_bytes));
    }
    memmove(c->at, c->at + end, (size_t)(c->count - end) * sizeof *c->at);
    memmove(c->ends, c->ends + whole, (size_t)newer * sizeof *c->ends);
    for (int g = 0; g < newer; g++) c->ends[g] -= end;
    c->count -= end;
    c->groups = newer;
}

/* ---- Launches */

static bool make_fibers(void)
{
    if (block.made) return true;
    block.idle_count = 0;
    for (int i = THREADS; i-- > 0;) {
        if (!fiber_make(&block.fibers[i], run_threads)) return false;
        block.idle[block.idle_count++] = &block.fibers[i];
    }
    return block.made = true;
}

/* What a GPU refuses. */
static const char *refused(const on_host_launch *l)
{
    uint64_t threads = (uint64_t)l->block.x * l->block.y * l->block.z, blocks = (uint64_t)l->grid.x * l->grid.y * l->grid.z;
    if (!blocks || !threads) return "a launch of nothing";
    if (threads > THREADS || l->block.z > 64) return "a block of too many threads";
    if (l->grid.x > INT32_MAX || l->grid.y > 65535 || l->grid.z > 65535) return "a grid of too many blocks";
    if (l->shared > SHARED_BYTES) return "more shared memory than there is";
    return NULL;
}

/* Redzones of AddressSanitizer's may lie between what is erased. */
__attribute__((no_sanitize("address", "undefined"))) static void erase_own(void)
{
    if (!__start_on_host_static) return;
    for (volatile uint64_t *at = (volatile uint64_t *)__start_on_host_static; (char *)(at + 1) <= __stop_on_host_static; at++) *at = UINT64_MAX;
}

static void run_blocks(const on_host_launch *l)
{
    for (blockIdx.z = 0; blockIdx.z < l->grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < l->grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < l->grid.x && !block.failed; blockIdx.x++) {
                memset(block.shared, 0xFF, l->shared);
                run_block();
            }
}

cudaError_t on_host_run(const on_host_launch *l)
{
    const char *refusal = refused(l);
    block.launch = l;
    block.failed = false;
    if (refusal) {
        snprintf(block.reason, sizeof block.reason, "%s: %s", l->kernel, refusal);
        return cudaErrorInvalidConfiguration;
    }
    block.shared = aligned_alloc(1024, (l->shared + 1023) / 1024 * 1024);
    if (!make_fibers() || (l->shared && !block.shared)) {
        snprintf(block.reason, sizeof block.reason, "%s: no memory for its threads", l->kernel);
        return cudaErrorMemoryAllocation;
    }
    gridDim = l->grid;
    blockDim = l->block;
    block.count = (int)(l->block.x * l->block.y * l->block.z);
    erase_own();
    run_blocks(l);
    free(block.shared);
    block.shared = NULL;
    if (block.failed) block.made = false; /* some stopped where they were */
    return block.failed ? cudaErrorLaunchFailure : cudaSuccess;
}
