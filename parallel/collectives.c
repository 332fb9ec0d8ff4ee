/* Collectives and their communication-free relatives as operations of a program.
 *
 *     all_reduce       partial    -> replicated
 *     reduce_scatter   partial    -> sharded along dimension 0
 *     all_gather       sharded    -> replicated
 *     own_part         replicated -> sharded: this rank's part of what it has
 *     count_once       replicated -> partial: the value on the axis' first rank, zeros on the others
 *
 * Each works on one mesh axis. Failures of the transport are in the context when it returns.
 */
#include "parallel/strategy.h"

#include <stdio.h>
#include <string.h>

static const par_collective_attr *attr_of(const td_kernel *k) { return k->attr; }
static int64_t elements(const td_arg *a) { return td_shape_elements(a->shape); }
static size_t bytes_of(const td_arg *a) { return (size_t)(elements(a) * td_dtype_size(a->dtype)); }

static void print_axis(const td_program *p, const td_node *n, char *to, size_t room)
{
    const par_collective_attr *a = td_node_attr(p, n);
    const td_mesh *mesh = td_context_mesh(p->td);
    snprintf(to, room, "%s of %d", mesh->name[a->axis], mesh->size[a->axis]);
}

static int ranks_of(const td_kernel *k) { return k->run->mesh->size[attr_of(k)->axis]; }

/* ---- all_reduce */

static void all_reduce_cpu(const td_kernel *k)
{
    const td_transport *t = k->run->transport;
    if (k->out[0].data != k->in[0].data) memcpy(k->out[0].data, k->in[0].data, bytes_of(&k->in[0]));
    t->all_reduce(t->self, attr_of(k)->axis, k->out[0].data, elements(&k->out[0]), k->out[0].dtype);
}

static td_cost all_reduce_cost(const td_kernel *k)
{
    return (td_cost){ .flops = elements(&k->in[0]), .bytes = 2 * (int64_t)bytes_of(&k->in[0]),
                      .sent = par_bytes_sent(PAR_ALL_REDUCE, ranks_of(k), elements(&k->in[0]), k->in[0].dtype) };
}

const td_op par_op_all_reduce = {
    .name = "all_reduce", .inputs = 1, .flags = TD_OP_COLLECTIVE | TD_OP_INPLACE, .attr_bytes = sizeof(par_collective_attr),
    .cpu = all_reduce_cpu, .cost = all_reduce_cost, .print = print_axis,
};

/* ---- reduce_scatter */

static void reduce_scatter_cpu(const td_kernel *k)
{
    const td_transport *t = k->run->transport;
    t->reduce_scatter(t->self, attr_of(k)->axis, k->in[0].data, k->out[0].data, elements(&k->out[0]), k->out[0].dtype);
}

static td_cost reduce_scatter_cost(const td_kernel *k)
{
    return (td_cost){ .flops = elements(&k->in[0]), .bytes = (int64_t)(bytes_of(&k->in[0]) + bytes_of(&k->out[0])),
                      .sent = par_bytes_sent(PAR_REDUCE_SCATTER, ranks_of(k), elements(&k->out[0]), k->out[0].dtype) };
}

const td_op par_op_reduce_scatter = {
    .name = "reduce_scatter", .inputs = 1, .flags = TD_OP_COLLECTIVE, .attr_bytes = sizeof(par_collective_attr),
    .cpu = reduce_scatter_cpu, .cost = reduce_scatter_cost, .print = print_axis,
};

/* ---- all_gather */

static void all_gather_cpu(const td_kernel *k)
{
    const td_transport *t = k->run->transport;
    t->all_gather(t->self, attr_of(k)->axis, k->in[0].data, k->out[0].data, elements(&k->in[0]), k->in[0].dtype);
}

static td_cost all_gather_cost(const td_kernel *k)
{
    return (td_cost){ .bytes = (int64_t)(bytes_of(&k->in[0]) + bytes_of(&k->out[0])),
                      .sent = par_bytes_sent(PAR_ALL_GATHER, ranks_of(k), elements(&k->in[0]), k->in[0].dtype) };
}

const td_op par_op_all_gather = {
    .name = "all_gather", .inputs = 1, .flags = TD_OP_COLLECTIVE, .attr_bytes = sizeof(par_collective_attr),
    .cpu = all_gather_cpu, .cost = all_gather_cost, .print = print_axis,
};

/* ---- own_part: along any dimension; what lies before it repeats */

static void own_part_cpu(const td_kernel *k)
{
    const par_collective_attr *a = attr_of(k);
    const td_arg *in = &k->in[0], *out = &k->out[0];
    int64_t outer = 1, inner = td_dtype_size(in->dtype);
    for (int d = 0; d < a->dim; d++) outer *= in->shape.dim[d];
    for (int d = a->dim + 1; d < in->shape.rank; d++) inner *= in->shape.dim[d];
    int64_t from = in->shape.dim[a->dim] * inner, part = out->shape.dim[a->dim] * inner;
    int64_t at = k->run->mesh->at[a->axis] * part;
    for (int64_t o = 0; o < outer; o++) memcpy((char *)out->data + o * part, (const char *)in->data + o * from + at, (size_t)part);
}

const td_op par_op_own_part = {
    .name = "own_part", .inputs = 1, .attr_bytes = sizeof(par_collective_attr), .cpu = own_part_cpu, .print = print_axis,
};

/* ---- count_once */

static void count_once_cpu(const td_kernel *k)
{
    if (k->run->mesh->at[attr_of(k)->axis])
        memset(k->out[0].data, 0, bytes_of(&k->out[0]));
    else if (k->out[0].data != k->in[0].data)
        memcpy(k->out[0].data, k->in[0].data, bytes_of(&k->in[0]));
}

const td_op par_op_count_once = {
    .name = "count_once", .inputs = 1, .flags = TD_OP_INPLACE, .attr_bytes = sizeof(par_collective_attr), .cpu = count_once_cpu,
    .print = print_axis,
};
