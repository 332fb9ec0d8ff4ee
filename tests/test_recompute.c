/* Recomputation: less memory, more FLOPs, the same bits, on one rank and under fsdp.
 *
 * Labels: threads
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

enum { ROWS = 96, WIDTH = 24, BLOCKS = 6, STEPS = 4 };

typedef struct job {
    bool recompute;
    const char *strategy;
    td_dtype dtype;
    double losses[STEPS];
    td_report report;
} job;

typedef struct run_of {
    const job *asked;
    job *done;
} run_of;

typedef struct block {
    nn_linear in, out;
    nn_dropout drop;
} block;

static td_tensor apply(const block *b, td_tensor x, bool recompute)
{
    td_context *td = td_tensor_context(x);
    if (recompute) td_recompute_begin(td);
    td_tensor h = nn_dropout_apply(&b->drop, td_tanh(nn_linear_apply(&b->in, x)));
    td_tensor y = td_add(x, nn_linear_apply(&b->out, td_square(h)));
    if (recompute) td_recompute_end(td);
    return y;
}

static int train(par_world *world, int rank, void *user)
{
    const run_of *r = user;
    job own = *r->asked;
    int ranks = par_world_size(world), rows = ROWS / ranks;
    td_context *td = td_open(&(td_options){ .dtype = own.dtype, .seed = 3, .threads = 1, .poison = true });
    par_attach(td, world, rank, &(par_options){ .strategy = own.strategy });
    block blocks[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) {
        char name[16];
        snprintf(name, sizeof name, "h%d", b);
        td_module at = td_child(td_root(td), name);
        blocks[b] = (block){ nn_linear_make(at, "in", WIDTH, 4 * WIDTH), nn_linear_make(at, "out", 4 * WIDTH, WIDTH), nn_dropout_make(at, "drop", 0.1) };
    }
    opt_optimizer *opt = opt_adamw(td_root(td), &(opt_adamw_options){ .max_norm = 1 });
    double *x = malloc((size_t)(rows * WIDTH) * sizeof *x);
    if (!x) exit(1);
    for (int i = 0; i < rows * WIDTH; i++) x[i] = check_normal((uint64_t)(rank * rows * WIDTH + i));
    if (own.dtype != TD_F64)
        for (int i = 0; i < rows * WIDTH; i++) ((float *)x)[i] = (float)x[i];
    bool good = true;
    for (int s = 0; s < STEPS && good; s++) {
        td_tensor h = td_batch(td, "x", td_float(td), TD_SHAPE(ROWS, WIDTH), x), target = h;
        for (int b = 0; b < BLOCKS; b++) h = apply(&blocks[b], h, own.recompute);
        td_tensor loss = td_mse(h, target);
        td_backward(loss);
        opt_step(opt, 1e-2);
        good = td_step(td);
        own.losses[s] = td_item(loss);
    }
    own.report = td_last_report(td);
    if (!good) fprintf(stderr, "%s\n", td_error_text(td));
    if (rank == 0) *r->done = own;
    free(x);
    opt_close(opt);
    td_close(td);
    return good ? 0 : 1;
}

static job run(int ranks, job asked)
{
    job done = asked;
    ck_assert_int_eq(par_run_threads(ranks, NULL, train, &(run_of){ &asked, &done }), 0);
    return done;
}

static void compare(int ranks, const char *strategy, td_dtype dtype)
{
    job kept = run(ranks, (job){ .strategy = strategy, .dtype = dtype });
    job again = run(ranks, (job){ .strategy = strategy, .dtype = dtype, .recompute = true });
    for (int s = 0; s < STEPS; s++) ck_assert_double_eq(again.losses[s], kept.losses[s]);
    ck_assert_msg(again.report.step_bytes < kept.report.step_bytes * 3 / 5, "%s: %lld bytes against %lld", strategy,
                  (long long)again.report.step_bytes, (long long)kept.report.step_bytes);
    /* A product of a block is one of three; of its two in the forward the first is computed again, nobody needs the second's result. */
    double ratio = (double)again.report.flops / (double)kept.report.flops;
    ck_assert_msg(ratio > 1.1 && ratio < 1.2, "%s: %.3f times the FLOPs", strategy, ratio);
}

START_TEST(test_less_memory_and_the_same_bits)
{
    compare(1, "single", TD_F64);
    compare(1, "single", TD_F32);
}
END_TEST

/* What is narrowed for a product of the scope is narrowed again: no bf16 copy of the block's inputs and weights is kept. */
START_TEST(test_less_memory_and_the_same_bits_in_bf16)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    compare(1, "single", TD_BF16);
    compare(2, "fsdp", TD_BF16);
}
END_TEST

START_TEST(test_the_same_under_strategies)
{
    compare(2, "ddp", TD_F64);
    compare(3, "fsdp", TD_F64);
    compare(2, "zero2", TD_F64);
    compare(3, "zero3", TD_F64);
}
END_TEST

START_TEST(test_an_end_without_a_beginning_is_refused)
{
    td_context *td = open_cpu(TD_F64);
    td_recompute_end(td);
    ck_assert_str_eq(td_error_text(td), "td_recompute_end: no td_recompute_begin came before it");
    td_close(td);
}
END_TEST

TESTS("recompute", test_less_memory_and_the_same_bits, test_less_memory_and_the_same_bits_in_bf16,
      test_the_same_under_strategies, test_an_end_without_a_beginning_is_refused)
