/* Inside parallel/: the functions of NCCL that the transport needs, from a library loaded at run time.
 *
 * Types and numbers are those of nccl.h, which does not change what it has (NCCL 2.23 and newer): a build needs no NCCL and no CUDA for
 * them, and a program starts without. Where a build has nccl.h, tests/nccl_header.c compares. Queues are cudaStream_t.
 */
#ifndef TANDEM_PARALLEL_NCCL_LIBRARY_H
#define TANDEM_PARALLEL_NCCL_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

typedef struct ncclComm *nccl_comm;
typedef struct nccl_unique_id { char internal[128]; } nccl_unique_id;

/* Results; below NCCL_IN_PROGRESS and not NCCL_SUCCESS: errors. */
enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 };
/* Dtypes, and the one way to reduce. */
enum { NCCL_U8 = 1, NCCL_I32 = 2, NCCL_I64 = 4, NCCL_F16 = 6, NCCL_F32 = 7, NCCL_F64 = 8, NCCL_BF16 = 9, NCCL_SUM = 0 };

/* The beginning of ncclConfig_t, as far as 2.14 had it: what is behind it a library takes from its defaults. */
typedef struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
} nccl_config;
#define NCCL_CONFIG { .size = sizeof(nccl_config), .magic = 0xcafebeef, .version = 21400 }

enum { NCCL_LEAST_VERSION = 22300 }; /* from it on giving up a communicator that does not block returns when that is done */

/* A window: memory of all ranks of a communicator that each reaches; how it is registered, each rank's at the same offsets. */
typedef struct ncclWindow_vidmem *nccl_window;
enum { NCCL_WINDOW_SYMMETRIC = 1 };

typedef struct nccl_library {
    int (*get_version)(int *version);
    int (*get_unique_id)(nccl_unique_id *id);
    int (*comm_init_rank_config)(nccl_comm *comm, int ranks, nccl_unique_id id, int rank, nccl_config *config);
    int (*comm_finalize)(nccl_comm comm);
    int (*comm_destroy)(nccl_comm comm);
    int (*comm_abort)(nccl_comm comm);
    int (*comm_get_async_error)(nccl_comm comm, int *result);
    const char *(*get_error_string)(int result);
    const char *(*get_last_error)(nccl_comm comm);
    int (*all_reduce)(const void *in, void *out, size_t count, int dtype, int reduction, nccl_comm comm, void *queue);
    int (*reduce_scatter)(const void *in, void *out, size_t count, int dtype, int reduction, nccl_comm comm, void *queue);
    int (*all_gather)(const void *in, void *out, size_t count, int dtype, nccl_comm comm, void *queue);
    int (*broadcast)(const void *in, void *out, size_t count, int dtype, int root, nccl_comm comm, void *queue);
    int (*all_to_all)(const void *in, void *out, size_t count, int dtype, nccl_comm comm, void *queue); /* NULL before 2.28 */
    int (*send)(const void *at, size_t count, int dtype, int to, nccl_comm comm, void *queue);
    int (*receive)(void *at, size_t count, int dtype, int from, nccl_comm comm, void *queue);
    /* By all ranks of the communicator, and by each for itself; NULL before 2.27. */
    int (*comm_window_register)(nccl_comm comm, void *memory, size_t bytes, nccl_window *window, int flags);
    int (*comm_window_deregister)(nccl_comm comm, nccl_window window);
    int (*group_start)(void);
    int (*group_end)(void);
    int version;                              /* 22809 is 2.28.9 */
} nccl_library;

/* false: `message` says what is missing or too old, and what to install. The library stays loaded: its threads live on. */
bool nccl_library_load(const char *file, nccl_library *out, char *message, size_t room);
/* "2.28.9" */
enum { NCCL_VERSION_BYTES = 40 };
const char *nccl_version_text(int version, char to[NCCL_VERSION_BYTES]);

#endif
