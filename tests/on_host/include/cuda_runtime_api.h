/* The part of CUDA's runtime that Tandem uses, on the host: device memory is the host's, a stream does at once what it is given or when
 * the host waits, and a graph is a list of that. tests/on_host/runtime.c has the functions. */
#ifndef TANDEM_TESTS_CUDA_RUNTIME_API_H
#define TANDEM_TESTS_CUDA_RUNTIME_API_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct uint2 { unsigned x, y; } __attribute__((aligned(8))) uint2;
typedef struct uint3 { unsigned x, y, z; } uint3;
typedef struct uint4 { unsigned x, y, z, w; } __attribute__((aligned(16))) uint4;
typedef struct float2 { float x, y; } __attribute__((aligned(8))) float2;
typedef struct float4 { float x, y, z, w; } __attribute__((aligned(16))) float4;
typedef struct dim3 {
    unsigned x, y, z;
#ifdef __cplusplus
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
#endif
} dim3;

typedef enum cudaError {
    cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = 35, cudaErrorNoDevice = 100, cudaErrorNotReady = 600, cudaErrorLaunchFailure = 719,
} cudaError_t;
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3, cudaMemcpyDefault = 4 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
enum { cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2, cudaHostAllocDefault = 0, cudaHostAllocPortable = 1,
       cudaHostAllocMapped = 2, cudaEventRecordDefault = 0, cudaEventRecordExternal = 1 };
#define CUDART_CB
typedef void (*cudaHostFn_t)(void *user);

typedef struct on_host_stream *cudaStream_t;
typedef struct on_host_event *cudaEvent_t;
typedef struct on_host_graph *cudaGraph_t, *cudaGraphExec_t;
typedef struct on_host_nothing *cudaKernel_t, *cudaGraphNode_t;
typedef struct cudaKernelNodeParams {
    void *func;
    dim3 gridDim, blockDim;
    void **kernelParams;
} cudaKernelNodeParams;
struct cudaDeviceProp {
    char name[256];
    int multiProcessorCount, l2CacheSize, major, minor;
    char uuid[16];
};

const char *cudaGetErrorString(cudaError_t status);
cudaError_t cudaGetLastError(void);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *to, int device);
cudaError_t cudaDeviceGetPCIBusId(char *to, int room, int device);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);
cudaError_t cudaHostAlloc(void **to, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaMalloc(void **to, size_t bytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaMemset(void *to, int value, size_t bytes);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_row, const void *from, size_t from_row, size_t bytes, size_t rows, enum cudaMemcpyKind kind,
                              cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *to, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *to, unsigned flags, int priority);
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreate(cudaEvent_t *to);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *to, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *to);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *to, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *to, cudaGraph_t graph, const cudaGraphNode_t *after, size_t count, const cudaKernelNodeParams *launch);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph);
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream);
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user);
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
