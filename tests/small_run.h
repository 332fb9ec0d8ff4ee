/* What tests of the run layer share: a small model on made-up data, trained in this process, and its files.
 *
 * SMALL_FOLDER, defined before, is the folder in which all files of the test lie.
 */
#ifndef TANDEM_TESTS_SMALL_RUN_H
#define TANDEM_TESTS_SMALL_RUN_H

#include <sys/stat.h>
#include <unistd.h>

#include "run/loop.h"
#include "tests/check.h"

/* ---- Files ------------------------------------------------------------------------------------------------ */

static inline CHECK_UNUSED void enter_folder(void)
{
    static bool entered;
    if (entered) return;
    mkdir(SMALL_FOLDER, 0777);
    ck_assert_int_eq(chdir(SMALL_FOLDER), 0);
    entered = true;
}

static inline CHECK_UNUSED void write_text(const char *path, const char *text)
{
    enter_folder();
    FILE *to = fopen(path, "w");
    ck_assert_ptr_nonnull(to);
    ck_assert_int_ge(fputs(text, to), 0);
    ck_assert_int_eq(fclose(to), 0);
}

static inline CHECK_UNUSED void clean(const char *out)
{
    enter_folder();
    td_context *td = open_cpu(TD_F32);
    ck_assert(run_remove_tree(td, out));
    td_close(td);
}

static inline CHECK_UNUSED bool exists(const char *path) { return access(path, F_OK) == 0; }

static inline CHECK_UNUSED int64_t count_lines(const char *path)
{
    FILE *from = fopen(path, "r");
    ck_assert_ptr_nonnull(from);
    int64_t lines = 0;
    for (int c; (c = fgetc(from)) != EOF;) lines += c == '\n';
    fclose(from);
    return lines;
}

/* ---- The model -------------------------------------------------------------------------------------------- */

enum { SAMPLES = 40, FEATURES = 6, CLASSES = 3 };

/* The same numbers for every run, which are written once: a loader's thread may read them. */
static float features[SAMPLES][FEATURES];
static int32_t labels[SAMPLES];

static inline CHECK_UNUSED void fill_small(void)
{
    static bool filled;
    if (filled) return;
    filled = true;
    for (int i = 0; i < SAMPLES; i++) {
        labels[i] = i % CLASSES;
        for (int f = 0; f < FEATURES; f++)
            features[i][f] = (float)check_normal((uint64_t)(i * FEATURES + f)) + (float)(labels[i] == f);
    }
}

static inline CHECK_UNUSED data_set *small_set(td_context *td)
{
    fill_small();
    data_array arrays[] = {
        { .name = "x", .dtype = TD_F32, .shape = TD_SHAPE(SAMPLES, FEATURES), .data = features },
        { .name = "label", .dtype = TD_I32, .shape = TD_SHAPE(SAMPLES), .data = labels },
    };
    return data_memory(td, arrays, 2);
}

typedef struct small_model {
    td_state hidden, out;
} small_model;

static inline CHECK_UNUSED td_tensor small_loss(const small_model *m, const data_batch *b)
{
    td_tensor h = td_relu(td_matmul_with(data_get(b, "x"), td_use(m->hidden), 0, 1));
    return td_cross_entropy(td_matmul_with(td_dropout(h, 0.25), td_use(m->out), 0, 1), data_get(b, "label"));
}

static inline CHECK_UNUSED small_model make_small(td_context *td, int64_t width)
{
    td_module root = td_root(td);
    return (small_model){ td_parameter(root, "hidden", TD_SHAPE(width, FEATURES), td_init_uniform(0.4)),
                          td_parameter(root, "out", TD_SHAPE(CLASSES, width), td_init_uniform(0.4)) };
}

static inline CHECK_UNUSED opt_optimizer *adamw(td_module root)
{
    return opt_adamw(root, &(opt_adamw_options){ .decay = 0.01, .max_norm = 1 });
}
static inline CHECK_UNUSED opt_optimizer *plain_sgd(td_module root) { return opt_sgd(root, NULL); }

/* A run with the flags given, one string with blanks between. */
static inline CHECK_UNUSED run_loop *open_small(const char *flags)
{
    char text[512], *argv[40] = { "small" };
    int argc = 1;
    snprintf(text, sizeof text, "%s", flags);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    char **arguments = argv;
    return run_open(&argc, &arguments, &(run_defaults){ .name = "small", .batch = 12, .lr = 0.05 });
}

/* Keeps the loss of each update done so far: behind a step it may be the one before that has been read. */
static inline CHECK_UNUSED void keep_loss(run_loop *run, double *losses)
{
    if (run->read) losses[run->read - 1] = run->loss;
    if (run_read_late(run) && run->read) losses[run->read - 1] = run->loss;
}

/* Trains; keeps each update's loss. `measure`: NULL, or what is evaluated. Returns the exit status. */
static inline CHECK_UNUSED int loop_small(run_loop *run, opt_optimizer *(*optimizer)(td_module), int64_t width,
                                          double *losses, int64_t *updates, run_measure measure)
{
    td_context *td = run_context(run);
    small_model m = make_small(td, width);
    opt_optimizer *opt = optimizer(td_root(td));
    run_train_on(run, small_set(td));
    if (measure) run_evaluate_on(run, small_set(td), measure, &m);
    bool stepped = false;
    for (data_batch b; run_next(run, &b);) {
        run_step(run, opt, small_loss(&m, &b));
        stepped = true;
        if (losses && td_error(td) == TD_OK) keep_loss(run, losses);
    }
    if (updates) *updates = td_updates(td);
    if (!stepped) opt_close(opt); /* the run never met it */
    return run_close(run);
}

static inline CHECK_UNUSED int train_by(opt_optimizer *(*optimizer)(td_module), const char *flags, int64_t width,
                                        double *losses, int64_t *updates)
{
    return loop_small(open_small(flags), optimizer, width, losses, updates, NULL);
}

static inline CHECK_UNUSED int train(const char *flags, int64_t width, double *losses, int64_t *updates)
{
    return train_by(adamw, flags, width, losses, updates);
}

static inline CHECK_UNUSED int measure_loss(void *model, const data_batch *b, run_metric out[RUN_METRICS])
{
    td_tensor weights = data_get(b, "weight"), total = td_sum(weights, TD_ALL, TD_DROP);
    out[0] = (run_metric){ "loss", td_mul(small_loss(model, b), total), total };
    return 1;
}

/* What a run of seed 3 does in f64, by hand: all batches in their order, or the first one again and again. */
typedef enum small_batches { EACH_BATCH, FIRST_BATCH } small_batches;
static inline CHECK_UNUSED void train_by_hand(small_batches batches, int threads, int steps, double *losses)
{
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .seed = 3, .threads = threads });
    small_model m = make_small(td, 5);
    opt_optimizer *opt = adamw(td_root(td));
    data_set *set = small_set(td);
    data_loader *loader = data_loader_open(
        td, set, &(data_loader_options){ .batch = 12, .seed = 3, .shuffle = true, .dtype = TD_F64 });
    data_batch b;
    for (int step = 0; step < steps; step++) {
        if (step == 0 || batches == EACH_BATCH) ck_assert(data_next(loader, &b));
        td_tensor loss = small_loss(&m, &b);
        td_backward(loss);
        opt_step(opt, 0.05);
        td_step(td);
        losses[step] = td_item(loss);
    }
    ck_assert_no_error(td);
    data_loader_close(loader);
    data_set_close(set);
    opt_close(opt);
    td_close(td);
}

#endif
