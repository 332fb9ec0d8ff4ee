/* Which GPU a rank has, and what carries collectives between those of a world: NCCL where each rank has one of its own; where ranks share
 * one, if that was asked for, the host's memory.
 *
 * Whether ranks share is not a matter of names: each may see its own GPUs alone, as launchers arrange, under the same name. So each tells
 * the others what its GPU is.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/hash.h"
#include "parallel/gpus.h"
#include "parallel/group.h"
#include "parallel/nccl_library.h"
#include "parallel/rehearsed.h"
#include "parallel/transport_nccl.h"

#ifdef TANDEM_CUDA
static const par_device *const cuda = &par_cuda_device;
int par_gpus(void) { return par_cuda_count(); }
void par_gpu_address(int number, char address[PAR_GPU_ADDRESS]) { par_cuda_address(number, address); }
#else
static const par_device *const cuda = NULL;
int par_gpus(void) { return 0; }
void par_gpu_address(int number, char address[PAR_GPU_ADDRESS]) { (void)number, *address = 0; }
#endif

/* ---- Which GPU ------------------------------------------------------------------------------------------- */

/* What is to be done where ranks have too few GPUs. */
static void too_few(int ranks, int gpus, char *message, size_t room)
{
    snprintf(message, room, "%d ranks of this host have %d GPU%s, and a rank needs one of its own: start no more than %d, or, to try strategies "
             "and not for speed, put all ranks on one by its name (--device cuda:0)", ranks, gpus, gpus == 1 ? "" : "s", gpus);
}

bool par_gpu_of_rank(const char *device, int index, int ranks, int gpus, char name[PAR_GPU_NAME], char *message, size_t room)
{
    *message = 0;
    snprintf(name, PAR_GPU_NAME, "%s", device);
    if (strcmp(device, "cuda") != 0 || gpus < 2) return true; /* where one is seen, each rank may see another */
    if (index < gpus && ranks <= gpus) snprintf(name, PAR_GPU_NAME, "cuda:%d", index);
    else too_few(ranks, gpus, message, room);
    return !*message;
}

bool par_gpus_suffice(const char *device, int ranks, int gpus, char *message, size_t room)
{
    *message = 0;
    if (strcmp(device, "cuda") != 0 || ranks <= gpus || ranks == 1) return true;
    too_few(ranks, gpus, message, room);
    return false;
}

static void quiet(void *user, td_level level, const char *text) { (void)user, (void)level, (void)text; }

bool par_check_gpus(const char *device, int ranks, char *message, size_t room)
{
    int gpus = par_gpus();
    *message = 0;
    if (strncmp(device, "cuda", 4) != 0) return true;
    if (gpus) return par_gpus_suffice(device, ranks, gpus, message, room);
    td_context *td = td_open(&(td_options){ .device = device, .threads = 1, .log = quiet }); /* knows why there is none */
    if (td_error(td) != TD_OK) snprintf(message, room, "%d ranks have no GPU: %s", ranks, td_error_text(td));
    td_close(td);
    return !*message;
}

/* ---- What carries collectives ---------------------------------------------------------------------------- */

par_gpu_use par_gpu_use_of(const uint64_t *keys, int ranks, int rank)
{
    par_gpu_use u = { 0 };
    for (int r = 0; r < ranks; r++) {
        bool first = true;
        for (int before = 0; before < r; before++) first = first && keys[before] != keys[r];
        u.gpus += first;
        u.with += keys[r] == keys[rank];
    }
    u.shared = u.gpus < ranks;
    return u;
}

/* Of the ranks on `rank`'s host. */
static int gpus_of_host(const par_world *world, int rank, const uint64_t *keys, int *ranks)
{
    uint64_t here[PAR_MAX_RANKS];
    *ranks = 0;
    for (int r = 0; r < world->ranks; r++)
        if (!world->mpi || par_mpi_same_host(world->mpi, r, rank)) here[(*ranks)++] = keys[r];
    return par_gpu_use_of(here, *ranks, 0).gpus;
}

/* All ranks find the same, and one tells it. */
static bool refuse(par_attached *a, td_code code, const char *text)
{
    par_stop_world(a->world, a->rank, text);
    td_fail(a->td, code, "%s", text);
    return false;
}

