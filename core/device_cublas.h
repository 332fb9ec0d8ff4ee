/* cuBLASLt as the files of CUDA's side share it: its functions, a described product, and the algorithms chosen for products.
 *
 * Of the ways that the library proposes for a product the fastest is taken: all are timed when the first plan that needs it runs for the
 * first time, on the operands and in the workspace of that very call, with a cache that holds none of them. A choice is kept in the
 * context and on disk (device_cache.h), by the product, the device and the library's version. A deterministic context takes the library's
 * first proposal whose sums' order is not open. So does a product that several ranks make copies of, which must stay equal; of its own part
 * of a value each rank makes what is fastest on its GPU.
 *
 * What is asked for beside a product is made by the library's epilogues only where that is faster than the product and a kernel behind it
 * by this very measure; never where nothing is timed.
 */
#ifndef TANDEM_CORE_DEVICE_CUBLAS_H
#define TANDEM_CORE_DEVICE_CUBLAS_H

#include <cublasLt.h>

#include "core/device_cuda.h"

#define TD_CUBLAS_FUNCTIONS(X) \
    X(Create) X(Destroy) X(Matmul) X(MatmulAlgoGetHeuristic) X(MatmulAlgoCheck) X(MatmulDescCreate) X(MatmulDescDestroy) \
    X(MatmulDescSetAttribute) X(MatrixLayoutCreate) X(MatrixLayoutDestroy) X(MatrixLayoutSetAttribute) X(MatmulPreferenceCreate) \
    X(MatmulPreferenceDestroy) X(MatmulPreferenceSetAttribute) X(GetStatusString) X(GetVersion)

enum { TD_CUBLAS_CANDIDATES = 12, TD_CUBLAS_RUNS = 4 };

/* The algorithms for one product that are still in question. */
typedef struct td_choice {
    struct td_choice *next;
    char *key;
    uint64_t hash;                            /* of the key */
    bool settled;                             /* one is left, or none: its rival is faster */
    int count;                                /* the library's first proposal comes first */
    cublasLtMatmulHeuristicResult_t found[TD_CUBLAS_CANDIDATES];
} td_choice;

struct td_cublas {
    void *library;
    cublasLtHandle_t handle;
    td_choice *choices;
    int64_t timing_ns;                        /* spent on timing so far */
    bool told;                                /* that it has been enough */
    cudaEvent_t begin[TD_CUBLAS_RUNS], end[TD_CUBLAS_RUNS];
    void *flush;                              /* memory to write over what a cache holds, while a plan runs for the first time */
#define TD_CUBLAS_MEMBER(name) __typeof__(&cublasLt##name) name;
    TD_CUBLAS_FUNCTIONS(TD_CUBLAS_MEMBER)
};

/* In the library's terms, see device_cublas.c. */
enum { TD_FIRST, TD_SECOND, TD_RESULT, TD_LAYOUTS };
typedef struct td_matmul {
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t layout[TD_LAYOUTS];
    bool has_rival;                           /* td_choice_settle is given one */
} td_matmul;
typedef struct td_matmul_call {
    const td_matmul *matmul;
    const void *first, *second;
    const void *added;                        /* of the result's layout; NULL: nothing */
    void *result, *workspace;
    size_t workspace_bytes;
    cudaStream_t stream;
} td_matmul_call;

/* False, and the context's error, which names `what` and the library's reason: status is no success. */
bool td_cublas_ok(td_context *td, cublasStatus_t status, const char *what);
cublasStatus_t td_cublas_matmul(td_context *td, const td_matmul_call *call, const cublasLtMatmulAlgo_t *algo);

/* The choice for a product of operands at multiples of `alignment` bytes; `product` tells it apart from all others. The context's. NULL:
 * the library has no way, or an error. */
td_choice *td_choice_for(td_context *td, const td_matmul *m, const char *product, bool timed, uint32_t alignment, int64_t workspace_bytes);
/* Whether algorithms for the product are timed: else the library's first proposal is taken. */
bool td_choice_is_timed(const td_context *td, const td_kernel *k);
/* What any algorithm still in question may need. */
int64_t td_choice_workspace(const td_choice *c);
/* Another way to the same results, on the call's stream. False after an error. */
typedef struct td_rival {
    bool (*run)(void *user);
    void *user;
} td_rival;
/* Times what is in question by making the call with each; not while a graph is captured. found[0] is the one left; count is 0 where the
 * rival, which may be NULL, is as fast. */
bool td_choice_settle(td_context *td, td_choice *c, const td_matmul_call *call, const td_rival *rival);
void td_choices_free(td_context *td);

#endif
