/* Checkpoints of several ranks: who writes what, any world to any other, what a kill or a full disk leaves.
 *
 * Models have what a sharding gets wrong elsewhere: sizes that no number of ranks divides, tied weights with 67 tokens, several units.
 * An epoch ends between the save and what follows it. By default a selection; TANDEM_TEST_ALL=1: all.
 *
 * Timeout: 600 s
 */
#include <sys/stat.h>
#include <unistd.h>

#define SHELL_FOLDER "test_checkpoint_files"
#include "core/json.h"
#include "tests/shell.h"

/* 100 rows of 7 numbers and a class; every tenth is for testing, so that 36 rows are taken twice an epoch. */
static void make_table(void)
{
    mkdir(SHELL_FOLDER, 0777);
    FILE *to = fopen(SHELL_FOLDER "/table.csv", "w");
    ck_assert_ptr_nonnull(to);
    for (uint64_t row = 0; row < 100; row++) {
        double first = check_normal(row * 7);
        for (uint64_t i = 0; i < 7; i++) fprintf(to, "%.6f,", check_normal(row * 7 + i));
        fprintf(to, "%d\n", first > 0.7 ? 4 : first > 0.2 ? 3 : first > -0.2 ? 2 : first > -0.7 ? 1 : 0);
    }
    ck_assert_int_eq(fclose(to), 0);
}

#define TABLE "--data table.csv --classes 5 --batch 36 --dropout 0.2 --dtype f64 --threads 1 --log-every 1 "

static double file_bytes(const char *format, ...) TD_PRINTF(1, 2);
static double file_bytes(const char *format, ...)
{
    char path[256], whole[512];
    struct stat status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(path, sizeof path, format, arguments);
    va_end(arguments);
    snprintf(whole, sizeof whole, SHELL_FOLDER "/%s", path);
    ck_assert_msg(!stat(whole, &status), "%s: %s", whole, strerror(errno));
    return (double)status.st_size;
}

static double number_in(const char *file, const char *name)
{
    char path[256];
    td_context *td = open_cpu(TD_F32);
    snprintf(path, sizeof path, SHELL_FOLDER "/%s", file);
    td_json_document *document = td_json_read(td, path);
    ck_assert_no_error(td);
    double number = td_json_get_number(td_json_root(document), name, (double)NAN);
    td_json_close(document);
    td_close(td);
    return number;
}

/* ---- Who writes what -------------------------------------------------------------------------------------- */

START_TEST(test_every_rank_writes_its_share)
{
#define SHARED " --tensor-columns net.0 --tensor-rows net.3"
    static const struct { const char *strategy; int ranks; } worlds[] = {
        { "ddp", 4 },  { "zero1", 3 },    { "zero2", 2 },    { "zero3 --whole-elements 200", 4 },
        { "fsdp", 3 }, { "hsdp:2x2", 4 }, { "hsdp:1x3", 3 }, { "ddp+tp:2" SHARED, 4 }, { "fsdp+tp:2" SHARED, 4 },
    };
    static const char flags[] = "--task regress --hidden 128,131 --batch 36 --dtype f64 --threads 1";
    ck_assert_sh(0, "rm -rf one; $MLP train %s --steps 2 --out one", flags);
    double whole = file_bytes("one/checkpoints/step-2/rank-0.safetensors");
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++) {
        int ranks = worlds[w].ranks;
        double all = 0;
        ck_assert_sh(0, "rm -rf share; $MLP train %s --steps 2 --out share --ranks %d --strategy %s", flags, ranks, worlds[w].strategy);
        for (int rank = 0; rank < ranks; rank++) {
            double bytes = file_bytes("share/checkpoints/step-2/rank-%d.safetensors", rank);
            ck_assert_msg(bytes < 1.05 * whole / ranks, "%s: rank %d of %d writes %.0f bytes of %.0f", worlds[w].strategy, rank, ranks,
                          bytes, whole);
            all += bytes;
        }
        double copied = number_in("share/summary.json", "checkpoint_bytes");
        double written = file_bytes("share/checkpoints/step-2/rank-0.safetensors");
        ck_assert_msg(copied < written && copied > 0.97 * written, "%.0f bytes copied, %.0f written", copied, written);
        ck_assert_sh(0, "$MLP plan --json %s --world %d --strategy %s >plan.json", flags, ranks, worlds[w].strategy);
        ck_assert_double_eq(number_in("plan.json", "checkpoint_bytes"), copied);
        ck_assert_msg(fabs(all - whole) < 0.02 * whole, "%s: %.0f bytes, not %.0f", worlds[w].strategy, all, whole);
    }
}
END_TEST

