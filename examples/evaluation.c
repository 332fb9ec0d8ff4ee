/* A training loop with evaluation: a classifier of made-up points, measured every 50 updates on points that it has not seen.
 *
 *     build/bin/examples/evaluation --epochs 4 --eval-every 50
 */
#include <math.h>
#include <tandem/tandem.h>

enum { POINTS = 4096, TEST_POINTS = 512, CLASSES = 3 };

typedef struct { nn_linear hidden, out; } mlp;                      /* (N, 2) -> (N, CLASSES) */

static td_tensor forward(const mlp *m, td_tensor x)
{
    return nn_linear_apply(&m->out, td_relu(nn_linear_apply(&m->hidden, x)));
}

/* Sums over the rows of a batch, and what they are divided by in the end; rows that only fill a batch up have weight 0. */
static int measure(void *model, const data_batch *b, run_metric out[RUN_METRICS])
{
    td_tensor logits = forward(model, data_get(b, "point")), label = data_get(b, "label"), weight = data_get(b, "weight");
    td_tensor rows = td_sum(weight, TD_ALL, TD_DROP);
    td_tensor right = td_cast(td_equal(td_argmax(logits), label), TD_F32);
    out[0] = (run_metric){ "loss", td_mul(td_cross_entropy_weighted(logits, label, weight), rows), rows };
    out[1] = (run_metric){ "accuracy", td_sum(td_mul(right, weight), TD_ALL, TD_DROP), rows };
    return 2;
}

/* Three arms of a spiral: point i is on arm i mod 3. */
static data_set *spiral(td_context *td, int64_t first, int64_t count, float (*points)[2], int32_t *labels)
{
    for (int64_t i = 0; i < count; i++) {
        double along = fmod(0.6180339887 * (double)(first + i), 1), angle = 4 * along + 2.0943951 * (double)(i % CLASSES);
        labels[i] = (int32_t)(i % CLASSES);
        points[i][0] = (float)(along * cos(angle));
        points[i][1] = (float)(along * sin(angle));
    }
    data_array arrays[] = { { .name = "point", .dtype = TD_F32, .shape = TD_SHAPE(count, 2), .data = points },
                            { .name = "label", .dtype = TD_I32, .shape = TD_SHAPE(count), .data = labels } };
    return data_memory(td, arrays, 2);
}

int main(int argc, char **argv)
{
    static float points[POINTS + TEST_POINTS][2];
    static int32_t labels[POINTS + TEST_POINTS];
    run_loop *run = run_open(&argc, &argv, &(run_defaults){ .batch = 64, .epochs = 8, .lr = 1e-2 });
    td_context *td = run_context(run);
    td_module root = td_root(td);
    mlp m = { nn_linear_make(root, "hidden", 2, 64), nn_linear_make(root, "out", 64, CLASSES) };
    opt_optimizer *opt = opt_adamw(root, &(opt_adamw_options){ .decay = 0.01 });
    run_train_on(run, spiral(td, 0, POINTS, points, labels));
    run_evaluate_on(run, spiral(td, POINTS, TEST_POINTS, points + POINTS, labels + POINTS), measure, &m);
    for (data_batch b; run_next(run, &b);)                          /* evaluates where --eval-every says, and at the end */
        run_step(run, opt, td_cross_entropy(forward(&m, data_get(&b, "point")), data_get(&b, "label")));
    return run_close(run);
}
