/* See faults.cu. */
#ifndef TANDEM_TESTS_FAULTS_H
#define TANDEM_TESTS_FAULTS_H

#include <cuda_runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FAULT_THREADS = 64 };
typedef enum fault {
    FAULT_NONE, FAULT_ENDED, FAULT_ELSEWHERE, FAULT_MASK, FAULT_BARRIER, FAULT_THREADS_TOO_MANY, FAULT_SHARED, FAULT_COPY, FAULT_COPY_NONE
} fault;
/* out, ones: FAULT_THREADS elements. */
void fault_launch(fault which, float *out, const float *ones, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
