/* transpose, slice and concat on a GPU: they copy bytes, of any dtype. Floor: the bytes of the operands, read once and written once.
 *
 * A transposition whose runs of adjacent elements are longer than one element, or whose dimensions are small, is a gather of such runs, in
 * units of up to sixteen bytes and in the order of the output. Others go through squares in shared memory, so that reads and writes are of
 * adjacent elements both.
 */
#include "core/device_cuda.h"
#include "core/ops/stored.cuh"
#include "core/ops/unit.cuh"

extern "C" {
#include "core/ops/divisor.h"
}

enum { THREADS = 256, MOST_BLOCKS = 1 << 16, LARGEST_INDEX = 0x7FFFFFFF };

/* Splits an index: *rest = index / by, and the remainder is returned. */
static __device__ __forceinline__ uint32_t split(uint32_t index, td_divisor by, uint32_t *rest)
{
    *rest = td_quotient(index, by.multiplier, by.shift);
    return index - *rest * by.size;
}

static unsigned blocks_for(int64_t count)
{
    return (unsigned)td_smaller(td_blocks_for(count, THREADS, 1), MOST_BLOCKS);
}

/* ---- transpose ------------------------------------------------------------------------------------------ */

/* x (outer, rows, middle, columns, inner) -> y (outer, columns, middle, rows, inner). */
typedef struct transposition {
    const void *x;
    void *y;
    int64_t outer, rows, middle, columns;
    int64_t inner;                            /* units */
} transposition;

/* Units in the order of y; `total` is below 2^31. */
template <typename U> static __global__ void __launch_bounds__(THREADS)
gather_runs(transposition t, uint32_t total, td_divisor inner, td_divisor rows, td_divisor middle, td_divisor columns)
{
    for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < total; i += gridDim.x * THREADS) {
        uint32_t rest;
        uint32_t unit = split(i, inner, &rest), row = split(rest, rows, &rest), plane = split(rest, middle, &rest);
        uint32_t column = split(rest, columns, &rest);
        int64_t from = ((rest * t.rows + row) * t.middle + plane) * t.columns + column;
        ((U *)t.y)[i] = ((const U *)t.x)[from * t.inner + unit];
    }
}

/* The same where there are more. */
template <typename U> static __global__ void __launch_bounds__(THREADS) gather_many_runs(transposition t, int64_t total)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < total; i += gridDim.x * (int64_t)THREADS) {
        int64_t rest = i, unit = rest % t.inner;
        rest /= t.inner;
        int64_t row = rest % t.rows;
        rest /= t.rows;
        int64_t plane = rest % t.middle;
        rest /= t.middle;
        int64_t column = rest % t.columns;
        int64_t from = ((rest / t.columns * t.rows + row) * t.middle + plane) * t.columns + column;
        ((U *)t.y)[i] = ((const U *)t.x)[from * t.inner + unit];
    }
}

/* Squares of 32 x each elements a side, `each` of them in one access: rows and columns are multiples of it. A row of shared memory has one
 * element more, so that a column's elements lie in different banks. */
enum { LANES = 32, LINES = THREADS / LANES };

template <typename S, int each> static __global__ void __launch_bounds__(THREADS)
swap_squares(transposition t, uint32_t total, td_divisor across, td_divisor down, td_divisor middle)
{
    enum { SIDE = LANES * each };
    __shared__ S square[SIDE][SIDE + 1];
    int lane = threadIdx.x % LANES, line = threadIdx.x / LANES;
    for (uint32_t i = blockIdx.x; i < total; i += gridDim.x) {
        uint32_t rest;
        int64_t column = split(i, across, &rest) * (int64_t)SIDE, row = split(rest, down, &rest) * (int64_t)SIDE;
        uint32_t plane = split(rest, middle, &rest);
        const S *x = (const S *)t.x + (rest * t.rows * t.middle + plane) * t.columns;
        S *y = (S *)t.y + (rest * t.columns * t.middle + plane) * t.rows;
        for (int r = line; r < SIDE; r += LINES) {
            if (row + r >= t.rows || column + lane * each >= t.columns) continue;
            td_group<S, each> read = *(const td_group<S, each> *)(x + (row + r) * t.middle * t.columns + column + lane * each);
            for (int v = 0; v < each; v++) square[r][lane * each + v] = read.at[v];
        }
        __syncthreads();
        for (int c = line; c < SIDE; c += LINES) {
            if (column + c >= t.columns || row + lane * each >= t.rows) continue;
            td_group<S, each> made;
            for (int v = 0; v < each; v++) made.at[v] = square[lane * each + v][c];
            *(td_group<S, each> *)(y + (column + c) * t.middle * t.rows + row + lane * each) = made;
        }
        __syncthreads();
    }
}

/* False: there are too many. */
template <typename S, int each> static bool launch_squares(const td_kernel *k, const transposition *t)
{
    int64_t side = LANES * each, across = (t->columns + side - 1) / side, down = (t->rows + side - 1) / side;
    int64_t total = across * down * t->middle * t->outer;
    if (total > LARGEST_INDEX) return false;
    swap_squares<S, each><<<(unsigned)td_smaller(total, MOST_BLOCKS), THREADS, 0, td_stream(k)>>>(
        *t, (uint32_t)total, td_divisor_of((uint32_t)across), td_divisor_of((uint32_t)down), td_divisor_of((uint32_t)t->middle));
    return true;
}

