/* CUB's sums up to each element, as Tandem calls them. */
#ifndef TANDEM_TESTS_CUB_SCAN_H
#define TANDEM_TESTS_CUB_SCAN_H

#include <cub/device/device_radix_sort.cuh>

namespace cub {

struct DeviceScan {
    template <typename T, typename Count>
    static cudaError_t InclusiveSum(void *room, size_t &bytes, const T *from, T *to, Count count, cudaStream_t stream = nullptr)
    {
        size_t needed = 1024;
        if (room && bytes < needed) return cudaErrorInvalidValue;
        bytes = needed;
        if (!room) return cudaSuccess;
        return on_host_call(room, needed, stream, [=] {
            T sum = 0;
            for (Count i = 0; i < count; i++) to[i] = sum += from[i];
        });
    }
};

}

#endif
