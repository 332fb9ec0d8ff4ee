/* A whole program: an MLP learns to tell images apart. All flags of training are there: --help lists them.
 *
 *     build/bin/examples/classifier --data /usr/share/datasets/fashion-mnist --steps 20
 */
#include <tandem/tandem.h>

typedef struct { nn_linear hidden, out; } mlp;                      /* (N, 784) -> (N, 10) */

static td_tensor forward(const mlp *m, td_tensor x)
{
    return nn_linear_apply(&m->out, td_relu(nn_linear_apply(&m->hidden, x)));
}

int main(int argc, char **argv)
{
    run_loop *run = run_open(&argc, &argv, &(run_defaults){ .batch = 144, .epochs = 3, .lr = 1e-3 });
    td_module root = td_root(run_context(run));                     /* flags --device --ranks --strategy ... override */
    mlp m = { nn_linear_make(root, "hidden", 784, 1024), nn_linear_make(root, "out", 1024, 10) };
    opt_optimizer *opt = opt_adamw(root, &(opt_adamw_options){ .decay = 0.01 });
    run_train_on(run, data_idx(run_context(run), run_data(run), "train"));
    for (data_batch b; run_next(run, &b);) {                        /* ends on data, --steps, a signal or the first error */
        td_tensor x = td_reshape(data_get(&b, "image"), -1, 784);
        run_step(run, opt, td_cross_entropy(forward(&m, x), data_get(&b, "label")));
    }                                                               /* backward; update, log and save when due */
    return run_close(run);                                          /* waits, reports, saves */
}
