/* A program with an installed Tandem: (1 + 2) x 3 and its gradient. */
#include <stdio.h>
#include <tandem/tandem.h>

int main(void)
{
    td_context *td = td_open(NULL);
    td_tensor x = td_scalar(td, 2);
    td_tensor y = td_mul(td_add(td_scalar(td, 1), x), td_scalar(td, 3));
    double dx = td_item(td_gradient(y, x)), value = td_item(y);
    if (td_error(td) != TD_OK) fprintf(stderr, "%s\n", td_error_text(td));
    printf("%g %g\n", value, dx);
    td_close(td);
    return value == 9 && dx == 3 ? 0 : 1;
}
