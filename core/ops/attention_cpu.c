/* Attention on the CPU: blocks of queries against blocks of keys, so that no row of scores is ever whole.
 *
 * The forward's tasks are blocks of QUERIES of one (b, h); the backward's are one (b, head of keys) each, whose queries
 * follow one another, so dk and dv are summed in one order whatever the number of threads.
 */
#include "core/ops/attention.h"
#include "core/ops/convert.h"
#include "core/ops/math.h"
#include "core/ops/simd.h"
#include "core/random.h"

#include <math.h>

enum { QUERIES = 32, KEYS = 64 };

/* Local sizes of a call: queries (batch, heads, rows, depth), keys (batch, shared, keys, depth), values. */
typedef struct attention {
    const td_kernel *k;
    const td_attention_attr *attr;
    int64_t batch, heads, rows, depth, shared, keys, values;
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
    int64_t row, count, width;                /* rows of q; lanes: count rounded up to whole vectors */
    int64_t key_row;                          /* of the head's first key */
    int64_t position;                         /* of the first query */
    int64_t begin, end;                       /* keys that any of them may see */
    uint64_t draw;                            /* index of (first query, key 0) in the mask's draw */
} queries;

/* Lanes [begin, end) of a block see the key. */
typedef struct lanes {
    int64_t begin, end;
} lanes;

static int64_t clipped(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

static lanes lanes_of(const queries *q, int64_t key)
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

static float power_f32(float x) { return td_exp_f32(x); }
static double power_f64(double x) { return exp(x); }

/* Elements [at, at + count) in T: the operand's own, or converted to `room`. */
static const float *view_f32(const td_arg *x, int64_t at, int64_t count, float *room)
{
    return td_view_f32(x->dtype, td_arg_at(x, at), count, room);
}

static const double *view_f64(const td_arg *x, int64_t at, int64_t count, double *room)
{
    (void)count, (void)room;
    return td_arg_at(x, at);
}

static void store_f32(const td_arg *y, int64_t at, int64_t count, const float *from)
{
    td_store_f32(td_arg_at(y, at), y->dtype, from, count);
}

static void store_f64(const td_arg *y, int64_t at, int64_t count, const double *from)
{
    td_store_f64(td_arg_at(y, at), y->dtype, from, count);
}

#define T float
#define NAME(x) x##_f32
#include "core/ops/attention_tiles.h"
#undef T
#undef NAME
#define T double
#define NAME(x) x##_f64
#include "core/ops/attention_tiles.h"
#undef T
#undef NAME

/* ---- Tasks ---------------------------------------------------------------------------------------------- */

static attention attention_of(const td_kernel *k)
{
    const td_attention_attr *attr = k->attr;
    bool forward = k->op == &td_op_attention;
    const td_arg *q = &k->in[0], *keys = &k->in[1], *v = &k->in[2], *extra = &k->in[forward ? 3 : 6];
    attention w = { .k = k, .attr = attr, .batch = q->shape.dim[0], .heads = q->shape.dim[1], .rows = q->shape.dim[2],
                    .depth = q->shape.dim[3], .shared = keys->shape.dim[1], .keys = keys->shape.dim[2],
                    .values = v->shape.dim[3], .global_heads = q->global.dim[1] };
    w.blocks = (w.rows + QUERIES - 1) / QUERIES;
    w.lengths = attr->lengths ? extra->data : NULL;
    w.positions = attr->positions ? extra[attr->lengths].data : NULL;
    w.tasks = forward ? w.batch * w.heads * w.blocks : w.batch * w.shared;
    w.parts = td_smaller(k->run->threads, w.tasks);
    int64_t elements = (4 * QUERIES + KEYS) * (w.depth + w.values) + 3 * KEYS * QUERIES;
    w.room = (elements * td_dtype_size(td_wide_dtype(q->dtype)) + 63) / 64 * 64;
    w.rooms = k->workspace;
    return w;
}

/* What is known only when the kernel runs: where this rank's part lies in the draw. */
static void find_draw(attention *w)
{
    const td_run *run = w->k->run;
    const td_arg *q = &w->k->in[0];
    uint64_t micro = (uint64_t)run->micro + w->k->phase / 2;
    w->first_sequence = td_arg_extent(run->mesh, q, 0).begin;
    w->first_head = td_arg_extent(run->mesh, q, 1).begin;
    w->base = micro * (uint64_t)(td_shape_product(q->global, 0, 3) * w->keys);
    w->random = td_random_of(run->seed, w->attr->key, (uint64_t)run->update);
}

bool td_attention_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    attention w = attention_of(k);
    out->workspace_bytes = w.parts * w.room;
    return true;
}