/* ---- Any world to any other ------------------------------------------------------------------------------- */

enum { SAVED = 3, ENDS = 5 };     /* updates before and after; an epoch ends behind the fourth */

static const struct { const char *strategy; int ranks; } worlds[] = {
    { "single", 1 },   { "ddp", 2 },      { "ddp", 3 },      { "ddp", 4 },      { "zero1", 2 },    { "zero1", 3 },    { "zero1", 4 },
    { "zero2", 2 },    { "zero2", 3 },    { "zero2", 4 },    { "zero3", 2 },    { "zero3", 3 },    { "zero3", 4 },    { "fsdp", 2 },
    { "fsdp", 3 },     { "fsdp", 4 },     { "hsdp:2x2", 4 }, { "hsdp:1x2", 2 }, { "hsdp:3x1", 3 },
    { "ddp+tp:2", 2 }, { "ddp+tp:2", 4 }, { "zero1+tp:2", 4 }, { "fsdp+tp:2", 4 },
};
enum { WORLDS = sizeof worlds / sizeof *worlds };

/* The layers that +tp shares: those that are 22 wide, or an MLP's. Rows are saved in another order than that of their shape. */
static const char mlp_shared[] = "--tensor-columns net.3 --tensor-rows net.6",
                  gpt_shared[] = "--tensor-columns 'h.*.mlp.c_fc' --tensor-rows 'h.*.mlp.c_proj'";

/* "--ranks 4 --strategy zero3 ..." with units small enough that there are several. */
static const char *world_flags(int w, const char *shared)
{
    static char text[240];
    const char *strategy = worlds[w].strategy, *units = "";
    if (!strncmp(strategy, "ddp", 3) || !strncmp(strategy, "zero1", 5) || !strcmp(strategy, "zero2")) units = "--bucket-bytes 3000";
    if (!strcmp(strategy, "zero3")) units = "--unit-elements 500 --whole-elements 30";
    snprintf(text, sizeof text, "--ranks %d --strategy %s %s %s", worlds[w].ranks, strategy, units, strchr(strategy, '+') ? shared : "");
    return text;
}

/* Losses of updates 1, 2 ... in OUT/metrics.jsonl (NaN: there is no line), and what the last evaluation found, of the averages. */
typedef struct curve {
    double loss[16], evaluation;
} curve;

static curve read_curve(const char *out)
{
    char path[256], line[1024];
    curve c = { .evaluation = (double)NAN };
    td_context *td = open_cpu(TD_F32);
    snprintf(path, sizeof path, SHELL_FOLDER "/%s/metrics.jsonl", out);
    FILE *from = fopen(path, "r");
    ck_assert_msg(from != NULL, "%s: %s", path, strerror(errno));
    for (int i = 0; i < 16; i++) c.loss[i] = (double)NAN;
    while (fgets(line, sizeof line, from)) {
        td_json_document *document = td_json_parse(td, line, strlen(line), path);
        ck_assert_no_error(td);
        const td_json *root = td_json_root(document);
        int64_t step = td_json_get_whole(root, "step", -1);
        ck_assert(step >= 1 && step <= 16);
        c.loss[step - 1] = td_json_get_number(root, "loss", (double)NAN);
        c.evaluation = td_json_get_number(td_json_get(root, "eval"), "loss", (double)NAN);
        td_json_close(document);
    }
    fclose(from);
    td_close(td);
    return c;
}

/* From update `first` to `last`. */
static void assert_same_curve(const curve *got, const curve *want, int first, int last, const char *who)
{
    for (int i = first - 1; i < last; i++)
        ck_assert_msg(fabs(got->loss[i] - want->loss[i]) <= 1e-10 * want->loss[i], "%s: loss %d is %.17g, not %.17g", who, i + 1,
                      got->loss[i], want->loss[i]);
    ck_assert_msg(fabs(got->evaluation - want->evaluation) <= 1e-10 * want->evaluation, "%s: evaluated to %.17g, not %.17g", who,
                  got->evaluation, want->evaluation);
}

/* By default one in `every` saved worlds, each loaded into one other. */
static bool is_saved(int from, int every) { return check_all() || from % every == 0; }
static bool is_loaded(int from, int to) { return check_all() || to == (from * 7 + 3) % WORLDS; }

