/* Tensors and gradients: a call records, td_item and td_read compute.
 *
 *     build/bin/examples/gradients
 */
#include <stdio.h>
#include <tandem/tandem.h>

int main(void)
{
    td_context *td = td_open(&(td_options){ .dtype = TD_F64 });
    double numbers[6] = { 1, 2, 3, 4, 5, 6 }, got[6];

    td_tensor x = td_input(td, "x", TD_F64, TD_SHAPE(2, 3), numbers);
    td_tensor y = td_sum(td_square(x), TD_ALL, TD_DROP);            /* nothing has run yet */
    printf("sum of squares %g\n", td_item(y));

    td_tensor dx = td_gradient(y, x);                               /* 2 x */
    td_read(dx, got);
    printf("its gradient   %g %g %g %g %g %g\n", got[0], got[1], got[2], got[3], got[4], got[5]);

    td_tensor t = td_scalar(td, 0.5);
    td_tensor second = td_gradient(td_gradient(td_sin(t), t), t);   /* a gradient is a value like any other */
    printf("sin'' (0.5)    %.6f\n", td_item(second));

    td_add(x, td_input(td, "row", TD_F64, TD_SHAPE(2), numbers));   /* a mistake is kept and names this line */
    printf("a mistake:     %s\n", td_error_text(td));
    int failed = td_error(td) != TD_ERROR_USAGE;
    td_close(td);
    return failed;
}
