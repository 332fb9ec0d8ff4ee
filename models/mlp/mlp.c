/* mlp: linear layers with ReLU and dropout between them, as a classifier or as a regression.
 *
 *     classify    784-1024-1024-10 on images or a table, cross-entropy          1,863,690 parameters
 *     regress     10-64-64-1 with dropout 0.2 on a teacher's function, MSE          4,929 parameters
 *
 * Parameters are named as in a PyTorch Sequential of Linear, ReLU, Dropout, ...: net.0.weight, net.0.bias,
 * net.3.weight ...
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tandem/nn.h>

#include "models/mlp/mlp.h"

enum { MLP_LAYERS = 32 };

typedef struct mlp {
    bool regresses;
    const char *column;           /* of the data: what goes in */
    int64_t features;             /* a sample has */
    int layers;
    nn_linear linear[MLP_LAYERS];
    nn_dropout dropout[MLP_LAYERS]; /* behind each layer but the last */
    double p;
} mlp;

static bool regresses(run_loop *run) { return !strcmp(run_flag_text(run, "task"), "regress"); }

int64_t mlp_classes(run_loop *run) { return run_flag_text(run, "classes") ? run_flag_whole(run, "classes") : 10; }

/* The function to regress on is made up: it has no file, labels or columns. */
static bool check_regression(run_loop *run)
{
    static const char *const others[] = { "data", "classes", "scale", "target" };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (!run_flag_text(run, others[i])) continue;
        td_fail(run_context(run), TD_ERROR_USAGE, "--%s has no effect with --task regress: leave it out", others[i]);
        return false;
    }
    return true;
}

static data_set *mlp_data(run_loop *run, const char *split)
{
    if (regresses(run) && !check_regression(run)) return NULL;
    if (!strcmp(split, "random")) return mlp_random(run, regresses(run));
    return regresses(run) ? mlp_teacher(run_context(run), split) : mlp_images_or_table(run, split);
}

/* Sizes of the hidden layers and the output; 0 after an error. */
static int layer_sizes(run_loop *run, int64_t sizes[MLP_LAYERS])
{
    bool regression = regresses(run);
    int hidden = run_flag_counts(run, "hidden", sizes, MLP_LAYERS - 1);
    if (hidden > MLP_LAYERS - 1) {
        td_fail(run_context(run), TD_ERROR_USAGE, "--hidden has %d layers, at most %d can be", hidden, MLP_LAYERS - 1);
        return 0;
    }
    if (!hidden) sizes[0] = sizes[1] = regression ? 64 : 1024, hidden = 2;
    sizes[hidden] = regression ? 1 : mlp_classes(run);
    return hidden + 1;
}

static void mlp_make_layers(mlp *m, td_module root, const int64_t *sizes)
{
    td_module net = td_child(root, "net");
    int64_t in = m->features;
    for (int i = 0; i < m->layers; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", 3 * i);
        m->linear[i] = nn_linear_make(net, name, in, sizes[i]);
        snprintf(name, sizeof name, "%d", 3 * i + 2);
        if (m->p > 0 && i + 1 < m->layers) m->dropout[i] = nn_dropout_make(net, name, m->p);
        in = sizes[i];
    }
}

static void *mlp_make(run_loop *run, td_module root, const data_set *set)
{
    int64_t sizes[MLP_LAYERS];
    int layers = layer_sizes(run, sizes);
    mlp *m = layers ? calloc(1, sizeof *m) : NULL;
    if (layers && !m) td_fail(run_context(run), TD_ERROR_MEMORY, "out of memory for the model");
    if (!m) return NULL;
    m->regresses = regresses(run);
    m->column = set->column[0].name;
    m->features = td_shape_elements(set->column[0].shape);
    m->layers = layers;
    m->p = run_flag_text(run, "dropout") ? run_flag_number(run, "dropout") : m->regresses ? 0.2 : 0;
    mlp_make_layers(m, root, sizes);
    return m;
}

/* (N, ...) -> (N, classes), or (N, 1) */
static td_tensor forward(const mlp *m, const data_batch *b)
{
    td_tensor x = td_reshape(data_get(b, m->column), -1, m->features);
    for (int i = 0; i < m->layers; i++) {
        x = nn_linear_apply(&m->linear[i], x);
        if (i + 1 == m->layers) break;
        x = td_relu(x);
        if (m->p > 0) x = nn_dropout_apply(&m->dropout[i], x);
    }
    return x;
}

static td_tensor mlp_loss(void *model, const data_batch *b)
{
    const mlp *m = model;
    td_tensor y = forward(m, b);
    return m->regresses ? td_mse(y, data_get(b, "y")) : td_cross_entropy(y, data_get(b, "label"));
}

static int mlp_measure(void *model, const data_batch *b, run_metric out[RUN_METRICS])
{
    const mlp *m = model;
    td_tensor y = forward(m, b), weights = data_get(b, "weight"), total = td_sum(weights, TD_ALL, TD_DROP);
    if (m->regresses) {
        td_tensor loss = td_mse_weighted(y, data_get(b, "y"), weights);
        out[0] = (run_metric){ "loss", td_mul(loss, total), total };
        return 1;
    }
    td_tensor labels = data_get(b, "label");
    td_tensor loss = td_cross_entropy_weighted(y, labels, weights);
    td_tensor right = td_cast(td_equal(td_argmax(y), labels), td_dtype_at(weights)); /* (N) */
    out[0] = (run_metric){ "loss", td_mul(loss, total), total };
    out[1] = (run_metric){ "accuracy", td_sum(td_mul(right, weights), TD_ALL, TD_DROP), total };
    return 2;
}

static const run_flag mlp_flags[] = {
    { .name = "task", .kind = RUN_CHOICE, .choices = "classify|regress", .standard = "classify",
      .help = "what is learned" },
    { .name = "hidden", .kind = RUN_COUNTS, .most = 1 << 24,
      .help = "sizes of the hidden layers (1024,1024; regress: 64,64)" },
    { .name = "dropout", .kind = RUN_FRACTION,
      .help = "share of hidden values set to 0 (0; regress: 0.2)" },
    { .name = "classes", .kind = RUN_COUNT, .most = 1 << 24,
      .help = "labels are 0 to N - 1 (10)" },
    { .name = "scale", .kind = RUN_POSITIVE, .commands = RUN_TRAIN | RUN_EVAL,
      .help = "factor on a table's features (1)" },
    { .name = "target", .kind = RUN_COUNT, .commands = RUN_TRAIN | RUN_EVAL,
      .help = "column of a table's labels, from 1 (the last)" },
    RUN_OPTIMIZER_FLAGS("adamw"),
    { 0 }
};

static const run_model mlp_model = {
    .about = "mlp: a multi-layer perceptron on images (IDX files), a table (CSV), or a made-up function",
    .defaults = { .name = "mlp", .batch = 128, .epochs = 3, .lr = 1e-3, .schedule = "cosine", .flags = mlp_flags },
    .data = mlp_data,
    .make = mlp_make,
    .free = free,
    .loss = mlp_loss,
    .measure = mlp_measure,
};

int main(int argc, char **argv) { return run_main(argc, argv, &mlp_model); }
