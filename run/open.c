/* Opening a run: the common flags, what they come to, the ranks, the context. */
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "run/loop.h"

enum { TE = RUN_TRAIN | RUN_EVAL, TB = RUN_TRAIN | RUN_BENCH, TEB = TE | RUN_BENCH, TBP = TB | RUN_PLAN };

/* Kinds, ranges and defaults of what every binary takes. */
static const run_flag common_flags[] = {
    { .name = "data", .kind = RUN_TEXT, .commands = TE, .help = "directory or file of the data" },
    { .name = "device", .kind = RUN_CHOICE, .choices = "cpu|cuda", .standard = "cpu",
      .help = "where it runs" },
    { .name = "dtype", .kind = RUN_CHOICE, .choices = "f32|bf16|f16|fp8|f64", .standard = "f32",
      .help = "precision" },
    { .name = "ranks", .kind = RUN_COUNT, .standard = "1", .most = 256, .commands = TEB,
      .help = "processes on this machine" },
    { .name = "world", .kind = RUN_COUNT, .standard = "1", .most = 65536, .commands = RUN_PLAN,
      .help = "ranks to plan for" },
    { .name = "strategy", .kind = RUN_TEXT,
      .help = "single, ddp or fsdp (single on one rank, else ddp)" },
    { .name = "units", .kind = RUN_TEXT,
      .help = "fsdp: name patterns, each match is gathered as one" },
    { .name = "batch", .kind = RUN_COUNT, .standard = "128", .most = 1e9,
      .help = "global batch of one update" },
    { .name = "accumulate", .kind = RUN_COUNT, .standard = "1", .most = 1e6, .commands = TBP,
      .help = "micro-batches it is cut into" },
    { .name = "steps", .kind = RUN_COUNT, .most = 1e15, .commands = TB,
      .help = "updates, in place of --epochs; bench: timed ones" },
    { .name = "epochs", .kind = RUN_COUNT, .standard = "1", .most = 1e9, .commands = RUN_TRAIN,
      .help = "times through the data" },
    { .name = "lr", .kind = RUN_POSITIVE, .standard = "0.001", .commands = TBP,
      .help = "learning rate" },
    { .name = "schedule", .kind = RUN_CHOICE, .choices = "constant|linear|cosine", .standard = "constant",
      .commands = RUN_TRAIN, .help = "course of the learning rate" },
    { .name = "final-lr", .kind = RUN_AMOUNT, .commands = RUN_TRAIN,
      .help = "learning rate at the end of a schedule that falls (a tenth of --lr)" },
    { .name = "warmup", .kind = RUN_WHOLE, .standard = "0", .most = 1e15, .commands = RUN_TRAIN,
      .help = "updates in which it rises from 0" },
    { .name = "schedule-steps", .kind = RUN_COUNT, .most = 1e15, .commands = RUN_TRAIN,
      .help = "updates the schedule spans (--steps)" },
    { .name = "seed", .kind = RUN_WHOLE, .standard = "0",
      .help = "of initial values, order of data and dropout" },
    { .name = "out", .kind = RUN_TEXT, .commands = TE,
      .help = "directory for curves, summary and checkpoints" },
    { .name = "resume", .kind = RUN_SWITCH, .standard = "false", .commands = RUN_TRAIN,
      .help = "go on from the last checkpoint in --out" },
    { .name = "save-every", .kind = RUN_COUNT, .standard = "1000", .most = 1e15, .commands = RUN_TRAIN,
      .help = "updates between checkpoints" },
    { .name = "log-every", .kind = RUN_COUNT, .standard = "10", .most = 1e15, .commands = RUN_TRAIN,
      .help = "updates between lines of metrics.jsonl" },
    { .name = "eval-every", .kind = RUN_COUNT, .most = 1e15, .commands = RUN_TRAIN,
      .help = "updates between evaluations (only at the end)" },
    { .name = "threads", .kind = RUN_COUNT, .most = 4096,
      .help = "CPU threads of all ranks together (all cores)" },
    { .name = "timeout", .kind = RUN_POSITIVE, .standard = "60", .most = 1e6, .commands = TEB,
      .help = "seconds a rank waits for another" },
    { .name = "deterministic", .kind = RUN_SWITCH, .standard = "false",
      .help = "the same bits run after run" },
    { .name = "json", .kind = RUN_SWITCH, .standard = "false",
      .help = "one JSON object on stdout, nothing else" },
    { .name = "config", .kind = RUN_TEXT, .help = "JSON file of the same names; flags win" },
    { .name = "help", .kind = RUN_SWITCH, .standard = "false", .help = "this list" },
    { 0 }
};

