/* The printed step of an MLP: what is recorded, what placing makes of it under ddp and fsdp, and its plan, as text.
 *
 * The texts in tests/golden/print_*.txt are read by people first: TANDEM_WRITE_GOLDEN=1 writes them anew after a change.
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

typedef struct job {
    const char *stage, *strategy;
    int64_t bucket_bytes;
    char text[16384];
} job;

static void keep_program(void *user, td_level level, const char *text)
{
    job *j = user;
    if (level == TD_LOG_PROGRAM) snprintf(j->text + strlen(j->text), sizeof j->text - strlen(j->text), "%s", text);
}

static void ignore(void *user, td_level level, const char *text) { (void)user, (void)level, (void)text; }

/* 8 rows of 20 through 16 to 5, dropout, AdamW with clipping: one step. */
static int one_step(par_world *world, int rank, void *user)
{
    job *j = user;
    td_context *td = td_open(&(td_options){ .threads = 1, .print = rank ? NULL : j->stage, .log = rank ? ignore : keep_program, .log_user = j });
    par_attach(td, world, rank, &(par_options){ .strategy = j->strategy, .bucket_bytes = j->bucket_bytes });
    td_module root = td_root(td);
    nn_linear hidden = nn_linear_make(root, "hidden", 20, 16), out = nn_linear_make(root, "out", 16, 5);
    nn_dropout drop = nn_dropout_make(root, "drop", 0.2);
    opt_optimizer *opt = opt_adamw(root, &(opt_adamw_options){ .decay = 0.01, .max_norm = 1 });
    float x[8 * 20] = { 0 };
    int32_t labels[8] = { 0 };
    td_tensor h = nn_dropout_apply(&drop, td_relu(nn_linear_apply(&hidden, td_batch(td, "x", TD_F32, TD_SHAPE(8, 20), x))));
    td_tensor y = td_batch(td, "y", TD_I32, TD_SHAPE(8), labels); /* before, not inside, the call: C orders no arguments */
    td_backward(td_cross_entropy(nn_linear_apply(&out, h), y));
    opt_step(opt, 1e-3);
    bool good = td_step(td);
    opt_close(opt);
    td_close(td);
    return good ? 0 : 1;
}

/* Line by line: the whole is too long for a message. */
static void compare(const char *got, const char *want, const char *name)
{
    for (int line = 1; *got || *want; line++) {
        int a = (int)strcspn(got, "\n"), b = (int)strcspn(want, "\n");
        ck_assert_msg(a == b && !strncmp(got, want, (size_t)a), "print_%s.txt, line %d:\n  got  %.*s\n  want %.*s", name, line, a, got, b, want);
        got += a + (got[a] == '\n');
        want += b + (want[b] == '\n');
    }
}

static void check_text(const char *stage, const char *strategy, int64_t bucket_bytes, int ranks, const char *name)
{
    static job j;
    char path[4096], want[16384] = "";
    j = (job){ .stage = stage, .strategy = strategy, .bucket_bytes = bucket_bytes };
    ck_assert_int_eq(par_run_threads(ranks, NULL, one_step, &j), 0);
    snprintf(path, sizeof path, "%s/tests/golden/print_%s.txt", TANDEM_SOURCE, name);
    bool write = getenv("TANDEM_WRITE_GOLDEN") != NULL;
    FILE *f = fopen(path, write ? "w" : "r");
    ck_assert_msg(f != NULL, "%s cannot be opened", path);
    if (write)
        fputs(j.text, f);
    else
        want[fread(want, 1, sizeof want - 1, f)] = 0;
    fclose(f);
    if (!write) compare(j.text, want, name);
}

START_TEST(test_what_is_recorded) { check_text("record", "single", 0, 1, "record"); } END_TEST
START_TEST(test_what_ddp_makes_of_it) { check_text("place", "ddp", 0, 2, "ddp"); } END_TEST
START_TEST(test_what_fsdp_makes_of_it) { check_text("place", "fsdp", 0, 2, "fsdp"); } END_TEST
/* Three buckets: the one of the last layer is reduced in the middle of the backward. */
START_TEST(test_how_ddp_is_scheduled) { check_text("schedule", "ddp", 400, 2, "schedule"); } END_TEST
START_TEST(test_the_plan) { check_text("plan", "single", 0, 1, "plan"); } END_TEST

TESTS("print", test_what_is_recorded, test_what_ddp_makes_of_it, test_what_fsdp_makes_of_it, test_how_ddp_is_scheduled, test_the_plan)
