/* A call of attention as its kernels see it: attention_cpu.c cuts it into blocks of queries, attention_tiles.h computes one.
 */
#ifndef TANDEM_CORE_OPS_ATTENTION_BLOCK_H
#define TANDEM_CORE_OPS_ATTENTION_BLOCK_H

#include "core/ops/attention.h"
#include "core/ops/convert.h"
#include "core/ops/draw.h"
#include "core/ops/lanes.h"
#include "core/ops/math.h"
#include "core/ops/simd.h"
#include "core/random.h"

#include <math.h>

enum { QUERIES = 32, KEYS = 64 };

/* Element (b, h, i, c) of an operand is at `at` + b batch + h head + i row + c. */
typedef struct heads {
    const td_arg *arg;
    int64_t at, batch, head, row;
} heads;

/* Local sizes of a call: queries (batch, heads, rows, depth), keys (batch, shared, keys, depth), values. */
typedef struct attention {
    const td_kernel *k;
    const td_attention_attr *attr;
    const struct td_attention_kernels *kernels;
    int64_t batch, heads, rows, depth, shared, keys, values;
    heads q, key, value, o, dy;               /* dy and the three below: of the backward */
    heads dq, dk, dv;
    const td_arg *log_sums;                   /* (batch, heads, rows) */
    int64_t blocks;                           /* of queries */
    const int32_t *lengths, *positions;       /* or NULL */
    int64_t first_sequence, first_head, global_heads; /* of this rank's part */
    uint64_t base;                            /* of dropout's draw */
    td_random random;
    int64_t tasks, parts, room;               /* bytes of room a part */
    char *rooms;
} attention;

/* A block of queries of one head. */
typedef struct queries {
    const attention *work;
    int64_t sequence, head, shared;           /* which it belongs to */
    int64_t first, count, width;              /* rows of q; lanes: count rounded up to whole vectors */
    int64_t position;                         /* of the first query */
    int64_t begin, end;                       /* keys that any of them may see */
    uint64_t draw;                            /* index of (first query, key 0) in the mask's draw */
} queries;

/* One block: o and the logsumexp, or dq and its part of dk and dv. `room` holds w->room bytes. */
typedef void (*td_attention_block)(const queries *q, char *room);
typedef struct td_attention_kernels {
    int64_t lanes;                            /* of a vector: widths are multiples of it */
    td_attention_block forward, backward;
} td_attention_kernels;
extern const td_attention_kernels td_attention_avx512; /* f32 */

/* ---- What a block sees, and how its operands are read ---------------------------------------------------------- */

/* Lanes [begin, end) of a block see the key. */
typedef struct lanes {
    int64_t begin, end;
} lanes;

static inline int64_t clipped(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

static inline lanes lanes_of(const queries *q, int64_t key)
{
    const td_attention_attr *attr = q->work->attr;
    lanes l = { 0, q->width };
    int64_t at = key - q->position; /* the lane whose position is the key's */
    if (attr->causal)
        l.begin = clipped(at, 0, q->width);
    if (attr->window) {
        l.begin = clipped(at - attr->window + 1, l.begin, q->width);
        l.end = clipped(at + attr->window, l.begin, q->width);
    }
    return l;
}

/* A mask's bits: bit i of word[w][lane] is 1 where key 32 w + i is kept. */
typedef struct kept_bits {
    uint32_t word[KEYS / 32][QUERIES];
} kept_bits;

/* Which of `keys` keys from `first` on dropout keeps, for every query of the block: those whose draw is at least
 * td_draw_below(p). */
static inline void draw_kept(const queries *q, int64_t first, int64_t keys, kept_bits *kept)
{
    uint32_t below = td_draw_below(q->work->attr->p);
    uint16_t bits[KEYS];
    memset(kept, 0, sizeof *kept);
    for (int64_t i = 0; i < q->count; i++) {
        td_random_halves(q->work->random, q->draw + (uint64_t)(i * q->work->keys + first), keys, bits);
        for (int64_t j = keys; j < KEYS; j++)
            bits[j] = 0;
        for (int w = 0; w < KEYS / 32; w++) {
            uint32_t word = 0;
            TD_SIMD_OR(word)
            for (int j = 0; j < 32; j++)
                word |= bits[32 * w + j] >= below ? 1u << j : 0;
            kept->word[w][i] = word;
        }
    }
}

/* e^x of what is at most a little above 0; of larger x, which stand where no key is seen, whatever: `hide` comes after. */
static inline float power_f32(float x) { return td_exp_below_f32(x); }
static inline double power_f64(double x) { return exp(x); }

/* Rows [first, first + count) of a head, (count, columns): pointer and elements from row to row. */
typedef struct rows_f32 {
    const float *at;
    int64_t step;
} rows_f32;
typedef struct rows_f64 {
    const double *at;
    int64_t step;
} rows_f64;

static inline int64_t row_at(const heads *x, int64_t sequence, int64_t head, int64_t row)
{
    return x->at + sequence * x->batch + head * x->head + row * x->row;
}

/* Where they lie, or converted to `room`. */
static inline rows_f32 view_f32(const heads *x, int64_t at, int64_t count, int64_t columns, float *room)
{
    if (x->arg->dtype == TD_F32)
        return (rows_f32){ td_arg_at(x->arg, at), x->row };
    for (int64_t i = 0; i < count; i++)
        td_load_f32(room + i * columns, x->arg->dtype, td_arg_at(x->arg, at + i * x->row), columns);
    return (rows_f32){ room, columns };
}

static inline rows_f64 view_f64(const heads *x, int64_t at, int64_t count, int64_t columns, double *room)
{
    (void)count, (void)columns, (void)room;
    return (rows_f64){ td_arg_at(x->arg, at), x->row };
}

static inline void store_f32(const heads *y, int64_t at, int64_t count, int64_t columns, const float *from)
{
    for (int64_t i = 0; i < count; i++)
        td_store_f32(td_arg_at(y->arg, at + i * y->row), y->arg->dtype, from + i * columns, columns);
}

static inline void store_f64(const heads *y, int64_t at, int64_t count, int64_t columns, const double *from)
{
    for (int64_t i = 0; i < count; i++)
        td_store_f64(td_arg_at(y->arg, at + i * y->row), y->arg->dtype, from + i * columns, columns);
}

#endif
