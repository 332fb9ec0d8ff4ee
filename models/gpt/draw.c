/* Draws; see draw.h. Without a cut the tokens stay in the order of their ids. With one the likeliest come off a heap, as many as are kept:
 * the rest is never sorted. */
#include "models/gpt/draw.h"

#include <math.h>
#include <stdbool.h>

/* The first of the largest; -1: one is NaN, or none is finite. */
static int64_t largest(const double *logits, int64_t count)
{
    int64_t best = 0;
    for (int64_t i = 0; i < count; i++) {
        if (isnan(logits[i])) return -1;
        if (logits[i] > logits[best]) best = i;
    }
    return isfinite(logits[best]) ? best : -1;
}

static bool comes_first(const gpt_choice *a, const gpt_choice *b)
{
    return a->weight != b->weight ? a->weight > b->weight : a->id < b->id;
}

static void swap(gpt_choice *a, gpt_choice *b)
{
    gpt_choice kept = *a;
    *a = *b;
    *b = kept;
}

/* heap[i] goes down to its place among the `count`. */
static void sink(gpt_choice *heap, int64_t i, int64_t count)
{
    for (;;) {
        int64_t first = i, left = 2 * i + 1, right = left + 1;
        if (left < count && comes_first(&heap[left], &heap[first])) first = left;
        if (right < count && comes_first(&heap[right], &heap[first])) first = right;
        if (first == i) return;
        swap(&heap[i], &heap[first]);
        i = first;
    }
}

/* Takes the likeliest off the heap to the end of its memory, the likeliest last, until there are top_k or their weights sum to `least`.
 * Returns how many; *kept becomes the sum. */
static int64_t take(gpt_choice *heap, int64_t count, int64_t top_k, double least, double *kept)
{
    int64_t taken = 0;
    *kept = 0;
    while (taken < top_k && (taken == 0 || *kept < least)) {
        *kept += heap[0].weight;
        taken++;
        swap(&heap[0], &heap[count - taken]);
        sink(heap, 0, count - taken);
    }
    return taken;
}

/* Where the sum of weights, in the order of `step`, passes `at`; what has none is never it. */
static int32_t pick(const gpt_choice *first, int64_t count, int64_t step, double at)
{
    double sum = 0;
    const gpt_choice *likely = first;
    for (int64_t i = 0; i < count; i++) {
        const gpt_choice *c = first + i * step;
        if (!(c->weight > 0)) continue;
        likely = c;
        sum += c->weight;
        if (sum > at) break;
    }
    return likely->id;
}

int32_t gpt_draw(const double *logits, int64_t count, const gpt_draw_options *o, double uniform, gpt_choice *room)
{
    int64_t best = largest(logits, count), top_k = o->top_k && o->top_k < count ? o->top_k : count;
    if (best < 0 || o->temperature == 0) return (int32_t)best;
    double total = 0, kept;
    for (int64_t i = 0; i < count; i++) {
        room[i] = (gpt_choice){ exp((logits[i] - logits[best]) / o->temperature), (int32_t)i };
        total += room[i].weight;
    }
    if (top_k == count && o->top_p == 1) return pick(room, count, 1, uniform * total);
    for (int64_t i = count / 2; i-- > 0;) sink(room, i, count);
    int64_t taken = take(room, count, top_k, top_k < count ? INFINITY : o->top_p * total, &kept);
    if (top_k < count && o->top_p < 1) { /* a share of the top_k: the likeliest of them, once more */
        double least = o->top_p * kept;
        taken = 0;
        for (kept = 0; taken < top_k && (taken == 0 || kept < least);) kept += room[count - ++taken].weight;
    }
    return pick(room + count - 1, taken, -1, uniform * kept);
}