/* program: "$MLP"; flags: of its training. */
static void check_worlds(const char *program, const char *flags, const char *shared, int every)
{
    ck_assert_sh(0, "rm -rf whole; %s train %s --steps %d --schedule-steps 9 --out whole", program, flags, ENDS);
    curve whole = read_curve("whole");
    for (int from = 0; from < WORLDS; from++) {
        if (!is_saved(from, every)) continue;
        ck_assert_sh(0, "rm -rf saved; %s train %s --steps %d --schedule-steps 9 --out saved %s", program, flags, SAVED,
                     world_flags(from, shared));
        for (int to = 0; to < WORLDS; to++) {
            if (!is_loaded(from, to)) continue;
            char who[160];
            snprintf(who, sizeof who, "%s on %d ranks to %s on %d", worlds[from].strategy, worlds[from].ranks, worlds[to].strategy,
                     worlds[to].ranks);
            ck_assert_sh(0, "rm -rf loaded; cp -r saved loaded; %s train --resume --out loaded --steps %d %s", program, ENDS,
                         world_flags(to, shared));
            curve loaded = read_curve("loaded");
            assert_same_curve(&loaded, &whole, 1, ENDS, who);
        }
    }
}

#define SCHEDULED "--schedule cosine --warmup 2 --ema 0.7 --lr 0.01 --clip 1 "

START_TEST(test_mlp_goes_on_in_any_world)
{
    make_table();
    check_worlds("$MLP", TABLE "--hidden 37,22 " SCHEDULED, mlp_shared, 2);
}
END_TEST

/* 67 characters. */
static void make_text(void)
{
    mkdir(SHELL_FOLDER, 0777);
    FILE *to = fopen(SHELL_FOLDER "/text.txt", "w");
    ck_assert_ptr_nonnull(to);
    for (int i = 0; i < 67 * 40; i++) fputc('!' + i * (i % 11 + 1) % 67, to);
    for (int i = 0; i < 67; i++) fputc('!' + i, to);
    ck_assert_int_eq(fclose(to), 0);
}

START_TEST(test_gpt_goes_on_in_any_world)
{
    make_text();
    check_worlds("$GPT", "--data text.txt --layers 2 --heads 3 --width 21 --context 7 --dropout 0.1 --batch 36 --dtype f64 --threads 1 "
                         "--log-every 1 " SCHEDULED, gpt_shared, 5);
    ck_assert_sh(0, "grep -c '\"shape\":.67,21.' loaded/checkpoints/step-5/manifest.json");
}
END_TEST

/* In bf16 zero1 and zero2 save the f32 parameters they store in parts; the copies that products read are made of what is loaded. Losses of
 * the same parameters differ by the order in which f32 rows are summed. */
START_TEST(test_bf16_goes_on_from_f32_parameters)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    static const struct { const char *to; double tolerance; } loads[] = {
        { "--ranks 3 --strategy zero1", 0 }, { "--ranks 2 --strategy zero2 --accumulate 2", 1e-5 }, { "--ranks 3 --strategy fsdp", 1e-5 },
    };
    make_table();
    static const char bf16[] = "--data table.csv --classes 5 --batch 36 --dtype bf16 --threads 1 --log-every 1 --hidden 37,22 --schedule-steps 9";
    ck_assert_sh(0, "rm -rf whole; $MLP train %s --steps %d --out whole %s", bf16, ENDS, loads[0].to);
    ck_assert_sh(0, "rm -rf saved; $MLP train %s --steps %d --out saved %s", bf16, SAVED, loads[0].to);
    curve whole = read_curve("whole");
    for (size_t i = 0; i < sizeof loads / sizeof *loads; i++) {
        ck_assert_sh(0, "rm -rf loaded; cp -r saved loaded; $MLP train --resume --out loaded --steps %d %s", ENDS, loads[i].to);
        curve loaded = read_curve("loaded");
        double off = fabs(loaded.loss[SAVED] - whole.loss[SAVED]);
        ck_assert_msg(off <= loads[i].tolerance * whole.loss[SAVED], "%s: loss %d is %.9g, not %.9g", loads[i].to, SAVED + 1,
                      loaded.loss[SAVED], whole.loss[SAVED]);
        ck_assert(loads[i].tolerance > 0 || loaded.loss[ENDS - 1] == whole.loss[ENDS - 1]);
    }
}
END_TEST

