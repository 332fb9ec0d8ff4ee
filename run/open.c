/* Opening a run: what its flags come to. */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "run/loop.h"
#include "run/plan.h"

bool run_failed(const run_loop *run) { return run->ended || run->refused || td_error(run->td) != TD_OK; }

static void refuse(run_loop *run, int status, const char *format, va_list arguments)
{
    if (run->refused) return;
    run->refused = status;
    vsnprintf(run->refusal, sizeof run->refusal, format, arguments);
}

void run_fail_usage(run_loop *run, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    refuse(run, 2, format, arguments);
    va_end(arguments);
}

void run_fail_file(run_loop *run, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    refuse(run, 1, format, arguments);
    va_end(arguments);
}

/* ---- Flags */

static bool set_default(run_loop *run, const char *name, const char *text)
{
    return run_flags_set(&run->flags, name, text, RUN_DEFAULT);
}

static bool set_defaults(run_loop *run, const run_defaults *d)
{
    char batch[32], epochs[32], lr[32], warmup[32];
    snprintf(batch, sizeof batch, "%lld", (long long)d->batch);
    snprintf(epochs, sizeof epochs, "%lld", (long long)d->epochs);
    snprintf(lr, sizeof lr, "%.17g", d->lr);
    snprintf(warmup, sizeof warmup, "%lld", (long long)d->warmup);
    if (d->batch && !set_default(run, "batch", batch)) return false;
    if (d->epochs && !set_default(run, "epochs", epochs)) return false;
    if (d->lr && !set_default(run, "lr", lr)) return false;
    if (d->schedule && !set_default(run, "schedule", d->schedule)) return false;
    if (d->warmup && !set_default(run, "warmup", warmup)) return false;
    return !d->data || set_default(run, "data", d->data);
}

/* A run that goes on, or is evaluated, takes its flags from where it was started. */
static bool load_saved(run_loop *run)
{
    run_flags *f = &run->flags;
    bool restores = f->command & (RUN_EVAL | RUN_RESTORED);
    bool wanted = (restores || run_flags_on(f, "resume")) && !run_flags_on(f, "help");
    const char *out = run_flags_text(f, "out");
    char path[RUN_PATH];
    if (!wanted || !out) return true;
    int size = snprintf(path, sizeof path, "%s/config.json", out);
    if (size >= (int)sizeof path) return true; /* refused as too long with the other settings */
    if (run_flags_load(f, path, RUN_SAVED)) return true;
    run_fail_file(run, "%.400s; --out must be the directory of a run", f->error);
    return false;
}

static bool set_number(run_flags *f, const char *name, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    return !value || run_flags_set(f, name, text, RUN_GIVEN);
}

static bool vary(run_flags *f, const run_variant *v)
{
    if (!v) return true;
    return (!v->strategy || run_flags_set(f, "strategy", v->strategy, RUN_GIVEN)) && set_number(f, "accumulate", v->accumulate) &&
           set_number(f, "world", v->world) && set_number(f, "batch", v->batch) &&
           (!v->recompute || run_flags_set(f, "recompute", "true", RUN_GIVEN));
}

