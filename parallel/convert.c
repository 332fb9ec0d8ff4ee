/* par_convert: the only place where communication enters a program.
 *
 *     from \ to      replicated     sharded          partial
 *     replicated     -              own_part         count_once
 *     sharded        all_gather     via replicated   via replicated
 *     partial        all_reduce     reduce_scatter   -
 */
#include "parallel/strategy.h"

static td_id emit(td_program *p, const td_op *op, td_id in, int axis, int dim, td_place_kind kind, const td_node *reader)
{
    td_value value = p->values[in];
    value.place.kind[axis] = (int8_t)kind;
    value.place.dim[axis] = (int8_t)(kind == TD_SHARDED ? dim : 0);
    par_collective_attr attr = { axis, dim };
    return td_emit(p, &(td_emission){ .op = op, .like = reader, .inputs = &in, .input_count = 1, .attr = &attr, .attr_bytes = sizeof attr,
                                      .outputs = &value, .output_count = 1, .after = TD_NONE });
}

static td_id refuse(td_program *p, td_id id, const char *what, const td_node *reader)
{
    const td_node *maker = td_producer(p, id);
    td_fail(p->td, TD_ERROR_UNSUPPORTED, "place: %s of a value made by %s and read by %s is not available (%s:%d)", what, maker->op->name,
            reader->op->name, reader->file ? reader->file : "?", reader->line);
    return TD_NONE;
}

static bool divides(const td_program *p, td_id id, int axis, int dim)
{
    return p->values[id].shape.dim[dim] % td_context_mesh(p->td)->size[axis] == 0;
}

static td_id to_sharded(td_program *p, td_id id, int axis, int dim, const td_node *reader)
{
    if (!divides(p, id, axis, dim)) return refuse(p, id, "sharding a dimension that the ranks do not divide", reader);
    if (p->values[id].place.kind[axis] == TD_PARTIAL) return emit(p, &par_op_reduce_scatter, id, axis, dim, TD_SHARDED, reader);
    return emit(p, &par_op_own_part, id, axis, dim, TD_SHARDED, reader);
}

static td_id to_replicated(td_program *p, td_id id, int axis, const td_node *reader)
{
    td_placement have = p->values[id].place;
    if (have.kind[axis] == TD_PARTIAL) return emit(p, &par_op_all_reduce, id, axis, 0, TD_REPLICATED, reader);
    return emit(p, &par_op_all_gather, id, axis, have.dim[axis], TD_REPLICATED, reader);
}

td_id par_convert(td_program *p, td_id id, td_placement to, const td_node *reader)
{
    const td_mesh *mesh = td_context_mesh(p->td);
    for (int a = 0; a < mesh->axes && id != TD_NONE; a++) {
        td_placement have = p->values[id].place;
        bool same = have.kind[a] == to.kind[a] && (have.kind[a] != TD_SHARDED || have.dim[a] == to.dim[a]);
        if (same) continue;
        if (have.kind[a] == TD_SHARDED) id = to_replicated(p, id, a, reader);
        if (id == TD_NONE || to.kind[a] == p->values[id].place.kind[a]) continue;
        switch ((td_place_kind)to.kind[a]) {
        case TD_REPLICATED: id = to_replicated(p, id, a, reader); break;
        case TD_SHARDED:    id = to_sharded(p, id, a, to.dim[a], reader); break;
        case TD_PARTIAL:    id = emit(p, &par_op_count_once, id, a, 0, TD_PARTIAL, reader); break;
        case TD_FREE:       break; /* nobody asks for it */
        }
    }
    return id;
}
