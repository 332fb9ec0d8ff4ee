/* A run's ranks and its context: memory that is counted, messages, threads, strategy. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "run/loop.h"
#include "run/machine.h"
#include "run/plan.h"

static void *counted_get(void *user, size_t bytes, const char *kind)
{
    run_memory *memory = user;
    void *got = td_allocator_default()->get(NULL, bytes, kind);
    if (!got || (strcmp(kind, "state") && strcmp(kind, "step"))) return got;
    int64_t now = atomic_fetch_add(&memory->now, (int64_t)bytes) + (int64_t)bytes, peak = atomic_load(&memory->peak);
    while (now > peak && !atomic_compare_exchange_weak(&memory->peak, &peak, now)) {}
    return got;
}

static void counted_put(void *user, void *at, size_t bytes, const char *kind)
{
    run_memory *memory = user;
    td_allocator_default()->put(NULL, at, bytes, kind);
    if (!strcmp(kind, "state") || !strcmp(kind, "step")) atomic_fetch_sub(&memory->now, (int64_t)bytes);
}

static void print_message(run_loop *run, td_level level, const char *text)
{
    if (run->rank != 0 && level == TD_LOG_PROGRAM) return; /* the same on every rank */
    if (run->progress.drawn) fprintf(run->progress.to, "\r\033[K"), fflush(run->progress.to);
    run->progress.drawn = false;
    if (level == TD_LOG_PROGRAM) fprintf(stderr, "%s\n", text);
    else fprintf(stderr, "%s: %s%s\n", run->name, level == TD_LOG_WARNING ? "warning: " : "", text);
}

static void log_message(void *user, td_level level, const char *text)
{
    run_loop *run = user;
    if (level == TD_LOG_INFO) {
        run_say(run, "%s", text);
        return;
    }
    run_busy(run, true);
    print_message(run, level, text);
    run_busy(run, false);
}

static int cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
}

int run_threads(const run_loop *run)
{
    int64_t given = run_flags_whole(&run->flags, "threads");
    return given ? (int)given : cores();
}

/* This rank's part of the threads of all; where it is kept on `own` cores these are its part. */
static int thread_share(const run_loop *run, int own)
{
    int all = run_threads(run), ranks = run->present, at = run->rank;
    bool given = run_flags_whole(&run->flags, "threads") > 0; /* for the ranks of a host together; else what cores they share */
    if (own && !given) return own;
    if (run->scheduled && run->world) ranks = par_neighbours(run->world, run->rank, !given, &at);
    int share = all / ranks + (at < all % ranks);
    if (own && share > own) share = own; /* more would wait for one another */
    return share < 1 ? 1 : share;
}

/* NULL: what this build has not is said by the context. */
static const char *missing(const run_loop *run, td_dtype *dtype)
{
    const char *name = run_flags_text(&run->flags, "dtype");
    if (!td_dtype_named(name, dtype)) return "--dtype fp8 cannot be had: use f32, bf16 or f16, or f64 on the CPU";
    return NULL;
}

/* The machine's GPU, where there is one and it is the one that --machine says, if it does. Else it is planned for by its description, and so
 * are several ranks: what they send one another is not asked of one GPU. */
static void open_for_gpu(run_loop *run, td_options *options)
{
    bool said = false;
    td_gpu gpu;
    run->td = td_open(&(td_options){ .threads = 1, .log = log_message, .log_user = run });
    if (!run_machine_gpu(run, &gpu, &said)) return;
    td_close(run->td);
    run->td = run->ranks > 1 ? NULL : td_open(options);
    td_code code = run->td ? td_error(run->td) : TD_ERROR_DEVICE;
    bool another = code == TD_OK && said && strcmp(td_gpu_of(run->td)->name, gpu.name);
    run->described = another || code == TD_ERROR_DEVICE || code == TD_ERROR_UNSUPPORTED;
    if (!run->described) return;
    td_close(run->td);
    options->gpu = &gpu;
    run->td = td_open(options);
}

/* Of several ranks each has a GPU of its own, unless one is named for all; NULL: refused. */
static const char *own_device(run_loop *run, char name[PAR_GPU_NAME])
{
    const char *device = run_flags_text(&run->flags, "device");
    char message[512];
    int index, ranks = run->world ? par_neighbours(run->world, run->rank, false, &index) : 1;
    if (ranks == 1 || strcmp(device, "cuda") != 0) return device;
    if (par_gpu_of_rank(device, index, ranks, par_gpus(), name, message, sizeof message)) return name;
    par_stop_world(run->world, run->rank, message); /* all ranks of a host find the same */
    run_fail_usage(run, "%s", message);
    return NULL;
}

/* While this thread is the only one that computes: those that it starts later stay where it is. How many it has cores for; 0: nothing is
 * changed. */
