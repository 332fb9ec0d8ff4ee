/* Images in IDX files, or a table in a CSV file, of which every tenth row is kept for testing. */
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "models/mlp/mlp.h"

enum { FOLDS = 10 };

/* Rows of a table: the test rows are those with i % 10 == 9, the training rows all others. */
typedef struct mlp_split {
    data_set set;
    data_set *table;
    bool test;
} mlp_split;

static bool split_get(const data_set *set, int64_t i, void *const *out, char *error)
{
    const mlp_split *s = set->self;
    int64_t row = s->test ? i * FOLDS + FOLDS - 1 : i / (FOLDS - 1) * FOLDS + i % (FOLDS - 1);
    return s->table->get(s->table, row, out, error);
}

static void split_close(data_set *set)
{
    mlp_split *s = set->self;
    data_set_close(s->table);
    td_free(s->set.td, s, sizeof *s, "data");
}

/* Takes the table. */
static data_set *split_table(data_set *table, bool test)
{
    if (!table) return NULL;
    if (table->count < FOLDS)
        td_fail(table->td, TD_ERROR_DATA, "%s: %lld rows, at least %d are needed: every tenth is kept for testing",
                table->name, (long long)table->count, FOLDS);
    mlp_split *s = table->count < FOLDS ? NULL : td_alloc(table->td, sizeof *s, "data");
    if (!s) {
        data_set_close(table);
        return NULL;
    }
    *s = (mlp_split){ .set = *table, .table = table, .test = test };
    s->set.count = test ? table->count / FOLDS : table->count - table->count / FOLDS;
    s->set.self = s;
    s->set.get = split_get;
    s->set.close = split_close;
    return &s->set;
}

data_set *mlp_random(run_loop *run, bool regresses)
{
    static const data_column values[] = {
        { .name = "x", .dtype = TD_F32, .shape = { 1, { MLP_FEATURES } } },
        { .name = "y", .dtype = TD_F32, .shape = { 1, { 1 } } },
    };
    data_column images[] = {
        { .name = "image", .dtype = TD_F32, .shape = TD_SHAPE(28, 28, 1) },
        { .name = "label", .dtype = TD_I32, .classes = mlp_classes(run) },
    };
    return data_random(run_context(run), regresses ? values : images, 2, run_flag_whole(run, "batch"), 1);
}

/* Images know where their labels are and that they are bytes. */
static data_set *images(run_loop *run, const char *path, const char *split)
{
    td_context *td = run_context(run);
    bool scaled = run_flag_text(run, "scale") != NULL;
    if (scaled || run_flag_text(run, "target")) {
        td_fail(td, TD_ERROR_USAGE, "--%s is for a table (CSV), and --data %s is a directory of images: leave it out",
                scaled ? "scale" : "target", path);
        return NULL;
    }
    return data_idx_with(td, path, split, &(data_idx_options){ .classes = mlp_classes(run) });
}

data_set *mlp_images_or_table(run_loop *run, const char *split)
{
    td_context *td = run_context(run);
    const char *path = run_flag_text(run, "data");
    struct stat status;
    if (!path) {
        td_fail(td, TD_ERROR_USAGE,
                "--data is needed: a directory of IDX files or a CSV file (Debian's dataset-fashion-mnist is in "
                "/usr/share/datasets/fashion-mnist), or --task regress");
        return NULL;
    }
    if (stat(path, &status)) {
        td_fail(td, TD_ERROR_DATA, "--data %s: %s", path, strerror(errno));
        return NULL;
    }
    if (S_ISDIR(status.st_mode)) return images(run, path, split);
    data_csv_options options = { .target_column = run_flag_whole(run, "target"),
                                 .classes = mlp_classes(run),
                                 .scale = run_flag_number(run, "scale") };
    return split_table(data_csv(td, path, &options), !strcmp(split, "test"));
}
