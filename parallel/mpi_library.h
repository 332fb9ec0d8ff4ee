/* Inside parallel/: the few functions of MPI that the transport needs, from a library loaded at run time.
 *
 * MPI's types differ from one implementation to the other. These are Open MPI's (libmpi.so.40: versions 3, 4 and 5), where
 * communicators, datatypes and requests are pointers; a build needs no MPI, and a program starts without.
 */
#ifndef TANDEM_PARALLEL_MPI_LIBRARY_H
#define TANDEM_PARALLEL_MPI_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

enum { MPI_ANY = -1, MPI_SERIALIZED = 2, MPI_OK = 0, MPI_TEXT_BYTES = 256 };

typedef void *mpi_comm, *mpi_request;

typedef struct mpi_library {
    int (*init_thread)(int *argc, char ***argv, int required, int *provided);
    int (*initialized)(int *flag);
    int (*finalized)(int *flag);
    int (*finalize)(void);
    int (*comm_dup)(mpi_comm comm, mpi_comm *out);
    int (*comm_size)(mpi_comm comm, int *size);
    int (*comm_rank)(mpi_comm comm, int *rank);
    int (*comm_set_errhandler)(mpi_comm comm, void *handler);
    int (*isend)(const void *at, int count, void *type, int to, int tag, mpi_comm comm, mpi_request *out);
    int (*irecv)(void *at, int count, void *type, int from, int tag, mpi_comm comm, mpi_request *out);
    int (*test)(mpi_request *request, int *flag, void *status); /* status NULL: not wanted */
    int (*error_string)(int code, char *text, int *length);
    mpi_comm world;
    void *byte, *errors_return;
} mpi_library;

/* false: `message` says what is missing and what to install. The library stays loaded: its threads and handlers live on. */
bool mpi_library_load(const char *file, mpi_library *out, char *message, size_t room);

#endif
