/* The run layer inside one process: flags, the loop, its files, checkpoints. What needs the binaries is in test_cli.c.
 * Timeout: 300 s
 */
#include <signal.h>

#include "run/flags.h"

#define SMALL_FOLDER "test_run_files"
#include "tests/small_run.h"

/* ---- Flags ------------------------------------------------------------------------------------------------ */

static const run_flag table[] = {
    { .name = "batch", .kind = RUN_COUNT, .standard = "128", .most = 1000, .help = "size" },
    { .name = "steps", .kind = RUN_COUNT, .help = "updates" },
    { .name = "hidden", .kind = RUN_COUNTS, .help = "sizes" },
    { .name = "seed", .kind = RUN_SEED, .standard = "0", .help = "seed" },
    { .name = "lr", .kind = RUN_POSITIVE, .standard = "0.001", .help = "rate" },
    { .name = "clip", .kind = RUN_AMOUNT, .help = "norm" },
    { .name = "dropout", .kind = RUN_FRACTION, .help = "share" },
    { .name = "device", .kind = RUN_CHOICE, .choices = "cpu|cuda", .standard = "cpu", .help = "where" },
    { .name = "resume", .kind = RUN_SWITCH, .standard = "false", .help = "go on", .commands = RUN_TRAIN },
    { .name = "out", .kind = RUN_TEXT, .help = "directory" },
    { .name = "help", .kind = RUN_SWITCH, .standard = "false", .help = "help" },
    { 0 }
};

static run_flags open_flags(unsigned command)
{
    run_flags f = { .program = "mlp train", .command = command };
    ck_assert_msg(run_flags_add(&f, table), "%s", f.error);
    return f;
}

/* Parses one argument, or two where the second is not NULL; "" when it is fine, else the message. */
static const char *parse(run_flags *f, const char *a, const char *b)
{
    static char error[512];
    char *argv[] = { "mlp", (char *)a, (char *)b, NULL };
    int argc = b ? 3 : 2;
    snprintf(error, sizeof error, "%s", run_flags_parse(f, &argc, argv) ? "" : f->error);
    return error;
}

START_TEST(test_flags_take_both_forms)
{
    run_flags f = open_flags(RUN_TRAIN);
    ck_assert_int_eq(run_flags_whole(&f, "batch"), 128);
    ck_assert_str_eq(parse(&f, "--batch", "16"), "");
    ck_assert_int_eq(run_flags_whole(&f, "batch"), 16);
    ck_assert_str_eq(parse(&f, "--batch=32", NULL), "");
    ck_assert_int_eq(run_flags_whole(&f, "batch"), 32);
    ck_assert_str_eq(parse(&f, "--lr=3e-4", NULL), "");
    ck_assert_double_eq(run_flags_number(&f, "lr"), 3e-4);
    ck_assert_str_eq(parse(&f, "--resume", NULL), "");
    ck_assert(run_flags_on(&f, "resume"));
    ck_assert_ptr_null(run_flags_text(&f, "steps"));
    run_flags_free(&f);
}
END_TEST

