/* Loading Open MPI.
 */
#include <stdio.h>

#include "parallel/library.h"
#include "parallel/mpi_library.h"

/* Plugins of Open MPI's own look its symbols up in the whole program, so they must be global. */
bool mpi_library_load(const char *file, mpi_library *out, char *message, size_t room)
{
    void *library = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        snprintf(message, room, "ranks of several processes need Open MPI, which could not be loaded (%.200s): install Debian's package "
                 "libopenmpi3, on every host", dlerror());
        return false;
    }
    const struct { const char *name; void *to; } wanted[] = {
        { "MPI_Init_thread", &out->init_thread }, { "MPI_Initialized", &out->initialized }, { "MPI_Finalized", &out->finalized },
        { "MPI_Finalize", &out->finalize },       { "MPI_Comm_dup", &out->comm_dup },       { "MPI_Comm_size", &out->comm_size },
        { "MPI_Comm_rank", &out->comm_rank },     { "MPI_Comm_set_errhandler", &out->comm_set_errhandler },
        { "MPI_Isend", &out->isend },             { "MPI_Irecv", &out->irecv },             { "MPI_Test", &out->test },
        { "MPI_Error_string", &out->error_string },
        { "ompi_mpi_comm_world", &out->world },   { "ompi_mpi_byte", &out->byte },
        { "ompi_mpi_errors_return", &out->errors_return },
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        if (par_library_find(library, wanted[i].name, wanted[i].to)) continue;
        snprintf(message, room, "%.100s has no %s: it is another MPI than Open MPI, which is needed (Debian's package libopenmpi3)", file,
                 wanted[i].name);
        return false;
    }
    return true;
}