/* ---- While it trains -------------------------------------------------------------------------------------- */

/* The disk of the program that follows, of what lies in OUT/checkpoints. */
#define ON_DISK "ASAN_OPTIONS=$ASAN_OPTIONS:verify_asan_link_order=0 LD_PRELOAD='" DISK "' DISK_PATH=/checkpoints "
#define SLOW(ms) ON_DISK "DISK_DELAY_MS=" #ms " "
#define SMALL "$MLP train " TABLE "--hidden 37,22 " SCHEDULED "--schedule-steps 9 "

START_TEST(test_training_goes_on_while_a_checkpoint_is_written)
{
    static const char *const ways[] = { "", "--ranks 3 --strategy fsdp" };
    make_table();
    for (int i = 0; i < 2; i++) {
        ck_assert_sh(0, "rm -rf on; " SLOW(250) SMALL "--steps 9 --save-every 3 --keep 9 --out on %s >said.txt & "
                        "while kill -0 $! && ! ls -d on/checkpoints/.step-3; do sleep 0.01; done; "
                        "until test $(wc -l <on/metrics.jsonl) -ge 5; do sleep 0.01; done; "
                        "ls -d on/checkpoints/.step-3 && ! ls -d on/checkpoints/step-3; wait $!", ways[i]);
        ck_assert_str_has(out_text, "on/checkpoints/.step-3");
        ck_assert_sh(0, "for s in 3 6 9; do test -s on/checkpoints/step-$s/manifest.json || exit 1; done; "
                        "grep -c 'until the checkpoint of step 3 was written: a larger --save-every gives the disk more time' said.txt");
        ck_assert_str_eq(out_text, "1\n"); /* once: the save of step 9 waits, too */
    }
}
END_TEST

/* What is saved is of the step it was asked at: the second save waits for the first, and the updates between are not in it. */
START_TEST(test_what_is_saved_is_of_its_step)
{
    make_table();
    ck_assert_sh(0, "rm -rf whole; " SMALL "--steps 9 --out whole");
    curve whole = read_curve("whole");
    for (int step = 2; step <= 6; step += 2) {
        ck_assert_sh(0, "rm -rf now; " SLOW(30) SMALL "--steps 8 --save-every 2 --keep 9 --out now --ranks 2 --strategy zero1");
        ck_assert_sh(0, "for s in 2 4 6 8; do test $s -le %d || rm -r now/checkpoints/step-$s; done; "
                        "$MLP train --resume --steps 9 --out now", step);
        curve now = read_curve("now");
        assert_same_curve(&now, &whole, 1, 9, "saved while it trained");
    }
    ck_assert_sh(0, "rm -rf each; " SMALL "--steps 9 --save-every 1 --out each --ranks 3 && ls each/checkpoints");
    ck_assert_str_eq(out_text + strlen(out_text) - 21, "step-7\nstep-8\nstep-9\n");
}
END_TEST

/* One rank's save takes several times the deadline. */
START_TEST(test_a_slow_disk_is_no_late_rank)
{
    make_table();
    ck_assert_sh(0, "rm -rf slow; " SLOW(1000) "DISK_RANK=1 " SMALL "--ranks 3 --steps 4 --save-every 2 --timeout 1 --out slow && "
                    "test -s slow/checkpoints/step-2/manifest.json && test -s slow/checkpoints/step-4/manifest.json");
}
END_TEST

/* A rank that is done would be missed: under mpirun all end together. */
START_TEST(test_no_rank_leaves_before_the_checkpoint_stands)
{
    if (system("command -v mpirun >/dev/null 2>&1")) SKIP("there is no mpirun here: install Debian's package openmpi-bin");
    make_table();
    ck_assert_sh(0, "rm -rf together; export ASAN_OPTIONS=$ASAN_OPTIONS:verify_asan_link_order=0:detect_leaks=0 OMPI_ALLOW_RUN_AS_ROOT=1 "
                    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; timeout 60 mpirun --oversubscribe -n 2 -x LD_PRELOAD='" DISK "' "
                    "-x DISK_PATH=/checkpoints -x DISK_DELAY_MS=900 " SMALL "--steps 2 --timeout 3 --out together && "
                    "test -s together/checkpoints/step-2/manifest.json");
}
END_TEST

