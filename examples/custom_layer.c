/* A layer of one's own: parameters with a place in the tree, and how they are applied. A residual block, trained to give its input's square.
 *
 *     build/bin/examples/custom_layer
 */
#include <stdio.h>
#include <tandem/tandem.h>

typedef struct residual { td_module at; nn_linear wide, narrow; td_state gain; } residual; /* (N, width) -> (N, width) */

static residual residual_make(td_module parent, const char *name, int64_t width)
{
    td_module at = td_child(parent, name);
    return (residual){ at, nn_linear_make(at, "wide", width, 4 * width), nn_linear_make(at, "narrow", 4 * width, width),
                       td_parameter(at, "gain", TD_SHAPE(width), td_init_constant(1)) };
}

static td_tensor residual_apply(const residual *r, td_tensor x)
{
    td_enter(r->at);                                                    /* what follows is printed as part of it */
    td_tensor h = td_tanh(nn_linear_apply(&r->wide, x));
    td_tensor y = td_add(td_mul(x, td_use(r->gain)), nn_linear_apply(&r->narrow, h));
    td_leave(r->at);
    return y;
}

int main(void)
{
    enum { ROWS = 64, WIDTH = 4, STEPS = 400 };
    td_context *td = td_open(&(td_options){ .seed = 1 });
    residual block = residual_make(td_root(td), "block", WIDTH);
    opt_optimizer *opt = opt_adam(td_root(td), NULL);
    for (int64_t s = 0; s < td_state_count(td); s++)
        if (td_state_kind_of(td_state_at(td, s)) == TD_PARAMETER) printf("%s\n", td_state_name(td_state_at(td, s)));

    float x[ROWS * WIDTH];
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = (float)(i * 7 % 41) / 20 - 1;
    double loss = 1;
    for (int step = 0; step < STEPS; step++) {
        td_tensor in = td_batch(td, "x", TD_F32, TD_SHAPE(ROWS, WIDTH), x), target = td_square(in);
        td_tensor error = td_mse(residual_apply(&block, in), target);
        td_backward(error);
        opt_step(opt, 1e-2);
        if (!td_step(td)) break;
        loss = td_item(error);
        if (step % 100 == 0) printf("step %3d  loss %.5f\n", step, loss);
    }
    printf("at the end      %.5f %s\n", loss, td_error_text(td));
    td_close(td);                                                       /* the optimizer goes with it */
    return loss < 1e-2 ? 0 : 1;
}
