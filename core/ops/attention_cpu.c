/* Attention on the CPU: blocks of queries against blocks of keys, so that no row of scores is ever whole.
 *
 * The forward's tasks are blocks of QUERIES of one (b, h); the backward's are one (b, head of keys) each, whose queries
 * follow one another, so dk and dv are summed in one order whatever the number of threads.
 */
#include "core/ops/attention_block.h"

#include "core/cpu.h"
#include "core/ops/attention_cuda.h"

#define VECTOR_BYTES 32
#define BLOCK_ROWS 4
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

static const td_attention_kernels plain_f32 = { LANES_f32, forward_f32, backward_f32 };
static const td_attention_kernels plain_f64 = { LANES_f64, forward_f64, backward_f64 };

static const td_attention_kernels *kernels_of(td_dtype dtype)
{
    if (dtype == TD_F64)
        return &plain_f64;
    return td_cpu_has_avx512() ? &td_attention_avx512 : &plain_f32;
}

/* ---- Tasks ---------------------------------------------------------------------------------------------- */

/* Where heads of `columns` columns lie in x: by rows from column `at` on, or one after the other. */
static heads heads_in(const td_arg *x, bool by_rows, int64_t at, int64_t columns)
{
    int64_t rows = x->shape.dim[by_rows ? 1 : 2], width = by_rows ? x->shape.dim[2] : columns;
    if (by_rows)
        return (heads){ .arg = x, .at = at, .batch = rows * width, .head = columns, .row = width };
    return (heads){ .arg = x, .batch = x->shape.dim[1] * rows * width, .head = rows * width, .row = width };
}

static void find_gradients(attention *w)
{
    const td_attention_attr *attr = w->attr;
    const td_arg *out = w->k->out;
    bool packed = attr->rows & TD_ATTENTION_PACKED;
    int64_t keys_at = packed ? w->heads * w->depth : 0, values_at = packed ? keys_at + w->shared * w->depth : 0;
    w->dy = heads_in(&w->k->in[5], attr->rows & TD_ATTENTION_O, 0, w->values);
    w->dq = heads_in(&out[0], attr->rows & TD_ATTENTION_Q, 0, w->depth);
    w->dk = heads_in(&out[packed ? 0 : 1], attr->rows & TD_ATTENTION_K, keys_at, w->depth);
    w->dv = heads_in(&out[packed ? 0 : 2], attr->rows & TD_ATTENTION_V, values_at, w->values);
}

static attention attention_of(const td_kernel *k)
{
    const td_attention_attr *attr = k->attr;
    bool forward = k->op == &td_op_attention;
    const td_arg *q = &k->in[0], *keys = &k->in[1], *v = &k->in[2], *extra = &k->in[forward ? 3 : 6];
    attention w = { .k = k, .attr = attr, .kernels = kernels_of(q->dtype), .batch = q->shape.dim[0], .heads = attr->heads,
                    .depth = attr->depth, .shared = attr->shared, .values = attr->values };
    if (!attr->rows) {
        w.heads = q->shape.dim[1], w.depth = q->shape.dim[3];
        w.shared = keys->shape.dim[1], w.values = v->shape.dim[3];
    }
    w.global_heads = attr->rows & TD_ATTENTION_Q ? attr->heads : q->global.dim[1];
    w.rows = q->shape.dim[attr->rows & TD_ATTENTION_Q ? 1 : 2];
    w.keys = keys->shape.dim[attr->rows & TD_ATTENTION_K ? 1 : 2];
    w.q = heads_in(q, attr->rows & TD_ATTENTION_Q, attr->at[0], w.depth);
    w.key = heads_in(keys, attr->rows & TD_ATTENTION_K, attr->at[1], w.depth);
    w.value = heads_in(v, attr->rows & TD_ATTENTION_V, attr->at[2], w.values);
    w.o = heads_in(forward ? &k->out[0] : &k->in[3], attr->rows & TD_ATTENTION_O, 0, w.values);
    w.log_sums = forward ? &k->out[1] : &k->in[4];
    if (!forward)
        find_gradients(&w);
    w.blocks = (w.rows + QUERIES - 1) / QUERIES;
    w.lengths = attr->lengths ? extra->data : NULL;
    w.positions = attr->positions ? extra[attr->lengths].data : NULL;
    w.tasks = forward ? w.batch * w.heads * w.blocks : w.batch * w.shared;
    w.parts = td_smaller(k->run->threads, w.tasks);
    int64_t elements = (4 * QUERIES + KEYS) * (w.depth + w.values) + 2 * KEYS * QUERIES;
    w.room = td_round_up(elements * td_dtype_size(td_wide_dtype(q->dtype)), 64);
    w.rooms = k->workspace;
    return w;
}

static td_heads heads_on_gpu(const heads *x) { return (td_heads){ .at = x->at, .batch = x->batch, .head = x->head, .row = x->row }; }

