/* Gradients of one's own: a step function that is trained as if it were the identity, within the linear range.
 *
 *     build/bin/examples/custom_gradient
 *
 * sign(x) has no gradient to train by. The rule below passes the one that arrives where |x| <= width, and stops it elsewhere.
 */
#include <math.h>
#include <stdio.h>

#include <tandem/tandem.h>

typedef struct window { double width; } window;                         /* copied into the program: part of its fingerprint */

/* Recorded when a plan is made; the library sees to ranks, memory and further derivatives as for any operation. */
static void straight_through_gradient(const td_gradient_call *g)
{
    const window *a = g->attr;
    td_tensor width = td_fill(g->td, td_dtype_at(g->in[0]), (td_shape){ 0 }, a->width);
    td_tensor within = td_less_equal(td_abs(g->in[0]), width);
    td_gradient_set(g, 0, td_mul(g->dout[0], within));
}
static const td_gradient_rule straight_through = { "straight_through", straight_through_gradient };

static td_tensor binary_at(td_tensor x, double width, td_here here)
{
    return td_with_gradient_at(td_sign_at(x, here), &x, 1, &straight_through, &(window){ width }, sizeof(window), here);
}
#define binary(x, width) binary_at((x), (width), TD_HERE)

int main(void)
{
    td_context *td = td_open(NULL);
    float values[4] = { -2, -0.5f, 0.5f, 2 }, expected[4] = { 0, 1, 1, 0 }, got[4], slope[4];
    td_tensor x = td_input(td, "x", TD_F32, TD_SHAPE(4), values), y = binary(x, 1);
    td_tensor dx = td_gradient(y, x);
    td_keep(y);
    td_keep(dx);
    if (!td_step(td) || !td_read(y, got) || !td_read(dx, slope)) fprintf(stderr, "%s\n", td_error_text(td));
    bool good = td_error(td) == TD_OK;
    for (int i = 0; i < 4 && good; i++) {
        printf("binary(%4.1f) = %2g, slope %g\n", values[i], got[i], slope[i]);
        good = got[i] == copysignf(1, values[i]) && slope[i] == expected[i];
    }
    td_close(td);
    return good ? 0 : 1;
}
