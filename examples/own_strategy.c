/* A strategy of one's own is a table: where parameters, gradients and optimizer state are, on each axis of the ranks. Here pairs of
 * ranks share their moments, as zero1 does, and the pairs are to one another as ddp's ranks. Nobody writes down what is sent.
 *
 *     build/bin/examples/own_strategy
 */
#include <stdio.h>

#include <tandem/tandem.h>

enum { R = TD_REPLICATED, S = TD_SHARDED, P = TD_PARTIAL, AS_IS = PAR_AS_IS, RANKS = 4, ROWS = 16, IN = 64, OUT = 16 };

static const par_strategy pairs = {
    "pairs", PAR_UNITS_BUCKET,
    /*            parameter  gradient after  gradient at    moments  accumulator
     *                       each backward   the optimizer                       */
    { { "pairs",  R,         AS_IS,          R,             R,       P },
      { "pair",   R,         AS_IS,          S,             S,       P } },
};

/* One rank: fits y, each a sum of four x, from its own rows of a batch that all ranks share. */
static int train(par_world *world, int rank, void *user)
{
    td_context *td = td_open(&(td_options){ .threads = 1 });
    bool alone = par_world_size(world) == 1;
    par_attach(td, world, rank, &(par_options){ .strategy = alone ? "single" : "pairs:2x2", .own = &pairs });
    nn_linear layer = nn_linear_make(td_root(td), "layer", IN, OUT);
    opt_optimizer *opt = opt_adamw(td_root(td), NULL);
    double loss_value = 0;
    for (int step = 0; step < 50 && td_error(td) == TD_OK; step++) {
        float x[ROWS][IN], y[ROWS][OUT] = { { 0 } };
        int own = ROWS / par_world_size(world);
        for (int r = 0; r < own; r++)
            for (int i = 0; i < IN; i++) y[r][i / 4] += x[r][i] = (float)((7 * (rank * own + r) + 3 * i + step) % 11) / 11;
        td_tensor in = td_batch(td, "x", TD_F32, TD_SHAPE(ROWS, IN), x), want = td_batch(td, "y", TD_F32, TD_SHAPE(ROWS, OUT), y);
        td_tensor error = td_sub(nn_linear_apply(&layer, in), want), loss = td_mean(td_mul(error, error), TD_ALL, TD_DROP);
        td_backward(loss);
        opt_step(opt, 0.02);
        if (td_step(td)) loss_value = td_item(loss);
    }
    int64_t state = td_last_report(td).state_bytes;
    if (rank == 0) printf("%d rank%s: loss %.4f, %lld bytes of state\n", par_world_size(world),
                          alone ? "" : "s", loss_value, (long long)state);
    if (td_error(td) != TD_OK) fprintf(stderr, "%s\n", td_error_text(td));
    if (rank == 0) *(double *)user = loss_value;
    bool good = td_error(td) == TD_OK;
    td_close(td);
    return good ? 0 : 1;
}

int main(void)
{
    double one = 0, many = 1;
    int failed = par_run_threads(1, NULL, train, &one) || par_run_threads(RANKS, NULL, train, &many);
    return failed || !(one < 0.1) || many - one > 1e-4 || one - many > 1e-4;
}