static bool refuse_sharing(par_attached *a, const uint64_t *keys)
{
    char text[512];
    int ranks, gpus = gpus_of_host(a->world, a->rank, keys, &ranks);
    if (ranks == gpus) snprintf(text, sizeof text, "ranks of another host share a GPU, where each needs one of its own");
    else too_few(ranks, gpus, text, sizeof text);
    return refuse(a, TD_ERROR_USAGE, text);
}

static void tell_sharing(const par_attached *a, const par_device *device, int ranks, const char *how)
{
    if (a->rank == 0)
        td_message(a->td, TD_LOG_INFO, "%d ranks share cuda:%d: collectives go through %s; for trying strategies, not for speed", ranks,
                   device->number(td_queue(a->td)), how);
}

static bool carry_by_host(par_attached *a, const par_device *device)
{
    td_transport inner = a->transport;
    if (!par_transport_staged(a->world, a->rank, a->td, &inner, device, &a->transport)) return false;
    a->staged = par_local_at(a->world, a->rank);
    a->world->on_device = "staged";
    if (a->options.windows && a->rank == 0)
        td_message(a->td, TD_LOG_WARNING, "ranks that share a GPU have no windows: collectives go through the host's memory");
    tell_sharing(a, device, a->on_gpu, "the host's memory");
    return true;
}

static bool carry_by_nccl(par_attached *a, const par_device *device)
{
    td_transport inner = a->transport;
    a->world->on_device = "nccl";
    return par_transport_nccl(a->world, a->rank, a->td, &inner, device, a->options.windows, &a->transport);
}

/* NCCL lets ranks share a GPU: it is asked to, and does from 2.30 on. */
static bool nccl_shares(void)
{
    enum { SHARES = 23000 };
    nccl_library lib;
    char message[600];
    bool asked = par_environment_number("NCCL_MULTI_RANK_GPU_ENABLE") > 0;
    return asked && nccl_library_load("libnccl.so.2", &lib, message, sizeof message) && lib.version >= SHARES;
}

/* As NCCL tells GPUs apart: NCCL_HOSTID says of which host it is to take a rank for. Ranks of several such hosts it connects through
 * sockets, and their GPUs may be one. 0: CUDA does not tell. */
static uint64_t gpu_key(par_attached *a, const par_device *device)
{
    uint64_t key = device->key(td_queue(a->td));
    const char *host = getenv("NCCL_HOSTID");
    return key && host && *host ? td_mix(key, td_hash_text(host)) : key;
}

bool par_carry_by(par_attached *a, const td_mesh *mesh, const par_device *device)
{
    par_local *me = par_local_at(a->world, a->rank);
    uint64_t keys[PAR_MAX_RANKS], own = gpu_key(a, device);
    if (!own) td_fail(a->td, TD_ERROR_DEVICE, "rank %d: CUDA does not tell which GPU it has", a->rank);
    if (!own || !par_group_tell(me, &a->transport, mesh->axes, &own, keys, 1)) return false;
    par_gpu_use use = par_gpu_use_of(keys, a->world->ranks, a->rank);
    if (!use.shared) return carry_by_nccl(a, device);
    if (!a->options.share_gpu) return refuse_sharing(a, keys);
    if (a->world->here > 1) /* their driver calls one function at a time, and each waits for the other's */
        return refuse(a, TD_ERROR_UNSUPPORTED, "ranks that are threads of one process cannot share a GPU: start each as a process (--ranks)");
    a->on_gpu = use.with;
    uint64_t shares = nccl_shares();
    if (!par_group_tell(me, &a->transport, mesh->axes, &shares, keys, 1)) return false;
    for (int r = 0; r < a->world->ranks; r++)
        if (!keys[r]) return carry_by_host(a, device);
    tell_sharing(a, device, a->on_gpu, "NCCL");
    return carry_by_nccl(a, device);
}

bool par_carry(par_attached *a, const td_mesh *mesh)
{
    a->world->on_device = NULL;
    if (a->world->rehearsal.seconds && mesh->axes) return par_transport_rehearsed(a->world, a->rank, a->td, td_queue(a->td) ? cuda : NULL, &a->transport);
    return !cuda || !td_queue(a->td) || mesh->axes == 0 || par_carry_by(a, mesh, cuda);
}