START_TEST(test_a_run_that_ends_ends_behind_its_save)
{
    static const char *const ways[] = { "", "--ranks 2" }, *const disks[] = { SLOW(200), SLOW(3500) "DISK_RANK=1 " };
    make_table();
    for (int i = 0; i < 2; i++) {
        ck_assert_sh(0, "rm -rf term; " SLOW(100) SMALL "--steps 1000000 --save-every 5 --out term %s >said.txt & "
                        "while kill -0 $! && ! ls -d term/checkpoints/.step-5; do sleep 0.01; done; kill -TERM $!; wait $! && "
                        "grep 'stopped by a signal after step' said.txt | sed 's/.*step \\([0-9]*\\).*/\\1/' >step.txt && "
                        "test -s term/checkpoints/step-$(cat step.txt)/manifest.json && ! ls -d term/checkpoints/.step-*", ways[i]);
        /* nor does the error of an update behind it cut it off */
        ck_assert_sh(0, "rm -rf nan; $MLP train " TABLE "--hidden 37,23 --optimizer sgd --steps 2 --out nan %s", ways[i]);
        ck_assert_sh(1, "%s $MLP train --resume --lr 1e80 --steps 9 --save-every 1 --out nan", disks[i]);
        ck_assert_str_has(err_text, "; the last checkpoint saved is nan/checkpoints/step-3");
        ck_assert_sh(0, "ls -A nan/checkpoints");
        ck_assert_str_eq(out_text, "step-2\nstep-3\n");
    }
}
END_TEST

/* ---- What fails ------------------------------------------------------------------------------------------- */

START_TEST(test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint)
{
    make_table();
    ck_assert_sh(0, "rm -rf was; " SMALL "--steps 2 --out was && rm -rf whole; " SMALL "--steps 7 --out whole");
    curve whole = read_curve("whole");
    for (int rank = 0; rank < 3; rank++) {
        ck_assert_sh(1, "rm -rf full; cp -r was full; " ON_DISK "DISK_RANK=%d DISK_FULL=4 $MLP train --resume --steps 9 "
                        "--save-every 1 --out full --ranks %d", rank, rank == 0 ? 1 : 3);
        char says[160];
        snprintf(says, sizeof says, "full/checkpoints/.step-3/rank-%d.safetensors: cannot be written: No space left on device", rank);
        ck_assert_str_has(err_text, says);
        ck_assert_int_eq(count_of(err_text, "\n"), 1);
        ck_assert_sh(0, "ls full/checkpoints && ! ls -d full/checkpoints/.step-3");
        ck_assert_str_eq(out_text, "step-2\n");
        ck_assert_sh(0, "$MLP train --resume --steps 7 --out full && ! ls -d full/checkpoints/.step-*");
        curve full = read_curve("full");
        assert_same_curve(&full, &whole, 1, 7, "after a full disk");
    }
}
END_TEST

/* Each is told once, by one rank for all; the checkpoint is the only one. */
START_TEST(test_what_is_wrong_with_a_checkpoint_is_named)
{
#define ANEW "; there is no older checkpoint: train without --resume to begin anew"
#define MANIFEST(edit) "sed -i '" edit "' wrong/checkpoints/step-2/manifest.json"
    static const struct { const char *damage, *says; } cases[] = {
        { MANIFEST("s/\"name\":\"net.3.bias\"/\"name\":\"net.4.bias\"/"), "step-2: does not hold 'net.3.bias', which this model has" },
        { MANIFEST("s/\"name\":\"net.3.weight.exp_avg\"/\"name\":\"lost\"/"), "step-2: does not hold 'net.3.weight.exp_avg', which this model has" },
        { MANIFEST("s/\"states\":\\[/&{\"name\":\"more\",\"kind\":\"parameter\",\"dtype\":\"f64\",\"shape\":[],\"pieces\":[]},/"),
          "step-2: holds 'more', which this model has not: give the flags it was trained with" },
        { "truncate -s -8 wrong/checkpoints/step-2/rank-2.safetensors", "step-2/rank-2.safetensors: " },
        { "truncate -s -8 wrong/checkpoints/step-2/rank-2.safetensors", ANEW },
        { "rm wrong/checkpoints/step-2/rank-1.safetensors", "step-2/rank-1.safetensors: No such file or directory" ANEW },
        { "truncate -s 100 wrong/checkpoints/step-2/manifest.json", "step-2/manifest.json: " },
        { "truncate -s 100 wrong/checkpoints/step-2/manifest.json", ANEW },
        { "echo {} >wrong/checkpoints/step-2/manifest.json", "manifest.json is not one of a checkpoint this version can read" ANEW },
        { "rm wrong/checkpoints/step-2/manifest.json", "wrong/checkpoints holds no complete checkpoint" },
    };
    make_table();
    ck_assert_sh(0, "rm -rf right; " SMALL "--steps 2 --out right --ranks 3 --strategy zero2");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert_sh(0, "rm -rf wrong; cp -r right wrong; %s", cases[i].damage);
        ck_assert_sh(1, "$MLP train --resume --steps 4 --out wrong --ranks 2 --strategy fsdp");
        ck_assert_str_has(err_text, cases[i].says);
        ck_assert_int_eq(count_of(err_text, "\n"), 1);
    }
}
END_TEST

