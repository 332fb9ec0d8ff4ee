/* The pools of device_pool.h, by the driver's virtual memory management, whose functions the runtime finds: nothing links the driver. */
#include "core/device_pool.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <string.h>

enum { POOLS = 3 };
static const char *const kinds[POOLS] = { "state", "step", "inputs" };

typedef struct pool {
    CUdeviceptr base;
    int64_t mapped, used;
    int64_t given;                            /* parts not yet given back */
    int pieces;                               /* that memory was mapped in */
} pool;

struct td_pools {
    int64_t reserved;                         /* addresses of each pool */
    CUmemAllocationProp kind;
    pool pools[POOLS];
    PFN_cuGetErrorString_v6000 error_string;
    PFN_cuDeviceGetAttribute_v2000 attribute;
    PFN_cuMemAddressReserve_v10020 reserve;
    PFN_cuMemAddressFree_v10020 unreserve;
    PFN_cuMemGetAllocationGranularity_v10020 granularity;
    PFN_cuMemCreate_v10020 create;
    PFN_cuMemRelease_v10020 release;
    PFN_cuMemMap_v10020 map;
    PFN_cuMemUnmap_v10020 unmap;
    PFN_cuMemSetAccess_v10020 allow;
};

/* ---- The driver */

/* False: a driver without them. */
static bool find_functions(struct td_pools *p)
{
    const struct {
        const char *name;
        int version;
        void **to;
    } functions[] = {
        { "cuGetErrorString", 6000, (void **)&p->error_string },
        { "cuDeviceGetAttribute", 2000, (void **)&p->attribute },
        { "cuMemAddressReserve", 10020, (void **)&p->reserve },
        { "cuMemAddressFree", 10020, (void **)&p->unreserve },
        { "cuMemGetAllocationGranularity", 10020, (void **)&p->granularity },
        { "cuMemCreate", 10020, (void **)&p->create },
        { "cuMemRelease", 10020, (void **)&p->release },
        { "cuMemMap", 10020, (void **)&p->map },
        { "cuMemUnmap", 10020, (void **)&p->unmap },
        { "cuMemSetAccess", 10020, (void **)&p->allow },
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        enum cudaDriverEntryPointQueryResult found;
        cudaError_t status = cudaGetDriverEntryPointByVersion(functions[i].name, functions[i].to, (unsigned)functions[i].version,
                                                              cudaEnableDefault, &found);
        if (status != cudaSuccess || found != cudaDriverEntryPointSuccess || !*functions[i].to) {
            cudaGetLastError();
            return false;
        }
    }
    return true;
}

static bool driver_ok(td_context *td, const struct td_pools *p, CUresult status, const char *what)
{
    const char *reason = NULL;
    if (status == CUDA_SUCCESS) return true;
    p->error_string(status, &reason);
    td_fail(td, status == CUDA_ERROR_OUT_OF_MEMORY ? TD_ERROR_MEMORY : TD_ERROR_DEVICE, "CUDA: %s: %s", what,
            reason ? reason : "a status that is not known");
    return false;
}

/* ---- Opening and closing */

static bool can_map(struct td_pools *p, int device)
{
    int can = 0;
    return find_functions(p) &&
           p->attribute(&can, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) == CUDA_SUCCESS && can;
}

