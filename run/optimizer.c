/* Optimizers and schedules as flags describe them. */
#include <stdio.h>
#include <string.h>

#include <tandem/nn.h>

#include "run/loop.h"

/* Each pattern of --freeze. */
static bool freeze(run_loop *run, td_module root)
{
    char pattern[256];
    for (const char *at = run_flag_text(run, "freeze"); at && *at;) {
        size_t length = strcspn(at, ",");
        if (length >= sizeof pattern) run_fail_usage(run, "--freeze: a pattern of %zu characters is too long", length);
        if (run_failed(run)) return false;
        snprintf(pattern, sizeof pattern, "%.*s", (int)length, at);
        nn_freeze(root, pattern);
        at += length + (at[length] == ',');
    }
    return !run_failed(run);
}

opt_optimizer *run_optimizer(run_loop *run, td_module root)
{
    if (!run || run_failed(run) || run->opt) return run ? run->opt : NULL;
    const char *kind = run_flag_text(run, "optimizer");
    double decay = run_flag_number(run, "decay"), clip = run_flag_number(run, "clip");
    if (!kind) kind = "adamw";
    if (strcmp(kind, "sgd")) run_check_effect(run, "momentum", "optimizer", "sgd");
    if (!freeze(run, root)) return NULL;
    const char *norm = run_flag_text(run, "clip-norm");
    bool inf = norm && !strcmp(norm, "inf"), track = run->flags.command == RUN_TRAIN; /* for metrics.jsonl */
    opt_group matrices = { .min_rank = (int)run_flag_whole(run, "decay-dims"), .decay = decay }; /* only these decay */
    int groups = matrices.min_rank > 0;
    if (groups) decay = 0;
    opt_scaler *scaler = run_scaler(run);
    opt_adam_options adam = { .beta2 = run_flag_number(run, "beta2"), .decay = decay, .max_norm = clip, .clip_inf = inf,
                              .track_norm = track, .groups = &matrices, .group_count = groups, .scaler = scaler };
    if (!strcmp(kind, "sgd"))
        run->opt = opt_sgd(root, &(opt_sgd_options){ .momentum = run_flag_number(run, "momentum"), .decay = decay, .max_norm = clip,
                                                     .clip_inf = inf, .track_norm = track, .groups = &matrices, .group_count = groups,
                                                     .scaler = scaler });
    else if (!strcmp(kind, "adagrad"))
        run->opt = opt_adagrad(root, &(opt_adagrad_options){ .decay = decay, .max_norm = clip, .clip_inf = inf, .track_norm = track,
                                                             .groups = &matrices, .group_count = groups, .scaler = scaler });
    else if (!strcmp(kind, "lion"))
        run->opt = opt_lion(root, &(opt_lion_options){ .beta2 = run_flag_number(run, "beta2"), .decay = decay, .max_norm = clip, .clip_inf = inf,
                                                       .track_norm = track, .groups = &matrices, .group_count = groups, .scaler = scaler });
    else
        run->opt = !strcmp(kind, "adam") ? opt_adam(root, &adam) : opt_adamw(root, &adam);
    return run->opt;
}

bool run_average(run_loop *run)
{
    double decay = run_flag_number(run, "ema");
    if (decay > 0 && !run->ema && !run_failed(run))
        run->ema = opt_ema_open(td_root(run->td), &(opt_ema_options){ .decay = decay, .warm_up = true });
    return !run_failed(run);
}

static opt_schedule_kind kind_of_schedule(const char *name)
{
    static const char *const names[] = { [OPT_CONSTANT] = "constant", [OPT_LINEAR] = "linear", [OPT_COSINE] = "cosine",
                                         [OPT_POLYNOMIAL] = "polynomial", [OPT_STEP] = "step" };
    size_t kind = 0;
    while (kind < sizeof names / sizeof *names && strcmp(names[kind], name)) kind++;
    return (opt_schedule_kind)kind; /* the flag takes no other */
}

double run_rate(const run_loop *run, int64_t step)
{
    const run_flags *f = &run->flags;
    const char *kind = run_flags_text(f, "schedule");
    double rate = run_flags_number(f, "lr");
    opt_schedule schedule = {
        .kind = kind_of_schedule(kind),
        .rate = rate,
        .final_rate = run_flags_text(f, "final-lr") ? run_flags_number(f, "final-lr") : rate / 10,
        .warmup = run_flags_whole(f, "warmup"),
        .steps = run->schedule_steps,
        .power = run_flags_number(f, "power"),
        .every = run_flags_whole(f, "decay-every"),
        .factor = run_flags_number(f, "decay-factor"),
    };
    return opt_rate(&schedule, step);
}
