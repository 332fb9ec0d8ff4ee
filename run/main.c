/* A reference binary: one run_model gives it train, eval, bench, plan, plot, export and what is its own. */
#include <stdlib.h>
#include <string.h>

#include "run/loop.h"
#include "run/plan.h"

static const struct {
    const char *name;
    unsigned command;
    const char *split;            /* of the data the model is made for; NULL: none is made */
    const char *help;
} commands[] = {
    { "train", RUN_TRAIN, "train", "train a model, or go on with one (--resume)" },
    { "eval", RUN_EVAL, "test", "evaluate the last checkpoint of a run" },
    { "bench", RUN_BENCH, "random", "time training steps on made-up data" },
    { "plan", RUN_PLAN, "random", "what one rank would hold, compute and send; runs nothing" },
    { "plot", RUN_PLOT, NULL, "draw the curves of several runs in one picture" },
    { "export", RUN_EXPORT | RUN_RESTORED, NULL, "write the parameters of a run to one file" },
};
enum { COMMANDS = sizeof commands / sizeof *commands };

/* The index of the model's own command of that name; -1: it has none. */
static int own_command(const run_model *model, const char *name)
{
    for (int i = 0; model->commands && i < RUN_OWN_COMMANDS && model->commands[i].name; i++)
        if (!strcmp(name, model->commands[i].name)) return i;
    return -1;
}

static void print_usage(FILE *to, const run_model *model)
{
    const char *name = model->defaults.name;
    fprintf(to, "%s\n\nusage: %s COMMAND [flags]\n\n", model->about, name);
    for (int i = 0; i < COMMANDS; i++)
        if (own_command(model, commands[i].name) < 0) fprintf(to, "  %-8s %s\n", commands[i].name, commands[i].help);
    for (const run_command *c = model->commands; c && c->name; c++) fprintf(to, "  %-8s %s\n", c->name, c->help);
    fprintf(to, "\n'%s COMMAND --help' lists the flags of one.\n", name);
}

/* The model's state from the last checkpoint. */
static bool restore(run_loop *run)
{
    run_busy(run, true);
    run_restore *from = run_failed(run) ? NULL : run_restore_open(run, false);
    bool restored = from && run_average(run) && run_restore_states(run, from);
    if (restored) td_set_updates(run->td, run_restore_step(from));
    run_restore_close(from);
    run_busy(run, false);
    return restored;
}

static void run_eval(run_loop *run)
{
    if (!restore(run)) return;
    if (!run->evaluation.set && !run_failed(run))
        td_fail(run->td, TD_ERROR_DATA, "there is no data to evaluate on");
    if (run_evaluate(run)) run_summary(run, "eval", false);
}

static void run_train(run_loop *run, const run_model *model, void *object)
{
    data_set *test = run_failed(run) ? NULL : model->data(run, "test");
    if (test) run_evaluate_on(run, test, model->measure, object);
    for (data_batch b; run_next(run, &b);) run_step(run, run->opt, model->loss(object, &b));
}

/* Commands that make no model. */
static int run_without_model(int argc, char **argv, const run_model *model, int command)
{
    unsigned kind = commands[command].command;
    run_loop *run = run_open_command(kind, commands[command].name, &argc, &argv, &model->defaults, model->about);
    if (run && kind == RUN_PLOT) run_compare(run);
    if (run && kind & RUN_EXPORT) run_export(run);
    return run_close(run);
}

static void use_model(run_loop *run, const run_model *model)
{
    run->model = model;
    if (!run_failed(run) && model->settle) model->settle(run);
}

static void *make_model(run_loop *run, const run_model *model, const char *split, data_set **set)
{
    use_model(run, model);
    *set = run_failed(run) ? NULL : model->data(run, split);
    if (!*set && !run_failed(run)) td_fail(run->td, TD_ERROR_DATA, "there is no %s data", split);
    return *set && !run_failed(run) ? model->make(run, td_root(run->td), *set) : NULL;
}

void *run_make(run_loop *run, const run_model *model, const char *split)
{
    data_set *set;
    void *object = make_model(run, model, split, &set);
    if (object) run_optimizer(run, td_root(run->td));
    run_train_on(run, set);
    return object;
}

/* For eval: without an optimizer. */
static void *make_for_evaluation(run_loop *run, const run_model *model, const char *split)
{
    data_set *set;
    void *object = make_model(run, model, split, &set);
    run_evaluate_on(run, set, model->measure, object);
    return object;
}

static int run_plans(run_loop *run, const run_model *model, int argc, char **argv)
{
    use_model(run, model);
    run_plan_table(run, model, argc, argv);
    return run_close(run);
}

static int run_common(int argc, char **argv, const run_model *model, int command)
{
    unsigned kind = commands[command].command;
    int count = argc;
    char **given = kind == RUN_PLAN ? run_copy_arguments(argc, argv) : NULL;
    run_loop *run = run_open_command(kind, commands[command].name, &argc, &argv, &model->defaults, model->about);
    if (run && given && run_plans_several(run)) {
        int status = run_plans(run, model, count, given);
        free(given);
        return status;
    }
    free(given);
    if (!run) return run_close(run);
    const char *split = commands[command].split;
    void *object = kind == RUN_EVAL ? make_for_evaluation(run, model, split) : run_make(run, model, split);
    if (object && kind == RUN_TRAIN) run_train(run, model, object);
    if (object && kind == RUN_EVAL) run_eval(run);
    if (object && kind == RUN_BENCH) run_bench(run, model, object);
    if (object && kind == RUN_PLAN) run_plan(run, model, object);
    int status = run_close(run);
    if (object && model->free) model->free(object);
    return status;
}

static int run_own(int argc, char **argv, const run_model *model, int index)
{
    const run_command *command = &model->commands[index];
    unsigned kind = (unsigned)RUN_OWN << index | (command->restores ? RUN_RESTORED : 0u);
    run_loop *run = run_open_command(kind, command->name, &argc, &argv, &model->defaults, model->about);
    if (!run) return run_close(run);
    use_model(run, model);
    void *object = command->restores && !run_failed(run) ? model->make(run, td_root(run->td), NULL) : NULL;
    if (!run_failed(run) && (!command->restores || restore(run))) {
        opt_ema_begin(run->ema);
        command->go(run, object);
        opt_ema_end(run->ema);
    }
    int status = run_close(run);
    if (object && model->free) model->free(object);
    return status;
}

int run_main(int argc, char **argv, const run_model *model)
{
    const char *name = model->defaults.name, *command = argc > 1 ? argv[1] : "";
    if (!strcmp(command, "--help") || !strcmp(command, "-h")) {
        print_usage(stdout, model);
        return run_stdout_status(name);
    }
    int own = own_command(model, command);
    if (own >= 0) return run_own(argc, argv, model, own);
    for (int i = 0; i < COMMANDS; i++)
        if (!strcmp(command, commands[i].name))
            return commands[i].split ? run_common(argc, argv, model, i) : run_without_model(argc, argv, model, i);
    if (!par_tells_error(NULL, 0)) return 2;
    if (*command) fprintf(stderr, "%s: '%.40s' is no command: it is ", name, command);
    else fprintf(stderr, "%s: a command comes first: ", name);
    for (int i = 0; i < COMMANDS; i++)
        if (own_command(model, commands[i].name) < 0) fprintf(stderr, "%s%s", i ? ", " : "", commands[i].name);
    for (const run_command *c = model->commands; c && c->name; c++) fprintf(stderr, ", %s", c->name);
    fprintf(stderr, "; see '%s --help'\n", name);
    return 2;
}
