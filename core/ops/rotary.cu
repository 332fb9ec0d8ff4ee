/* rotary on a GPU: a thread turns one pair at one position in every head, so that an angle's cosine and sine, taken in f64, are computed
 * once. 2 x the bytes of x.
 */
#include "core/device_cuda.h"
#include "core/ops/number.cuh"
#include "core/ops/rotary_cuda.h"

enum { THREADS = 128 };

template <typename T>
static __global__ void turn(T *y, const T *x, const int32_t *positions, int64_t sequences, int64_t heads, int64_t rows, int64_t half,
                            const __grid_constant__ td_rotary_angles angles)
{
    int64_t count = sequences * rows * half;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t pair = i % half, row = i / half % rows, sequence = i / half / rows;
        double position = (double)row + (positions ? positions[sequence] : 0), c, s;
        sincos(position * angles.step[pair], &s, &c);
        float cosine = (float)c, sine = (float)s;
        for (int64_t head = 0; head < heads; head++) {
            int64_t at = ((sequence * heads + head) * rows + row) * 2 * half + pair;
            float a = td_wide(x[at]), b = td_wide(x[at + half]);
            y[at] = td_narrow<T>(a * cosine - b * sine);
            y[at + half] = td_narrow<T>(b * cosine + a * sine);
        }
    }
}

extern "C" void td_rotary_cuda(const td_kernel *k)
{
    td_shape x = k->in[0].shape;
    int64_t count = x.dim[0] * x.dim[2] * (x.dim[3] / 2);
    if (!td_arg_elements(&k->in[0])) return;
    const int32_t *positions = k->inputs > 1 ? (const int32_t *)k->in[1].data : NULL;
    TD_CUDA_FLOATS(k->in[0].dtype, (turn<T><<<td_blocks_for(count, THREADS, 1), THREADS, 0, td_stream(k)>>>(
                                        (T *)k->out[0].data, (const T *)k->in[0].data, positions, x.dim[0], x.dim[1], x.dim[2], x.dim[3] / 2,
                                        *(const td_rotary_angles *)k->prepared)));
    td_cuda_launched(k);
}