static bool read_flags(run_loop *run, int *argc, char **argv, const run_defaults *defaults, const run_variant *variant)
{
    run_flags *f = &run->flags;
    if (!run_flags_add(f, run_common_flags) || !run_flags_add(f, defaults->flags) || !set_defaults(run, defaults))
        return false;
    if (!run_flags_parse(f, argc, argv) || !vary(f, variant)) return false;
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

static bool same_value(const char *a, const char *b)
{
    if (!b || !strcmp(a, b)) return b != NULL;
    char *a_end, *b_end;
    double x = strtod(a, &a_end), y = strtod(b, &b_end);
    return a_end != a && !*a_end && b_end != b && !*b_end && x == y;
}

void run_check_effect(run_loop *run, const char *flag, const char *decider, const char *only)
{
    run_flags *f = &run->flags;
    const char *text = run_flags_text(f, flag);
    run_source source = run_flags_source(f, flag);
    if (!text || source == RUN_DEFAULT || same_value(text, run_flags_standard(f, flag))) return;
    if (source < RUN_CONFIG || source < run_flags_source(f, decider)) run_flags_unset(f, flag);
    else run_fail_usage(run, "--%s has no effect here: it is for --%s %s; leave it out", flag, decider, only);
}

static void check_batch(run_loop *run)
{
    int parts = par_batch_parts(run->strategy, run->ranks);
    int64_t cut = parts * run->accumulate;
    if (run->batch % cut == 0) return;
    if (run->flags.command == RUN_PLAN && run_flags_source(&run->flags, "batch") == RUN_DEFAULT) {
        char rounded[32];
        run->batch = (run->batch + cut - 1) / cut * cut;
        snprintf(rounded, sizeof rounded, "%lld", (long long)run->batch);
        if (run_flags_set(&run->flags, "batch", rounded, RUN_DEFAULT)) return;
    }
    int64_t below = run->batch / cut * cut;
    char mend[64];
    if (below) snprintf(mend, sizeof mend, "%lld or %lld would", (long long)below, (long long)(below + cut));
    else snprintf(mend, sizeof mend, "%lld would", (long long)cut);
    run_fail_usage(run, "--batch %lld does not divide by %d %s%s x %lld micro-batch%s: %s", (long long)run->batch,
                   parts, parts == run->ranks ? "rank" : "group", parts == 1 ? "" : "s", (long long)run->accumulate,
                   run->accumulate == 1 ? "" : "es", mend);
}

static void check_schedule_flags(run_loop *run)
{
    const char *kind = run_flags_text(&run->flags, "schedule");
    bool steps = !strcmp(kind, "step"), falls = !steps && strcmp(kind, "constant");
    if (!falls) run_check_effect(run, "final-lr", "schedule", "linear, cosine or polynomial");
    if (!falls) run_check_effect(run, "schedule-steps", "schedule", "linear, cosine or polynomial");
    if (strcmp(kind, "polynomial")) run_check_effect(run, "power", "schedule", "polynomial");
    if (!steps) run_check_effect(run, "decay-every", "schedule", "step");
    if (!steps) run_check_effect(run, "decay-factor", "schedule", "step");
    if (steps && !run_flags_text(&run->flags, "decay-every"))
        run_fail_usage(run, "--schedule step needs --decay-every N: the updates from one fall to the next");
}

static void check_strategy_flags(run_loop *run)
{
    static const struct { const char *flag, *strategies; } rows[] = {
        { "bucket-bytes", "ddp, zero1 or zero2" }, { "unit-elements", "zero3" }, { "whole-elements", "zero3" }, { "units", "fsdp or hsdp" },
        { "reshard-after-forward", "fsdp or hsdp" }, { "prefetch", "zero3, fsdp or hsdp" },
    };
    char name[sizeof run->strategy];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(run->strategy, ":+"), run->strategy);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (!strstr(rows[i].strategies, name)) run_check_effect(run, rows[i].flag, "strategy", rows[i].strategies);
    if (run_reshard_group(run) < 0)
        run_fail_usage(run, "--reshard-after-forward takes yes, no or a number of ranks that keep a unit together, not '%.80s'",
                       run_flags_text(&run->flags, "reshard-after-forward"));
    if (!strstr(run->strategy, "+tp:")) {
        run_check_effect(run, "tensor-columns", "strategy", "one with +tp:T, T ranks that share layers");
        run_check_effect(run, "tensor-rows", "strategy", "one with +tp:T, T ranks that share layers");
    }
    const char *ranks = run->flags.command == RUN_PLAN ? "world" : "ranks";
    if (run->ranks == 1) run_check_effect(run, "reduce-dtype", ranks, "2 or more");
    if (run->ranks == 1) run_check_effect(run, "windows", ranks, "2 or more");
    if (strncmp(run_flags_text(&run->flags, "device"), "cuda", 4)) run_check_effect(run, "windows", "device", "cuda");
}

