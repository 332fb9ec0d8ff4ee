/* Every public header in C++17, alone as well as together, and the macros that C++ spells differently. */
#include <tandem/core.h>
#include <tandem/data.h>
#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>
#include <tandem/rewrite.h>
#include <tandem/run.h>
#include <tandem/tandem.h>

#include <cstdio>

int main()
{
    td_context *td = td_open(nullptr);
    td_tensor ones = td_fill(td, TD_F32, TD_SHAPE(2, 3), 1);
    double sum = td_item(td_sum(td_reshape(ones, 3, -1), TD_ALL, TD_DROP));
    if (td_error(td) != TD_OK) std::fprintf(stderr, "%s\n", td_error_text(td));
    std::printf("%g\n", sum);
    td_close(td);
    return sum == 6 ? 0 : 1;
}
