/* Values that are read later than their step: by td_item_later, and by runs, in which a GPU never waits for the host to look at what nobody
 * looks at yet. What is printed and written is what it is on the CPU, where values are there at once.
 *
 * The program is its own subject: with LATE="late" or "now" in the environment it trains as its flags say, with a device whose values come
 * late or without.
 *
 * Labels: threads
 * Timeout: 300 s
 */
#define SMALL_FOLDER "late"
#define SHELL_FOLDER "late"
#include <signal.h>

#include "tests/late_device.h"
#include "tests/memory.h"
#include "tests/shell.h"
#include "tests/small_run.h"

/* ---- Values ----------------------------------------------------------------------------------------------- */

static td_context *open_late(td_dtype dtype)
{
    td_context *td = open_cpu(dtype);
    late_open(td);
    return td;
}

/* The square of x, after a step of its own. */
static td_tensor square_of(td_context *td, double x)
{
    td_tensor t = td_scalar(td, x), square = td_mul(t, t);
    td_keep(square);
    td_step(td);
    return square;
}

START_TEST(test_a_value_is_read_behind_any_number_of_steps)
{
    td_context *td = open_late(TD_F32);
    td_tensor early = square_of(td, 3);
    ck_assert(td_item_later(early));
    ck_assert_int_eq(late.looks, 0);
    square_of(td, 4);
    ck_assert_int_eq(late.looks, 0);
    td_tensor third = square_of(td, 5);
    ck_assert_int_eq(late.looks, 1); /* before its set served the third */
    ck_assert_int_eq(late.look[0].behind, 1);
    ck_assert(td_item_later(third));
    ck_assert_double_eq(td_item(td_add(td_scalar(td, 1), td_scalar(td, 2))), 3); /* what is pending runs, too */
    for (int s = 0; s < 5; s++) square_of(td, s);
    ck_assert_double_eq(td_item(third), 25);
    ck_assert_double_eq(td_item(early), 9);
    ck_assert_no_error(td);
    ck_assert(isnan(td_item(early))); /* it was asked for once */
    ck_assert_str_has(td_error_text(td), "of an earlier step, whose results are gone");
    td_close(td);
}
END_TEST

START_TEST(test_a_value_is_read_as_often_as_it_was_asked_for)
{
    td_context *td = open_late(TD_F32);
    td_tensor t = square_of(td, 3);
    for (int i = 0; i < 3; i++) ck_assert(td_item_later(t));
    ck_assert_double_eq(td_item(t), 9);
    for (int s = 0; s < 3; s++) square_of(td, s);
    for (int i = 0; i < 2; i++) ck_assert_double_eq(td_item(t), 9);
    ck_assert(isnan(td_item(t)));
    td_close(td);
}
END_TEST

/* The bits of each dtype. */
START_TEST(test_values_of_any_dtype_are_kept)
{
    static const td_dtype dtypes[] = { TD_F32, TD_I32, TD_I64, TD_U8, TD_BF16, TD_F16 };
    enum { DTYPES = sizeof dtypes / sizeof *dtypes };
    td_context *td = open_late(TD_F32);
    td_tensor t[DTYPES];
    for (int d = 0; d < DTYPES; d++) {
        t[d] = td_cast(td_scalar(td, 40 + d), dtypes[d]);
        td_keep(t[d]);
    }
    ck_assert(td_step(td));
    for (int d = 0; d < DTYPES; d++) ck_assert(td_item_later(t[d]));
    for (int s = 0; s < 3; s++) square_of(td, s);
    for (int d = DTYPES - 1; d >= 0; d--) ck_assert_double_eq(td_item(t[d]), 40 + d);
    ck_assert_int_eq(late.looks, 1);
    td_close(td);
}
END_TEST

