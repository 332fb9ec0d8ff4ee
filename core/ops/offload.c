/* Copies between the memory of the device and that of its host, which is pinned. On a CPU both are ordinary memory and a copy is made all the
 * same.
 *
 *     to_host, to_device   the value, in the other memory
 */
#include "core/ops/op.h"

typedef struct copying {
    char *to;
    const char *from;
} copying;

static void copy_range(void *user, int64_t begin, int64_t end)
{
    const copying *c = user;
    memcpy(c->to + begin, c->from + begin, (size_t)(end - begin));
}

static void copy_cpu(const td_kernel *k)
{
    copying c = { k->out[0].data, k->in[0].data };
    td_parallel_for(k->run, td_arg_bytes(&k->in[0]), 1 << 20, copy_range, &c);
}

static td_cost copy_cost(const td_kernel *k)
{
    int64_t bytes = td_arg_bytes(&k->in[0]);
    return (td_cost){ .bytes = 2 * bytes, .copied = bytes };
}

TD_CUDA_KERNEL(td_transfer_cuda);
const td_op td_op_to_host = { .name = "to_host", .inputs = 1, .flags = TD_OP_COPY, .cpu = copy_cpu, .cuda = TD_CUDA(td_transfer_cuda), .cost = copy_cost };
const td_op td_op_to_device = { .name = "to_device", .inputs = 1, .flags = TD_OP_COPY, .cpu = copy_cpu, .cuda = TD_CUDA(td_transfer_cuda), .cost = copy_cost };
