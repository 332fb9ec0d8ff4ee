/* par_attach: a context joins a world under a strategy. */
#include "parallel/gpus.h"
#include "parallel/transport_nccl.h"

#include <stdio.h>
#include <string.h>

#include "core/hash.h"

static void add_axis(td_mesh *mesh, const par_axis *from, int size, int at, par_axis axis[TD_MAX_AXES])
{
    if (size == 1) return;
    axis[mesh->axes] = *from;
    mesh->name[mesh->axes] = from->name;
    mesh->size[mesh->axes] = size;
    mesh->at[mesh->axes++] = at;
}

/* The ranks as the strategy's axes and that of shared layers, but for those of one rank. Where groups keep what they gathered, the last
 * of the strategy's is two, between them and within. */
static td_mesh mesh_of(const par_chosen *chosen, int ranks, int rank, par_axis axis[TD_MAX_AXES])
{
    td_mesh mesh = { .rank = rank, .world = ranks };
    for (int a = 0, left = ranks; a < PAR_STRATEGY_AXES && chosen->strategy->axis[a].name; a++) {
        bool last = a + 1 == PAR_STRATEGY_AXES || !chosen->strategy->axis[a + 1].name;
        int within = last ? chosen->group : 1, between = chosen->size[a] / within;
        left /= chosen->size[a];
        add_axis(&mesh, &chosen->strategy->axis[a], between, rank / left / within % between, axis);
        add_axis(&mesh, &chosen->strategy->axis[a], within, rank / left % within, axis);
        if (within > 1) mesh.name[mesh.axes - 1] = "group";
    }
    if (chosen->tensor > 1) mesh.same_rows[mesh.axes] = true; /* consecutive ranks: what they exchange is on the way of every layer */
    add_axis(&mesh, &par_tensor_axis, chosen->tensor, rank % chosen->tensor, axis);
    return mesh;
}

/* Where the parameter is stored along the axis. What computes in less than it is stored in reads a copy where the strategy has parameters
 * whole (copies.c), but for those in host memory, which are short of room on the device. */
static int stored(const par_axis *axis, bool copied)
{
    return copied && axis->parameter == TD_REPLICATED && axis->moment == TD_SHARDED ? TD_SHARDED : axis->parameter;
}

static td_strategy_places places_of(const td_context *td, const td_mesh *mesh, const par_axis *axis, int offload)
{
    bool copied = td_dtype_size(td_compute_dtype(td)) < td_dtype_size(TD_F32) && !(offload & PAR_OFFLOAD_PARAMETERS);
    td_strategy_places places = { .parameter.memory = offload & PAR_OFFLOAD_PARAMETERS ? TD_HOST : TD_DEVICE,
                                  .moment.memory = offload & PAR_OFFLOAD_OPTIMIZER ? TD_HOST : TD_DEVICE };
    for (int a = 0; a < mesh->axes; a++) {
        places.parameter.kind[a] = (int8_t)stored(&axis[a], copied);
        places.moment.kind[a] = (int8_t)axis[a].moment;
        places.accumulator.kind[a] = (int8_t)axis[a].accumulator;
    }
    return places;
}

static bool agree(void *self, int64_t run, const td_program *recording, uint64_t fingerprint, bool is_new_plan)
{
    par_attached *a = self;
    bool evaluates = td_get_mode(a->td) == TD_EVAL;
    par_moment at = { .run = run, .step = td_updates(a->td) + !evaluates, .evaluates = evaluates };
    if (a->staged && !par_staged_before(a->staged, at, is_new_plan)) return false;
    if (!par_agree(a->world, a->rank, a->td, at, recording, fingerprint, is_new_plan)) return false;
    return !a->staged || par_staged_begin(a->staged, at);
}

static void failed(void *self, const char *text)
{
    par_attached *a = self;
    par_fail_world(a->world, a->rank, text);
}