/* Killed before one of its calls on the files, wherever that is: what is left goes on as if nothing had been. */
typedef struct death {
    const char *world;
    int rank;                     /* whose call it is; all ranks die */
} death;

/* The calls made, those of a name or all. */
static int count_calls(const char *name)
{
    ck_assert_sh(0, "grep -c '^%s' calls.txt || true", name);
    return (int)strtol(out_text, NULL, 10);
}

/* Each call there is once, at any time it is made; then any of all calls. */
START_TEST(test_killed_at_any_point_of_a_save_the_last_one_loads)
{
    static const death deaths[] = { { "", 0 }, { "--ranks 2 --strategy ddp", 0 }, { "--ranks 3 --strategy fsdp", 1 },
                                    { "--ranks 4 --strategy hsdp:2x2", 3 }, { "--ranks 3 --strategy zero1", 0 } };
    static const char *const calls[] = { "write", "fsync", "rename", "open", "unlink", "mkdir", "rmdir" };
    enum { DEATHS = sizeof deaths / sizeof *deaths, KINDS = sizeof calls / sizeof *calls };
    int kills = check_all() ? KINDS + 30 : KINDS + 3;
    make_table();
    ck_assert_sh(0, "rm -rf was; " SMALL "--steps 1 --out was && rm -rf whole; " SMALL "--steps 8 --out whole");
    curve whole = read_curve("whole");
    for (int k = 0; k < kills; k++) {
        /* Rank 0 alone makes and removes folders and puts a checkpoint in its place. */
        const char *call = k < KINDS ? calls[k] : "";
        const death *d = &deaths[k % DEATHS];
        int rank = *call ? 0 : d->rank;
        ck_assert_sh(0, "rm -rf killed calls.txt; cp -r was killed; " ON_DISK "DISK_RANK=%d DISK_LOG=calls.txt $MLP train --resume --steps 6 "
                        "--save-every 1 --keep 1 --out killed %s", rank, d->world);
        int last = count_calls(call), at = 1 + (int)(fabs(check_normal((uint64_t)k)) * 1e6) % (last ? last : 1);
        ck_assert_msg(last > 0, "'%s' never calls %s", d->world, call);
        ck_assert_sh(137, "rm -rf killed calls.txt; cp -r was killed; " ON_DISK "DISK_RANK=%d DISK_LOG=calls.txt DISK_KILL=%d %s%s $MLP train --resume "
                          "--steps 6 --save-every 1 --keep 1 --out killed %s", rank, at, *call ? "DISK_KILL_CALL=" : "", call, d->world);
        ck_assert_int_eq(count_calls(call), at);
        ck_assert_sh(0, "tail -n 1 calls.txt");
        char who[256];
        snprintf(who, sizeof who, "'%s', killed before call %d of %d of rank %d: %.120s", d->world, at, last, rank, out_text);
        int w = (k * 5 + 2) % WORLDS;
        int status = sh("$MLP train --resume --steps 8 --out killed %s", world_flags(w, mlp_shared));
        ck_assert_msg(status == 0, "%s: %s", who, err_text);
        ck_assert_sh(0, "! ls -d killed/checkpoints/.step-*");
        curve killed = read_curve("killed");
        assert_same_curve(&killed, &whole, 7, 8, who); /* the killed one may have saved an update before it wrote its line */
    }
}
END_TEST

/* ---- export ----------------------------------------------------------------------------------------------- */

static td_safetensors *open_weights(td_context *td, const char *path)
{
    char whole[256];
    snprintf(whole, sizeof whole, SHELL_FOLDER "/%s", path);
    td_safetensors *file = td_safetensors_open(td, whole);
    ck_assert_no_error(td);
    return file;
}

