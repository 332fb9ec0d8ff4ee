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
 * workspace. Failures of the transport are in the context when it returns.
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
static size_t bytes_of(const td_arg *a) { return (size_t)(elements(a) * td_dtype_size(a->dtype)); }

static void print_axis(const td_program *p, const td_node *n, char *to, size_t room)
{
    const par_collective_attr *a = td_node_attr(p, n);
    const td_mesh *mesh = td_context_mesh(p->td);
    size_t at = 0;
    for (int i = a->axis; i <= a->last && at < room; i++)
        at += (size_t)snprintf(to + at, room - at, "%s%s of %d", i > a->axis ? ", " : "", mesh->name[i], mesh->size[i]);
}


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

/* Copies part `rank` of `whole` to `part` (or back). */
static void copy_part(const parts *p, int rank, char *whole, char *part, bool back)
{
    for (int64_t o = 0; o < p->outer; o++) {
        char *w = whole + o * p->whole + rank * p->part, *q = part + o * p->part;
        memcpy(back ? w : q, back ? q : w, (size_t)p->part);
    }
}

static bool prepare_parts(td_context *td, const td_kernel *k, td_preparation *out)
{
    (void)td;
    const td_arg *whole = elements(&k->in[0]) > elements(&k->out[0]) ? &k->in[0] : &k->out[0];
    if (parts_of(k, whole).outer > 1) out->workspace_bytes = (int64_t)bytes_of(whole);
    return true;
}

/* ---- all_reduce */

static void all_reduce_cpu(const td_kernel *k)
{
    const td_transport *t = k->run->transport;
    if (k->out[0].data != k->in[0].data) memcpy(k->out[0].data, k->in[0].data, bytes_of(&k->in[0]));
    t->all_reduce(t->self, axes_of(k), k->out[0].data, elements(&k->out[0]), k->out[0].dtype);
}

static td_cost all_reduce_cost(const td_kernel *k)
{
    return (td_cost){ .flops = elements(&k->in[0]), .bytes = 2 * (int64_t)bytes_of(&k->in[0]),
                      .sent = par_bytes_sent(PAR_ALL_REDUCE, ranks_of(k), elements(&k->in[0]), k->in[0].dtype) };
}

const td_op par_op_all_reduce = {
    .name = "all_reduce", .inputs = 1, .flags = TD_OP_COLLECTIVE | TD_OP_OF_RANKS | TD_OP_INPLACE, .attr_bytes = sizeof(par_collective_attr),
    .cpu = all_reduce_cpu, .cost = all_reduce_cost, .print = print_axis,
};

/* ---- reduce_scatter */

static void reduce_scatter_cpu(const td_kernel *k)
{
    const td_transport *t = k->run->transport;
    char *from = k->in[0].data;
    parts p = parts_of(k, &k->in[0]);
    if (p.outer > 1 && elements(&k->in[0])) {
        for (int r = 0; r < ranks_of(k); r++) copy_part(&p, r, k->in[0].data, (char *)k->workspace + r * p.outer * p.part, false);
        from = k->workspace;
    }
    t->reduce_scatter(t->self, axes_of(k), from, k->out[0].data, elements(&k->out[0]), k->out[0].dtype);
}

static td_cost reduce_scatter_cost(const td_kernel *k)
{
    return (td_cost){ .flops = elements(&k->in[0]), .bytes = (int64_t)(bytes_of(&k->in[0]) + bytes_of(&k->out[0])),
                      .sent = par_bytes_sent(PAR_REDUCE_SCATTER, ranks_of(k), elements(&k->out[0]), k->out[0].dtype) };
}

const td_op par_op_reduce_scatter = {
    .name = "reduce_scatter", .inputs = 1, .flags = TD_OP_COLLECTIVE | TD_OP_OF_RANKS, .attr_bytes = sizeof(par_collective_attr),
    .prepare = prepare_parts, .cpu = reduce_scatter_cpu, .cost = reduce_scatter_cost, .print = print_axis,
};

/* ---- all_gather */

static void all_gather_cpu(const td_kernel *k)
{
    const td_transport *t = k->run->transport;
    parts p = parts_of(k, &k->out[0]);
    bool apart = p.outer > 1 && elements(&k->in[0]);
    char *to = apart ? k->workspace : k->out[0].data;
    if (!t->all_gather(t->self, axes_of(k), k->in[0].data, to, elements(&k->in[0]), k->in[0].dtype) || !apart) return;
    for (int r = 0; r < ranks_of(k); r++) copy_part(&p, r, k->out[0].data, to + r * p.outer * p.part, true);
}

static td_cost all_gather_cost(const td_kernel *k)
{
    return (td_cost){ .bytes = (int64_t)(bytes_of(&k->in[0]) + bytes_of(&k->out[0])),
                      .sent = par_bytes_sent(PAR_ALL_GATHER, ranks_of(k), elements(&k->in[0]), k->in[0].dtype) };
}

const td_op par_op_all_gather = {
    .name = "all_gather", .inputs = 1, .flags = TD_OP_COLLECTIVE | TD_OP_OF_RANKS, .attr_bytes = sizeof(par_collective_attr),
    .prepare = prepare_parts, .cpu = all_gather_cpu, .cost = all_gather_cost, .print = print_axis,
};

/* ---- own_part */

static void own_part_cpu(const td_kernel *k)
{
    parts p = parts_of(k, &k->in[0]);
    copy_part(&p, k->run->mesh->at[attr_of(k)->axis], k->in[0].data, k->out[0].data, false);
}

const td_op par_op_own_part = {
    .name = "own_part", .inputs = 1, .flags = TD_OP_OF_RANKS, .attr_bytes = sizeof(par_collective_attr), .cpu = own_part_cpu,
    .print = print_axis,
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
    .name = "count_once", .inputs = 1, .flags = TD_OP_OF_RANKS | TD_OP_INPLACE, .attr_bytes = sizeof(par_collective_attr),
    .cpu = count_once_cpu, .print = print_axis,
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

static void own_members_cpu(const td_kernel *k)
{
    const par_member_range *r = k->attr;
    int64_t item = td_dtype_size(k->out[0].dtype);
    memset(k->out[0].data, 0, bytes_of(&k->out[0]));
    for (const par_member_range *end = r + k->attr_bytes / sizeof *r; r < end; r++) {
        const td_arg *in = &k->in[r->input];
        int64_t first = begin_of(k->run->mesh, in), last = first + elements(in);
        int64_t from = r->from > first ? r->from : first, to = r->from + r->elements < last ? r->from + r->elements : last;
        if (to <= from) continue;
        char *at = (char *)k->out[0].data + (r->to + from - r->from) * item;
        memcpy(at, (const char *)in->data + (from - first) * item, (size_t)((to - from) * item));
    }
}

static td_cost own_members_cost(const td_kernel *k) { return (td_cost){ .bytes = 2 * (int64_t)bytes_of(&k->out[0]) }; }

const td_op par_op_own_members = {
    .name = "own_members", .inputs = -1, .flags = TD_OP_OF_RANKS, .cpu = own_members_cpu, .cost = own_members_cost,
};
