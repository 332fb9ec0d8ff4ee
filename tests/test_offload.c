/* Offload as a placement: moments, parameters or both in host memory under every strategy. The same bits as without; bytes held on the
 * device and on the host, and copied between them, against formulas written out here; updates computed on the host.
 *
 * Labels: threads
 * Timeout: 300 s
 */
#include "tests/blocks.h"

enum { NOTHING = 0, MOMENTS = PAR_OFFLOAD_OPTIMIZER, PARAMETERS = PAR_OFFLOAD_PARAMETERS, ALL = MOMENTS | PARAMETERS };

static const struct { const char *strategy; int ranks, parameter, moment; } worlds[] = { /* and parts of which a rank holds one */
    { "single", 1, 1, 1 }, { "ddp", 2, 1, 1 },  { "zero1", 2, 1, 2 },    { "zero1", 3, 1, 3 },
    { "zero2", 2, 1, 2 },  { "fsdp", 2, 2, 2 }, { "fsdp", 4, 4, 4 }, { "hsdp:2x2", 4, 2, 2 }, { "zero3", 3, 3, 3 },
};
enum { WORLDS = sizeof worlds / sizeof *worlds };

static void assert_same_bits(const block_job *got, const block_job *want)
{
    char who[120];
    snprintf(who, sizeof who, "%s, %d ranks, accumulation %d, offload %d", got->strategy, got->ranks, got->accumulate, got->offload);
    for (int s = 0; s < STEPS; s++)
        ck_assert_msg(got->losses[s] == want->losses[s], "%s: loss %d is %.17g, not %.17g", who, s, got->losses[s], want->losses[s]);
    ck_assert_msg(got->parameters == want->parameters, "%s: parameters", who);
    ck_assert_msg(got->averaged == want->averaged, "%s: averages", who);
    ck_assert_int_eq(got->sent, want->sent);
    ck_assert_int_eq(got->calls, want->calls);
}

START_TEST(test_the_curve_has_the_bits_it_has_without)
{
    for (int w = 0; w < WORLDS; w++)
        for (int m = 1; m <= 2; m++) {
            block_job j = { .dtype = TD_F32, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks, .accumulate = m, .max_norm = m > 1 ? 0.5 : 0,
                            .averages = (w + m) % 2, .frozen = w % 3 == 1 ? "h.1.*" : NULL };
            block_job without = blocks_run(j);
            ck_assert_int_eq(without.copied + without.most_host + without.report.host_bytes, 0);
            for (j.offload = MOMENTS; j.offload <= ALL; j.offload++) {
                block_job with = blocks_run(j);
                assert_same_bits(&with, &without);
            }
        }
}
END_TEST

START_TEST(test_bf16_and_sgd_have_the_bits_they_have_without)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    for (int w = 0; w < WORLDS; w++) {
        block_job j = { .dtype = TD_BF16, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks, .accumulate = 1, .sgd = w % 2 };
        block_job without = blocks_run(j);
        for (j.offload = MOMENTS; j.offload <= ALL; j.offload++) {
            block_job with = blocks_run(j);
            ck_assert_msg(with.losses[STEPS - 1] == without.losses[STEPS - 1] && with.parameters == without.parameters, "%s, %d ranks, offload %d",
                          j.strategy, j.ranks, j.offload);
        }
    }
}
END_TEST

/* Elements of all units: buckets are one; fsdp's are blocks and the root. */
static int64_t elements_of(const char *strategy, int ranks)
{
    if (strstr(strategy, "sdp") && ranks > 1) return BLOCKS * aligned(BLOCK, 16 * ranks) + aligned(ROOT, 16 * ranks);
    return aligned(BLOCKS * BLOCK + ROOT, 16 * ranks);
}