START_TEST(test_what_cannot_wait_is_told_and_is_no_error)
{
    td_context *td = open_late(TD_F32);
    td_tensor kept[TD_LANDED + 1], row = td_fill(td, TD_F32, TD_SHAPE(2), 1), pending;
    for (int i = 0; i <= TD_LANDED; i++) td_keep(kept[i] = td_scalar(td, i));
    td_keep(row);
    ck_assert(!td_item_later(kept[0])); /* not yet run */
    ck_assert(td_step(td));
    for (int i = 0; i < TD_LANDED; i++) ck_assert(td_item_later(kept[i]));
    ck_assert(!td_item_later(kept[TD_LANDED]));
    ck_assert(!td_item_later(row));
    ck_assert(!td_item_later(pending = td_scalar(td, 1)));
    ck_assert(!td_item_later(TD_NO_TENSOR));
    ck_assert_double_eq(td_item(kept[TD_LANDED]), TD_LANDED);
    ck_assert_no_error(td);
    for (int s = 0; s < 3; s++) square_of(td, s);
    for (int i = 0; i < TD_LANDED; i++) ck_assert_double_eq(td_item(kept[i]), i);
    ck_assert(!td_item_later(kept[0])); /* gone */
    ck_assert(!td_item_later(pending));
    td_close(td);
    td = open_cpu(TD_F32);
    ck_assert(!td_item_later(square_of(td, 3))); /* it is there */
    td_close(td);
}
END_TEST

/* What a step gave stays to be read when a later one has failed. */
START_TEST(test_a_value_outlives_an_error)
{
    td_context *td = open_late(TD_F32);
    td_tensor t = square_of(td, 3);
    ck_assert(td_item_later(t));
    td_fail(td, TD_ERROR_DATA, "a file is gone");
    ck_assert(!td_item_later(t));
    ck_assert_double_eq(td_item(t), 9);
    ck_assert(isnan(td_item(t))); /* it was asked for once; others are none in a context that has failed */
    td_clear_error(td);
    ck_assert_double_eq(td_item(t), 9);
    ck_assert(td_item_later(t));
    for (int s = 0; s < 3; s++) square_of(td, s);
    td_fail(td, TD_ERROR_DATA, "another one is gone");
    ck_assert_double_eq(td_item(t), 9);
    ck_assert(isnan(td_item(t)));
    td_close(td);
}
END_TEST

/* Every allocation fails once; what was to be read later is there when memory is. */
START_TEST(test_memory_that_runs_out_takes_no_value)
{
    memory_test memory = { .refused = -1 };
    td_allocator allocator = { .user = &memory, .get = memory_get, .put = memory_put };
    int failed = 0;
    for (int refused = 0;; refused++) {
        memory_refuse(&memory, refused);
        td_context *td = td_open(&(td_options){ .threads = 1, .allocator = &allocator, .log = check_log_line });
        if (td_error(td) == TD_OK) late_open(td);
        td_tensor t = square_of(td, 3);
        bool later = td_item_later(t);
        for (int s = 0; s < 3 && td_error(td) == TD_OK; s++) square_of(td, s);
        bool reached = memory.calls > refused;
        ck_assert_int_eq(td_error(td), reached ? TD_ERROR_MEMORY : TD_OK);
        if (later) ck_assert_double_eq(td_item(t), 9);
        td_close(td);
        ck_assert_int_eq(memory.held, 0);
        failed += reached && later;
        if (!reached) break;
    }
    ck_assert_int_gt(failed, 0);
}
END_TEST

/* ---- A run ------------------------------------------------------------------------------------------------ */

/* What happens in one of the updates. */
typedef struct event {
    char name[16];                /* "nan", "fail", "term", "usr1" */
    int64_t update;               /* 0: none */
} event;

static float counted[SAMPLES];

/* Rows count unequally, most of them not at all. */
static data_set *weighted_set(td_context *td)
{
    static bool filled;
    fill_small();
    for (int i = 0; i < SAMPLES && !filled; i++) counted[i] = i % 5 == 2 ? 0.5F + (float)(i % 4) : 0;
    filled = true;
    data_array arrays[] = {
        { .name = "x", .dtype = TD_F32, .shape = TD_SHAPE(SAMPLES, FEATURES), .data = features },
        { .name = "label", .dtype = TD_I32, .shape = TD_SHAPE(SAMPLES), .data = labels },
        { .name = "counted", .dtype = TD_F32, .shape = TD_SHAPE(SAMPLES), .data = counted },
    };
    return data_memory(td, arrays, 3);
}