static bool check_rank(td_context *td, int ranks, int rank)
{
    if (rank >= 0 && rank < ranks) return true;
    td_fail(td, TD_ERROR_USAGE, "par_attach: rank %d is not one of the world's %d", rank, ranks);
    return false;
}

static bool check_options(td_context *td, const par_options *o, int ranks)
{
    if (td_is_eager(td) && ranks > 1)
        td_fail(td, TD_ERROR_UNSUPPORTED, "TD_EAGER is for one rank: run with --ranks 1 to find the operation");
    else if (o->reduce_dtype != TD_F32 && o->reduce_dtype != TD_BF16)
        td_fail(td, TD_ERROR_UNSUPPORTED, "par_attach: gradients cannot be reduced in %s: in bf16, or as parameters are stored",
                td_dtype_name(o->reduce_dtype));
    else if (o->bucket_bytes < 0 || o->unit_elements < 0 || o->whole_elements < -1 || o->prefetch < 0)
        td_fail(td, TD_ERROR_USAGE, "par_attach: bucket_bytes, unit_elements, whole_elements and prefetch cannot be negative");
    else if (o->offload & ~(PAR_OFFLOAD_OPTIMIZER | PAR_OFFLOAD_PARAMETERS))
        td_fail(td, TD_ERROR_USAGE, "par_attach: offload is PAR_OFFLOAD_OPTIMIZER, PAR_OFFLOAD_PARAMETERS or both");
    return td_error(td) == TD_OK;
}

/* What keep_group asks for. A group of all is what fsdp is anyway. */
static bool choose_group(td_context *td, par_options *o, par_chosen *chosen)
{
    bool two = chosen->strategy->axis[1].name != NULL, applies = chosen->strategy->units == PAR_UNITS_PATTERN;
    int sharing = chosen->size[two];
    chosen->group = 1;
    if (!applies || !o->keep_group) return true;
    if (o->keep_group < 0 || sharing % o->keep_group) {
        td_fail(td, TD_ERROR_USAGE, "%s: after the forward units cannot be kept by groups of %d ranks: the %d that share them cannot be "
                "divided so", chosen->strategy->name, o->keep_group, sharing);
        return false;
    }
    if (o->keep_group == 1) o->keep_gathered = true;
    else if (o->keep_group < sharing) chosen->group = o->keep_group;
    if (two && chosen->size[0] > 1 && chosen->group > 1 && chosen->tensor > 1)
        td_fail(td, TD_ERROR_UNSUPPORTED, "%s: with +tp there is no room for groups of %d ranks that keep units after the forward; leave "
                "one of them out", chosen->strategy->name, chosen->group);
    return td_error(td) == TD_OK;
}

/* Without patterns all would be whole on every rank, and do the same. */
static bool check_tensor(td_context *td, const par_options *o, int ranks, const char *strategy)
{
    if (ranks == 1 || o->tensor_columns || o->tensor_rows) return true;
    td_fail(td, TD_ERROR_USAGE, "strategy '%.80s' says that %d ranks share layers, but not which: name them by tensor_columns and "
            "tensor_rows (--tensor-columns, --tensor-rows), as 'h.*.mlp.up*' and 'h.*.mlp.down*'", strategy, ranks);
    return false;
}

