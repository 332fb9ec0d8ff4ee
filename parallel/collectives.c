/* Collectives and their communication-free relatives as operations of a program.
 *
 *     all_reduce       partial    -> replicated
 *     reduce_scatter   partial    -> sharded
 *     all_gather       sharded    -> replicated
 *     own_part         replicated -> sharded: this rank's part of what it has
 *     count_once       replicated -> partial: the value on the axis' first rank, zeros on the others
 *     own_members      sharded    -> partial: some ranges of flat values, side by side; what this rank has of them, zeros elsewhere
 *
 * Each but the last works on one mesh axis, the first three also on several that follow one another. A part along a dimension that
 * nothing stands before, the first say, is consecutive memory; along another the parts are put together, or taken apart, in the
 * workspace. Failures of the transport are in the context when it returns, or, of one whose calls go to a queue, when that comes to them.
 */
#include "parallel/strategy.h"

#include <stdio.h>
#include <string.h>

static const par_collective_attr *attr_of(const td_kernel *k) { return k->attr; }
static int axes_of(const td_kernel *k) { return td_axes(attr_of(k)->axis, attr_of(k)->last); }

static int ranks_of(const td_kernel *k)
{
    int ranks = 1;
    for (int a = attr_of(k)->axis; a <= attr_of(k)->last; a++) ranks *= k->run->mesh->size[a];
    return ranks;
}

static int64_t elements(const td_arg *a) { return td_shape_elements(a->shape); }
static int64_t bytes_of(const td_arg *a) { return elements(a) * td_dtype_size(a->dtype); }

static void print_axis(const td_program *p, const td_node *n, char *to, size_t room)
{
    const par_collective_attr *a = td_node_attr(p, n);
    const td_mesh *mesh = td_context_mesh(p->td);
    size_t at = 0;
    for (int i = a->axis; i <= a->last && at < room; i++)
        at += (size_t)snprintf(to + at, room - at, "%s%s of %d", i > a->axis ? ", " : "", mesh->name[i], mesh->size[i]);
}

/* ---- Copying on the CPU */

static void copy_host(const td_kernel *k, const par_copy *c)
{
    (void)k;
    for (int64_t r = 0; r < c->rows; r++) memcpy(c->to + r * c->to_step, c->from + r * c->from_step, (size_t)c->bytes);
}

static void clear_host(const td_kernel *k, void *memory, int64_t bytes)
{
    (void)k;
    memset(memory, 0, (size_t)bytes);
}

static const par_copier host = { copy_host, clear_host };

/* The operand, as it is. */
static void copy_whole(const td_kernel *k, const par_copier *by, const td_arg *to, const td_arg *from)
{
    if (to->data != from->data && bytes_of(from))
        by->copy(k, &(par_copy){ .to = to->data, .from = from->data, .rows = 1, .bytes = bytes_of(from) });
}

/* Kernels on a GPU: those of collectives.cu. */
TD_CUDA_KERNEL(par_all_reduce_cuda);
TD_CUDA_KERNEL(par_reduce_scatter_cuda);
TD_CUDA_KERNEL(par_all_gather_cuda);
TD_CUDA_KERNEL(par_own_part_cuda);
TD_CUDA_KERNEL(par_count_once_cuda);
TD_CUDA_KERNEL(par_own_members_cuda);

/* ---- Parts along a dimension other than the first */

typedef struct parts {
    int64_t outer, whole, part;               /* runs of the dimension, their bytes in the whole and in a part */
} parts;

static parts parts_of(const td_kernel *k, const td_arg *whole)
{
    int dim = attr_of(k)->dim;
    parts p = { .outer = 1, .whole = td_dtype_size(whole->dtype) };
    for (int d = 0; d < dim; d++) p.outer *= whole->shape.dim[d];
    for (int d = dim; d < whole->shape.rank; d++) p.whole *= whole->shape.dim[d];
    p.part = p.whole / ranks_of(k);
    return p;
}

/* Part `rank` of `whole` to `part`. */
static void take_part(const td_kernel *k, const par_copier *by, const parts *p, int rank, const void *whole, void *part)
{
    const par_copy c = { .to = part, .from = (const char *)whole + rank * p->part, .rows = p->outer, .bytes = p->part, .to_step = p->part,
                         .from_step = p->whole };
    if (p->outer && p->part) by->copy(k, &c);
}