/* Only a rehearsal of several ranks asks what a machine's links take. */
static void check_rehearsal(run_loop *run)
{
    if (run->flags.command != RUN_BENCH) return;
    if (!run->rehearses) {
        run_check_effect(run, "machine", "rehearse", "true");
        run_check_effect(run, "host-ranks", "rehearse", "true");
    } else if (run->scheduled)
        run_fail_usage(run, "--rehearse runs one rank alone: start it without a launcher, with --ranks N");
    else if (run->ranks == 1)
        run_fail_usage(run, "--rehearse needs --ranks N, 2 or more: how many ranks there would be");
    else if (!run_flags_text(&run->flags, "machine"))
        run_fail_usage(run, "--rehearse needs --machine NAME: whose links take the time of collectives");
    if (run->rehearses) run_check_effect(run, "windows", "rehearse", "false");
}

/* Ranks that a launcher of the system started are its to start again. */
static void check_restarts(run_loop *run)
{
    bool given = run_flags_source(&run->flags, "max-restarts") == RUN_GIVEN && run_flags_whole(&run->flags, "max-restarts") > 0;
    if (given && run->scheduled)
        run_fail_usage(run, "--max-restarts is for ranks that this program starts: let the launcher start them again, with --resume");
    else if (given && !*run->out)
        run_fail_usage(run, "--max-restarts needs --out DIR: ranks start again from its checkpoints");
    else if (run->ranks == 1) run_check_effect(run, "max-restarts", "ranks", "2 or more");
}

static void check_settings(run_loop *run)
{
    const run_flags *f = &run->flags;
    if (run_flags_on(f, "resume") && !*run->out)
        run_fail_usage(run, "--resume needs --out DIR: the directory of the run to go on with");
    if (f->command & (RUN_EVAL | RUN_RESTORED) && !*run->out)
        run_fail_usage(run, "%s needs --out DIR: the directory of a trained model", strrchr(run->program, ' ') + 1);
    if (f->command == RUN_PLOT && (!*run->out || !run_flags_text(f, "plot")))
        run_fail_usage(run, "plot needs --plot DIR,DIR,...: the runs to draw, and --out DIR: where compare.png goes");
    if (f->command == RUN_TRAIN && run_flags_text(f, "plot") && !*run->out)
        run_fail_usage(run, "--plot needs --out DIR: where compare.png goes");
    static const char *const savers[] = { "save-every", "keep", "keep-best" };
    for (size_t i = 0; i < sizeof savers / sizeof *savers; i++)
        if (run_flags_source(f, savers[i]) == RUN_GIVEN && !*run->out)
            run_fail_usage(run, "--%s needs --out DIR: without it nothing is saved", savers[i]);
    bool trains = f->command == RUN_TRAIN;
    if (trains && run->keep_best && !run->eval_every)
        run_fail_usage(run, "--keep-best needs --eval-every N: the best of those evaluations is kept");
    if (f->command == RUN_BENCH && *run->out && !run->profile.updates)
        run_fail_usage(run, "--out is where bench leaves a profile: give --profile N too, or leave --out out");
    if (!run->is_variant && !run_plans_several(run)) check_strategy_flags(run);
    check_schedule_flags(run);
    if (trains) check_restarts(run);
    check_rehearsal(run);
    if (trains && run->stop_after && !run->eval_every)
        run_fail_usage(run, "--stop-after needs --eval-every N: it counts those evaluations");
    check_batch(run);
    if (f->command & (RUN_TRAIN | RUN_PLOT) && run_flags_text(f, "plot") && !run->refused) run_compare_check(run);
}