/* A torch.nn.Sequential of Linear, ReLU and Dropout loads it: its names, and weights as (out, in). The averages are what is exported. */
static void check_export(const char *ways)
{
    static const struct { const char *name; td_shape shape; } want[] = {
        { "net.0.weight", { 2, { 37, 7 } } },  { "net.0.bias", { 1, { 37 } } }, { "net.3.weight", { 2, { 22, 37 } } },
        { "net.3.bias", { 1, { 22 } } },       { "net.6.weight", { 2, { 5, 22 } } }, { "net.6.bias", { 1, { 5 } } },
    };
    ck_assert_sh(0, "rm -rf one parts *.safetensors; " SMALL "--steps 4 --out one && " SMALL "--steps 4 --out parts %s && "
                    "$MLP export --out one --to one.safetensors && $MLP export --out parts --to parts.safetensors", ways);
    ck_assert_str_has(out_text, "exported 1247 parameters in f64 of step 4 to parts.safetensors\n");
    td_context *td = open_cpu(TD_F32);
    td_safetensors *one = open_weights(td, "one.safetensors"), *parts = open_weights(td, "parts.safetensors");
    td_safetensors *saved = open_weights(td, "one/checkpoints/step-4/rank-0.safetensors");
    ck_assert_str_eq(td_safetensors_metadata(parts, "format"), "pt");
    ck_assert_int_eq(td_safetensors_count(parts), 6);
    for (int i = 0; i < 6; i++) {
        char average[64];
        td_safetensors_entry a, b, c;
        snprintf(average, sizeof average, "%s.ema", want[i].name);
        ck_assert(td_safetensors_find(one, want[i].name, &a) && td_safetensors_find(parts, want[i].name, &b) &&
                  td_safetensors_find(saved, average, &c));
        ck_assert(b.dtype == TD_F64 && td_shape_equal(b.shape, want[i].shape));
        ck_assert_mem_eq(a.data, c.data, (size_t)c.bytes);
        ck_assert_near(b.data, a.data, (int)td_shape_elements(b.shape), 1e-10);
    }
    td_safetensors_close(one);
    td_safetensors_close(parts);
    td_safetensors_close(saved);
    td_close(td);
}

START_TEST(test_export_is_one_file_of_what_is_evaluated)
{
    make_table();
    check_export("--ranks 3 --strategy zero3");
    check_export("--ranks 4 --strategy fsdp+tp:2 --tensor-columns net.3 --tensor-rows net.6");
}
END_TEST

START_TEST(test_export_says_what_is_wrong)
{
    static const struct { int status; const char *command, *says; } cases[] = {
        { 2, "$MLP export --out of", "export needs --to FILE" },
        { 2, "$MLP export --out of --to table.csv", "table.csv is there already and stays as it is" },
        { 2, "$MLP export --to x.safetensors", "export needs --out DIR" },
        { 1, "$MLP export --out of --to nowhere/x.safetensors", "nowhere/x.safetensors: cannot be written" },
        { 1, "truncate -s -8 of/checkpoints/step-2/rank-1.safetensors; $MLP export --out of --to x.safetensors", "step-2/rank-1.safetensors" },
        { 1, "rm of/checkpoints/step-2/rank-1.safetensors; $MLP export --out of --to x.safetensors", "step-2/rank-1.safetensors: No such file" },
    };
    make_table();
    ck_assert_sh(0, "rm -rf of x.safetensors; " SMALL "--steps 2 --out of --ranks 2");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert_sh(cases[i].status, "%s", cases[i].command);
        ck_assert_str_has(err_text, cases[i].says);
        ck_assert_sh(0, "! test -e x.safetensors");
    }
}
END_TEST

TESTS("checkpoint", test_every_rank_writes_its_share, test_mlp_goes_on_in_any_world, test_gpt_goes_on_in_any_world, test_bf16_goes_on_from_f32_parameters,
      test_training_goes_on_while_a_checkpoint_is_written, test_what_is_saved_is_of_its_step, test_a_slow_disk_is_no_late_rank,
      test_no_rank_leaves_before_the_checkpoint_stands, test_a_run_that_ends_ends_behind_its_save,
      test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint,
      test_what_is_wrong_with_a_checkpoint_is_named, test_killed_at_any_point_of_a_save_the_last_one_loads,
      test_export_is_one_file_of_what_is_evaluated, test_export_says_what_is_wrong)