static td_tensor loss_of(const small_model *m, const data_batch *b, bool weighs, double factor)
{
    td_tensor x = data_get(b, "x"), scaled = td_mul(x, td_scalar(x.td, factor));
    td_tensor h = td_relu(td_matmul_with(scaled, td_use(m->hidden), 0, 1));
    td_tensor y = td_matmul_with(td_dropout(h, 0.25), td_use(m->out), 0, 1), label = data_get(b, "label");
    return weighs ? td_cross_entropy_weighted(y, label, data_get(b, "counted")) : td_cross_entropy(y, label);
}

/* Loss and accuracy, of one weight. */
static int measure_both(void *model, const data_batch *b, run_metric out[RUN_METRICS])
{
    td_tensor weights = data_get(b, "weight"), total = td_sum(weights, TD_ALL, TD_DROP);
    out[0] = (run_metric){ "loss", td_mul(loss_of(model, b, false, 1), total), total };
    out[1] = (run_metric){ "weight", td_scale(total, 2), total };
    return 2;
}

/* What a program may do between updates: steps of its own. */
static void interlude(td_context *td)
{
    double sum = td_item(td_add(td_scalar(td, 1), td_scalar(td, 2)));
    for (int s = 0; s < 3; s++) sum += td_item(square_of(td, s));
    if (sum != 8) td_fail(td, TD_ERROR_NUMBER, "3 + 0 + 1 + 4 is %g", sum);
}

typedef struct late_options {
    bool weighs, evaluates, interludes, draws, counts;
    int keeps;                    /* scalars beside the loss */
    event event;                  /* on the last rank */
} late_options;

static int train_late(run_loop *run, const late_options *o)
{
    td_context *td = run_context(run);
    small_model m = make_small(td, 5);
    opt_optimizer *opt = opt_adamw(td_root(td), &(opt_adamw_options){ .decay = 0.01, .max_norm = 1, .scaler = run_scaler(run) });
    run_train_on(run, weighted_set(td));
    if (o->evaluates) run_evaluate_on(run, small_set(td), measure_both, &m);
    bool stepped = false;
    for (data_batch b; run_next(run, &b); stepped = true) {
        bool comes = td_updates(td) + 1 == o->event.update && b.micro == 0 && run->rank == run->ranks - 1;
        const char *now = comes ? o->event.name : "";
        if (!strcmp(now, "fail")) td_fail(td, TD_ERROR_DATA, "update %lld has no data", (long long)o->event.update);
        if (!strcmp(now, "term")) raise(SIGTERM);
        if (!strcmp(now, "usr1")) raise(SIGUSR1);
        for (int i = 0; i < o->keeps; i++) td_keep(td_scalar(td, i));
        if (o->draws) run->progress.terminal = true, run->progress.drawn_at = 0; /* every update is due */
        run_step(run, opt, loss_of(&m, &b, o->weighs, strcmp(now, "nan") ? 1 : (double)NAN));
        if (o->interludes && td_error(td) == TD_OK) interlude(td);
    }
    if (!stepped) opt_close(opt);
    return run_close(run);
}

/* ---- When values are read --------------------------------------------------------------------------------- */

/* Trains with a device whose values come late; what was looked at is in `late`. */
static void train_and_look(const char *flags, const late_options *o)
{
    run_loop *run = open_small(flags);
    late_open(run_context(run));
    ck_assert_int_eq(train_late(run, o), 0);
}

/* How many steps were looked at when `behind` others had been handed over. */
static int count_looks(int64_t behind)
{
    int count = 0;
    for (int i = 0; i < late.looks; i++) count += late.look[i].behind == behind;
    return count;
}