/* The ranks are those that were started; --ranks may only say the same. */
static void take_scheduled(run_loop *run, int ranks)
{
    if (!(run->flags.command & (RUN_TRAIN | RUN_EVAL | RUN_BENCH)))
        run_fail_usage(run, "%s is for one process, but %d were started: start it alone, without a launcher", run->program, ranks);
    else if (run_flags_source(&run->flags, "ranks") >= RUN_CONFIG && run->ranks != ranks)
        run_fail_usage(run, "--ranks %d, but the launcher started %d processes: leave --ranks out, or start as many", run->ranks, ranks);
    char text[16];
    snprintf(text, sizeof text, "%d", ranks);
    run_flags_set(&run->flags, "ranks", text, RUN_CONFIG); /* as the run's configuration has it */
    run->ranks = ranks;
}

static void resolve(run_loop *run)
{
    run_flags *f = &run->flags;
    bool planning = f->command == RUN_PLAN, alone = f->command & RUN_ALONE; /* whatever ranks it was trained on */
    int scheduled = run->scheduled ? run->ranks : 0;
    run->ranks = alone ? 1 : (int)run_flags_whole(f, planning ? "world" : "ranks");
    if (scheduled) take_scheduled(run, scheduled);
    run->rehearses = f->command == RUN_BENCH && run_flags_on(f, "rehearse");
    run->present = run->rehearses ? 1 : run->ranks;
    run->batch = run_flags_whole(f, "batch");
    run->accumulate = f->command & (RUN_TRAIN | RUN_BENCH | RUN_PLAN) ? run_flags_whole(f, "accumulate") : 1;
    run->overfits = f->command == RUN_TRAIN && run_flags_on(f, "overfit-batch");
    run->save_every = run_flags_whole(f, "save-every");
    run->log_every = run_flags_whole(f, "log-every");
    run->eval_every = run_flags_whole(f, "eval-every");
    run->keep = run_flags_whole(f, "keep");
    run->keep_best = run_flags_on(f, "keep-best");
    run->stop_after = run_flags_whole(f, "stop-after");
    run->eval_batches = run_flags_whole(f, "eval-batches");
    run->profile.updates = run_flags_whole(f, "profile");
    const char *out = run_flags_text(f, "out"), *strategy = alone ? NULL : run_flags_text(f, "strategy");
    if (out && strlen(out) > RUN_PATH - 256) run_fail_usage(run, "--out is too long a path");
    else if (out) snprintf(run->out, sizeof run->out, "%s", out);
    if (strategy && strlen(strategy) >= sizeof run->strategy)
        run_fail_usage(run, "--strategy is too long: %.40s...", strategy);
    else snprintf(run->strategy, sizeof run->strategy, "%s", strategy ? strategy : run->ranks > 1 ? "ddp" : "single");
    resolve_steps(run);
    check_settings(run);
    run->schedule_steps = run_flags_whole(f, "schedule-steps");
}

/* ---- Opening */

static void print_help(const run_loop *run, const char *about)
{
    if (about) printf("%s\n\n", about);
    printf("usage: %s [flags]\n\n", run->program);
    run_flags_help(&run->flags, stdout);
}

/* Flags and what they come to; false: the run has ended or is refused. */
static bool prepare(run_loop *run, const char *subcommand, int *argc, char **argv, const run_defaults *defaults,
                    const char *about, const run_variant *variant)
{
    int words = subcommand ? 2 : 1; /* before the flags */
    if (!read_flags(run, argc, argv, defaults, variant)) {
        run_fail_usage(run, "%.500s", run->flags.error);
    } else if (run_flags_on(&run->flags, "help")) {
        print_help(run, about);
        run->status = run_stdout_status(run->name);
        run->ended = true;
    } else if (*argc > words) {
        run_fail_usage(run, "'%.80s' stands where a flag should: flags begin with --, see '%s --help'", argv[words],
                       run->program);
    } else {
        resolve(run);
    }
    return !run->ended && !run->refused;
}

