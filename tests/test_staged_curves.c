/* Strategies whose collectives go through transport `staged`: each job of the matrix of tests/curves.h gives, to the bit, what it gives by the
 * transport underneath, and sends as much. The device is one that tests have, whose queue is waited for behind every piece of work: the CPU
 * makes a step's calls in turn. By default a few; TANDEM_TEST_ALL=1: all of them, in f32 and f64.
 *
 * Labels: threads
 * Timeout: 600 s
 */
#include "tests/curves.h"
#include "tests/staged.h"

#include "parallel/strategy.h"

static bool line_copy(void *queue, void *to, const void *from, int64_t bytes) { return stream_copy(queue, to, from, bytes) && stream_wait(queue); }
static bool line_call(void *queue, void (*function)(void *user), void *user) { return stream_call(queue, function, user) && stream_wait(queue); }

static const par_device in_line = {
    .key = stream_key, .number = stream_number, .get_host = stream_get, .put_host = free, .to_host = line_copy, .to_device = line_copy,
    .call = line_call, .wait = stream_wait,
};

/* The stream is closed behind the context, whose it is. */
static _Thread_local stream *own_stream;

/* Puts transport `staged` before the one that the context has joined with. */
static void stage(td_context *td, par_world *world, int rank)
{
    par_attached *a = td->parallel.self;
    td_transport inner = a->transport;
    own_stream = stream_open(td, 1);
    if (par_transport_staged(world, rank, td, &inner, &in_line, &a->transport)) a->staged = par_local_at(world, rank);
}

static int train_staged(par_world *world, int rank, void *user)
{
    int result = train(world, rank, user);
    if (own_stream) stream_close(own_stream);
    own_stream = NULL;
    return result;
}

static void check(job j)
{
    char text[CURVE_TEXT];
    job plain = j, staged = j;
    j.offload = 0;
    int failed = par_run_threads(j.ranks, &(par_world_options){ .timeout_s = 60 }, train, &(run_of){ &j, &plain });
    ck_assert_msg(!failed, "%s on %d ranks: %s", j.strategy, j.ranks, plain.error);
    j.joined = stage;
    failed = par_run_threads(j.ranks, &(par_world_options){ .timeout_s = 60 }, train_staged, &(run_of){ &j, &staged });
    ck_assert_msg(!failed, "%s on %d ranks: %s", j.strategy, j.ranks, staged.error);
    ck_assert_msg(same_curve(&staged, &plain, 0, text), "%s", text);
    ck_assert_msg(staged.sent == plain.sent && staged.calls == plain.calls, "%s on %d ranks: %lld bytes in %lld calls, not %lld in %lld",
                  j.strategy, j.ranks, (long long)staged.sent, (long long)staged.calls, (long long)plain.sent, (long long)plain.calls);
    ck_assert(plain.sent > 0);
}

START_TEST(test_every_strategy_gives_what_it_gives_by_the_transport_beneath)
{
    for (int w = 0; w < WORLDS; w++)
        for (int c = 0; c < CHOICES; c++) {
            if (!check_all() && (w % 2 || c != 5 * w % CHOICES)) continue;
            check(job_at(w % 4 ? TD_F32 : TD_F64, check_all() && c % 2, w, c));
        }
}
END_TEST

TESTS("staged_curves", test_every_strategy_gives_what_it_gives_by_the_transport_beneath)