td_attention_layout td_attention_layout_of(const td_kernel *k)
{
    attention w = attention_of(k);
    const td_arg *q = &k->in[0];
    return (td_attention_layout){
        .batch = w.batch, .heads = w.heads, .rows = w.rows, .depth = w.depth, .shared = w.shared, .keys = w.keys, .values = w.values,
        .q = heads_on_gpu(&w.q), .key = heads_on_gpu(&w.key), .value = heads_on_gpu(&w.value), .o = heads_on_gpu(&w.o), .dy = heads_on_gpu(&w.dy),
        .dq = heads_on_gpu(&w.dq), .dk = heads_on_gpu(&w.dk), .dv = heads_on_gpu(&w.dv),
        .first_sequence = td_arg_extent(k->run->mesh, q, 0).begin,
        .first_head = w.attr->rows & TD_ATTENTION_Q ? 0 : td_arg_extent(k->run->mesh, q, 1).begin,
        .global_heads = w.global_heads, .global_batch = q->global.dim[0], .lengths = w.lengths, .positions = w.positions,
    };
}

static bool is_aligned(const td_heads *x) { return x->at % 8 == 0 && x->batch % 8 == 0 && x->head % 8 == 0 && x->row % 8 == 0; }

bool td_attention_aligned(const td_kernel *k, const td_attention_layout *at)
{
    bool forward = is_aligned(&at->q) && is_aligned(&at->key) && is_aligned(&at->value) && is_aligned(&at->o);
    if (k->op == &td_op_attention) return forward;
    return forward && is_aligned(&at->dy) && is_aligned(&at->dq) && is_aligned(&at->dk) && is_aligned(&at->dv);
}

/* What is known only when the kernel runs: where this rank's part lies in the draw. */
static void find_draw(attention *w)
{
    const td_run *run = w->k->run;
    const td_arg *q = &w->k->in[0];
    bool by_rows = w->attr->rows & TD_ATTENTION_Q;
    uint64_t micro = (uint64_t)run->micro + w->k->phase / 2;
    w->first_sequence = td_arg_extent(run->mesh, q, 0).begin;
    w->first_head = by_rows ? 0 : td_arg_extent(run->mesh, q, 1).begin;
    w->base = micro * (uint64_t)(q->global.dim[0] * w->global_heads * w->rows * w->keys);
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
    int64_t first = block * QUERIES;
    queries q = { .work = w, .sequence = sequence, .head = head, .shared = head / (w->heads / w->shared), .first = first,
                  .count = td_smaller(QUERIES, w->rows - first), .begin = 0, .end = w->keys };
    q.width = td_round_up(q.count, w->kernels->lanes);
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

/* Part `part` takes one task of each round of `parts`, from the front and from the back by turns: blocks late in a causal sequence
 * have more to do. */
static void forward_part(void *user, int64_t part, int64_t end)
{
    (void)end; /* one part a call */
    const attention *w = user;
    for (int64_t round = 0; round * w->parts < w->tasks; round++) {
        int64_t task = round * w->parts + (round % 2 ? w->parts - 1 - part : part), head = task / w->blocks;
        if (task >= w->tasks)
            continue;
        queries q = queries_of(w, head / w->heads, head % w->heads, task % w->blocks);
        w->kernels->forward(&q, w->rooms + part * w->room);
    }
}

void td_attention_cpu(const td_kernel *k)
{
    attention w = attention_of(k);
    find_draw(&w);
    td_parallel_for(k->run, w.parts, 1, forward_part, &w);
}

/* A head's rows become zeros. */
static void zero_rows(const heads *y, int64_t sequence, int64_t head, int64_t rows, int64_t columns)
{
    int64_t at = row_at(y, sequence, head, 0);
    for (int64_t i = 0; i < rows; i++)
        memset(td_arg_at(y->arg, at + i * y->row), 0, (size_t)(columns * td_dtype_size(y->arg->dtype)));
}

static void backward_part(void *user, int64_t part, int64_t end)
{
    (void)end; /* one part a call */
    const attention *w = user;
    int64_t group = w->heads / w->shared;
    for (int64_t task = part; task < w->tasks; task += w->parts) {
        int64_t sequence = task / w->shared, shared = task % w->shared;
        zero_rows(&w->dk, sequence, shared, w->keys, w->depth);
        zero_rows(&w->dv, sequence, shared, w->keys, w->values);
        for (int64_t i = 0; i < group * w->blocks; i++) {
            queries q = queries_of(w, sequence, shared * group + i / w->blocks, i % w->blocks);
            w->kernels->backward(&q, w->rooms + part * w->room);
        }
    }
}

void td_attention_gradient_cpu(const td_kernel *k)
{
    attention w = attention_of(k);
    find_draw(&w);
    td_parallel_for(k->run, w.parts, 1, backward_part, &w);
}