/* With a line for each. */
START_TEST(test_losses_are_read_when_the_next_update_has_been_handed_over)
{
    train_and_look("--steps 25 --log-every 1 --threads 1", &(late_options){ 0 });
    ck_assert_int_eq(late.looks, 25);
    for (int i = 0; i < 25; i++) {
        ck_assert_int_eq(late.look[i].step, i + 1);
        ck_assert_int_eq(late.look[i].behind, i == 0 || i == 24 ? 0 : 1);
    }
    ck_assert_int_eq(late.reads, 0);
}
END_TEST

START_TEST(test_an_update_is_waited_for_where_it_is_saved)
{
    ck_assert_sh(0, "rm -rf due");
    train_and_look("--steps 25 --log-every 7 --save-every 10 --threads 1 --out late/due", &(late_options){ 0 });
    ck_assert_int_eq(late.looks, 25);
    for (int i = 0; i < 25; i++) {
        int step = i + 1;
        bool due = step == 1 || step % 10 == 0 || step == 25;
        ck_assert_int_eq(late.look[i].step, step);
        ck_assert_msg(late.look[i].behind == !due, "update %d was read behind %lld others", step, (long long)late.look[i].behind);
    }
}
END_TEST

/* Twenty other values are kept before the loss, and sixteen come to the host. */
START_TEST(test_what_does_not_come_with_its_step_is_read_at_once)
{
    train_and_look("--steps 5 --threads 1", &(late_options){ .keeps = 20 });
    ck_assert_int_eq(late.looks, 0);
    ck_assert_int_eq(late.reads, 2 * 5); /* loss and norm */
}
END_TEST

/* Three micro-batches: 3 x 6 steps, of which those of the first and the last update end in a wait. */
START_TEST(test_parts_of_an_update_are_read_late)
{
    train_and_look("--steps 6 --accumulate 3 --log-every 1000 --threads 1", &(late_options){ 0 });
    ck_assert_int_eq(late.looks, 18);
    ck_assert_int_eq(count_looks(0), 2);
    ck_assert_int_eq(count_looks(1), 16);
    train_and_look("--steps 6 --accumulate 3 --log-every 1000 --threads 1", &(late_options){ .weighs = true });
    ck_assert_int_eq(late.looks, 18);
    ck_assert_int_eq(count_looks(0), 2 + 6); /* what two of three weigh goes into the update of the third */
    ck_assert_int_eq(count_looks(1), 10);
}
END_TEST

/* 40 samples in batches of 12 are four steps an evaluation. */
START_TEST(test_evaluations_are_read_late)
{
    train_and_look("--steps 6 --eval-every 3 --log-every 1000 --threads 1", &(late_options){ .evaluates = true });
    int last = 0, others = 0;
    for (int i = 0; i < late.looks; i++) {
        if (late.look[i].mode != TD_EVAL) continue;
        last += late.look[i].behind == 0;
        others += late.look[i].behind == 1;
    }
    ck_assert_int_eq(last, 2); /* of each evaluation */
    ck_assert_int_eq(others, 2 * 3);
}
END_TEST

/* ---- What is printed and written -------------------------------------------------------------------------- */

/* The file of this program. */
static const char *own_path(void)
{
    static char path[4096];
    ssize_t bytes = readlink("/proc/self/exe", path, sizeof path - 1);
    ck_assert_int_gt(bytes, 0);
    path[bytes] = 0;
    return path;
}

/* Times are no part of it, nor is when a checkpoint stands and what that says of the disk. */
#define WITHOUT_TIMES                                                                                                  \
    "sed -E -i -e 's/[0-9,.?]+ items\\/s/R items\\/s/g; s/[0-9:?]+ left/T left/g; s/\\[[=> ]*\\]/[]/g' "               \
    "-e 's/\"(items_per_s|step_ms|exposed_comm_ms)\": *[^,}]*/\"\\1\":0/g' "                                           \
    "-e 's/\"compute_ms\": *\\[[^]]*\\]/\"compute_ms\":0/; /^(saved on a signal|waited)/d'"

