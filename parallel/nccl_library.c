/* Loading NCCL.
 */
#include <stdio.h>

#include "parallel/library.h"
#include "parallel/nccl_library.h"

#define INSTALL "install NCCL 2.23 or newer (libnccl2 of NVIDIA's packages, or pip's nvidia-nccl-cu13), or name the folder of its " \
                "libnccl.so.2 in LD_LIBRARY_PATH"

const char *nccl_version_text(int version, char to[NCCL_VERSION_BYTES])
{
    int thousands = version < 10000 ? 1000 : 10000; /* as versions to 2.8 were numbered, and those since */
    snprintf(to, NCCL_VERSION_BYTES, "%d.%d.%d", version / thousands, version % thousands / 100, version % 100);
    return to;
}

static bool find_all(void *library, const char *file, nccl_library *out, char *message, size_t room)
{
    const struct { const char *name; void *to; } wanted[] = {
        { "ncclGetUniqueId", &out->get_unique_id },       { "ncclCommInitRankConfig", &out->comm_init_rank_config },
        { "ncclCommFinalize", &out->comm_finalize },      { "ncclCommDestroy", &out->comm_destroy },
        { "ncclCommAbort", &out->comm_abort },            { "ncclCommGetAsyncError", &out->comm_get_async_error },
        { "ncclGetErrorString", &out->get_error_string }, { "ncclGetLastError", &out->get_last_error },
        { "ncclAllReduce", &out->all_reduce },            { "ncclReduceScatter", &out->reduce_scatter },
        { "ncclAllGather", &out->all_gather },            { "ncclBroadcast", &out->broadcast },
        { "ncclSend", &out->send },                       { "ncclRecv", &out->receive },
        { "ncclGroupStart", &out->group_start },          { "ncclGroupEnd", &out->group_end },
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        if (par_library_find(library, wanted[i].name, wanted[i].to)) continue;
        snprintf(message, room, "%.100s has no %s, so it is not the NCCL that ranks on GPUs need: " INSTALL, file, wanted[i].name);
        return false;
    }
    par_library_find(library, "ncclAlltoAll", &out->all_to_all);
    bool windows = par_library_find(library, "ncclCommWindowRegister", &out->comm_window_register) &&
                   par_library_find(library, "ncclCommWindowDeregister", &out->comm_window_deregister);
    if (!windows) out->comm_window_register = NULL;
    return true;
}

bool nccl_library_load(const char *file, nccl_library *out, char *message, size_t room)
{
    char text[NCCL_VERSION_BYTES];
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library) {
        snprintf(message, room, "ranks on several GPUs need NCCL, which could not be loaded (%.200s): " INSTALL, dlerror());
        return false;
    }
    bool versioned = par_library_find(library, "ncclGetVersion", &out->get_version) && out->get_version(&out->version) == NCCL_SUCCESS;
    if (versioned && out->version < NCCL_LEAST_VERSION) {
        snprintf(message, room, "%.100s is NCCL %s, which is too old for ranks on several GPUs: " INSTALL, file,
                 nccl_version_text(out->version, text));
        return false;
    }
    return find_all(library, file, out, message, room);
}