/* Block number `block` of the queries of (sequence, head). */
static queries queries_of(const attention *w, int64_t sequence, int64_t head, int64_t block)
{
    int64_t first = block * QUERIES, lanes_whole = w->k->in[0].dtype == TD_F64 ? LANES_f64 : LANES_f32;
    queries q = { .work = w, .count = td_smaller(QUERIES, w->rows - first), .begin = 0, .end = w->keys };
    q.row = (sequence * w->heads + head) * w->rows + first;
    q.width = (q.count + lanes_whole - 1) / lanes_whole * lanes_whole;
    q.key_row = (sequence * w->shared + head / (w->heads / w->shared)) * w->keys;
    q.position = (w->positions ? w->positions[sequence] : w->keys - w->rows) + first;
    if (w->lengths)
        q.end = clipped(w->lengths[sequence], 0, q.end);
    int64_t last = q.position + q.count - 1;
    if (w->attr->causal)
        q.end = clipped(last + 1, 0, q.end);
    if (w->attr->window) {
        q.end = clipped(last + w->attr->window, 0, q.end);
        q.begin = clipped(q.position - w->attr->window + 1, 0, q.end) / KEYS * KEYS;
    }
    int64_t row = ((w->first_sequence + sequence) * w->global_heads + w->first_head + head) * w->rows + first;
    q.draw = w->base + (uint64_t)(row * w->keys);
    return q;
}

/* Part `part` takes every parts-th task: blocks late in a causal sequence have more to do. */
static void forward_part(void *user, int64_t part, int64_t end)
{
    (void)end; /* one part a call */
    const attention *w = user;
    for (int64_t task = part; task < w->tasks; task += w->parts) {
        int64_t head = task / w->blocks;
        queries q = queries_of(w, head / w->heads, head % w->heads, task % w->blocks);
        if (w->k->in[0].dtype == TD_F64)
            forward_f64(&q, w->rooms + part * w->room);
        else
            forward_f32(&q, w->rooms + part * w->room);
    }
}

void td_attention_cpu(const td_kernel *k)
{
    attention w = attention_of(k);
    find_draw(&w);
    td_parallel_for(k->run, w.parts, 1, forward_part, &w);
}

static void zero_rows(const td_arg *y, int64_t row, int64_t rows)
{
    int64_t columns = td_arg_last(y);
    memset(td_arg_at(y, row * columns), 0, (size_t)(rows * columns * td_dtype_size(y->dtype)));
}

static void backward_part(void *user, int64_t part, int64_t end)
{
    (void)end; /* one part a call */
    const attention *w = user;
    int64_t group = w->heads / w->shared;
    for (int64_t task = part; task < w->tasks; task += w->parts) {
        zero_rows(&w->k->out[1], task * w->keys, w->keys);
        zero_rows(&w->k->out[2], task * w->keys, w->keys);
        for (int64_t i = 0; i < group * w->blocks; i++) {
            int64_t head = task % w->shared * group + i / w->blocks;
            queries q = queries_of(w, task / w->shared, head, i % w->blocks);
            if (w->k->in[0].dtype == TD_F64)
                backward_f64(&q, w->rooms + part * w->room);
            else
                backward_f32(&q, w->rooms + part * w->room);
        }
    }
}

void td_attention_gradient_cpu(const td_kernel *k)
{
    attention w = attention_of(k);
    find_draw(&w);
    td_parallel_for(k->run, w.parts, 1, backward_part, &w);
}