bool run_failed(const run_loop *run) { return run->ended || *run->usage || td_error(run->td) != TD_OK; }

void run_fail_usage(run_loop *run, const char *format, ...)
{
    if (*run->usage) return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(run->usage, sizeof run->usage, format, arguments);
    va_end(arguments);
}

/* ---- Flags */

static bool set_default(run_loop *run, const char *name, const char *text)
{
    return run_flags_set(&run->flags, name, text, RUN_DEFAULT);
}

static bool set_defaults(run_loop *run, const run_defaults *d)
{
    char batch[32], epochs[32], lr[32];
    snprintf(batch, sizeof batch, "%lld", (long long)d->batch);
    snprintf(epochs, sizeof epochs, "%lld", (long long)d->epochs);
    snprintf(lr, sizeof lr, "%.17g", d->lr);
    if (d->batch && !set_default(run, "batch", batch)) return false;
    if (d->epochs && !set_default(run, "epochs", epochs)) return false;
    if (d->lr && !set_default(run, "lr", lr)) return false;
    if (d->schedule && !set_default(run, "schedule", d->schedule)) return false;
    return !d->data || set_default(run, "data", d->data);
}

/* A run that goes on, or is evaluated, takes its flags from where it was started. */
static bool load_saved(run_loop *run)
{
    bool wanted = run->flags.command == RUN_EVAL || run_flags_on(&run->flags, "resume");
    const char *out = run_flags_text(&run->flags, "out");
    char path[RUN_PATH];
    if (!wanted || !out) return true;
    int size = snprintf(path, sizeof path, "%s/config.json", out);
    if (size >= (int)sizeof path || access(path, F_OK))
        return true; /* the missing checkpoint is reported where it is read */
    return run_flags_load(&run->flags, path, RUN_SAVED);
}

static bool read_flags(run_loop *run, int *argc, char **argv, const run_defaults *defaults)
{
    run_flags *f = &run->flags;
    if (!run_flags_add(f, common_flags) || !run_flags_add(f, defaults->flags) || !set_defaults(run, defaults))
        return false;
    if (!run_flags_parse(f, argc, argv)) return false;
    const char *config = run_flags_text(f, "config");
    return (!config || run_flags_load(f, config, RUN_CONFIG)) && load_saved(run);
}

/* ---- Settings */

/* Of --steps and --epochs the one from the stronger source holds; the other is forgotten. */
static void resolve_steps(run_loop *run)
{
    run_flags *f = &run->flags;
    run_source steps = run_flags_source(f, "steps"), epochs = run_flags_source(f, "epochs");
    if (!run_flags_text(f, "steps")) return;
    if (steps == RUN_GIVEN && epochs == RUN_GIVEN)
        run_fail_usage(run, "--steps and --epochs both say how long to train: give one of them");
    run_flags_unset(f, steps >= epochs ? "epochs" : "steps");
    run->steps = run_flags_whole(f, "steps");
}

