/* The MLP against PyTorch in f64: loss, every gradient and ten updates, to 1e-9 (tests/golden/mlp.py). */
#include "tests/golden.h"

#include <tandem/nn.h>
#include <tandem/optim.h>

enum { LAYERS = 3, STEPS = 10 };

typedef struct net {
    td_context *td;
    nn_linear layer[LAYERS];
} net;

/* Layers named as PyTorch's Sequential does. */
static net open_net(golden g, const int64_t sizes[LAYERS + 1], const char *const names[LAYERS])
{
    net n = { .td = open_cpu(TD_F64) };
    td_module at = td_child(td_root(n.td), "net");
    for (int l = 0; l < LAYERS; l++) n.layer[l] = nn_linear_make(at, names[l], sizes[l], sizes[l + 1]);
    golden_write_parameters(g, "initial", n.td);
    return n;
}

static td_tensor forward(const net *n, td_tensor x)
{
    for (int l = 0; l < LAYERS; l++) {
        x = nn_linear_apply(&n->layer[l], x);
        if (l + 1 < LAYERS) x = td_relu(x);
    }
    return x;
}

static td_tensor input(const net *n, golden_array a) { return td_input(n->td, "x", TD_F64, a.shape, a.values); }

static td_tensor classifier_loss(const net *n, golden g, td_tensor *logits)
{
    golden_array labels = golden_get(g, "labels");
    *logits = forward(n, input(n, golden_get(g, "x")));
    return td_cross_entropy(*logits, td_input(n->td, "labels", TD_I32, labels.shape, golden_as(labels, TD_I32)));
}

static const int64_t classifier_sizes[] = { 20, 16, 16, 5 };
static const char *const classifier_names[] = { "0", "2", "4" };

START_TEST(test_loss_and_every_gradient)
{
    golden g = golden_open("classifier.txt");
    net n = open_net(g, classifier_sizes, classifier_names);
    td_tensor logits, loss = classifier_loss(&n, g, &logits), gradient[2 * LAYERS];
    td_keep(loss);
    td_keep(logits);
    for (int p = 0; p < 2 * LAYERS; p++) {
        const nn_linear *l = &n.layer[p / 2];
        gradient[p] = td_gradient(loss, td_use(p % 2 ? l->bias : l->weight));
        td_keep(gradient[p]);
    }
    ck_assert_msg(td_step(n.td), "%s", td_error_text(n.td));
    double value = td_item(loss), *buffer = check_alloc(4096 * sizeof(double));
    ck_assert_near(&value, golden_get(g, "loss").values, 1, 1e-9);
    ck_assert(td_read(logits, buffer));
    ck_assert_near(buffer, golden_get(g, "logits").values, 60, 1e-9);
    for (int p = 0; p < 2 * LAYERS; p++) {
        char name[64];
        snprintf(name, sizeof name, "gradient.net.%s.%s", classifier_names[p / 2], p % 2 ? "bias" : "weight");
        golden_array want = golden_get(g, name);
        ck_assert(td_read(gradient[p], buffer));
        ck_assert_near(buffer, want.values, want.count, 1e-9);
    }
    td_close(n.td);
}
END_TEST

static void ten_updates(const char *run, double max_norm)
{
    char name[64];
    golden g = golden_open("classifier.txt");
    net n = open_net(g, classifier_sizes, classifier_names);
    opt_optimizer *opt = opt_adamw(td_root(n.td), &(opt_adamw_options){ .decay = 0.1, .max_norm = max_norm });
    snprintf(name, sizeof name, "%s.losses", run);
    const double *losses = golden_get(g, name).values;
    const double *norms = max_norm > 0 ? golden_get(g, "clipped.norms").values : NULL;
    for (int s = 0; s < STEPS; s++) {
        td_tensor logits, loss = classifier_loss(&n, g, &logits);
        td_backward(loss);
        opt_step(opt, 1e-2);
        ck_assert_msg(td_step(n.td), "%s", td_error_text(n.td));
        double got = td_item(loss);
        ck_assert_near(&got, &losses[s], 1, 1e-9);
        if (!norms) continue;
        got = td_item(opt_gradient_norm(opt));
        ck_assert_near(&got, &norms[s], 1, 1e-9);
    }
    golden_check_parameters(g, run, n.td, 1e-9);
    opt_close(opt);
    td_close(n.td);
}

START_TEST(test_ten_adamw_updates) { ten_updates("adamw", 0); } END_TEST
START_TEST(test_ten_clipped_adamw_updates) { ten_updates("clipped", 0.5); } END_TEST

START_TEST(test_ten_adam_updates_of_the_regression)
{
    golden g = golden_open("regression.txt");
    net n = open_net(g, (const int64_t[]){ 10, 64, 64, 1 }, (const char *const[]){ "0", "3", "6" });
    ck_assert_int_eq(td_parameter_elements(n.td), 4929);
    opt_optimizer *opt = opt_adam(td_root(n.td), NULL);
    const double *losses = golden_get(g, "adam.losses").values;
    for (int s = 0; s < STEPS; s++) {
        td_tensor loss = td_mse(forward(&n, input(&n, golden_get(g, "x"))), input(&n, golden_get(g, "y")));
        td_backward(loss);
        opt_step(opt, 1e-3);
        ck_assert_msg(td_step(n.td), "%s", td_error_text(n.td));
        double got = td_item(loss);
        ck_assert_near(&got, &losses[s], 1, 1e-9);
    }
    golden_check_parameters(g, "adam", n.td, 1e-9);
    opt_close(opt);
    td_close(n.td);
}
END_TEST

TESTS("golden", test_loss_and_every_gradient, test_ten_adamw_updates, test_ten_clipped_adamw_updates, test_ten_adam_updates_of_the_regression)