/* Runs the program with values now and late, in a folder each; what it says and leaves must be the same, byte for byte. */
static void compare_ways(int status, const char *words, const char *flags)
{
    static const char *const ways[] = { "now", "late" };
    for (int w = 0; w < 2; w++)
        ck_assert_sh(status, "mkdir -p %s && cd %s && LATE='%s %s' OMP_WAIT_POLICY=passive '%s' --threads 1 --seed 3 %s >said 2>err",
                     ways[w], ways[w], ways[w], words, own_path(), flags);
    ck_assert_sh(0, "rm -f */out/events* && " WITHOUT_TIMES " $(find now late -name '*.json*' -o -name said) && diff -r now late");
}

static void compare_anew(int status, const char *words, const char *flags)
{
    ck_assert_sh(0, "rm -rf now late");
    compare_ways(status, words, flags);
}

START_TEST(test_what_a_run_says_and_leaves_is_the_same)
{
    compare_anew(0, "", "--steps 23 --log-every 5 --save-every 4 --schedule cosine --warmup 3 --out out");
    compare_anew(0, "interludes", "--steps 12 --log-every 5 --save-every 4 --out out");
    compare_anew(0, "", "--steps 12 --log-every 5 --accumulate 3 --save-every 4 --out out");
    compare_anew(0, "weighs interludes", "--steps 12 --log-every 5 --accumulate 3 --save-every 4 --out out");
    compare_anew(0, "evaluates", "--steps 20 --log-every 4 --eval-every 3 --save-every 50 --keep-best --stop-after 2 --lr 3 --out out");
    ck_assert_sh(0, "grep -q 'stopped early' late/said");
    compare_anew(0, "", "--dtype f16 --steps 12 --log-every 5 --out out");
    compare_anew(0, "evaluates", "--ranks 2 --strategy ddp --steps 9 --log-every 4 --eval-every 5 --out out");
    compare_anew(0, "draws", "--steps 9 --log-every 1000");
    ck_assert_sh(0, "grep -c 5/9 late/said");
}
END_TEST

START_TEST(test_a_run_goes_on_as_it_would_have)
{
    compare_anew(0, "evaluates", "--steps 7 --log-every 3 --eval-every 6 --out out");
    compare_ways(0, "evaluates", "--steps 14 --resume --out out");
    compare_ways(0, "evaluates", "--steps 14 --resume --out out"); /* there is nothing to do */
}
END_TEST

/* An update that another one had followed, the one before a line or a save, and one of them. */
START_TEST(test_signals_stop_and_save_behind_the_same_update)
{
    static const int updates[] = { 2, 5, 11, 1, 4 };
    for (int i = 0; i < (check_all() ? 5 : 3); i++) {
        char words[32];
        snprintf(words, sizeof words, "term %d", updates[i]);
        compare_anew(0, words, "--steps 12 --log-every 5 --out out");
        ck_assert_sh(0, "grep -q 'after step %d, saved' late/said", updates[i]);
        snprintf(words, sizeof words, "usr1 %d", updates[i]);
        compare_anew(0, words, "--steps 12 --log-every 5 --out out");
        ck_assert_sh(0, "test -s late/out/checkpoints/step-%d/manifest.json", updates[i]);
    }
}
END_TEST

#define RANKS "OMP_WAIT_POLICY=passive '%s' --ranks 2 --strategy ddp --steps 12 --log-every 5 --save-every 10 --threads 1 --seed 3 "

/* A signal to one of the ranks in update `at`: all save, or stop, behind update `step`, and go on from there as if nothing had been. */
static void check_signal_to_ranks(const char *way, int at, int step, const char *saved)
{
    char said[64];
    ck_assert_sh(0, "rm -rf ranks && LATE='%s usr1 %d' " RANKS "--out ranks", way, at, own_path());
    ck_assert_sh(0, "echo $(ls -v ranks/checkpoints)");
    ck_assert_str_eq(out_text, saved);
    if (step == 12) return;
    ck_assert_sh(0, "rm -rf ranks && LATE='%s term %d' " RANKS "--out ranks", way, at, own_path());
    snprintf(said, sizeof said, "stopped by a signal after step %d, saved", step);
    ck_assert_str_has(out_text, said);
    ck_assert_sh(0, "LATE=%s " RANKS "--out ranks --resume", way, own_path());
    ck_assert_sh(0, "grep -ho '\"final_loss[^,]*' ranks/summary.json whole/summary.json | uniq | wc -l");
    ck_assert_int_eq(atoi(out_text), 1);
}