static void check_settings(run_loop *run)
{
    const run_flags *f = &run->flags;
    if (run_flags_on(f, "resume") && !*run->out)
        run_fail_usage(run, "--resume needs --out DIR: the directory of the run to go on with");
    if (f->command == RUN_EVAL && !*run->out)
        run_fail_usage(run, "eval needs --out DIR: the directory of a trained model");
    int64_t cut = run->ranks * run->accumulate;
    if (run->batch % cut == 0) return;
    int64_t below = run->batch / cut * cut;
    char mend[64];
    if (below) snprintf(mend, sizeof mend, "%lld or %lld would", (long long)below, (long long)(below + cut));
    else snprintf(mend, sizeof mend, "%lld would", (long long)cut);
    run_fail_usage(run, "--batch %lld does not divide by %d ranks x %lld micro-batches: %s", (long long)run->batch,
                   run->ranks, (long long)run->accumulate, mend);
}

static void resolve(run_loop *run)
{
    run_flags *f = &run->flags;
    bool planning = f->command == RUN_PLAN;
    run->ranks = (int)run_flags_whole(f, planning ? "world" : "ranks");
    run->batch = run_flags_whole(f, "batch");
    run->accumulate = f->command == RUN_EVAL ? 1 : run_flags_whole(f, "accumulate");
    run->save_every = run_flags_whole(f, "save-every");
    run->log_every = run_flags_whole(f, "log-every");
    run->eval_every = run_flags_whole(f, "eval-every");
    run->schedule_steps = run_flags_whole(f, "schedule-steps");
    const char *out = run_flags_text(f, "out"), *strategy = run_flags_text(f, "strategy");
    if (out && strlen(out) > RUN_PATH - 256) run_fail_usage(run, "--out is too long a path");
    else if (out) snprintf(run->out, sizeof run->out, "%s", out);
    if (strategy && strlen(strategy) >= sizeof run->strategy)
        run_fail_usage(run, "--strategy is too long: %.40s...", strategy);
    else snprintf(run->strategy, sizeof run->strategy, "%s", strategy ? strategy : run->ranks > 1 ? "ddp" : "single");
    resolve_steps(run);
    check_settings(run);
}

/* ---- The context */

static void *counted_get(void *user, size_t bytes, const char *kind)
{
    run_memory *memory = user;
    void *got = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!got || (strcmp(kind, "state") && strcmp(kind, "step"))) return got;
    int64_t now = atomic_fetch_add(&memory->now, (int64_t)bytes) + (int64_t)bytes, peak = atomic_load(&memory->peak);
    while (now > peak && !atomic_compare_exchange_weak(&memory->peak, &peak, now)) {}
    return got;
}

static void counted_put(void *user, void *at, size_t bytes, const char *kind)
{
    run_memory *memory = user;
    free(at);
    if (!strcmp(kind, "state") || !strcmp(kind, "step")) atomic_fetch_sub(&memory->now, (int64_t)bytes);
}

static void log_message(void *user, td_level level, const char *text)
{
    run_loop *run = user;
    if (level == TD_LOG_INFO) {
        run_say(run, "%s", text);
        return;
    }
    if (run->rank != 0 && level == TD_LOG_PROGRAM) return; /* the same on every rank */
    if (run->progress.drawn) fprintf(run->progress.to, "\r\033[K"), fflush(run->progress.to);
    run->progress.drawn = false;
    if (level == TD_LOG_PROGRAM) fprintf(stderr, "%s\n", text);
    else fprintf(stderr, "%s: %s%s\n", run->name, level == TD_LOG_WARNING ? "warning: " : "", text);
}

static int cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
}

/* This rank's part of the threads of all. */
static int thread_share(const run_loop *run)
{
    int64_t given = run_flags_whole(&run->flags, "threads");
    int all = given ? (int)given : cores(), ranks = run->flags.command == RUN_PLAN ? 1 : run->ranks;
    int share = all / ranks + (run->rank < all % ranks);
    return share < 1 ? 1 : share;
}

/* NULL: what this build has not is said by the context. */
static const char *missing(const run_loop *run, td_dtype *dtype)
{
    const char *name = run_flags_text(&run->flags, "dtype");
    if (!strcmp(run_flags_text(&run->flags, "device"), "cuda"))
        return "--device cuda: this build has no CUDA device; leave it out to run on the CPU";
    if (!td_dtype_named(name, dtype) || *dtype == TD_F16)
        return "--dtype f16 and fp8 need a CUDA device, which this build has not: use f32, bf16 or f64";
    return NULL;
}

