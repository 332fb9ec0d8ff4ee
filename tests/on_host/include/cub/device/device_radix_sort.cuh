/* CUB's sort as Tandem calls it: by the bits given, equal keys in their order. What it is lent is written over, as there. */
#ifndef TANDEM_TESTS_CUB_RADIX_SORT_H
#define TANDEM_TESTS_CUB_RADIX_SORT_H

#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

namespace cub {

/* A function to be called with the stream's other work; `room_bytes` at `room` are the caller's no more. */
template <typename Call> static cudaError_t on_host_call(void *room, size_t room_bytes, cudaStream_t stream, Call call)
{
    struct work {
        on_host_work base;
        void *room;
        size_t room_bytes;
        Call call;
        static cudaError_t run(on_host_work *self)
        {
            memset(((work *)self)->room, 0xFF, ((work *)self)->room_bytes);
            ((work *)self)->call();
            return cudaSuccess;
        }
        static void drop(on_host_work *self) { delete (work *)self; }
    };
    on_host_put(stream, &(new work{ { work::run, work::drop }, room, room_bytes, call })->base);
    return cudaSuccess;
}

struct DeviceRadixSort {
    template <typename Key, typename Value, typename Count>
    static cudaError_t SortPairs(void *room, size_t &bytes, const Key *keys, Key *sorted_keys, const Value *values, Value *sorted_values,
                                 Count count, int begin_bit, int end_bit, cudaStream_t stream = nullptr)
    {
        size_t needed = (size_t)count * (sizeof(Key) + sizeof(Value)) + 768;
        if (room && bytes < needed) return cudaErrorInvalidValue;
        bytes = needed;
        if (!room) return cudaSuccess;
        return on_host_call(room, needed, stream, [=] {
            std::vector<Count> order((size_t)count);
            Key mask = (end_bit < (int)sizeof(Key) * 8 ? (Key)1 << end_bit : (Key)0) - 1;
            for (Count i = 0; i < count; i++) order[(size_t)i] = i;
            std::stable_sort(order.begin(), order.end(), [=](Count a, Count b) { return (keys[a] & mask) >> begin_bit < (keys[b] & mask) >> begin_bit; });
            for (Count i = 0; i < count; i++) {
                sorted_keys[i] = keys[order[(size_t)i]];
                sorted_values[i] = values[order[(size_t)i]];
            }
        });
    }
};

}

#endif
