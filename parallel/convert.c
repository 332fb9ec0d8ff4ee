/* par_convert: the only place where communication, and copies between device and host, enter a program.
 *
 *     from \ to      replicated     sharded          partial
 *     replicated     -              own_part         count_once
 *     sharded        all_gather     via replicated   via replicated
 *     partial        all_reduce     reduce_scatter   -
 *
 * On a mesh of several axes: first what a rank then has less of, last what it then has more of, so that the least is sent. A
 * gradient that is partial on both axes of hsdp is scattered in the group, and each part summed across the groups. Axes that follow one
 * another and need the same are one call: a loss is summed over both at once.
 *
 * What is sent is sent from the device's memory to the device's. A value in host memory is copied to the device before, one that is
 * wanted there after: that is where a rank has least of it.
 */
#include "parallel/strategy.h"

/* Over axes `axis` to `last`. */
static td_id emit_over(td_program *p, const td_op *op, td_id in, int axis, int last, int dim, td_place_kind kind, const td_node *reader)
{
    td_value value = p->values[in];
    for (int a = axis; a <= last; a++) {
        value.place.kind[a] = (int8_t)kind;
        value.place.dim[a] = (int8_t)(kind == TD_SHARDED ? dim : 0);
    }
    par_collective_attr attr = { .axis = axis, .last = last, .dim = dim };
    return td_emit(p, &(td_emission){ .op = op, .like = reader, .inputs = &in, .input_count = 1, .attr = &attr, .attr_bytes = sizeof attr,
                                      .outputs = &value, .output_count = 1, .after = TD_NONE });
}

static td_id emit(td_program *p, const td_op *op, td_id in, int axis, int dim, td_place_kind kind, const td_node *reader)
{
    return emit_over(p, op, in, axis, axis, dim, kind, reader);
}

static td_id move(td_program *p, td_id id, int8_t memory, const td_node *reader)
{
    td_value value = p->values[id];
    value.place.memory = memory;
    return td_emit(p, &(td_emission){ .op = memory == TD_HOST ? &td_op_to_host : &td_op_to_device, .like = reader, .inputs = &id, .input_count = 1,
                                      .outputs = &value, .output_count = 1, .after = TD_NONE });
}

static td_id refuse(td_program *p, td_id id, const char *what, const td_node *reader)
{
    const td_node *maker = td_producer(p, id);
    td_fail(p->td, TD_ERROR_UNSUPPORTED, "place: %s of a value made by %s and read by %s is not available (%s:%d)", what, maker->op->name,
            reader->op->name, reader->file ? reader->file : "?", reader->line);
    return TD_NONE;
}

/* Whether the ranks of all axes that are to share `dim` divide it. */
static bool divides(const td_program *p, td_id id, td_placement place, int dim)
{
    const td_mesh *mesh = td_context_mesh(p->td);
    int64_t parts = 1;
    for (int a = 0; a < mesh->axes; a++)
        if (place.kind[a] == TD_SHARDED && place.dim[a] == dim) parts *= mesh->size[a];
    return p->values[id].shape.dim[dim] % parts == 0;
}

static bool same_on(td_placement x, td_placement y, int a)
{
    return x.kind[a] == y.kind[a] && (x.kind[a] != TD_SHARDED || x.dim[a] == y.dim[a]);
}

static bool shares(const td_placement *p, int a, int dim) { return p->kind[a] == TD_SHARDED && p->dim[a] == dim; }

/* The first of the axes up to a that are parts of the same dimension and shall be whole. */
static int gathered_from(td_placement have, td_placement to, int a)
{
    int first = a;
    while (first > 0 && shares(&have, first - 1, have.dim[a]) && to.kind[first - 1] == TD_REPLICATED) first--;
    return first;
}

/* Whether parts along the axis must be put together before anything else is done: to be parts of something else, or because, where
 * two axes share a dimension, the later one's parts are parts of the earlier one's, which cannot change under them. */