/* And back. */
static void put_part(const td_kernel *k, const par_copier *by, const parts *p, int rank, void *whole, const void *part)
{
    const par_copy c = { .to = (char *)whole + rank * p->part, .from = part, .rows = p->outer, .bytes = p->part, .to_step = p->whole,
                         .from_step = p->part };
    if (p->outer && p->part) by->copy(k, &c);
}

/* Whether parts of `whole` are put together in the workspace. */
static bool is_apart(const td_kernel *k, const td_arg *whole) { return parts_of(k, whole).outer > 1 && elements(whole) > 0; }

static bool prepare_call(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    const td_transport *t = k->run->transport;
    const td_arg *whole = elements(&k->in[0]) > elements(&k->out[0]) ? &k->in[0] : &k->out[0];
    bool in_place = elements(&k->in[0]) == elements(&k->out[0]); /* all_reduce */
    if (!in_place && is_apart(k, whole)) out->workspace_bytes = bytes_of(whole);
    return !t || !t->expect || t->expect(t->self, bytes_of(&k->in[0]), in_place ? 0 : bytes_of(&k->out[0]));
}

/* ---- all_reduce */

void par_run_all_reduce(const td_kernel *k, const par_copier *by)
{
    const td_transport *t = k->run->transport;
    copy_whole(k, by, &k->out[0], &k->in[0]);
    t->all_reduce(t->self, axes_of(k), k->out[0].data, elements(&k->out[0]), k->out[0].dtype);
}

static void all_reduce_cpu(const td_kernel *k) { par_run_all_reduce(k, &host); }

static td_cost all_reduce_cost(const td_kernel *k)
{
    return (td_cost){ .flops = elements(&k->in[0]), .bytes = 2 * bytes_of(&k->in[0]),
                      .sent = par_bytes_sent(PAR_ALL_REDUCE, ranks_of(k), elements(&k->in[0]), k->in[0].dtype) };
}

const td_op par_op_all_reduce = {
    .name = "all_reduce", .inputs = 1, .flags = TD_OP_COLLECTIVE | TD_OP_INPLACE, .attr_bytes = sizeof(par_collective_attr),
    .prepare = prepare_call, .cpu = all_reduce_cpu, .cuda = TD_CUDA(par_all_reduce_cuda, prepare_call), .cost = all_reduce_cost,
    .print = print_axis,
};

/* ---- reduce_scatter */

void par_run_reduce_scatter(const td_kernel *k, const par_copier *by)
{
    const td_transport *t = k->run->transport;
    const void *from = k->in[0].data;
    parts p = parts_of(k, &k->in[0]);
    if (is_apart(k, &k->in[0])) {
        for (int r = 0; r < ranks_of(k); r++) take_part(k, by, &p, r, k->in[0].data, (char *)k->workspace + r * p.outer * p.part);
        from = k->workspace;
    }
    t->reduce_scatter(t->self, axes_of(k), from, k->out[0].data, elements(&k->out[0]), k->out[0].dtype);
}

static void reduce_scatter_cpu(const td_kernel *k) { par_run_reduce_scatter(k, &host); }

static td_cost reduce_scatter_cost(const td_kernel *k)
{
    return (td_cost){ .flops = elements(&k->in[0]), .bytes = bytes_of(&k->in[0]) + bytes_of(&k->out[0]),
                      .sent = par_bytes_sent(PAR_REDUCE_SCATTER, ranks_of(k), elements(&k->out[0]), k->out[0].dtype) };
}

const td_op par_op_reduce_scatter = {
    .name = "reduce_scatter", .inputs = 1, .flags = TD_OP_COLLECTIVE, .attr_bytes = sizeof(par_collective_attr),
    .prepare = prepare_call, .cpu = reduce_scatter_cpu, .cuda = TD_CUDA(par_reduce_scatter_cuda, prepare_call), .cost = reduce_scatter_cost,
    .print = print_axis,
};

/* ---- all_gather */

void par_run_all_gather(const td_kernel *k, const par_copier *by)
{
    const td_transport *t = k->run->transport;
    parts p = parts_of(k, &k->out[0]);
    bool apart = is_apart(k, &k->out[0]);
    char *to = apart ? k->workspace : k->out[0].data;
    if (!t->all_gather(t->self, axes_of(k), k->in[0].data, to, elements(&k->in[0]), k->in[0].dtype) || !apart) return;
    for (int r = 0; r < ranks_of(k); r++) put_part(k, by, &p, r, k->out[0].data, to + r * p.outer * p.part);
}

