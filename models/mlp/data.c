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
    mlp_split *s = td_alloc(table->td, sizeof *s, "data");
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

static data_set *random_images(run_loop *run)
{
    data_column columns[] = {
        { .name = "image", .dtype = TD_F32, .shape = TD_SHAPE(28, 28, 1) },
        { .name = "label", .dtype = TD_I32, .classes = run_flag_whole(run, "classes") },
    };
    return data_random(run_context(run), columns, 2, run_flag_whole(run, "batch"), 1);
}

data_set *mlp_images_or_table(run_loop *run, const char *split)
{
    td_context *td = run_context(run);
    const char *path = run_data(run);
    struct stat status;
    if (!strcmp(split, "random")) return random_images(run);
    if (!*path) {
        td_fail(td, TD_ERROR_USAGE,
                "--data is needed: a directory of IDX files or a CSV file (Debian's dataset-fashion-mnist is in "
                "/usr/share/datasets/fashion-mnist), or --task regress");
        return NULL;
    }
    if (stat(path, &status)) {
        td_fail(td, TD_ERROR_DATA, "--data %s: %s", path, strerror(errno));
        return NULL;
    }
    int64_t classes = run_flag_whole(run, "classes");
    if (S_ISDIR(status.st_mode)) return data_idx_with(td, path, split, &(data_idx_options){ .classes = classes });
    data_csv_options options = { .target_column = run_flag_whole(run, "target"),
                                 .classes = classes,
                                 .scale = run_flag_number(run, "scale") };
    return split_table(data_csv(td, path, &options), !strcmp(split, "test"));
}