static bool gathers_first(const td_mesh *mesh, td_placement have, td_placement to, int axis)
{
    if (have.kind[axis] != TD_SHARDED) return false;
    bool changes = !same_on(have, to, axis), first = changes && to.kind[axis] != TD_REPLICATED;
    int dim = have.dim[axis], joined = to.kind[axis] == TD_REPLICATED ? gathered_from(have, to, axis) : axis; /* these go together */
    for (int a = 0; a < TD_MAX_AXES && a < mesh->axes; a++) {
        if (a >= joined && a <= axis) continue;
        bool moves_under = a < axis && !same_on(have, to, a) && (shares(&have, a, dim) || shares(&to, a, dim));
        first = first || moves_under || (changes && shares(&to, a, dim));
    }
    return first;
}

/* Whether ranks must send something to change the placement. */
static bool sends(const td_mesh *mesh, td_placement have, td_placement to)
{
    bool sends = false;
    for (int a = 0; a < mesh->axes; a++)
        sends = sends || (have.kind[a] == TD_SHARDED && !same_on(have, to, a)) || (have.kind[a] == TD_PARTIAL && to.kind[a] != TD_PARTIAL);
    return sends;
}

/* The last of the axes from a on that go from what a has to what it shall have. */
static int alike_until(const td_mesh *mesh, td_placement have, td_placement to, int a)
{
    int last = a;
    while (last + 1 < mesh->axes && have.kind[last + 1] == have.kind[a] && to.kind[last + 1] == to.kind[a] && to.dim[last + 1] == to.dim[a])
        last++;
    return last;
}

static td_id scatter(td_program *p, td_id id, td_placement to, const td_node *reader)
{
    const td_mesh *mesh = td_context_mesh(p->td);
    for (int a = 0; a < mesh->axes && id != TD_NONE; a++) {
        td_placement now = p->values[id].place;
        if (to.kind[a] != TD_SHARDED || now.kind[a] == TD_SHARDED) continue;
        if (!divides(p, id, to, to.dim[a])) return refuse(p, id, "sharding a dimension that the ranks do not divide", reader);
        if (now.kind[a] == TD_PARTIAL)
            id = emit_over(p, &par_op_reduce_scatter, id, a, alike_until(mesh, now, to, a), to.dim[a], TD_SHARDED, reader);
        else
            id = emit(p, &par_op_own_part, id, a, to.dim[a], TD_SHARDED, reader);
    }
    return id;
}

static td_id reduce(td_program *p, td_id id, td_placement to, const td_node *reader)
{
    const td_mesh *mesh = td_context_mesh(p->td);
    for (int a = 0; a < mesh->axes && id != TD_NONE; a++) {
        td_placement now = p->values[id].place;
        if (to.kind[a] == TD_REPLICATED && now.kind[a] == TD_PARTIAL)
            id = emit_over(p, &par_op_all_reduce, id, a, alike_until(mesh, now, to, a), 0, TD_REPLICATED, reader);
        if (to.kind[a] == TD_PARTIAL && now.kind[a] == TD_REPLICATED) id = emit(p, &par_op_count_once, id, a, 0, TD_PARTIAL, reader);
    }
    return id;
}

static td_id gather(td_program *p, td_id id, td_placement to, const td_node *reader)
{
    for (int a = td_context_mesh(p->td)->axes; a-- > 0 && id != TD_NONE;) {
        td_placement now = p->values[id].place;
        if (to.kind[a] != TD_REPLICATED || now.kind[a] != TD_SHARDED) continue;
        id = emit_over(p, &par_op_all_gather, id, gathered_from(now, to, a), a, now.dim[a], TD_REPLICATED, reader);
    }
    return id;
}

td_id par_convert(td_program *p, td_id id, td_placement to, const td_node *reader)
{
    const td_mesh *mesh = td_context_mesh(p->td);
    td_placement have = p->values[id].place;
    if (have.memory == TD_HOST && sends(mesh, have, to)) id = move(p, id, TD_DEVICE, reader);
    for (int a = mesh->axes; a-- > 0 && id != TD_NONE;)
        if (gathers_first(mesh, have, to, a)) id = emit(p, &par_op_all_gather, id, a, have.dim[a], TD_REPLICATED, reader);
    if (id != TD_NONE) id = scatter(p, id, to, reader);
    if (id != TD_NONE) id = reduce(p, id, to, reader);
    if (id != TD_NONE) id = gather(p, id, to, reader);
    if (id != TD_NONE && p->values[id].place.memory != to.memory) id = move(p, id, to.memory, reader);
    return id;
}
