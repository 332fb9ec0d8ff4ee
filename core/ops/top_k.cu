/* top_k on CUDA; see top_k.c. One after the other: each is the first in order of those that stand behind the one before it, so a row is
 * read k times, from the caches. Made for a few of many; a long row that is sorted whole takes the square of its length.
 */
#include "core/ops/rows.cuh"

template <int threads, typename T>
static __global__ void __launch_bounds__(TD_ROW_BLOCK(threads))
top_k_kernel(const T *x, T *values, int32_t *indices, int64_t rows, int64_t columns, td_top_k_attr attr)
{
    bool smallest = attr.smallest != 0;
    TD_FOR_ROWS(row, rows, threads) {
        const T *from = x + row * columns;
        td_place<float> last = { 0, -1 };
        for (int64_t j = 0; j < attr.k; j++) {
            td_place<float> best = { 0, -1 };
            td_group_visit<threads>(from, row < rows ? columns : 0, [&](int64_t at, auto pack) {
                #pragma unroll
                for (int i = 0; i < (int)(sizeof pack / sizeof(T)); i++) {
                    td_place<float> next = { td_wide(pack.at[i]), at + i };
                    if ((j == 0 || td_stands_before(last, next, smallest)) && td_stands_before(next, best, smallest)) best = next;
                }
            });
            best = td_group_join<threads>(best, [=](td_place<float> a, td_place<float> b) { return td_stands_before(b, a, smallest) ? b : a; });
            if (row < rows && td_group_lane<threads>() == 0) {
                values[row * attr.k + j] = from[best.index];
                indices[row * attr.k + j] = (int32_t)best.index;
            }
            last = best;
        }
    }
}

template <typename T> static void top_k(const td_kernel *k)
{
    const td_top_k_attr attr = *(const td_top_k_attr *)k->attr;
    const T *x = (const T *)k->in[0].data;
    T *values = (T *)k->out[0].data;
    int32_t *indices = (int32_t *)k->out[1].data;
    int64_t columns = td_arg_last(&k->in[0]), rows = td_arg_elements(&k->out[0]);
    if (rows == 0) return;
    rows /= attr.k;
    TD_ROW_THREADS(columns, top_k_kernel<threads><<<td_row_blocks(rows, threads), TD_ROW_BLOCK(threads), 0, td_stream(k)>>>(
                                x, values, indices, rows, columns, attr))
    td_cuda_launched(k);
}

extern "C" void td_top_k_cuda(const td_kernel *k) { TD_CUDA_FLOATS(k->in[0].dtype, top_k<T>(k)) }