/* Everything that must be the same on every rank besides what is recorded. */
static void tell_options(par_attached *a, td_context *td, const char *strategy, uint64_t *hash)
{
    char text[4096];
    const par_options *o = &a->options;
    const char *units = o->units ? o->units : "modules", *passes = td_passes(td), *agreed = o->agreed ? o->agreed : "";
    const char *columns = o->tensor_columns ? o->tensor_columns : "none", *rows = o->tensor_rows ? o->tensor_rows : "none";
    uint64_t table = (uint64_t)a->units + 1;
    for (int i = 0; i < TD_MAX_AXES; i++) {
        const par_axis *x = &a->axis[i];
        const int row[] = { x->parameter, x->gradient, x->optimizer_gradient, x->moment, x->accumulator };
        for (size_t k = 0; k < sizeof row / sizeof *row; k++) table = 8 * table + (uint64_t)(row[k] + 1);
    }
    snprintf(text, sizeof text,
             "world=%d strategy=%s table=%llx dtype=%s reduce=%s seed=%llu bucket=%lld unit=%lld whole=%lld gathered=%d group=%d "
             "prefetch=%d offload=%d windows=%d passes=%s units=%s columns=%s rows=%s %s", par_world_size(a->world), strategy,
             (unsigned long long)table, td_dtype_name(td_compute_dtype(td)), td_dtype_name(o->reduce_dtype),
             (unsigned long long)td_seed(td), (long long)o->bucket_bytes, (long long)o->unit_elements, (long long)o->whole_elements,
             o->keep_gathered, o->keep_group, o->prefetch, o->offload, o->windows, *passes ? passes : "all", units, columns, rows, agreed);
    *hash = td_hash_text(text);
    if (a->world->segment) par_agree_options(a->world, a->rank, text);
}

/* A text of the options that may be gone when the call returns, as one of the context's; NULL stays. */
static bool own_text(td_context *td, const char **text)
{
    if (!*text) return true;
    size_t bytes = strlen(*text) + 1;
    char *copy = td_own(td, bytes);
    if (copy) *text = memcpy(copy, *text, bytes);
    return copy != NULL;
}

bool par_attach(td_context *td, par_world *world, int rank, const par_options *options)
{
    if (td_error(td) != TD_OK) return false;
    int ranks = par_world_size(world);
    par_options o = options ? *options : (par_options){ 0 };
    par_chosen chosen;
    if (!o.strategy) o.strategy = ranks > 1 ? "ddp" : "single";
    if (!check_rank(td, ranks, rank) || !check_options(td, &o, ranks)) return false;
    if (!par_strategy_read(td, o.strategy, o.own, ranks, &chosen) || !choose_group(td, &o, &chosen)) return false;
    par_attached *a = td_own(td, sizeof *a);
    if (!a) return false;
    *a = (par_attached){ .td = td, .world = world, .rank = rank, .options = o };
    a->name = chosen.strategy->name;
    a->units = chosen.strategy->units;
    const char **texts[] = { &a->options.units, &a->options.tensor_columns, &a->options.tensor_rows };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!own_text(td, texts[i])) return false;
    td_parallel parallel = {
        .self = a, .mesh = mesh_of(&chosen, ranks, rank, a->axis), .unit_multiple = ranks,
        .choose_units = par_choose_units, .place = par_place_pass, .schedule = par_schedule_pass, .failed = failed,
    };
    a->tensor_axis = chosen.tensor > 1 ? parallel.mesh.axes - 1 : -1;
    parallel.cuts = chosen.tensor > 1;
    a->between_axis = chosen.group > 1 ? parallel.mesh.axes - 2 - (chosen.tensor > 1) : -1;
    if (!par_nccl_may_join(world, rank, td)) return false;
    if (!check_tensor(td, &a->options, chosen.tensor, o.strategy)) return false;
    bool runs = world->segment != NULL;
    if (!(world->mpi ? par_transport_mpi(world, rank, td, &parallel.mesh, &a->transport)
          : runs     ? par_transport_local(world, rank, td, &parallel.mesh, &a->transport)
                     : par_transport_none(world, rank, td, &a->transport)))
        return false;
    if (runs && !par_carry(a, &parallel.mesh)) return false;
    if (runs && ranks > 1 && !world->rehearsal.seconds) parallel.agree = agree;
    parallel.transport = &a->transport;
    parallel.on_gpu = a->on_gpu;
    parallel.places = places_of(td, &parallel.mesh, a->axis, o.offload);
    tell_options(a, td, o.strategy, &parallel.options_hash);
    a->options.agreed = NULL; /* the caller's */
    return td_set_parallel(td, &parallel);
}
