/* Those functions' types, and how they are found. */
#ifndef TANDEM_TESTS_CUDA_TYPEDEFS_H
#define TANDEM_TESTS_CUDA_TYPEDEFS_H

#include <cuda.h>

typedef CUresult (*PFN_cuGetErrorString_v6000)(CUresult status, const char **text);
typedef CUresult (*PFN_cuDeviceGetAttribute_v2000)(int *to, CUdevice_attribute attribute, CUdevice device);
typedef CUresult (*PFN_cuMemAddressReserve_v10020)(CUdeviceptr *to, size_t bytes, size_t alignment, CUdeviceptr at, unsigned long long flags);
typedef CUresult (*PFN_cuMemAddressFree_v10020)(CUdeviceptr at, size_t bytes);
typedef CUresult (*PFN_cuMemGetAllocationGranularity_v10020)(size_t *to, const CUmemAllocationProp *of, CUmemAllocationGranularity_flags which);
typedef CUresult (*PFN_cuMemCreate_v10020)(CUmemGenericAllocationHandle *to, size_t bytes, const CUmemAllocationProp *of, unsigned long long flags);
typedef CUresult (*PFN_cuMemRelease_v10020)(CUmemGenericAllocationHandle memory);
typedef CUresult (*PFN_cuMemMap_v10020)(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle memory, unsigned long long flags);
typedef CUresult (*PFN_cuMemUnmap_v10020)(CUdeviceptr at, size_t bytes);
typedef CUresult (*PFN_cuMemSetAccess_v10020)(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *to, size_t count);

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
enum { cudaEnableDefault = 0 };
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **to, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found);

#endif