/* Ranks learn of it by what an update gives; where that is read late they have handed over another one. */
START_TEST(test_ranks_stop_and_save_together)
{
    ck_assert_sh(0, "rm -rf whole && LATE=now " RANKS "--out whole", own_path());
    check_signal_to_ranks("now", 4, 4, "step-4 step-10 step-12\n");
    check_signal_to_ranks("late", 4, 5, "step-5 step-10 step-12\n");
    if (check_all()) check_signal_to_ranks("late", 9, 10, "step-10 step-12\n");
    check_signal_to_ranks("late", 10, 10, "step-10 step-12\n"); /* that update was waited for */
    check_signal_to_ranks("late", 11, 12, "step-10 step-12\n");
    ck_assert_sh(0, "LATE='late counts' OMP_WAIT_POLICY=passive '%s' --ranks 2 --strategy fsdp --steps 12 --log-every 5", own_path());
    ck_assert_str_eq(err_text, "2 of 12 at once, 0 reads\n"); /* rank 0 */
}
END_TEST

/* Of the first update, of one between, before a save, with one, before the last and of the last. */
START_TEST(test_a_number_that_is_none_is_told_of_its_update_and_nothing_is_saved_behind_it)
{
    static const struct { int update, saved; } cases[] = { { 1, 0 }, { 4, 0 }, { 5, 0 }, { 6, 5 }, { 8, 5 }, { 11, 10 }, { 12, 10 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char words[32], said[256], kept[80] = "", last[32] = "";
        int saved = cases[i].saved;
        snprintf(words, sizeof words, "nan %d", cases[i].update);
        compare_anew(1, words, "--steps 12 --log-every 7 --save-every 5 --out out");
        if (saved) snprintf(kept, sizeof kept, "; the last checkpoint saved is out/checkpoints/step-%d", saved);
        if (saved) snprintf(last, sizeof last, "step-%d\n", saved);
        snprintf(said, sizeof said, "small: step %d: the loss is nan: stopped; TD_EAGER=1 names the operation that made it%s\n",
                 cases[i].update, kept);
        ck_assert_sh(0, "cat late/err");
        ck_assert_str_eq(out_text, said);
        ck_assert_sh(0, "ls -v late/out/checkpoints 2>/dev/null | tail -1");
        ck_assert_str_eq(out_text, last);
    }
    compare_anew(1, "weighs nan 4", "--steps 12 --accumulate 2 --log-every 7 --save-every 5 --out out");
    compare_anew(1, "nan 4", "--steps 4 --log-every 7 --ranks 2 --strategy fsdp --out out");
}
END_TEST

START_TEST(test_an_update_that_fails_ends_the_run_with_its_error)
{
    compare_anew(1, "fail 1", "--steps 12 --log-every 7 --save-every 5 --out out");
    compare_anew(1, "fail 8", "--steps 12 --log-every 7 --save-every 5 --out out");
    ck_assert_sh(0, "grep -q 'step 7/12' late/said && grep -q '\"step\":7' late/out/metrics.jsonl");
    compare_anew(1, "fail 11", "--steps 12 --log-every 7 --save-every 5 --out out");
    ck_assert_sh(0, "cat late/err");
    ck_assert_str_eq(out_text, "small: update 11 has no data\n");
}
END_TEST

/* ---- bench ------------------------------------------------------------------------------------------------ */

/* A reference binary, for what it does beside training. */
static void *make_model(run_loop *run, td_module root, const data_set *set)
{
    (void)set;
    small_model *m = malloc(sizeof *m);
    if (!m) return NULL;
    *m = make_small(run_context(run), 5);
    run_optimizer(run, root);
    if (strstr(getenv("LATE"), "late")) late_open(run_context(run));
    return m;
}

static data_set *model_data(run_loop *run, const char *split)
{
    return strcmp(split, "random") ? NULL : weighted_set(run_context(run));
}

static td_tensor model_loss(void *model, const data_batch *b) { return loss_of(model, b, strstr(getenv("LATE"), "weighs"), 1); }

static int model_program(int argc, char **argv)
{
    static const run_flag flags[] = { RUN_OPTIMIZER_FLAGS("sgd"), { 0 } };
    static const run_model model = { .about = "values that come late", .defaults = { .name = "small", .batch = 12, .flags = flags },
                                     .data = model_data, .make = make_model, .free = free, .loss = model_loss };
    return run_main(argc, argv, &model);
}

START_TEST(test_benchmarks_end_with_the_same_loss)
{
    static const char *const words[] = { "", "weighs" }, *const flags[] = { "", "--accumulate 3" };
    for (int i = 0; i < 4; i++) {
        char now[128];
        for (int late = 0; late < 2; late++) {
            ck_assert_sh(0, "LATE='model %s %s' OMP_WAIT_POLICY=passive '%s' bench --threads 1 --steps 7 --lr 0.05 --batch 36 --json %s | "
                            "grep -o '\"f[a-z]*_loss[^,]*' | sort", late ? "late" : "now", words[i / 2], own_path(), flags[i % 2]);
            if (late) ck_assert_str_eq(out_text, now);
            else snprintf(now, sizeof now, "%.127s", out_text);
        }
        ck_assert_str_has(now, "\"final_loss\":0.");
    }
}
END_TEST

/* ---- The program ------------------------------------------------------------------------------------------ */

static int program(int argc, char **argv)
{
    char words[256];
    late_options o = { 0 };
    bool comes_late = false;
    snprintf(words, sizeof words, "%s", getenv("LATE"));
    if (strstr(words, "model")) return model_program(argc, argv);
    for (char *word = strtok(words, " "); word; word = strtok(NULL, " ")) {
        if (!strcmp(word, "late")) comes_late = true;
        else if (!strcmp(word, "weighs")) o.weighs = true;
        else if (!strcmp(word, "evaluates")) o.evaluates = true;
        else if (!strcmp(word, "interludes")) o.interludes = true;
        else if (!strcmp(word, "draws")) o.draws = true;
        else if (!strcmp(word, "counts")) o.counts = true;
        else if (*word >= '0' && *word <= '9') o.event.update = atoi(word);
        else snprintf(o.event.name, sizeof o.event.name, "%s", word);
    }
    run_loop *run = run_open(&argc, &argv, &(run_defaults){ .name = "small", .batch = 12, .lr = 0.05 });
    if (comes_late) late_open(run_context(run));
    int status = train_late(run, &o);
    if (o.counts && late.looks) fprintf(stderr, "%d of %d at once, %d reads\n", count_looks(0), late.looks, (int)late.reads);
    return status;
}

int main(int argc, char **argv)
{
    if (getenv("LATE")) return program(argc, argv);
    const TTest *const tests[] = {
        test_a_value_is_read_behind_any_number_of_steps,
        test_a_value_is_read_as_often_as_it_was_asked_for,
        test_values_of_any_dtype_are_kept,
        test_what_cannot_wait_is_told_and_is_no_error,
        test_a_value_outlives_an_error,
        test_memory_that_runs_out_takes_no_value,
        test_losses_are_read_when_the_next_update_has_been_handed_over,
        test_an_update_is_waited_for_where_it_is_saved,
        test_what_does_not_come_with_its_step_is_read_at_once,
        test_parts_of_an_update_are_read_late,
        test_evaluations_are_read_late,
        test_what_a_run_says_and_leaves_is_the_same,
        test_a_run_goes_on_as_it_would_have,
        test_signals_stop_and_save_behind_the_same_update,
        test_ranks_stop_and_save_together,
        test_a_number_that_is_none_is_told_of_its_update_and_nothing_is_saved_behind_it,
        test_an_update_that_fails_ends_the_run_with_its_error,
        test_benchmarks_end_with_the_same_loss,
    };
    return check_main("late", tests, (int)(sizeof tests / sizeof tests[0]));
}