static void open_context(run_loop *run)
{
    td_dtype dtype = TD_F32;
    const char *lacks = missing(run, &dtype);
    td_allocator allocator = { .user = &run->memory, .get = counted_get, .put = counted_put };
    run->td = td_open(&(td_options){
        .dtype = lacks ? TD_F32 : dtype,
        .seed = (uint64_t)run_flags_whole(&run->flags, "seed"),
        .threads = thread_share(run),
        .deterministic = run_flags_on(&run->flags, "deterministic"),
        .log = log_message,
        .log_user = run,
        .allocator = &allocator,
    });
    if (lacks) td_fail(run->td, TD_ERROR_UNSUPPORTED, "%s", lacks);
}

/* ---- Ranks */

static par_options strategy_options(const run_loop *run)
{
    return (par_options){ .strategy = run->strategy, .units = run_flags_text(&run->flags, "units") };
}

/* Says what is wrong with the strategy once, before ranks are started. */
static void check_strategy(run_loop *run)
{
    td_context *td = td_open(&(td_options){ .threads = 1, .log = log_message, .log_user = run });
    par_world *world = par_world_none(run->ranks, 0);
    par_options options = strategy_options(run);
    if (!world) td_fail(td, TD_ERROR_MEMORY, "out of memory for a world of %d ranks", run->ranks);
    else if (!par_attach(td, world, 0, &options)) run_fail_usage(run, "%.500s", td_error_text(td));
    td_close(td);
    if (world) par_world_close(world);
}

static void launch(run_loop *run, char **argv)
{
    char message[1024] = "";
    par_world_options options = { .timeout_s = run_flags_number(&run->flags, "timeout") };
    fflush(NULL);
    run->status = par_launch(run->ranks, argv, &options, message, sizeof message);
    if (*message) fprintf(stderr, "%s: %s\n", run->name, message);
    run->ended = true;
}

static void attach(run_loop *run)
{
    bool alone = run->ranks == 1 && !strcmp(run->strategy, "single");
    if (alone || run_failed(run)) return;
    par_world_options options = { .timeout_s = run_flags_number(&run->flags, "timeout") };
    if (!run->world) run->world = par_world_threads(1, &options);
    if (!run->world) {
        td_fail(run->td, TD_ERROR_MEMORY, "out of memory for a world of ranks");
        return;
    }
    par_options chosen = strategy_options(run);
    par_attach(run->td, run->world, run->rank, &chosen);
}

bool run_attach_none(run_loop *run, int world)
{
    if (run_failed(run) || (world == 1 && !strcmp(run->strategy, "single"))) return !run_failed(run);
    par_options chosen = strategy_options(run);
    run->world = par_world_none(world, 0);
    if (!run->world) td_fail(run->td, TD_ERROR_MEMORY, "out of memory for a world of %d ranks", world);
    else par_attach(run->td, run->world, 0, &chosen);
    return !run_failed(run);
}

/* ---- Opening */

static void print_help(const run_loop *run, const char *about)
{
    if (about) printf("%s\n\n", about);
    printf("usage: %s [flags]\n\n", run->program);
    run_flags_help(&run->flags, stdout);
}

/* Everything up to the context; false: the run has ended or failed. */
static bool prepare(run_loop *run, const char *subcommand, int *argc, char **argv, const run_defaults *defaults,
                    const char *about)
{
    size_t count = (size_t)(*argc > 0 ? *argc : 0);
    char **original = malloc((count + 1) * sizeof *original);
    if (!original) {
        run_fail_usage(run, "out of memory while reading flags");
        return false;
    }
    memcpy(original, argv, count * sizeof *original);
    original[count] = NULL;
    bool parsed = read_flags(run, argc, argv, defaults);
    if (!parsed) {
        run_fail_usage(run, "%.500s", run->flags.error);
    } else if (run_flags_on(&run->flags, "help")) {
        print_help(run, about);
        run->ended = true;
    } else if (subcommand && *argc > 2) {
        run_fail_usage(run, "'%.80s' stands where a flag should: flags begin with --, see '%s --help'", argv[2],
                       run->program);
    } else {
        resolve(run);
        td_dtype dtype;
        bool launches = run->flags.command != RUN_PLAN && run->ranks > 1 && !par_launched() && !missing(run, &dtype);
        if (!*run->usage && (launches || strcmp(run->strategy, "single"))) check_strategy(run);
        if (!*run->usage && launches) launch(run, original);
    }
    free(original);
    return !run->ended && !*run->usage;
}

