/* A loop of one's own: fit y = 3 x - 1 from made-up points. Nothing but core, nn and optim.
 *
 *     build/bin/examples/own_loop
 */
#include <math.h>
#include <stdio.h>
#include <tandem/tandem.h>

enum { POINTS = 64, STEPS = 200 };

int main(void)
{
    td_context *td = td_open(NULL);
    nn_linear line = nn_linear_make(td_root(td), "line", 1, 1);
    opt_optimizer *opt = opt_sgd(td_root(td), &(opt_sgd_options){ .momentum = 0.9 });

    float x[POINTS], y[POINTS];
    for (int i = 0; i < POINTS; i++) {
        x[i] = (float)i / POINTS;
        y[i] = 3 * x[i] - 1;
    }
    double loss = NAN;
    for (int step = 0; step < STEPS; step++) {
        td_tensor in = td_batch(td, "x", TD_F32, TD_SHAPE(POINTS, 1), x);
        td_tensor target = td_batch(td, "y", TD_F32, TD_SHAPE(POINTS, 1), y);
        td_tensor error = td_mse(nn_linear_apply(&line, in), target);
        td_backward(error);                                         /* records: all of the step runs at once */
        opt_step(opt, 0.1);
        if (!td_step(td)) break;
        loss = td_item(error);
    }
    float weight = 0, bias = 0;
    td_state_read(line.weight, 0, 1, &weight);
    td_state_read(line.bias, 0, 1, &bias);
    printf("y = %.3f x + %.3f, loss %.2g %s\n", weight, bias, loss, td_error_text(td));
    opt_close(opt);
    td_close(td);
    return loss < 1e-4 ? 0 : 1;
}