static int stay_near_gpu(run_loop *run)
{
    char message[512];
    if (!run->world || run->flags.command == RUN_PLAN) return 0;
    int own = par_near_gpu(run->world, run->rank, run_flags_text(&run->flags, "device"), message, sizeof message);
    if (*message) log_message(run, own ? TD_LOG_INFO : TD_LOG_WARNING, message);
    return own;
}

static void open_context(run_loop *run)
{
    td_dtype dtype = TD_F32;
    char gpu[PAR_GPU_NAME];
    const char *lacks = missing(run, &dtype), *device = lacks ? NULL : own_device(run, gpu);
    int own = device ? stay_near_gpu(run) : 0;
    td_allocator allocator = { .user = &run->memory, .get = counted_get, .put = counted_put };
    td_options options = {
        .device = device,
        .dtype = lacks ? TD_F32 : dtype,
        .seed = (uint64_t)run_flags_whole(&run->flags, "seed"),
        .threads = thread_share(run, own),
        .deterministic = run_flags_on(&run->flags, "deterministic"),
        .log = log_message,
        .log_user = run,
        .allocator = &allocator,
    };
    bool plans = run->flags.command == RUN_PLAN && options.device && !strncmp(options.device, "cuda", 4);
    if (plans) open_for_gpu(run, &options);
    else run->td = td_open(&options);
    if (lacks) td_fail(run->td, TD_ERROR_UNSUPPORTED, "%s", lacks);
}

/* ---- Ranks */

static int offload_of(const run_loop *run)
{
    const char *what = run_flags_text(&run->flags, "offload");
    if (!what || !(run->flags.command & (RUN_TRAIN | RUN_EVAL | RUN_BENCH | RUN_PLAN))) return 0;
    bool all = !strcmp(what, "all");
    return (all || !strcmp(what, "optimizer") ? PAR_OFFLOAD_OPTIMIZER : 0) | (all || !strcmp(what, "parameters") ? PAR_OFFLOAD_PARAMETERS : 0);
}

int run_reshard_group(const run_loop *run)
{
    const char *text = run_flags_text(&run->flags, "reshard-after-forward");
    char *end;
    if (!text || !strcmp(text, "yes") || !strcmp(text, "no")) return 0;
    long group = *text >= '1' && *text <= '9' ? strtol(text, &end, 10) : -1;
    return group > 0 && group <= 65536 && !*end ? (int)group : -1;
}