static bool swap_in_squares(const td_kernel *k, const transposition *t, int64_t bytes)
{
    enum { SMALL = 16 }; /* a square would be mostly empty */
    if (t->inner * bytes != td_dtype_size(k->in[0].dtype) || t->rows < SMALL || t->columns < SMALL) return false;
    bool pairs = !((t->rows | t->columns) % 2 || ((uintptr_t)t->x | (uintptr_t)t->y) % 4);
    switch (bytes) {
    case 8: return launch_squares<uint2, 1>(k, t);
    case 4: return launch_squares<uint32_t, 1>(k, t);
    case 2: return pairs ? launch_squares<uint16_t, 2>(k, t) : launch_squares<uint16_t, 1>(k, t);
    default: return launch_squares<uint8_t, 1>(k, t);
    }
}

static void gather(const td_kernel *k, const transposition *t, int unit)
{
    int64_t total = t->outer * t->rows * t->middle * t->columns * t->inner;
    if (total > LARGEST_INDEX) {
        TD_UNITS(unit, (gather_many_runs<U><<<blocks_for(total), THREADS, 0, td_stream(k)>>>(*t, total)));
        return;
    }
    td_divisor inner = td_divisor_of((uint32_t)t->inner), rows = td_divisor_of((uint32_t)t->rows);
    td_divisor middle = td_divisor_of((uint32_t)t->middle), columns = td_divisor_of((uint32_t)t->columns);
    TD_UNITS(unit, (gather_runs<U><<<blocks_for(total), THREADS, 0, td_stream(k)>>>(*t, (uint32_t)total, inner, rows, middle, columns)));
}

extern "C" void td_transpose_cuda(const td_kernel *k)
{
    const td_transpose_attr *attr = (const td_transpose_attr *)k->attr;
    td_shape in = k->in[0].shape;
    int a = attr->a < attr->b ? attr->a : attr->b, b = attr->a < attr->b ? attr->b : attr->a;
    if (!td_arg_elements(&k->in[0])) return;
    int64_t bytes = td_shape_product(in, b + 1, (int)in.rank) * td_dtype_size(k->in[0].dtype);
    int unit = td_unit_of((uint64_t)bytes | (uintptr_t)k->in[0].data | (uintptr_t)k->out[0].data);
    transposition t = { k->in[0].data, k->out[0].data, td_shape_product(in, 0, a), in.dim[a], td_shape_product(in, a + 1, b), in.dim[b],
                        bytes / unit };
    if (!swap_in_squares(k, &t, unit)) gather(k, &t, unit);
    td_cuda_launched(k);
}

/* ---- slice and concat: rows of `bytes` at distances of from_step and to_step bytes ---------------------------- */

typedef struct row_copies {
    const char *from;
    char *to;
    int64_t rows, from_step, to_step, bytes;
} row_copies;

/* All sizes in units; `total` is below 2^31. */
template <typename U> static __global__ void __launch_bounds__(THREADS)
copy_rows(const U *from, U *to, int64_t from_step, int64_t to_step, uint32_t total, td_divisor row_units)
{
    for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < total; i += gridDim.x * THREADS) {
        uint32_t row, at = split(i, row_units, &row);
        to[row * to_step + at] = from[row * from_step + at];
    }
}

template <typename U> static __global__ void __launch_bounds__(THREADS)
copy_many_rows(const U *from, U *to, int64_t from_step, int64_t to_step, int64_t total, int64_t row_units)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < total; i += gridDim.x * (int64_t)THREADS) {
        int64_t row = i / row_units, at = i - row * row_units;
        to[row * to_step + at] = from[row * from_step + at];
    }
}

static void copy(const td_kernel *k, const row_copies *r)
{
    if (!r->rows || !r->bytes) return;
    uint64_t steps = r->rows > 1 ? (uint64_t)(r->from_step | r->to_step) : 0;
    int unit = td_unit_of((uint64_t)r->bytes | steps | (uintptr_t)r->from | (uintptr_t)r->to);
    int64_t row_units = r->bytes / unit, total = r->rows * row_units, from_step = r->from_step / unit, to_step = r->to_step / unit;
    if (total > LARGEST_INDEX) {
        TD_UNITS(unit, (copy_many_rows<U><<<blocks_for(total), THREADS, 0, td_stream(k)>>>(
                           (const U *)r->from, (U *)r->to, from_step, to_step, total, row_units)));
    } else {
        td_divisor by = td_divisor_of((uint32_t)row_units);
        TD_UNITS(unit, (copy_rows<U><<<blocks_for(total), THREADS, 0, td_stream(k)>>>(
                           (const U *)r->from, (U *)r->to, from_step, to_step, (uint32_t)total, by)));
    }
    td_cuda_launched(k);
}

extern "C" void td_slice_cuda(const td_kernel *k)
{
    const td_slice_attr *attr = (const td_slice_attr *)k->attr;
    td_shape in = k->in[0].shape;
    int axis = (int)attr->axis;
    int64_t step = td_shape_product(in, axis + 1, (int)in.rank) * td_dtype_size(k->in[0].dtype), bytes = (attr->end - attr->begin) * step;
    row_copies r = { (const char *)k->in[0].data + attr->begin * step, (char *)k->out[0].data, td_shape_product(in, 0, axis),
                     in.dim[axis] * step, bytes, bytes };
    copy(k, &r);
}

extern "C" void td_concat_cuda(const td_kernel *k)
{
    int axis = (int)((const td_concat_attr *)k->attr)->axis;
    td_shape out = k->out[0].shape;
    int64_t step = td_shape_product(out, axis + 1, (int)out.rank) * td_dtype_size(k->out[0].dtype), begin = 0;
    for (int i = 0; i < k->inputs; i++) {
        int64_t bytes = k->in[i].shape.dim[axis] * step;
        row_copies r = { (const char *)k->in[i].data, (char *)k->out[0].data + begin, td_shape_product(out, 0, axis), bytes,
                         out.dim[axis] * step, bytes };
        copy(k, &r);
        begin += bytes;
    }
}