/* What is offloaded is on the host, the rest on the device; besides, the count of updates. */
START_TEST(test_bytes_of_state_on_the_device_and_on_the_host)
{
    for (int w = 0; w < WORLDS - 1; w++) { /* zero3's small parameters stay whole: not here */
        bool ddp = !strcmp(worlds[w].strategy, "ddp"), fsdp = strstr(worlds[w].strategy, "sdp") != NULL;
        int64_t p = 4 * elements_of(ddp ? "zero1" : worlds[w].strategy, worlds[w].ranks);
        int64_t parameters = p / worlds[w].parameter, moments = 2 * p / worlds[w].moment;
        for (int offload = NOTHING; offload <= ALL; offload++) {
            block_job j = blocks_run((block_job){ .dtype = TD_F32, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks, .accumulate = 1,
                                                  .offload = offload });
            int64_t host = (offload & MOMENTS ? moments : 0) + (offload & PARAMETERS ? parameters : 0);
            ck_assert_msg(j.report.state_bytes == parameters + moments - host + 4, "%s, %d ranks, offload %d: %lld bytes on the device, expected %lld",
                          j.strategy, j.ranks, offload, (long long)j.report.state_bytes, (long long)(parameters + moments - host + 4));
            /* Steps too: the gradients' and parameters' parts that the update reads or makes there, at most both of all units. */
            ck_assert_int_ge(j.report.host_bytes, host);
            ck_assert_int_le(j.report.host_bytes, host + (offload ? 2 * p / worlds[w].moment + (fsdp ? 0 : p) + 256 : 0));
        }
    }
}
END_TEST

START_TEST(test_planned_bytes_are_those_allocated)
{
    for (int w = 0; w < WORLDS; w++)
        for (int offload = MOMENTS; offload <= ALL; offload++) {
            block_job j = blocks_run((block_job){ .dtype = TD_F32, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks, .accumulate = 2,
                                                  .max_norm = 0.5, .offload = offload });
            ck_assert_msg(llabs(j.report.peak_bytes - j.most_device) * 100 <= j.most_device, "%s, offload %d: planned %lld, allocated %lld", j.strategy,
                          offload, (long long)j.report.peak_bytes, (long long)j.most_device);
            ck_assert_msg(j.report.host_bytes == j.most_host, "%s, offload %d: planned %lld on the host, allocated %lld", j.strategy, offload,
                          (long long)j.report.host_bytes, (long long)j.most_host);
        }
}
END_TEST

static int64_t copied(const char *strategy, int ranks, int m, int offload, td_dtype dtype)
{
    return blocks_run((block_job){ .dtype = dtype, .strategy = strategy, .ranks = ranks, .accumulate = m, .offload = offload }).copied;
}

enum { COUNT = 4 };                           /* of updates, which are computed with it */

/* With P bytes of a rank's part, m micro-batches. Moments: the update's gradient and parameter to the host, the parameter back. Parameters:
 * fetched for each gather, and for the update, and back from it. All: the gradient to the host, and fetched for each gather. */
START_TEST(test_bytes_copied_by_fsdp)
{
    for (int n = 2; n <= 4; n += 2)
        for (int m = 1; m <= 2; m++) {
            int64_t block = 4 * aligned(BLOCK, 16 * n) / n, root = 4 * aligned(ROOT, 16 * n) / n, p = BLOCKS * block + root;
            int64_t fetched = 2 * BLOCKS * block + root; /* the root stays for the backward */
            ck_assert_int_eq(copied("fsdp", n, m, NOTHING, TD_F32), 0);
            ck_assert_int_eq(copied("fsdp", n, m, MOMENTS, TD_F32), 3 * p + COUNT);
            ck_assert_int_eq(copied("fsdp", n, m, PARAMETERS, TD_F32), m * fetched + 2 * p);
            ck_assert_int_eq(copied("fsdp", n, m, ALL, TD_F32), m * fetched + p + COUNT);
        }
}
END_TEST

/* In bf16 blocks are fetched as they are gathered, half as large, with what is read of them in f32 beside. */
START_TEST(test_bytes_copied_in_bf16)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    int64_t block = aligned(BLOCK, 32) / 2, root = aligned(ROOT, 32) / 2;
    int64_t fetched = 2 * BLOCKS * 2 * block + BLOCKS * 4 * NORM + 4 * root;
    ck_assert_int_eq(copied("fsdp", 2, 1, ALL, TD_BF16), fetched + 4 * (BLOCKS * block + root) + COUNT);
}
END_TEST

/* Where parameters are whole they are fetched whole, for the forward and again for the backward; zero1 updates its part of them and
 * gathers the others' parts on the device. */
START_TEST(test_bytes_copied_by_ddp_and_zero1)
{
    int64_t all = 4 * aligned(BLOCKS * BLOCK + ROOT, 32), part = all / 2;
    ck_assert_int_eq(copied("ddp", 2, 1, MOMENTS, TD_F32), 3 * all + COUNT);
    ck_assert_int_eq(copied("ddp", 2, 1, ALL, TD_F32), 2 * all + all + COUNT);
    ck_assert_int_eq(copied("zero1", 2, 1, MOMENTS, TD_F32), 3 * part + COUNT);
    ck_assert_int_eq(copied("zero1", 2, 1, ALL, TD_F32), 2 * all + part + part + all + COUNT);
}
END_TEST

