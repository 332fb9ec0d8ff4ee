/* A small model of blocks that trains under a strategy, and what it cost: for tests of what ranks hold and send.
 *
 * Blocks of a norm and a linear layer with residuals; an embedding, whose rows are read as they are stored, and the head are the root's.
 */
#ifndef TANDEM_TESTS_BLOCKS_H
#define TANDEM_TESTS_BLOCKS_H

#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

enum { TOKENS = 50, WIDTH = 48, BLOCKS = 3, ROWS = 24, STEPS = 4 };

typedef struct block_job {
    td_dtype dtype;
    const char *strategy;
    int ranks, accumulate, prefetch;
    bool keep_gathered;
    int keep_group;
    int64_t bucket_bytes;
    const char *frozen;                       /* patterns of names with commas between; NULL: none */
    double max_norm;
    bool sgd, averages;                       /* without momentum; moving averages of the parameters */
    int offload;
    double losses[STEPS];
    double parameters, averaged;              /* their sums at the end, each parameter with a weight of its own; of the averages */
    td_report report;                         /* of the step that updates */
    int64_t sent, calls;                      /* of one update */
    int64_t copied;                           /* of one update, as planned */
    int64_t most_device, most_host;           /* bytes that the allocator was asked for: of state and steps, pinned */
    char error[512];
} block_job;

typedef struct block_net {
    nn_embedding table;
    nn_norm norm[BLOCKS];
    nn_linear block[BLOCKS], head;
} block_net;

static inline block_net block_net_make(td_module root)
{
    block_net n = { .table = nn_embedding_make(root, "table", TOKENS, WIDTH) };
    for (int b = 0; b < BLOCKS; b++) {
        char name[16];
        snprintf(name, sizeof name, "h.%d", b);
        td_module at = td_child(root, name);
        n.norm[b] = nn_layer_norm_make(at, "norm", WIDTH);
        n.block[b] = nn_linear_make(at, "linear", WIDTH, WIDTH);
    }
    n.head = nn_linear_make(root, "head", WIDTH, 5);
    return n;
}

static inline td_tensor block_loss(td_context *td, const block_net *n, const int32_t *ids, const int32_t *labels, int rows)
{
    td_tensor x = nn_embedding_apply(&n->table, td_batch(td, "ids", TD_I32, TD_SHAPE(rows), ids));
    for (int b = 0; b < BLOCKS; b++) x = td_add(x, td_relu(nn_linear_apply(&n->block[b], nn_norm_apply(&n->norm[b], x))));
    return td_cross_entropy(nn_linear_apply(&n->head, x), td_batch(td, "labels", TD_I32, TD_SHAPE(rows), labels));
}

static inline void block_freeze(td_module root, const char *patterns)
{
    char pattern[32];
    for (const char *at = patterns; at && *at; at += strlen(pattern) + (at[strlen(pattern)] == ',')) {
        snprintf(pattern, sizeof pattern, "%.*s", (int)strcspn(at, ","), at);
        nn_freeze(root, pattern);
    }
}

typedef struct block_memory {
    int64_t now[2], most[2];                  /* of the device, of the host */
} block_memory;

static inline void block_count(block_memory *m, const char *kind, int64_t bytes)
{
    int at = !strcmp(kind, "pinned");
    if (!at && strcmp(kind, "state") && strcmp(kind, "step")) return;
    m->now[at] += bytes;
    if (m->now[at] > m->most[at]) m->most[at] = m->now[at];
}