static void name_program(run_loop *run, const char *subcommand, const char *file, const run_defaults *defaults)
{
    const char *base = file && strrchr(file, '/') ? strrchr(file, '/') + 1 : file ? file : "program";
    snprintf(run->name, sizeof run->name, "%s", defaults->name ? defaults->name : base);
    snprintf(run->program, sizeof run->program, "%s%s%s", run->name, subcommand ? " " : "",
             subcommand ? subcommand : "");
    run->flags.program = run->program;
}

run_loop *run_open_command(unsigned command, const char *subcommand, int *argc, char ***argv,
                           const run_defaults *defaults, const char *about)
{
    static const run_defaults none;
    run_loop *run = calloc(1, sizeof *run);
    if (!run) return NULL;
    if (!defaults) defaults = &none;
    run->flags.command = command;
    run->ranks = 1;
    run->saved_step = -1;
    name_program(run, subcommand, *argc > 0 ? (*argv)[0] : NULL, defaults);
    bool goes_on = prepare(run, subcommand, argc, *argv, defaults, about);
    if (goes_on && par_launched()) {
        run->world = par_world_join(&run->rank);
        if (!run->world) run_fail_usage(run, "this process was started as a rank, but its world is gone");
        goes_on = run->world != NULL;
    }
    if (!goes_on) { /* a context that does nothing, for what the program still calls */
        run->td = td_open(&(td_options){ .threads = 1, .log = log_message, .log_user = run });
        td_fail(run->td, TD_ERROR_USAGE, "the run has ended");
        return run;
    }
    run_progress_open(run);
    open_context(run);
    if (command != RUN_PLAN) attach(run);
    run_signals_catch();
    return run;
}

run_loop *run_open(int *argc, char ***argv, const run_defaults *defaults)
{
    return run_open_command(RUN_TRAIN, NULL, argc, argv, defaults, NULL);
}

/* ---- What programs read */

static void *no_memory(void *user, size_t bytes, const char *kind)
{
    (void)user, (void)bytes, (void)kind;
    return NULL;
}

/* Without a run: the context td_open gives when there is no memory. */
td_context *run_context(run_loop *run)
{
    static const td_allocator nothing = { .get = no_memory };
    return run ? run->td : td_open(&(td_options){ .allocator = &nothing });
}

const char *run_data(run_loop *run)
{
    const char *data = run ? run_flags_text(&run->flags, "data") : NULL;
    return data ? data : "";
}

const char *run_flag_text(run_loop *run, const char *flag) { return run ? run_flags_text(&run->flags, flag) : NULL; }
int64_t run_flag_whole(run_loop *run, const char *flag) { return run ? run_flags_whole(&run->flags, flag) : 0; }
double run_flag_number(run_loop *run, const char *flag) { return run ? run_flags_number(&run->flags, flag) : 0; }
bool run_flag_on(run_loop *run, const char *flag) { return run && run_flags_on(&run->flags, flag); }

int run_flag_counts(run_loop *run, const char *flag, int64_t *out, int room)
{
    const char *at = run_flag_text(run, flag);
    int count = 0;
    while (at && *at) {
        char *end;
        int64_t value = strtoll(at, &end, 10);
        if (end == at) break;
        if (count < room) out[count] = value;
        count++;
        at = *end == ',' ? end + 1 : end;
    }
    return count;
}