/* ---- What cannot be */

static int train_table(par_world *world, int rank, void *user)
{
    char *error = user;
    td_context *td = td_open(&(td_options){ .threads = 1, .log = check_log_line });
    par_attach(td, world, rank, &(par_options){ .strategy = "ddp", .offload = MOMENTS });
    nn_embedding table = nn_embedding_make(td_root(td), "table", TOKENS, WIDTH);
    td_sparse_rows(table.weight);
    opt_optimizer *opt = opt_adagrad(td_root(td), NULL);
    static const int32_t ids[4];
    td_backward(td_sum(nn_embedding_apply(&table, td_batch(td, "ids", TD_I32, TD_SHAPE(4), ids)), TD_ALL, TD_DROP));
    opt_step(opt, 0.1);
    bool good = td_step(td);
    snprintf(error, 512, "%s", td_error_text(td));
    opt_close(opt);
    td_close(td);
    return !good;
}

START_TEST(test_a_table_of_rows_is_refused)
{
    char error[512];
    ck_assert_int_eq(par_run_threads(1, NULL, train_table, error), 1);
    ck_assert_str_has(error, "offload: 'table.weight' is updated row by row, which is done on the device; leave the offload out, or choose");
}
END_TEST

START_TEST(test_what_is_nothing_to_offload_is_refused)
{
    par_world *world = par_world_none(2, 0);
    td_context *td = open_cpu(TD_F32);
    ck_assert(!par_attach(td, world, 0, &(par_options){ .strategy = "ddp", .offload = 4 }));
    ck_assert_str_eq(td_error_text(td), "par_attach: offload is PAR_OFFLOAD_OPTIMIZER, PAR_OFFLOAD_PARAMETERS or both");
    td_close(td);
    par_world_close(world);
}
END_TEST

/* ---- Where things are done */

/* Of the calls of a step under fsdp with everything offloaded: the update is the host's, what it reads of the gradient is copied there as
 * soon as it is scattered, each gather reads a copy, made as early, and nothing else is on the host. */
START_TEST(test_updates_are_computed_on_the_host)
{
    par_world *world = par_world_none(2, 0);
    td_context *td = open_cpu(TD_F32);
    par_attach(td, world, 0, &(par_options){ .strategy = "fsdp", .offload = ALL });
    block_net n = block_net_make(td_root(td));
    opt_optimizer *opt = opt_adamw(td_root(td), NULL);
    static const int32_t ids[ROWS];
    td_backward(block_loss(td, &n, ids, ids, ROWS));
    opt_step(opt, 0.1);
    ck_assert(td_plan(td));
    int64_t count, updates = 0, fetched = 0, handed = 0, ahead = 0;
    bool computed = false;
    par_call *calls = par_calls(td, &count);
    ck_assert(calls != NULL);
    for (int64_t i = 0; i < count; i++) {
        const par_call *c = &calls[i];
        bool update = !strcmp(c->task.op, "update_unit");
        ck_assert_msg(c->task.on_host == update || !strcmp(c->task.op, "fill"), "%s", c->task.op); /* a scalar is made where it is read */
        updates += update;
        computed = computed || !strcmp(c->task.kind, "matmul");
        if (c->kind == PAR_GATHERS) fetched += c->waits[TD_QUEUE_TO_DEVICE] >= 0, ahead += !computed;
        if (c->kind == PAR_SCATTERS) handed += calls[i + 1].kind == PAR_COPIES && calls[i + 1].waits[TD_QUEUE_COLLECTIVES] == i;
    }
    ck_assert_int_eq(updates, BLOCKS + 1);
    ck_assert_int_eq(fetched, 2 * BLOCKS + 1);
    ck_assert_int_eq(ahead, 3); /* the root, the first block, and the one after it */
    ck_assert_int_eq(handed, BLOCKS + 1);
    td_disown(td, calls);
    opt_close(opt);
    td_close(td);
    par_world_close(world);
}
END_TEST

TESTS("offload", test_the_curve_has_the_bits_it_has_without, test_bf16_and_sgd_have_the_bits_they_have_without,
      test_bytes_of_state_on_the_device_and_on_the_host, test_planned_bytes_are_those_allocated, test_bytes_copied_by_fsdp,
      test_bytes_copied_in_bf16, test_bytes_copied_by_ddp_and_zero1, test_a_table_of_rows_is_refused,
      test_what_is_nothing_to_offload_is_refused, test_updates_are_computed_on_the_host)
