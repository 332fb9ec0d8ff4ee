/* Slices at an index that is a value of the program, on a GPU: bytes moved in the widest unit that sizes and places allow. */
#include "core/device_cuda.h"
#include "core/ops/slice_at.h"
#include "core/ops/unit.cuh"

enum { THREADS = 256 };

/* The units of one row, from its slice or from x. In place only the slice's. s.bytes counts units. */
template <typename U>
static __global__ void write_rows(td_slices s, bool in_place)
{
    int64_t width = (in_place ? s.count : s.size) * s.bytes, total = s.rows * width;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t row = i / width, unit = i % width, at = s.at[row / s.middle];
        int64_t to = in_place ? unit / s.bytes + at : unit / s.bytes, from = to - at; /* indices of x and of the slice */
        if (to < 0 || to >= s.size) continue;
        int64_t inner = unit % s.bytes, whole = (row * s.size + to) * s.bytes + inner;
        bool sliced = from >= 0 && from < s.count;
        ((U *)s.y)[whole] = sliced ? ((const U *)s.value)[(row * s.count + from) * s.bytes + inner] : ((const U *)s.x)[whole];
    }
}

template <typename U>
static __global__ void read_rows(td_slices s)
{
    int64_t width = s.count * s.bytes, total = s.rows * width;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t row = i / width, unit = i % width, from = s.at[row / s.middle] + unit / s.bytes;
        U zero = {};
        ((U *)s.y)[i] = from >= 0 && from < s.size ? ((const U *)s.x)[(row * s.size + from) * s.bytes + unit % s.bytes] : zero;
    }
}

static int unit_of(const td_slices *s)
{
    return td_unit_of((uintptr_t)s->x | (uintptr_t)s->y | (uintptr_t)s->value | (uint64_t)s->bytes);
}

extern "C" void td_slice_write_on_gpu(const td_kernel *k, td_slices s, void *room)
{
    bool in_place = s.x == s.y;
    int64_t value_bytes = s.rows * s.count * s.bytes, row_bytes = (in_place ? s.count : s.size) * s.bytes;
    if (in_place && !value_bytes) return;
    if (in_place && s.value < s.y + s.rows * s.size * s.bytes && s.y < s.value + value_bytes) { /* the value lies in x */
        if (!td_copy_bytes_cuda(k->run->td, room, s.value, value_bytes, td_stream(k))) return;
        s.value = (const char *)room;
    }
    int unit = unit_of(&s);
    int64_t total = s.rows * row_bytes / unit;
    s.bytes /= unit;
    TD_UNITS(unit, (write_rows<U><<<td_blocks_for(total, THREADS, 1), THREADS, 0, td_stream(k)>>>(s, in_place)));
    td_cuda_launched(k);
}

extern "C" void td_slice_read_on_gpu(const td_kernel *k, td_slices s)
{
    int unit = unit_of(&s);
    int64_t total = s.rows * s.count * s.bytes / unit;
    s.bytes /= unit;
    TD_UNITS(unit, (read_rows<U><<<td_blocks_for(total, THREADS, 1), THREADS, 0, td_stream(k)>>>(s)));
    td_cuda_launched(k);
}
