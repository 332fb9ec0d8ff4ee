/* The arena: where the blocks of a plan lie, so that those alive together do not overlap and the top is low.
 *
 * Fitting blocks into the lowest gap is good in some order of the blocks; a few orders are tried, and mended where the
 * result is more than 0.25 % above the largest sum of live bytes, which nothing can be below. The search is the same on every
 * rank and machine: it counts its work, not time.
 */
#include "core/internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct placed {
    uint32_t block;
    int64_t bytes;
    int32_t first, last;
    int64_t offset;
} placed;

static int by_size(const void *a, const void *b)
{
    const placed *x = a, *y = b;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? 1 : -1;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return x->block < y->block ? -1 : 1;
}

static int by_start(const void *a, const void *b)
{
    const placed *x = a, *y = b;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? 1 : -1;
    return x->block < y->block ? -1 : 1;
}

/* Puts `block` where it belongs among the first n of `sorted`, which are in order of their offsets. */
static void insert_by_offset(const placed **sorted, uint32_t n, const placed *block)
{
    uint32_t low = 0, high = n;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (sorted[middle]->offset <= block->offset) low = middle + 1;
        else high = middle;
    }
    memmove(sorted + low + 1, sorted + low, (n - low) * sizeof *sorted);
    sorted[low] = block;
}

/* Puts each block, in the order given, into the lowest gap between those alive at the same time. Returns the top. */
static int64_t fit(placed *blocks, uint32_t count, const placed **sorted)
{
    int64_t top = 0;
    for (uint32_t i = 0; i < count; i++) {
        int64_t at = 0;
        for (uint32_t j = 0; j < i; j++) {
            const placed *other = sorted[j];
            if (other->first > blocks[i].last || blocks[i].first > other->last) continue;
            if (other->offset - at >= blocks[i].bytes) break;
            int64_t end = other->offset + other->bytes;
            if (end > at) at = end;
        }
        blocks[i].offset = at;
        insert_by_offset(sorted, i, &blocks[i]);
        if (at + blocks[i].bytes > top) top = at + blocks[i].bytes;
    }
    return top;
}

static int64_t most_alive(const placed *blocks, uint32_t count, int32_t tasks)
{
    int64_t most = 0;
    for (int32_t t = 0; t < tasks; t++) {
        int64_t sum = 0;
        for (uint32_t i = 0; i < count; i++)
            if (blocks[i].first <= t && t <= blocks[i].last) sum += blocks[i].bytes;
        if (sum > most) most = sum;
    }
    return most;
}

/* The best found so far, and what it cannot go below. */
typedef struct arena {
    td_planned *plan;
    int64_t bytes, live_bytes;
} arena;

static void keep_if_better(arena *a, const placed *blocks, uint32_t count, int64_t top)
{
    if (top >= a->bytes) return;
    a->bytes = top;
    for (uint32_t i = 0; i < count; i++) a->plan->blocks[blocks[i].block].offset = blocks[i].offset;
}

/* The block that reaches highest is the one that found no room: it chooses first in the next try. */
static void move_highest_first(placed *blocks, uint32_t count)
{
    uint32_t highest = 0;
    for (uint32_t i = 1; i < count; i++)
        if (blocks[i].offset + blocks[i].bytes > blocks[highest].offset + blocks[highest].bytes) highest = i;
    placed first = blocks[highest];
    memmove(blocks + 1, blocks, highest * sizeof *blocks);
    blocks[0] = first;
}

/* Fitting work that tries may take, counted in pairs of blocks: milliseconds. */
enum { FIT_WORK = 4 << 20, MOST_TRIES = 2000 };

static bool fits_well(const arena *a) { return (a->bytes - a->live_bytes) * 400 <= a->live_bytes; }

/* Two orders, each mended for a while; then pairs of the last order exchanged at random as long as that does no harm. */
static void search_order(arena *a, placed *blocks, uint32_t count, const placed **sorted)
{
    static int (*const orders[])(const void *, const void *) = { by_start, by_size };
    int64_t tries = 4 + FIT_WORK / ((int64_t)count * count + 1), top = INT64_MAX;
    if (tries > MOST_TRIES) tries = MOST_TRIES;
    a->bytes = INT64_MAX;
    for (int o = 0; o < 2; o++) {
        qsort(blocks, count, sizeof *blocks, orders[o]);
        for (int64_t t = 0; t < tries / 8 + 2 && !(a->bytes < INT64_MAX && fits_well(a)); t++) {
            if (t) move_highest_first(blocks, count);
            top = fit(blocks, count, sorted);
            keep_if_better(a, blocks, count, top);
        }
    }
    uint64_t draw = 1;
    for (int64_t t = 0; t < tries && !fits_well(a); t++) {
        draw = draw * 6364136223846793005u + 1442695040888963407u;
        uint32_t i = (uint32_t)(draw >> 33) % count, j = (uint32_t)(draw >> 11) % count;
        placed swap = blocks[i];
        blocks[i] = blocks[j], blocks[j] = swap;
        int64_t next = fit(blocks, count, sorted);
        keep_if_better(a, blocks, count, next);
        if (next <= top) {
            top = next;
            continue;
        }
        swap = blocks[i];
        blocks[i] = blocks[j], blocks[j] = swap;
    }
}

/* The blocks in one memory, with room for all of them. */
static arena arrange(td_planned *plan, td_memory memory, placed *blocks)
{
    arena a = { .plan = plan };
    uint32_t count = 0;
    const placed **sorted = (const placed **)(blocks + plan->block_count);
    for (uint32_t b = 0; b < plan->block_count; b++) {
        const td_block *block = &plan->blocks[b];
        if (block->kind == TD_BLOCK_ARENA && block->memory == memory && block->part_of == TD_NONE && block->bytes)
            blocks[count++] = (placed){ b, block->bytes, block->first, block->last, 0 };
    }
    a.live_bytes = most_alive(blocks, count, (int32_t)plan->task_count);
    if (count) search_order(&a, blocks, count, sorted);
    return a;
}

bool td_arena_arrange(td_context *td, td_planned *plan)
{
    size_t bytes = plan->block_count * (sizeof(placed) + sizeof(placed *));
    placed *blocks = td_alloc(td, bytes, "program");
    if (!blocks) return false;
    arena device = arrange(plan, TD_DEVICE, blocks), host = arrange(plan, TD_HOST, blocks);
    plan->arena_bytes = device.bytes;
    plan->live_bytes = device.live_bytes;
    plan->host_arena_bytes = host.bytes;
    td_free(td, blocks, bytes, "program");
    return true;
}