static void all_gather_cpu(const td_kernel *k) { par_run_all_gather(k, &host); }

static td_cost all_gather_cost(const td_kernel *k)
{
    return (td_cost){ .bytes = bytes_of(&k->in[0]) + bytes_of(&k->out[0]),
                      .sent = par_bytes_sent(PAR_ALL_GATHER, ranks_of(k), elements(&k->in[0]), k->in[0].dtype) };
}

const td_op par_op_all_gather = {
    .name = "all_gather", .inputs = 1, .flags = TD_OP_COLLECTIVE, .attr_bytes = sizeof(par_collective_attr),
    .prepare = prepare_call, .cpu = all_gather_cpu, .cuda = TD_CUDA(par_all_gather_cuda, prepare_call), .cost = all_gather_cost,
    .print = print_axis,
};

/* ---- own_part */

void par_run_own_part(const td_kernel *k, const par_copier *by)
{
    parts p = parts_of(k, &k->in[0]);
    take_part(k, by, &p, k->run->mesh->at[attr_of(k)->axis], k->in[0].data, k->out[0].data);
}

static void own_part_cpu(const td_kernel *k) { par_run_own_part(k, &host); }

const td_op par_op_own_part = {
    .name = "own_part", .inputs = 1, .attr_bytes = sizeof(par_collective_attr), .cpu = own_part_cpu,
    .cuda = TD_CUDA(par_own_part_cuda), .print = print_axis,
};

/* ---- count_once */

void par_run_count_once(const td_kernel *k, const par_copier *by)
{
    bool counts = k->run->mesh->at[attr_of(k)->axis] == 0;
    if (counts) copy_whole(k, by, &k->out[0], &k->in[0]);
    else if (bytes_of(&k->out[0])) by->clear(k, k->out[0].data, bytes_of(&k->out[0]));
}

static void count_once_cpu(const td_kernel *k) { par_run_count_once(k, &host); }

const td_op par_op_count_once = {
    .name = "count_once", .inputs = 1, .flags = TD_OP_INPLACE, .attr_bytes = sizeof(par_collective_attr),
    .cpu = count_once_cpu, .cuda = TD_CUDA(par_count_once_cuda), .print = print_axis,
};

/* ---- own_members */

/* Where this rank's part of a flat value begins. */
static int64_t begin_of(const td_mesh *mesh, const td_arg *a)
{
    int64_t begin = 0, length = a->global.dim[0];
    for (int axis = 0; axis < mesh->axes; axis++) {
        if (a->place.kind[axis] != TD_SHARDED) continue;
        length /= mesh->size[axis];
        begin += mesh->at[axis] * length;
    }
    return begin;
}

void par_run_own_members(const td_kernel *k, const par_copier *by)
{
    const par_member_range *r = k->attr;
    int64_t item = td_dtype_size(k->out[0].dtype);
    if (bytes_of(&k->out[0])) by->clear(k, k->out[0].data, bytes_of(&k->out[0]));
    for (const par_member_range *end = r + k->attr_bytes / sizeof *r; r < end; r++) {
        const td_arg *in = &k->in[r->input];
        int64_t first = begin_of(k->run->mesh, in), last = first + elements(in);
        int64_t from = r->from > first ? r->from : first, to = r->from + r->elements < last ? r->from + r->elements : last;
        if (to <= from) continue;
        const par_copy c = { .to = (char *)k->out[0].data + (r->to + from - r->from) * item,
                             .from = (const char *)in->data + (from - first) * item, .rows = 1, .bytes = (to - from) * item };
        by->copy(k, &c);
    }
}

static void own_members_cpu(const td_kernel *k) { par_run_own_members(k, &host); }

static td_cost own_members_cost(const td_kernel *k) { return (td_cost){ .bytes = 2 * bytes_of(&k->out[0]) }; }

const td_op par_op_own_members = {
    .name = "own_members", .inputs = -1, .cpu = own_members_cpu, .cuda = TD_CUDA(par_own_members_cuda),
    .cost = own_members_cost,
};
