/* pack on CUDA: members side by side in a flat value, zeros between; see state.c. Members that the planner put in place already are left
 * alone. What is left is a list of pieces, which a launch takes many of at once. */
#include "core/device_cuda.h"
#include "core/ops/group.cuh"

enum { THREADS = 256, PIECES = 96, BLOCK_BYTES = 32 << 10 };

typedef struct piece {
    char *to;
    const char *from;                         /* NULL: zeros */
    int64_t bytes;
    int64_t first;                            /* the number of its first block */
} piece;

typedef struct pieces {
    piece at[PIECES];
    int count;
} pieces;

static __global__ void __launch_bounds__(THREADS) pack_kernel(const __grid_constant__ pieces list)
{
    int n = 0;
    while (n + 1 < list.count && blockIdx.x >= list.at[n + 1].first) n++;
    int64_t begin = (blockIdx.x - list.at[n].first) * BLOCK_BYTES, count = list.at[n].bytes - begin;
    if (count > BLOCK_BYTES) count = BLOCK_BYTES;
    char *to = list.at[n].to + begin;
    if (!list.at[n].from)
        td_group_visit<THREADS>(to, count, [&](int64_t at, auto pack) {
            memset(&pack, 0, sizeof pack); /* what was there is not even loaded */
            *(decltype(pack) *)(to + at) = pack;
        });
    else if (((uintptr_t)to - (uintptr_t)list.at[n].from) % 16 == 0)
        td_group_visit<THREADS>(list.at[n].from + begin, count, [&](int64_t at, auto pack) { *(decltype(pack) *)(to + at) = pack; });
    else
        for (int64_t i = threadIdx.x; i < count; i += THREADS) to[i] = list.at[n].from[begin + i];
}

typedef struct packing {
    const td_kernel *k;
    pieces list;
    int64_t blocks;
} packing;

static void launch(packing *p)
{
    if (p->list.count) pack_kernel<<<(unsigned)p->blocks, THREADS, 0, td_stream(p->k)>>>(p->list);
    td_cuda_launched(p->k);
    p->list.count = 0;
    p->blocks = 0;
}

static void add(packing *p, char *to, const void *from, int64_t bytes)
{
    if (bytes == 0 || to == from) return;
    if (p->list.count == PIECES) launch(p);
    piece *next = &p->list.at[p->list.count++];
    next->to = to;
    next->from = (const char *)from;
    next->bytes = bytes;
    next->first = p->blocks;
    p->blocks += (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
}

extern "C" void td_pack_cuda(const td_kernel *k)
{
    const td_pack_attr *a = (const td_pack_attr *)k->attr;
    const int64_t *offset = (const int64_t *)(a + 1);
    int64_t item = td_dtype_size(k->out[0].dtype), end = 0;
    char *out = (char *)k->out[0].data;
    packing p;
    p.k = k;
    p.list.count = 0;
    p.blocks = 0;
    for (int i = 0; i < k->inputs; i++) {
        int64_t at = offset[i] * item;
        add(&p, out + end, NULL, at - end);
        add(&p, out + at, k->in[i].data, td_arg_bytes(&k->in[i]));
        end = at + td_arg_bytes(&k->in[i]);
    }
    add(&p, out + end, NULL, td_arg_bytes(&k->out[0]) - a->unread * item - end);
    launch(&p);
}