START_TEST(test_wrong_values_say_what_is_right)
{
    static const struct { const char *flag, *value, *message; } cases[] = {
        { "--batch", "0", "--batch takes a whole number of at least 1, at most 1000, not '0'" },
        { "--batch", "-4", "--batch takes a whole number of at least 1, at most 1000, not '-4'" },
        { "--batch", "1001", "--batch takes a whole number of at least 1, at most 1000, not '1001'" },
        { "--batch", "12x", "--batch takes a whole number of at least 1, at most 1000, not '12x'" },
        { "--batch", "1.5", "--batch takes a whole number of at least 1, at most 1000, not '1.5'" },
        { "--batch", "99999999999999999999",
          "--batch takes a whole number of at least 1, at most 1000, not '99999999999999999999'" },
        { "--steps", "many", "--steps takes a whole number of at least 1, not 'many'" },
        { "--steps", " 3", "--steps takes a whole number of at least 1, not ' 3'" },
        { "--seed", "-1", "--seed takes a whole number of at least 0, below 2^64, not '-1'" },
        { "--seed", "18446744073709551616",
          "--seed takes a whole number of at least 0, below 2^64, not '18446744073709551616'" },
        { "--steps", "9223372036854775808",
          "--steps takes a whole number of at least 1, not '9223372036854775808'" },
        { "--lr", "0", "--lr takes a number above 0, not '0'" },
        { "--lr", "nan", "--lr takes a number above 0, not 'nan'" },
        { "--lr", "inf", "--lr takes a number above 0, not 'inf'" },
        { "--clip", "-0.5", "--clip takes a number of at least 0, not '-0.5'" },
        { "--dropout", "1", "--dropout takes a number from 0 to below 1, not '1'" },
        { "--hidden", "8,",
          "--hidden takes whole numbers of at least 1 with commas between them, as 1024,1024, not '8,'" },
        { "--hidden", "8,0",
          "--hidden takes whole numbers of at least 1 with commas between them, as 1024,1024, not '8,0'" },
        { "--device", "gpu", "--device takes one of cpu|cuda, not 'gpu'" },
        { "--device", "cpu|cuda", "--device takes one of cpu|cuda, not 'cpu|cuda'" },
        { "--out", "", "--out takes a text that is not empty, not ''" },
        { "--resume=maybe", NULL, "--resume takes no value, not 'maybe': write --resume alone" },
        { "--steps", NULL, "--steps needs a value behind it: a whole number of at least 1" },
        { "--steps", "--batch", "--steps needs a value behind it: a whole number of at least 1" },
        { "--device", NULL, "--device needs a value behind it: cpu|cuda" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_flags f = open_flags(RUN_TRAIN);
        ck_assert_str_eq(parse(&f, cases[i].flag, cases[i].value), cases[i].message);
        run_flags_free(&f);
    }
}
END_TEST

START_TEST(test_unknown_flags_suggest_the_nearest)
{
    run_flags f = open_flags(RUN_TRAIN);
    ck_assert_str_eq(parse(&f, "--stpes", "3"), "unknown flag --stpes: did you mean --steps?");
    ck_assert_str_eq(parse(&f, "--batchsize", "3"), "unknown flag --batchsize: 'mlp train --help' lists all");
    ck_assert_str_eq(parse(&f, "--drop", "0.1"), "unknown flag --drop: did you mean --dropout?");
    ck_assert_str_eq(parse(&f, "--foo", NULL), "unknown flag --foo: 'mlp train --help' lists all");
    ck_assert_str_eq(parse(&f, "--oot", NULL), "unknown flag --oot: did you mean --out?");
    ck_assert_str_eq(parse(&f, "--zzzzzzzz", NULL), "unknown flag --zzzzzzzz: 'mlp train --help' lists all");
    run_flags_free(&f);
}
END_TEST

START_TEST(test_a_flag_of_another_command_is_refused)
{
    run_flags f = open_flags(RUN_EVAL);
    ck_assert_str_eq(parse(&f, "--resume", NULL),
                     "--resume is no flag of 'mlp train': leave it out, or see 'mlp train --help'");
    run_flags_free(&f);
}
END_TEST

START_TEST(test_the_command_line_wins_over_files_and_they_over_defaults)
{
    run_flags f = open_flags(RUN_TRAIN);
    write_text("config-a.json", "{\"batch\": 5, \"lr\": 0.5, \"hidden\": \"7,8\", \"resume\": true}");
    write_text("config-b.json", "{\"batch\": 6, \"lr\": 0.25, \"steps\": 9}");
    ck_assert_str_eq(parse(&f, "--batch", "4"), "");
    ck_assert_msg(run_flags_load(&f, "config-a.json", RUN_CONFIG), "%s", f.error);
    ck_assert_msg(run_flags_load(&f, "config-b.json", RUN_SAVED), "%s", f.error);
    ck_assert_int_eq(run_flags_whole(&f, "batch"), 4);
    ck_assert_double_eq(run_flags_number(&f, "lr"), 0.5);
    ck_assert_str_eq(run_flags_text(&f, "hidden"), "7,8");
    ck_assert_int_eq(run_flags_whole(&f, "steps"), 9);
    ck_assert(run_flags_on(&f, "resume"));
    run_flags_free(&f);
}
END_TEST

START_TEST(test_a_wrong_config_names_file_and_flag)
{
    static const struct { const char *text, *message; } cases[] = {
        { "{\"bacth\": 5}", "config.json: unknown flag --bacth: did you mean --batch?" },
        { "{\"batch\": 0}", "config.json: --batch takes a whole number of at least 1, at most 1000, not '0'" },
        { "{\"batch\": [1]}", "config.json: \"batch\" must be a text, a number, true or false" },
        { "[1]", "config.json: must hold one JSON object of flags" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_flags f = open_flags(RUN_TRAIN);
        write_text("config.json", cases[i].text);
        ck_assert(!run_flags_load(&f, "config.json", RUN_CONFIG));
        ck_assert_str_eq(f.error, cases[i].message);
        run_flags_free(&f);
    }
    run_flags f = open_flags(RUN_TRAIN);
    ck_assert(!run_flags_load(&f, "no-such.json", RUN_CONFIG));
    ck_assert_str_has(f.error, "no-such.json");
    run_flags_free(&f);
}
END_TEST

START_TEST(test_what_is_saved_reads_back_the_same)
{
    run_flags f = open_flags(RUN_TRAIN), g = open_flags(RUN_TRAIN);
    td_context *td = open_cpu(TD_F32);
    parse(&f, "--lr", "0.0003");
    parse(&f, "--hidden", "5,6");
    parse(&f, "--out", "/somewhere");
    parse(&f, "--seed", "18446744073709551615"); /* more than a reader of JSON keeps of a number */
    td_json_writer w = td_json_begin(td);
    td_json_open_object(&w, NULL);
    run_flags_put(&f, &w);
    td_json_close_object(&w);
    write_text("saved.json", td_json_text(&w));
    td_json_end(&w);
    ck_assert_msg(run_flags_load(&g, "saved.json", RUN_SAVED), "%s", g.error);
    ck_assert_double_eq(run_flags_number(&g, "lr"), 0.0003);
    ck_assert_str_eq(run_flags_text(&g, "hidden"), "5,6");
    ck_assert_uint_eq((uint64_t)run_flags_whole(&g, "seed"), UINT64_MAX);
    ck_assert_ptr_null(run_flags_text(&g, "out")); /* where a run lies is no part of it */
    td_close(td);
    run_flags_free(&f);
    run_flags_free(&g);
}
END_TEST

/* ---- The loop --------------------------------------------------------------------------------------------- */

START_TEST(test_the_loop_is_backward_step_and_nothing_else)
{
    double losses[6], expected[6];
    int64_t updates = 0;
    ck_assert_int_eq(train("--steps 6 --dtype f64 --seed 3 --threads 1", 5, losses, &updates), 0);
    ck_assert_int_eq(updates, 6);
    train_by_hand(EACH_BATCH, 1, 6, expected);
    ck_assert_near(losses, expected, 6, 0);
}
END_TEST

START_TEST(test_the_loss_of_an_update_is_the_mean_of_its_micro_batches)
{
    double one[5], three[5];
    ck_assert_int_eq(train("--steps 5 --dtype f64", 5, one, NULL), 0);
    ck_assert_int_eq(train("--steps 5 --dtype f64 --accumulate 3", 5, three, NULL), 0);
    ck_assert_near(three, one, 5, 1e-12); /* sums in another order */
}
END_TEST

START_TEST(test_epochs_are_counted_in_whole_batches)
{
    int64_t updates = 0;
    double losses[6];
    ck_assert_int_eq(train("--epochs 2", 5, losses, &updates), 0);
    ck_assert_int_eq(updates, 6); /* 40 samples, batches of 12: 3 an epoch */
}
END_TEST

START_TEST(test_what_a_program_cannot_use_is_refused)
{
    static const char *const cases[] = {
        "--steps 2 stray",                                  /* no flag */
        "--steps 2 --eval-every 1",                         /* there is nothing to evaluate on */
        "--steps 2 --units hidden",                         /* of fsdp */
        "--steps 2 --strategy ddp --units hidden",
        "--steps 2 --final-lr 0.1",                         /* of a schedule that falls */
        "--steps 2 --schedule-steps 5",
        "--steps 2 --save-every 1",                         /* without --out */
        "--steps 2 --warmup 3",
        "--steps 2 --schedule cosine --schedule-steps 4 --warmup 5",
        "--steps 2 --power 2",                              /* of another schedule */
        "--steps 2 --schedule cosine --decay-every 1",
        "--steps 2 --schedule cosine --decay-factor 0.5",
        "--steps 2 --schedule step --decay-every 1 --final-lr 0.1",
        "--steps 2 --schedule step",                        /* it must be said when */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int status = train(cases[i], 5, NULL, NULL);
        ck_assert_msg(status == 2, "%s: status %d", cases[i], status);
    }
    double losses[2];
    ck_assert_int_eq(train("--steps 2 --schedule cosine --warmup 2 --final-lr 0.1", 5, losses, NULL), 0);
}
END_TEST

/* The rates a run of `flags` trains with, from --lr 1. Returns the exit status. */
static int train_rates(const char *flags, int64_t warmup, double *rates)
{
    char text[512], *argv[40] = { "small" };
    int argc = 1;
    snprintf(text, sizeof text, "%s", flags);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    char **arguments = argv;
    run_loop *run = run_open(&argc, &arguments, &(run_defaults){ .name = "small", .batch = 12, .lr = 1, .warmup = warmup });
    td_context *td = run_context(run);
    small_model m = make_small(td, 5);
    opt_optimizer *opt = plain_sgd(td_root(td));
    run_train_on(run, small_set(td));
    bool stepped = false;
    for (data_batch b; run_next(run, &b); stepped = true) {
        run_step(run, opt, small_loss(&m, &b));
        rates[td_updates(td) - 1] = run->lr;
    }
    if (!stepped) opt_close(opt);
    return run_close(run);
}

START_TEST(test_schedules_by_their_flags)
{
    static const struct { const char *flags; double rates[5]; } cases[] = {
        { "--steps 5", { 1, 1, 1, 1, 1 } },
        { "--steps 5 --warmup 3", { 0.25, 0.5, 0.75, 1, 1 } },
        { "--steps 5 --schedule linear --final-lr 0", { 1, 0.8, 0.6, 0.4, 0.2 } },
        { "--steps 5 --schedule cosine --schedule-steps 4", { 1, 0.86819805153394640, 0.55, 0.23180194846605360, 0.1 } },
        { "--steps 5 --schedule polynomial --final-lr 0 --power 2", { 1, 0.64, 0.36, 0.16, 0.04 } },
        { "--steps 5 --schedule polynomial", { 1, 0.82, 0.64, 0.46, 0.28 } },
        { "--steps 5 --schedule step --decay-every 2", { 1, 1, 0.1, 0.1, 0.01 } },
        { "--steps 5 --schedule step --decay-every 1 --decay-factor 0.5", { 1, 0.5, 0.25, 0.125, 0.0625 } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double rates[5];
        ck_assert_int_eq(train_rates(cases[i].flags, 0, rates), 0);
        ck_assert_near(rates, cases[i].rates, 5, 1e-15);
    }
}
END_TEST

START_TEST(test_a_flag_of_the_command_line_makes_others_be_forgotten)
{
    double losses[4];
    write_text("fsdp.json", "{\"strategy\": \"fsdp\", \"units\": \"hidden\", "
                            "\"schedule\": \"cosine\", \"final-lr\": 0.5}");
    ck_assert_int_eq(train("--steps 2 --config fsdp.json --strategy ddp --schedule constant", 5, losses, NULL), 0);
    write_text("ddp.json", "{\"strategy\": \"ddp\", \"units\": \"hidden\"}");
    ck_assert_int_eq(train("--steps 2 --config ddp.json", 5, NULL, NULL), 2);
}
END_TEST

START_TEST(test_a_program_reads_flags_of_its_own)
{
    static const run_flag own[] = {
        { .name = "sizes", .kind = RUN_COUNTS, .help = "sizes" },
        { .name = "loud", .kind = RUN_SWITCH, .standard = "false", .help = "noise" },
        { .name = "share", .kind = RUN_FRACTION, .standard = "0.25", .help = "share" },
        { 0 }
    };
    char *argv[] = { "own", "--sizes", "3,4,5", "--loud", NULL }, **arguments = argv;
    int argc = 4;
    int64_t sizes[2];
    run_loop *run = run_open(&argc, &arguments, &(run_defaults){ .name = "own", .flags = own });
    ck_assert_int_eq(argc, 1);
    ck_assert_int_eq(run_flag_counts(run, "sizes", sizes, 2), 3);
    ck_assert_int_eq(sizes[1], 4);
    ck_assert(run_flag_on(run, "loud") && !run_flag_on(run, "resume"));
    ck_assert_double_eq(run_flag_number(run, "share"), 0.25);
    ck_assert_str_eq(run_data(run), ""); /* needed, and not given */
    ck_assert_int_eq(run_close(run), 2);
}
END_TEST

/* ---- Checkpoints ------------------------------------------------------------------------------------------ */

/* What a program has as its default gives way to a short run, also when that goes on; what is asked for does not. */
START_TEST(test_a_default_warmup_is_no_longer_than_the_schedule)
{
    static const double short_run[] = { 0.25, 0.5, 0.75 }, long_run[] = { 1.0 / 3, 2.0 / 3, 1, 1 }, longer[] = { 0.25, 0.5, 0.75, 1 },
                        none[] = { 1, 1, 1, 1 };
    double rates[4];
    clean("warmed");
    ck_assert_int_eq(train_rates("--steps 3 --out warmed", 100, rates), 0);
    ck_assert_near(rates, short_run, 3, 1e-15);
    ck_assert_int_eq(train_rates("--steps 4 --resume --out warmed", 100, rates), 0);
    ck_assert_near(rates, longer, 4, 1e-15);
    ck_assert_int_eq(train_rates("--steps 4", 2, rates), 0);
    ck_assert_near(rates, long_run, 4, 1e-15);
    ck_assert_int_eq(train_rates("--steps 4 --warmup 0", 2, rates), 0);
    ck_assert_near(rates, none, 4, 0);
    ck_assert_int_eq(train_rates("--steps 3 --warmup 100", 100, rates), 2);
    write_text("warm.json", "{\"warmup\": 100}");
    ck_assert_int_eq(train_rates("--steps 3 --config warm.json", 0, rates), 2);
}
END_TEST

START_TEST(test_a_resumed_run_is_the_same_to_the_bit)
{
    double whole[8], parts[8];
    ck_assert_int_eq(train("--steps 8 --accumulate 2 --seed 5", 5, whole, NULL), 0);
    clean("resumed");
    /* 4 and 8 are in the middle of an epoch of 3 batches */
    ck_assert_int_eq(train("--steps 4 --accumulate 2 --seed 5 --out resumed", 5, parts, NULL), 0);
    ck_assert_int_eq(train("--steps 8 --resume --out resumed", 5, parts, NULL), 0);
    ck_assert_near(parts, whole, 8, 0);
}
END_TEST

static opt_optimizer *row_wise(td_module root) { return opt_adagrad(root, &(opt_adagrad_options){ .row_wise = true }); }

/* Moments of another shape than their parameters' are saved and read like any state. */
START_TEST(test_sums_of_rows_are_resumed)
{
    double whole[8], parts[8];
    ck_assert_int_eq(train_by(row_wise, "--steps 8 --seed 5", 5, whole, NULL), 0);
    clean("rows");
    ck_assert_int_eq(train_by(row_wise, "--steps 4 --seed 5 --out rows", 5, parts, NULL), 0);
    ck_assert_int_eq(train_by(row_wise, "--steps 8 --resume --out rows", 5, parts, NULL), 0);
    ck_assert_near(parts, whole, 8, 0);
}
END_TEST

START_TEST(test_lines_after_the_checkpoint_are_cut)
{
    double losses[8];
    clean("cut");
    ck_assert_int_eq(train("--steps 4 --log-every 1 --out cut", 5, losses, NULL), 0);
    ck_assert_int_eq(count_lines("cut/metrics.jsonl"), 4);
    FILE *to = fopen("cut/metrics.jsonl", "a");
    fputs("{\"step\": 5, \"loss\": 1}\n{\"step\": 6, \"lo", to); /* as a crash leaves it */
    fclose(to);
    ck_assert_int_eq(train("--steps 6 --resume --out cut", 5, losses, NULL), 0);
    ck_assert_int_eq(count_lines("cut/metrics.jsonl"), 6);
}
END_TEST

START_TEST(test_the_last_three_checkpoints_are_kept)
{
    clean("kept");
    ck_assert_int_eq(train("--steps 10 --save-every 2 --out kept", 5, NULL, NULL), 0);
    ck_assert(!exists("kept/checkpoints/step-2") && !exists("kept/checkpoints/step-4"));
    ck_assert(exists("kept/checkpoints/step-6/manifest.json") && exists("kept/checkpoints/step-8/manifest.json"));
    ck_assert_int_eq(run_latest("kept"), 10);
}
END_TEST

START_TEST(test_a_checkpoint_without_manifest_is_none)
{
    double losses[6];
    clean("half");
    ck_assert_int_eq(train("--steps 2 --out half", 5, losses, NULL), 0);
    ck_assert_int_eq(mkdir("half/checkpoints/step-4", 0777), 0);
    ck_assert_int_eq(mkdir("half/checkpoints/.step-5", 0777), 0);
    ck_assert_int_eq(run_latest("half"), 2);
    ck_assert_int_eq(train("--steps 5 --resume --out half", 5, losses, NULL), 0);
    ck_assert_int_eq(run_latest("half"), 5);
}
END_TEST

START_TEST(test_what_a_crash_left_is_removed)
{
    clean("left");
    ck_assert_int_eq(train("--steps 2 --out left", 5, NULL, NULL), 0);
    ck_assert_int_eq(mkdir("left/checkpoints/.step-1", 0777), 0);
    write_text("left/checkpoints/.step-1/rank-3.safetensors", "half");
    ck_assert_int_eq(train("--steps 3 --resume --out left", 5, NULL, NULL), 0);
    ck_assert(!exists("left/checkpoints/.step-1"));
}
END_TEST

START_TEST(test_another_run_in_the_same_place_loses_nothing_of_the_first)
{
    static const char *const files[] = { "checkpoints/step-9/manifest.json", "config.json", "metrics.jsonl",
                                         "summary.json", "loss.gnuplot" };
    clean("twice");
    ck_assert_int_eq(train("--steps 9 --log-every 1 --out twice", 5, NULL, NULL), 0);
    ck_assert_int_eq(train("--steps 2 --log-every 1 --out twice", 5, NULL, NULL), 0);
    ck_assert_int_eq(run_latest("twice"), 2);
    ck_assert_int_eq(count_lines("twice/metrics.jsonl"), 2);
    ck_assert_int_eq(train("--steps 3 --out twice", 5, NULL, NULL), 0);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char path[256];
        snprintf(path, sizeof path, "twice/previous-1/%s", files[i]);
        ck_assert_msg(exists(path), "%s", path);
    }
    ck_assert_int_eq(count_lines("twice/previous-1/metrics.jsonl"), 9);
    ck_assert(exists("twice/previous-2/checkpoints/step-2/manifest.json"));
}
END_TEST

/* A signal comes before the first update, twice. */
static int train_interrupted(const char *flags)
{
    run_loop *run = open_small(flags);
    raise(SIGTERM);
    raise(SIGTERM); /* Slurm sends one, and its srun another */
    return loop_small(run, adamw, 5, NULL, NULL, NULL);
}

START_TEST(test_before_the_first_update_nothing_is_touched)
{
    clean("early");
    ck_assert_int_eq(train_interrupted("--steps 9 --out early"), 0);
    ck_assert(!exists("early/config.json") && !exists("early/checkpoints"));
    ck_assert_int_eq(train("--steps 4 --log-every 1 --out early", 5, NULL, NULL), 0);
    write_text("early/metrics.jsonl", "{\"step\": 5, \"loss\": 1}\n");
    ck_assert_int_eq(train_interrupted("--steps 9 --out early"), 0);
    ck_assert_int_eq(train_interrupted("--steps 9 --resume --out early"), 0);
    ck_assert_int_eq(train("--steps 3 --resume --out early", 5, NULL, NULL), 0); /* nothing to do */
    ck_assert(!exists("early/previous-1"));
    ck_assert_int_eq(count_lines("early/metrics.jsonl"), 1);
    double losses[5];
    ck_assert_int_eq(train("--resume --steps 5 --out early", 5, losses, NULL), 0);
    ck_assert_int_eq(count_lines("early/metrics.jsonl"), 1); /* the line beyond the checkpoint was cut */
}
END_TEST

static int measure_nothing(void *model, const data_batch *b, run_metric out[RUN_METRICS])
{
    (void)model, (void)b, (void)out;
    return 0;
}

START_TEST(test_an_evaluation_that_fails_loses_no_training)
{
    clean("kept-by");
    run_loop *run = open_small("--steps 4 --out kept-by");
    ck_assert_int_eq(loop_small(run, adamw, 5, NULL, NULL, measure_nothing), 1);
    ck_assert_int_eq(run_latest("kept-by"), 4);
}
END_TEST

START_TEST(test_every_evaluation_is_of_the_whole_set)
{
    clean("evals");
    int64_t updates;
    run_loop *run = open_small("--steps 4 --lr 1e-30 --eval-every 1 --seed 2 --out evals");
    ck_assert_int_eq(loop_small(run, plain_sgd, 5, NULL, &updates, measure_loss), 0);
    td_context *td = open_cpu(TD_F32);
    FILE *from = fopen("evals/metrics.jsonl", "r");
    double first = 0;
    char line[512];
    for (int i = 0; i < 4; i++) {
        ck_assert_ptr_nonnull(fgets(line, sizeof line, from));
        td_json_document *document = td_json_parse(td, line, strlen(line), "evals/metrics.jsonl");
        double loss = td_json_get_number(td_json_get(td_json_root(document), "eval"), "loss", 0);
        if (i == 0) first = loss;
        ck_assert(loss > 0);
        ck_assert_double_eq(loss, first); /* nothing is learned at that rate */
        td_json_close(document);
    }
    fclose(from);
    td_close(td);
}
END_TEST

/* The mean of `hidden` as an evaluation reads it. */
static int measure_hidden(void *model, const data_batch *b, run_metric out[RUN_METRICS])
{
    td_context *td = data_get(b, "x").td;
    td_tensor one = td_fill(td, TD_F32, (td_shape){ 0 }, 1);
    out[0] = (run_metric){ "hidden", td_mean(td_use(((small_model *)model)->hidden), TD_ALL, TD_DROP), one };
    return 1;
}

typedef struct averaged {
    double evaluated;             /* the mean of `hidden` in the last evaluation */
    double trained, average;      /* the means of the states "hidden" and "hidden.ema"; NaN: there is none */
    double losses[8];
} averaged;

static double mean_of(td_context *td, const char *name)
{
    float values[5 * FEATURES];
    td_state s = td_state_named(td, name);
    if (s.id == TD_NONE) return (double)NAN;
    ck_assert(td_state_read(s, 0, 5 * FEATURES, values));
    double sum = 0;
    for (int i = 0; i < 5 * FEATURES; i++) sum += values[i];
    return sum / (5 * FEATURES);
}

static averaged train_averaged(const char *flags)
{
    averaged a = { 0 };
    run_loop *run = open_small(flags);
    td_context *td = run_context(run);
    small_model m = make_small(td, 5);
    opt_optimizer *opt = adamw(td_root(td));
    run_train_on(run, small_set(td));
    run_evaluate_on(run, small_set(td), measure_hidden, &m);
    for (data_batch b; run_next(run, &b);) {
        run_step(run, opt, small_loss(&m, &b));
        if (b.last) a.losses[td_updates(td) - 1] = run->loss;
    }
    ck_assert_no_error(td);
    a.evaluated = run->evaluation.value[0];
    a.trained = mean_of(td, "hidden");
    a.average = mean_of(td, "hidden.ema");
    ck_assert_int_eq(run_close(run), 0);
    return a;
}

START_TEST(test_averages_are_what_is_evaluated)
{
    averaged without = train_averaged("--steps 8 --accumulate 2 --eval-every 3 --seed 5");
    averaged with = train_averaged("--steps 8 --accumulate 2 --eval-every 3 --seed 5 --ema 0.9");
    ck_assert_near(with.losses, without.losses, 8, 0); /* nothing of it is trained on */
    ck_assert(with.trained == without.trained && isnan(without.average));
    ck_assert_near(&without.evaluated, &without.trained, 1, 1e-6);
    ck_assert_near(&with.evaluated, &with.average, 1, 1e-6);
    ck_assert(fabs(with.average - with.trained) > 1e-3);
}
END_TEST

START_TEST(test_averages_are_resumed)
{
    clean("averaged");
    averaged whole = train_averaged("--steps 8 --seed 5 --ema 0.9");
    train_averaged("--steps 4 --seed 5 --ema 0.9 --out averaged");
    averaged parts = train_averaged("--steps 8 --resume --out averaged"); /* --ema is kept with the run */
    ck_assert(parts.average == whole.average && parts.evaluated == whole.evaluated);
}
END_TEST

/* Opens a run on `flags`, makes `make`'s model, and reads the checkpoint: the error's text. */
static const char *restore_error(const char *out, void (*make)(td_context *td))
{
    static char text[1024];
    char *argv[] = { "small", "--out", (char *)out, "--steps", "9", NULL }, **arguments = argv;
    int argc = 5;
    run_loop *run = run_open(&argc, &arguments, &(run_defaults){ .name = "small", .batch = 12 });
    make(run_context(run));
    run_restore *restore = run_restore_open(run, true);
    ck_assert(!restore || !run_restore_states(run, restore));
    snprintf(text, sizeof text, "%s", td_error_text(run_context(run)));
    run_restore_close(restore);
    run_close(run);
    return text;
}

static void with_more(td_context *td)
{
    make_small(td, 5);
    td_parameter(td_root(td), "more", TD_SHAPE(2), td_init_constant(0));
}

static void with_less(td_context *td)
{
    td_parameter(td_root(td), "hidden", TD_SHAPE(5, FEATURES), td_init_constant(0));
}
static void with_other_shape(td_context *td) { make_small(td, 7); }

START_TEST(test_a_checkpoint_that_does_not_fit_names_what_differs)
{
    clean("fits");
    ck_assert_int_eq(train("--steps 2 --out fits", 5, NULL, NULL), 0);
    ck_assert_str_eq(restore_error("fits", with_more),
                     "fits/checkpoints/step-2: does not hold 'more', which this model has");
    ck_assert_str_eq(
        restore_error("fits", with_less),
        "fits/checkpoints/step-2: holds 'out', which this model has not: give the flags it was trained with");
    ck_assert_str_eq(
        restore_error("fits", with_other_shape),
        "fits/checkpoints/step-2: 'hidden' has shape (5, 6) there and (7, 6) here: give the sizes it was trained with");
    ck_assert_str_eq(restore_error("nowhere", with_more),
                     "nowhere/checkpoints holds no complete checkpoint: train with --out nowhere first");
}
END_TEST

START_TEST(test_a_checkpoint_without_the_optimizers_moments_is_refused)
{
    clean("sgd");
    ck_assert_int_eq(train_by(plain_sgd, "--steps 2 --out sgd", 5, NULL, NULL), 0);
    ck_assert_int_eq(train("--steps 4 --resume --out sgd", 5, NULL, NULL), 1);
    ck_assert_int_eq(run_latest("sgd"), 2);
    ck_assert_int_eq(train_by(plain_sgd, "--steps 4 --resume --out sgd", 5, NULL, NULL), 0);
    ck_assert_int_eq(run_latest("sgd"), 4);
}
END_TEST

START_TEST(test_a_damaged_checkpoint_is_an_error_that_names_the_file)
{
    clean("damaged");
    ck_assert_int_eq(train("--steps 2 --out damaged", 5, NULL, NULL), 0);
    ck_assert_int_eq(truncate("damaged/checkpoints/step-2/rank-0.safetensors", 300), 0);
    ck_assert_str_has(restore_error("damaged", with_less), "damaged/checkpoints/step-2/rank-0.safetensors");
    write_text("damaged/checkpoints/step-2/manifest.json", "{\"format\": \"tandem che");
    ck_assert_str_has(restore_error("damaged", with_less), "damaged/checkpoints/step-2/manifest.json");
}
END_TEST

/* The same elements under another shape. */
START_TEST(test_an_entry_of_another_shape_is_refused)
{
    static float values[5 * FEATURES];
    static const char path[] = "reshaped/checkpoints/step-2/rank-0.safetensors";
    clean("reshaped");
    ck_assert_int_eq(train("--steps 2 --out reshaped", 5, NULL, NULL), 0);
    td_context *td = open_cpu(TD_F32);
    td_safetensors_entry entry = { .name = "hidden", .dtype = TD_F32, .data = values, .bytes = sizeof values };
    for (int right = 0; right < 2; right++) {
        entry.shape = right ? TD_SHAPE(5, FEATURES) : TD_SHAPE(FEATURES, 5);
        ck_assert(td_safetensors_write(td, path, &entry, 1, NULL));
        ck_assert_str_has(restore_error("reshaped", with_less),
                          right ? "which this model has not"
                                : "rank-0.safetensors: 'hidden' has another shape or dtype than manifest.json says");
    }
    td_close(td);
}
END_TEST

START_TEST(test_a_damaged_checkpoint_says_which_one_is_left)
{
    clean("hint");
    ck_assert_int_eq(train("--steps 4 --save-every 2 --out hint", 5, NULL, NULL), 0);
    ck_assert_int_eq(truncate("hint/checkpoints/step-4/rank-0.safetensors", 300), 0);
    ck_assert_str_has(restore_error("hint", with_less), "; remove hint/checkpoints/step-4 and step-2 is taken");
    write_text("hint/checkpoints/step-4/manifest.json", "{}");
    ck_assert_str_has(restore_error("hint", with_less), "; remove hint/checkpoints/step-4 and step-2 is taken");
}
END_TEST

TESTS("run", test_flags_take_both_forms, test_wrong_values_say_what_is_right, test_unknown_flags_suggest_the_nearest,
      test_a_flag_of_another_command_is_refused, test_the_command_line_wins_over_files_and_they_over_defaults,
      test_a_wrong_config_names_file_and_flag, test_what_is_saved_reads_back_the_same,
      test_the_loop_is_backward_step_and_nothing_else, test_the_loss_of_an_update_is_the_mean_of_its_micro_batches,
      test_epochs_are_counted_in_whole_batches, test_what_a_program_cannot_use_is_refused, test_schedules_by_their_flags,
      test_a_default_warmup_is_no_longer_than_the_schedule,
      test_a_flag_of_the_command_line_makes_others_be_forgotten, test_a_program_reads_flags_of_its_own,
      test_a_resumed_run_is_the_same_to_the_bit, test_sums_of_rows_are_resumed,
      test_lines_after_the_checkpoint_are_cut, test_the_last_three_checkpoints_are_kept,
      test_a_checkpoint_without_manifest_is_none, test_what_a_crash_left_is_removed,
      test_another_run_in_the_same_place_loses_nothing_of_the_first, test_before_the_first_update_nothing_is_touched,
      test_an_evaluation_that_fails_loses_no_training, test_every_evaluation_is_of_the_whole_set, test_averages_are_what_is_evaluated, test_averages_are_resumed,
      test_a_checkpoint_that_does_not_fit_names_what_differs,
      test_a_checkpoint_without_the_optimizers_moments_is_refused,
      test_a_damaged_checkpoint_is_an_error_that_names_the_file, test_an_entry_of_another_shape_is_refused,
      test_a_damaged_checkpoint_says_which_one_is_left)
