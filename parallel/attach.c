/* par_attach: a context joins a world under a strategy. */
#include "parallel/strategy.h"

#include <stdio.h>
#include <string.h>

static td_placement on_data_axis(const td_mesh *mesh, int kind)
{
    td_placement place = { .kind = { 0 } };
    for (int a = 0; a < mesh->axes; a++) place.kind[a] = (int8_t)kind;
    return place;
}

static bool agree(void *self, int64_t step, const td_program *recording, uint64_t fingerprint, bool is_new_plan)
{
    par_attached *a = self;
    return par_agree(a->world, a->rank, a->td, step, recording, fingerprint, is_new_plan);
}

static void failed(void *self, const char *text)
{
    par_attached *a = self;
    par_fail_world(a->world, a->rank, text);
}

static bool check(td_context *td, const par_world *world, int rank, const char *name)
{
    int ranks = par_world_size(world);
    if (rank < 0 || rank >= ranks) {
        td_fail(td, TD_ERROR_USAGE, "par_attach: rank %d is not one of the world's %d", rank, ranks);
        return false;
    }
    if (!par_strategy_named(name))
        td_fail(td, TD_ERROR_USAGE, "strategy '%s' is not known; it can be one of %s", name, par_strategy_names());
    else if (ranks > 1 && !strcmp(name, "single"))
        td_fail(td, TD_ERROR_USAGE, "strategy 'single' is for one rank; for %d choose one of %s", ranks, par_strategy_names_for_ranks());
    return td_error(td) == TD_OK;
}

/* Everything that must be the same on every rank besides what is recorded. */
static void tell_options(par_attached *a, td_context *td, uint64_t *hash)
{
    char text[PAR_OPTIONS_BYTES];
    const char *units = a->options.units ? a->options.units : "modules", *passes = td_passes(td);
    snprintf(text, sizeof text, "world=%d strategy=%s dtype=%s seed=%llu bucket=%lld prefetch=%d passes=%s units_hash=%llx units=%s",
             par_world_size(a->world), a->strategy->name, td_dtype_name(td_compute_dtype(td)), (unsigned long long)td_seed(td),
             (long long)a->options.bucket_bytes, a->options.prefetch, *passes ? passes : "all", (unsigned long long)par_text_hash(units), units);
    *hash = par_text_hash(text);
    if (a->world->segment) par_agree_options(a->world, a->rank, text);
}

bool par_attach(td_context *td, par_world *world, int rank, const par_options *options)
{
    if (td_error(td) != TD_OK) return false;
    int ranks = par_world_size(world);
    const char *name = options && options->strategy ? options->strategy : ranks > 1 ? "ddp" : "single";
    if (!check(td, world, rank, name)) return false;
    if (td_is_eager(td) && ranks > 1) {
        td_fail(td, TD_ERROR_UNSUPPORTED, "TD_EAGER is for one rank: run with --ranks 1 to find the operation");
        return false;
    }
    size_t units_bytes = options && options->units ? strlen(options->units) + 1 : 0;
    par_attached *a = td_own(td, sizeof *a + units_bytes);
    if (!a) return false;
    *a = (par_attached){ .td = td, .world = world, .rank = rank, .strategy = par_strategy_named(name), .options = options ? *options : (par_options){ 0 } };
    if (units_bytes) a->options.units = memcpy(a + 1, options->units, units_bytes);
    td_parallel parallel = {
        .self = a, .mesh = { .axes = ranks > 1, .name = { "data" }, .size = { ranks }, .at = { rank }, .rank = rank, .world = ranks },
        .unit_multiple = ranks, .choose_units = par_choose_units, .place = par_place_pass, .schedule = par_schedule_pass, .failed = failed,
    };
    bool runs = world->segment != NULL;
    if (runs ? !par_transport_local(world, rank, td, &parallel.mesh, &a->transport) : !par_transport_none(world, rank, td, &a->transport))
        return false;
    if (runs && ranks > 1) parallel.agree = agree;
    parallel.transport = &a->transport;
    const par_strategy *s = a->strategy;
    parallel.places = (td_strategy_places){
        .parameter = on_data_axis(&parallel.mesh, s->parameter), .moment = on_data_axis(&parallel.mesh, s->moment),
        .accumulator = on_data_axis(&parallel.mesh, s->accumulator),
    };
    tell_options(a, td, &parallel.options_hash);
    return td_set_parallel(td, &parallel);
}
