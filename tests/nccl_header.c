/* What parallel/nccl_library.h declares of NCCL is what nccl.h has, where a build finds that. */
#include <nccl.h>

#include "parallel/nccl_library.h"

_Static_assert(sizeof(nccl_unique_id) == sizeof(ncclUniqueId) && sizeof(nccl_comm) == sizeof(ncclComm_t), "handles");
_Static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int) && sizeof(ncclRedOp_t) == sizeof(int), "numbers are int");
_Static_assert((int)NCCL_SUCCESS == (int)ncclSuccess && (int)NCCL_IN_PROGRESS == (int)ncclInProgress, "results");
_Static_assert((int)NCCL_SUM == (int)ncclSum, "reductions");
_Static_assert((int)NCCL_U8 == (int)ncclUint8 && (int)NCCL_I32 == (int)ncclInt32 && (int)NCCL_I64 == (int)ncclInt64 &&
                   (int)NCCL_F16 == (int)ncclFloat16 && (int)NCCL_F32 == (int)ncclFloat32 && (int)NCCL_F64 == (int)ncclFloat64 &&
                   (int)NCCL_BF16 == (int)ncclBfloat16, "dtypes");
_Static_assert(offsetof(nccl_config, size) == offsetof(ncclConfig_t, size) && offsetof(nccl_config, magic) == offsetof(ncclConfig_t, magic) &&
                   offsetof(nccl_config, version) == offsetof(ncclConfig_t, version) &&
                   offsetof(nccl_config, blocking) == offsetof(ncclConfig_t, blocking), "the beginning of the configuration");

/* Each function takes and gives what it is declared to, but for enums, which are int, and queues, which are pointers. */
#define GIVES(name, ...) _Static_assert(__builtin_types_compatible_p(__typeof__(&nccl##name), ncclResult_t (*)(__VA_ARGS__)), #name)
GIVES(GetVersion, int *);
GIVES(GetUniqueId, ncclUniqueId *);
GIVES(CommInitRankConfig, ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
GIVES(CommFinalize, ncclComm_t);
GIVES(CommDestroy, ncclComm_t);
GIVES(CommAbort, ncclComm_t);
GIVES(CommGetAsyncError, ncclComm_t, ncclResult_t *);
GIVES(AllReduce, const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
GIVES(ReduceScatter, const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
GIVES(AllGather, const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
GIVES(Broadcast, const void *, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
GIVES(Send, const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
GIVES(Recv, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
GIVES(GroupStart);
GIVES(GroupEnd);
#if NCCL_VERSION_CODE >= 22800
GIVES(AlltoAll, const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
#endif
#if NCCL_VERSION_CODE >= 22700
_Static_assert(sizeof(nccl_window) == sizeof(ncclWindow_t) && (int)NCCL_WINDOW_SYMMETRIC == NCCL_WIN_COLL_SYMMETRIC, "windows");
GIVES(CommWindowRegister, ncclComm_t, void *, size_t, ncclWindow_t *, int);
GIVES(CommWindowDeregister, ncclComm_t, ncclWindow_t);
#endif
_Static_assert(__builtin_types_compatible_p(__typeof__(&ncclGetErrorString), const char *(*)(ncclResult_t)), "GetErrorString");
_Static_assert(__builtin_types_compatible_p(__typeof__(&ncclGetLastError), const char *(*)(ncclComm_t)), "GetLastError");