static bool reserve(td_context *td, struct td_pools *p)
{
    size_t free, total, page;
    if (!td_cuda_ok(td, cudaMemGetInfo(&free, &total), "asking the GPU for its memory") ||
        !driver_ok(td, p, p->granularity(&page, &p->kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "asking for the size of a page"))
        return false;
    td->page_bytes = td->gpu.page_bytes = (int64_t)page;
    p->reserved = (int64_t)((total + page - 1) / page * page);
    for (int i = 0; i < POOLS; i++)
        if (!driver_ok(td, p, p->reserve(&p->pools[i].base, (size_t)p->reserved, 0, 0, 0), "reserving addresses")) return false;
    return true;
}

/* So that it may be mapped for other GPUs, whose collectives then need no copies. */
static CUmemAllocationHandleType sharing_of(const struct td_pools *p, int device)
{
    int can = 0;
    bool asked = p->attribute(&can, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device) == CUDA_SUCCESS;
    return asked && can ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
}

bool td_pools_open(td_context *td, int device)
{
    struct td_pools *p = td_alloc(td, sizeof *p, "host");
    if (!p) return false;
    memset(p, 0, sizeof *p);
    p->kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p->kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p->kind.location.id = device;
    if (can_map(p, device)) {
        p->kind.requestedHandleTypes = sharing_of(p, device);
        *td_pools_of(td) = p;
        return reserve(td, p);
    }
    td_free(td, p, sizeof *p, "host");
    td_message(td, TD_LOG_WARNING, "this GPU's driver cannot map memory to reserved addresses: a larger step than those before takes new "
               "memory, and graphs made before are made again");
    return true;
}

/* All that was handed out is given back, or of no use any more. */
void td_pools_close(td_context *td)
{
    struct td_pools *p = *td_pools_of(td);
    if (!p) return;
    for (int i = 0; i < POOLS; i++) {
        pool *at = &p->pools[i];
        if (at->mapped) (void)p->unmap(at->base, (size_t)at->mapped);
        if (at->base) (void)p->unreserve(at->base, (size_t)p->reserved);
        td->device_counts.bytes -= at->mapped;
    }
    *td_pools_of(td) = NULL;
    td_free(td, p, sizeof *p, "host");
}

/* ---- Memory */

static void *no_memory(td_context *td, int64_t bytes, const char *kind)
{
    size_t free = 0, total = 0;
    cudaGetLastError();
    cudaMemGetInfo(&free, &total);
    td_fail(td, TD_ERROR_MEMORY, "out of memory on the GPU: %lld bytes for %s could not be had; of its %zu bytes %zu are free, and this "
            "context holds %lld; a smaller batch, recomputation or more ranks that shard would make it fit", (long long)bytes, kind, total,
            free, (long long)td->device_counts.bytes);
    return NULL;
}

static void count(td_context *td, int64_t bytes)
{
    td_device_counts *c = &td->device_counts;
    c->allocations++;
    c->bytes += bytes;
    if (c->bytes > c->most_bytes) c->most_bytes = c->bytes;
}

/* Takes a pool's memory, none of which is in use any more: what it is given next is of one piece, at the same addresses. */
static bool empty(td_context *td, const struct td_pools *p, pool *at)
{
    if (!driver_ok(td, p, p->unmap(at->base, (size_t)at->mapped), "giving memory back")) return false;
    td->device_counts.bytes -= at->mapped;
    at->mapped = 0;
    at->pieces = 0;
    return true;
}

/* Gives the pool memory for its first `bytes` bytes. The addresses keep it when its handle is released. */
static bool map(td_context *td, struct td_pools *p, pool *to, int64_t bytes, const char *kind)
{
    int64_t more = td_round_up(bytes - to->mapped, td->page_bytes);
    if (more <= 0) return true;
    CUmemGenericAllocationHandle memory;
    CUmemAccessDesc access = { .location = p->kind.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    CUdeviceptr at = to->base + (CUdeviceptr)to->mapped;
    CUresult status = to->mapped + more > p->reserved ? CUDA_ERROR_OUT_OF_MEMORY : p->create(&memory, (size_t)more, &p->kind, 0);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) return no_memory(td, more, kind) != NULL;
    if (!driver_ok(td, p, status, "allocating memory")) return false;
    status = p->map(at, (size_t)more, 0, memory, 0);
    (void)p->release(memory);
    if (!driver_ok(td, p, status, "mapping memory")) return false;
    status = p->allow(at, (size_t)more, &access, 1);
    if (status != CUDA_SUCCESS) (void)p->unmap(at, (size_t)more);
    if (!driver_ok(td, p, status, "allowing access to memory")) return false;
    to->mapped += more;
    to->pieces++;
    count(td, more);
    return true;
}

static pool *pool_of(td_context *td, const char *kind)
{
    struct td_pools *p = *td_pools_of(td);
    for (int i = 0; p && i < POOLS; i++)
        if (!strcmp(kinds[i], kind)) return &p->pools[i];
    return NULL;
}

static void *alone(td_context *td, int64_t bytes, const char *kind)
{
    void *memory = NULL;
    cudaError_t status = cudaMalloc(&memory, (size_t)(bytes ? bytes : 1));
    if (status == cudaErrorMemoryAllocation) return no_memory(td, bytes, kind);
    if (!td_cuda_ok(td, status, "allocating memory")) return NULL;
    count(td, bytes);
    return memory;
}

static void note_state(td_context *td, const pool *of, int64_t begin)
{
    int piece = ++td->state_pieces;
    if (piece >= TD_PIECES) return;
    td->settled.piece[piece].memory = (void *)(uintptr_t)(of->base + (CUdeviceptr)begin);
    td->settled.piece[piece].bytes = of->mapped - begin;
}

/* Where ranks reach into memory nothing lies in two pieces. The step pool, which has one arena, is emptied before it would; the state pool takes
 * a piece for all that is laid out and has no memory yet, in which what is got next lies. */
static bool settle(td_context *td, struct td_pools *p, pool *of, const char *kind, int64_t bytes, int64_t *at)
{
    bool grows = *at + bytes > of->mapped, apart = of->pieces + grows > 1;
    if (!strcmp(kind, "step")) return !apart || of->given || empty(td, p, of);
    if (strcmp(kind, "state") || !grows) return true;
    int64_t begin = of->mapped, missing = td_state_missing(td, TD_DEVICE);
    if (!map(td, p, of, begin + (missing > bytes ? missing : bytes), kind)) return false;
    td->state_skipped += begin - *at;
    *at = begin;
    note_state(td, of, begin);
    return true;
}

void *td_cuda_get(td_context *td, int64_t bytes, const char *kind)
{
    pool *from = pool_of(td, kind);
    if (!from) return alone(td, bytes, kind);
    int64_t at = td_round_up(from->used, TD_GPU_ALIGN);
    if (td_is_reached(td) && !settle(td, *td_pools_of(td), from, kind, bytes, &at)) return NULL;
    if (!map(td, *td_pools_of(td), from, at + bytes, kind)) return NULL;
    from->used = at + bytes;
    from->given++;
    return (void *)(uintptr_t)(from->base + (CUdeviceptr)at);
}

void td_cuda_put(td_context *td, void *memory, int64_t bytes, const char *kind)
{
    pool *to = pool_of(td, kind);
    if (!memory) return;
    if (to) {
        if (!--to->given) to->used = 0;
        return;
    }
    cudaFree(memory); /* waits for what runs */
    td->device_counts.bytes -= bytes;
}