static inline void *block_get(void *user, size_t bytes, const char *kind)
{
    block_count(user, kind, (int64_t)bytes);
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static inline void block_put(void *user, void *at, size_t bytes, const char *kind)
{
    block_count(user, kind, -(int64_t)bytes);
    free(at);
}

typedef struct block_run {
    const block_job *asked;
    block_job *done;
} block_run;

static inline int block_train(par_world *world, int rank, void *user)
{
    const block_run *r = user;
    block_job own = *r->asked;
    block_memory memory = { { 0 }, { 0 } };
    td_allocator allocator = { &memory, block_get, block_put };
    td_context *td = td_open(&(td_options){ .dtype = own.dtype, .seed = 3, .threads = 1, .poison = true, .allocator = &allocator });
    par_attach(td, world, rank, &(par_options){ .strategy = own.strategy, .keep_gathered = own.keep_gathered,
                                                .keep_group = own.keep_group, .prefetch = own.prefetch, .offload = own.offload,
                                                .bucket_bytes = own.bucket_bytes });
    block_net n = block_net_make(td_root(td));
    block_freeze(td_root(td), own.frozen);
    opt_optimizer *opt = own.sgd ? opt_sgd(td_root(td), &(opt_sgd_options){ .max_norm = own.max_norm })
                                 : opt_adamw(td_root(td), &(opt_adamw_options){ .decay = 0.01, .max_norm = own.max_norm });
    opt_ema *ema = own.averages ? opt_ema_open(td_root(td), &(opt_ema_options){ .decay = 0.9 }) : NULL;
    int micro = ROWS / own.accumulate, rows = micro / own.ranks;
    int32_t ids[ROWS], labels[ROWS];
    int64_t before = 0, calls_before = 0;
    bool good = true;
    for (int s = 0; s < STEPS && good; s++) {
        if (s == 1) before = par_sent(world, rank, &calls_before);
        own.losses[s] = 0;
        for (int k = 0; k < own.accumulate && good; k++) {
            for (int i = 0; i < rows; i++) {
                int row = s * ROWS + k * micro + rank * rows + i;
                ids[i] = row * 7 % TOKENS, labels[i] = row % 5;
            }
            td_tensor loss = block_loss(td, &n, ids, labels, micro);
            td_backward(td_scale(loss, 1.0 / own.accumulate));
            td_keep(loss);
            if (k + 1 == own.accumulate) opt_step(opt, 1e-2);
            if (k + 1 == own.accumulate) opt_ema_update(ema);
            good = td_step(td);
            own.copied = (k ? own.copied : 0) + td_last_report(td).copied_bytes;
            own.losses[s] += td_item(loss) / own.accumulate;
        }
    }
    int64_t calls, sent = par_sent(world, rank, &calls);
    own.sent = (sent - before) / (STEPS - 1);
    own.calls = (calls - calls_before) / (STEPS - 1);
    own.report = td_last_report(td);
    own.most_device = memory.most[0], own.most_host = memory.most[1];
    own.parameters = sum_of_parameters(td);
    if (ema) opt_ema_begin(ema);
    own.averaged = ema ? sum_of_parameters(td) : 0;
    if (ema) opt_ema_end(ema);
    good = td_error(td) == TD_OK;
    snprintf(own.error, sizeof own.error, "%s", td_error_text(td));
    if (rank == 0) *r->done = own;
    opt_ema_close(ema);
    opt_close(opt);
    td_close(td);
    return good ? 0 : 1;
}

static inline block_job blocks_run(block_job j)
{
    block_job done = j;
    int failed = par_run_threads(j.ranks, &(par_world_options){ .timeout_s = 20 }, block_train, &(block_run){ &j, &done });
    ck_assert_msg(!failed, "%s on %d ranks: %s", j.strategy, j.ranks, done.error);
    return done;
}

static inline int64_t aligned(int64_t elements, int64_t to) { return (elements + to - 1) / to * to; }
/* What one of `ranks` sends of so many bytes: in a gather or reduce-scatter, in an all-reduce. */
static inline int64_t bytes_of_parts(int64_t bytes, int ranks) { return (ranks - 1) * (bytes / ranks); }
static inline int64_t bytes_of_sum(int64_t bytes, int ranks) { return (2 * (ranks - 1) * bytes + ranks - 1) / ranks; }

enum { NORM = 2 * WIDTH, LINEAR = WIDTH * WIDTH + WIDTH, BLOCK = NORM + LINEAR, ROOT = TOKENS * WIDTH + 5 * WIDTH + 5 };

#endif