static par_options strategy_options(const run_loop *run)
{
    const run_flags *f = &run->flags;
    const char *reshard = run_flags_text(f, "reshard-after-forward"), *reduce = run_flags_text(f, "reduce-dtype");
    bool whole = run_flags_text(f, "whole-elements") != NULL;
    int64_t whole_elements = run_flags_whole(f, "whole-elements");
    return (par_options){
        .strategy = run->strategy,
        .bucket_bytes = run_flags_whole(f, "bucket-bytes"),
        .unit_elements = run_flags_whole(f, "unit-elements"),
        .whole_elements = whole && !whole_elements ? -1 : whole_elements,
        .units = run_flags_text(f, "units"),
        .tensor_columns = run_flags_text(f, "tensor-columns"),
        .tensor_rows = run_flags_text(f, "tensor-rows"),
        .keep_gathered = reshard && !strcmp(reshard, "no"),
        .keep_group = run_reshard_group(run),
        .prefetch = (int)run_flags_whole(f, "prefetch"),
        .offload = offload_of(run),
        .windows = run_flags_on(f, "windows"),
        .share_gpu = strchr(run_flags_text(f, "device"), ':') != NULL,
        .reduce_dtype = reduce && !strcmp(reduce, "bf16") ? TD_BF16 : TD_F32,
    };
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

/* Says once, before ranks are started, that there are too few GPUs for them. */
static void check_gpus(run_loop *run)
{
    char message[512];
    if (!par_check_gpus(run_flags_text(&run->flags, "device"), run->ranks, message, sizeof message)) run_fail_file(run, "%s", message);
}

static void launch(run_loop *run, char **argv)
{
    run_restarts restarts;
    par_world_options options = { .timeout_s = run_flags_number(&run->flags, "timeout"), .cause = &restarts.cause };
    run_restarts_begin(run, &restarts, argv);
    fflush(NULL);
    do run->status = par_launch(run->ranks, restarts.argv, &options, restarts.message, sizeof restarts.message);
    while (run_restarts_again(run, &restarts));
    if (*restarts.message) fprintf(stderr, "%s: %s\n", run->name, restarts.message);
    run_restarts_end(&restarts);
    run->ended = true;
}

bool run_launch(run_loop *run, char **argv)
{
    td_dtype dtype;
    bool launches = run->flags.command != RUN_PLAN && run->present > 1 && !par_launched() && !run->scheduled && !missing(run, &dtype);
    if (run_plans_several(run)) return false;
    if (launches || run->scheduled || strcmp(run->strategy, "single")) check_strategy(run);
    if (launches) check_gpus(run);
    if (!launches || run->refused) return false;
    launch(run, argv);
    return true;
}

/* The flags given, but for those that may differ from host to host or say nothing of what is computed. Blanks would end a word. */
static void agreed_flags(const run_loop *run, char *text, size_t room)
{
    static const char free_to_differ[] = " data out threads timeout json config plot ";
    size_t used = (size_t)snprintf(text, room, "program=%s", run->program);
    for (int i = 0; i < run->flags.count && used < room; i++) {
        const run_value *v = &run->flags.values[i];
        char name[64];
        snprintf(name, sizeof name, " %.60s ", v->flag->name);
        if (v->source == RUN_DEFAULT || !v->text || strstr(free_to_differ, name)) continue;
        size_t length = strcmp(v->flag->name, "device") ? strlen(v->text) : strcspn(v->text, ":"); /* which GPU is a rank's own */
        used += (size_t)snprintf(text + used, room - used, "\n%s=%.*s", v->flag->name, (int)length, v->text);
    }
    for (char *at = text; *at; at++) *at = *at == ' ' ? '_' : *at == '\n' ? ' ' : *at;
}

static double collective_s(const void *machine, const par_call *call) { return run_collective_s(machine, call); }

/* NULL without memory, or after an error. */
static par_world *rehearsal(run_loop *run)
{
    run_machine *machine = td_own(run->td, sizeof *machine);
    if (!machine || !run_machine_of(run, machine)) return NULL;
    run_say(run, "rehearsal: collectives among %d ranks take what they would on %s (%s)", run->ranks, machine->name, machine->source);
    return par_world_rehearsed(run->ranks, &(par_rehearsal){ collective_s, machine, machine->collective_multiprocessors });
}

static void attach(run_loop *run)
{
    bool alone = run->ranks == 1 && !strcmp(run->strategy, "single") && !offload_of(run);
    if (alone || run_failed(run) || run_plans_several(run)) return;
    par_world_options options = { .timeout_s = run_flags_number(&run->flags, "timeout") };
    if (run->rehearses) run->world = rehearsal(run);
    else if (!run->world && run->flags.command == RUN_PLAN) run->world = par_world_none(run->ranks, 0);
    else if (!run->world) run->world = par_world_threads(1, &options);
    if (!run->world && run_failed(run)) return;
    if (!run->world) {
        td_fail(run->td, TD_ERROR_MEMORY, "out of memory for a world of %d rank%s", run->ranks,
                run->ranks == 1 ? "" : "s");
        return;
    }
    char agreed[3072];
    agreed_flags(run, agreed, sizeof agreed);
    par_options chosen = strategy_options(run);
    chosen.agreed = agreed;
    par_attach(run->td, run->world, run->rank, &chosen);
}

void run_find_scheduled(run_loop *run)
{
    char message[512];
    if (run->is_variant) return;
    run->scheduled = par_scheduled(&run->rank, &run->ranks, message, sizeof message);
    if (*message && run->flags.command & (RUN_TRAIN | RUN_EVAL | RUN_BENCH)) run_fail_usage(run, "%s", message);
}

/* Even a run that is refused joins: where all are, one rank says why. */
static bool join_scheduled(run_loop *run)
{
    if (!run->scheduled) return true;
    char message[1024];
    par_world_options options = { .timeout_s = run_flags_number(&run->flags, "timeout") };
    run->world = par_world_scheduled(&options, &run->rank, message, sizeof message);
    if (run->world) return !run->refused;
    if (!*message) *run->refusal = 0; /* another rank says why, alone */
    run_fail_usage(run, "%.500s", message);
    return false;
}

static void say_world(run_loop *run)
{
    char text[512];
    par_world_text(run->world, text, sizeof text);
    run_say(run, "world: %s, device %s, strategy %s", text, run_flags_text(&run->flags, "device"), run->strategy);
}

void run_enter_world(run_loop *run)
{
    if (!join_scheduled(run) || run->refused) return;
    if (par_launched()) {
        run->world = par_world_join(&run->rank);
        if (!run->world) {
            run_fail_usage(run, "this process was started as a rank, but its world is gone");
            return;
        }
    }
    run_progress_open(run);
    open_context(run);
    attach(run);
    bool planned = run->flags.command == RUN_PLAN; /* its ranks are nowhere */
    if (run->world && run->ranks > 1 && !planned && !run_failed(run)) say_world(run);
}

void run_open_nothing(run_loop *run)
{
    run->td = td_open(&(td_options){ .threads = 1, .log = log_message, .log_user = run });
    td_fail(run->td, TD_ERROR_USAGE, "the run has ended");
}

void run_busy(run_loop *run, bool busy)
{
    if (run->world) par_busy(run->world, run->rank, busy);
}