char **run_copy_arguments(int argc, char **argv)
{
    size_t count = (size_t)(argc > 0 ? argc : 0);
    char **copy = malloc((count + 1) * sizeof *copy);
    if (!copy) return NULL;
    memcpy(copy, argv, count * sizeof *copy);
    copy[count] = NULL;
    return copy;
}

static void name_program(run_loop *run, const char *subcommand, const char *file, const run_defaults *defaults)
{
    const char *base = file && strrchr(file, '/') ? strrchr(file, '/') + 1 : file ? file : "program";
    snprintf(run->name, sizeof run->name, "%s", defaults->name ? defaults->name : base);
    snprintf(run->program, sizeof run->program, "%s%s%s", run->name, subcommand ? " " : "",
             subcommand ? subcommand : "");
    run->flags.program = run->program;
}

static run_loop *open_command(unsigned command, const char *subcommand, int *argc, char ***argv, const run_defaults *defaults,
                              const char *about, const run_variant *variant)
{
    static const run_defaults none;
    run_loop *run = calloc(1, sizeof *run);
    if (!run) return NULL;
    if (!defaults) defaults = &none;
    run->flags.command = command;
    run->is_variant = variant != NULL;
    run->ranks = run->present = 1;
    run->saved_step = -1;
    run->best = (run_best){ .loss = HUGE_VAL, .step = -1, .judged = -1 };
    run->loss = run->first_loss = run->exposed_ms = (double)NAN;
    name_program(run, subcommand, *argc > 0 ? (*argv)[0] : NULL, defaults);
    run_signals_ignore();
    if (command == RUN_TRAIN) run_signals_ignore_save();
    char **arguments = run_copy_arguments(*argc, *argv);
    if (!arguments) run_fail_usage(run, "out of memory while reading flags");
    run_find_scheduled(run);
    bool goes_on = arguments && prepare(run, subcommand, argc, *argv, defaults, about, variant);
    if (goes_on ? !run_launch(run, arguments) : run->scheduled && run->refused) run_enter_world(run);
    free(arguments);
    if (!run->td) run_open_nothing(run);
    if (command == RUN_TRAIN && !run_failed(run)) run_signals_catch();
    return run;
}

run_loop *run_open_command(unsigned command, const char *subcommand, int *argc, char ***argv, const run_defaults *defaults,
                           const char *about)
{
    return open_command(command, subcommand, argc, argv, defaults, about, NULL);
}

run_loop *run_open_variant(unsigned command, const char *subcommand, int *argc, char ***argv, const run_defaults *defaults,
                           const run_variant *variant)
{
    return open_command(command, subcommand, argc, argv, defaults, NULL, variant);
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
    if (run && !data) run_fail_usage(run, "--data is needed: the directory or file of the data");
    return data ? data : "";
}

const char *run_flag_text(run_loop *run, const char *flag) { return run ? run_flags_text(&run->flags, flag) : NULL; }
int64_t run_flag_whole(run_loop *run, const char *flag) { return run ? run_flags_whole(&run->flags, flag) : 0; }
double run_flag_number(run_loop *run, const char *flag) { return run ? run_flags_number(&run->flags, flag) : 0; }
bool run_flag_on(run_loop *run, const char *flag) { return run && run_flags_on(&run->flags, flag); }

bool run_flag_default(run_loop *run, const char *flag, const char *text)
{
    if (!run || run_failed(run)) return false;
    if (run_flags_source(&run->flags, flag) > RUN_DEFAULT || run_flags_set(&run->flags, flag, text, RUN_DEFAULT)) return true;
    run_fail_usage(run, "%.500s", run->flags.error);
    return false;
}

bool run_flag_given(run_loop *run, const char *flag)
{
    return run && run_flags_text(&run->flags, flag) && run_flags_source(&run->flags, flag) >= RUN_CONFIG;
}

bool run_restores(run_loop *run)
{
    return run && (run->flags.command & (RUN_EVAL | RUN_RESTORED) || run_flags_on(&run->flags, "resume"));
}

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
