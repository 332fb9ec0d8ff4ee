/* The regression's data, made by Tandem itself: rows and teacher are parameters with keyed initial values, and the
 * targets are one forward of the teacher.
 */
#include <string.h>

#include <tandem/nn.h>

#include "models/mlp/mlp.h"

enum { WIDTH = 64, TRAIN_ROWS = 5000, TEST_ROWS = 1000, ROWS = TRAIN_ROWS + TEST_ROWS };
enum { TEACHER_SEED = 1 };

typedef struct teacher_set {
    data_set set;
    int64_t first;                /* row of the split */
    float x[ROWS][MLP_FEATURES], y[ROWS];
} teacher_set;

static bool teacher_get(const data_set *set, int64_t i, void *const *out, char *error)
{
    (void)error;
    const teacher_set *t = set->self;
    memcpy(out[0], t->x[t->first + i], sizeof t->x[0]);
    memcpy(out[1], &t->y[t->first + i], sizeof t->y[0]);
    return true;
}

static void teacher_close(data_set *set) { td_free(set->td, set->self, sizeof(teacher_set), "data"); }

/* y = 4 W2 tanh(W1 x + b1) + 4 b2, of about unit variance. */
static bool teach(td_context *td, teacher_set *t)
{
    td_context *own = td_open(&(td_options){ .seed = TEACHER_SEED, .threads = 1, .print = "" });
    td_module root = td_root(own);
    td_state rows = td_parameter(root, "x", TD_SHAPE(ROWS, MLP_FEATURES), td_init_normal(1));
    nn_linear hidden = nn_linear_make(root, "hidden", MLP_FEATURES, WIDTH), out = nn_linear_make(root, "out", WIDTH, 1);
    td_tensor x = td_use(rows);
    td_tensor y = td_scale(nn_linear_apply(&out, td_tanh(nn_linear_apply(&hidden, x))), 4);
    bool ok = td_read(x, t->x) && td_read(y, t->y);
    if (!ok) td_fail(td, td_error(own), "the regression's data: %s", td_error_text(own));
    td_close(own);
    return ok;
}

data_set *mlp_teacher(td_context *td, const char *split)
{
    teacher_set *t = td_alloc(td, sizeof *t, "data");
    if (!t) return NULL;
    bool test = !strcmp(split, "test");
    memset(t, 0, sizeof *t);
    t->first = test ? TRAIN_ROWS : 0;
    t->set = (data_set){
        .td = td, .name = "the teacher's function", .count = test ? TEST_ROWS : TRAIN_ROWS, .columns = 2,
        .column = { { .name = "x", .dtype = TD_F32, .shape = TD_SHAPE(MLP_FEATURES) },
                    { .name = "y", .dtype = TD_F32, .shape = TD_SHAPE(1) } },
        .self = t, .get = teacher_get, .close = teacher_close,
    };
    if (teach(td, t)) return &t->set;
    data_set_close(&t->set);
    return NULL;
}
