/* Whole copies of sharded parameters, kept from step to step.
 *
 * Under bf16 the f32 parameter is for the update alone: where a strategy has parameters whole and their moments sharded (zero1, zero2),
 * it is stored where the moments are, and what is whole is a copy in what products read. The first step that reads the copy after an
 * update gathers it, as fsdp gathers a unit, and leaves it to all steps up to the next update: other micro-batches, evaluations. So a
 * parameter is sent once an update, in two bytes, and held in 2 + 4/N.
 *
 * A copy is derived state (td_derived_unit): the core knows which are up to date, and plans a step for what it finds. Of a unit that is
 * gathered as it is stored the copy is in f32. Members of narrow units that are read in f32 (narrow.c) have one, of all units together.
 */
#include "parallel/strategy.h"

/* Whether, on axis x of the mesh, the unit is stored in parts where the strategy has parameters whole. */
static bool is_copied_along(const par_attached *a, const td_unit *u, int x)
{
    return a->axis[x].parameter == TD_REPLICATED && u->place.kind[x] == TD_SHARDED && u->place.dim[x] == td_unit_flat_dim(u);
}

bool par_reads_copy(const par_attached *a, const td_unit *u, td_placement want)
{
    bool reads = false;
    for (int x = 0; x < td_context_mesh(a->td)->axes && u->kind == TD_PARAMETER; x++)
        reads = reads || (is_copied_along(a, u, x) && want.kind[x] == TD_REPLICATED);
    return reads;
}

uint32_t par_copy_of(const par_attached *a, uint32_t unit, td_dtype dtype)
{
    td_unit copy = { .of = unit, .slot = "copy", .dtype = dtype };
    const td_unit *u = td_unit_at(a->td, unit);
    copy.elements = u->elements;
    copy.cut = u->cut;
    copy.place = u->place;
    for (int x = 0; x < td_context_mesh(a->td)->axes; x++)
        if (is_copied_along(a, u, x)) copy.place.kind[x] = TD_REPLICATED, copy.place.dim[x] = 0;
    return td_derived_unit(a->td, &copy);
}

uint32_t par_copy_of_members(td_context *td, const par_narrow *narrow)
{
    return td_derived_unit(td, &(td_unit){ .of = TD_NONE, .slot = "members", .dtype = TD_F32, .elements = narrow->elements,
                                           .layout = narrow->layout });
}

td_id par_copied(td_program *p, uint32_t copy, const td_node *reader)
{
    const td_unit *u = td_unit_at(p->td, copy);
    td_unit_attr attr = { .unit = copy };
    td_value value = { .shape = u->cut.ways ? TD_SHAPE(u->cut.ways, u->elements / u->cut.ways) : TD_SHAPE(u->elements),
                       .dtype = (uint8_t)u->dtype, .place = u->place };
    if (!u->current) return TD_NONE;
    return td_emit(p, &(td_emission){ .op = &td_op_unit, .like = reader, .attr = &attr, .attr_bytes = sizeof attr, .outputs = &value,
                                      .output_count = 1, .after = TD_NONE });
}

bool par_leave_copy(td_program *p, uint32_t copy, td_id value, const td_node *reader)
{
    td_unit_attr attr = { .unit = copy };
    td_emit(p, &(td_emission){ .op = &td_op_store, .like = reader, .inputs = &value, .input_count = 1, .attr = &attr,
                               .attr_bytes = sizeof attr, .after = TD_NONE });
    return td_error(p->td) == TD_OK;
}
