/* Kernels whose source is made while a program is planned: NVRTC compiles it for the context's device. What is compiled is kept in the
 * context and on disk (device_cache.h), by its source, the architecture and NVRTC's version.
 *
 * NVRTC is loaded when the first kernel is asked for. That it is not there, or cannot compile for the device, is an error that says so.
 */
#ifndef TANDEM_CORE_DEVICE_NVRTC_H
#define TANDEM_CORE_DEVICE_NVRTC_H

#include <cuda_runtime_api.h>

#include "core/internal.h"

/* Machine code of `source` for architecture 10 major + minor; needs no GPU. Owned by the caller: td_free(td, code, *bytes, "host").
 * NULL and an error. */
void *td_nvrtc_compile(td_context *td, const char *source, int architecture, size_t *bytes);

/* The kernel `name` of `source`, ready to be launched on the context's device; it lives until td_nvrtc_close. NULL and an error; without an
 * error the chain is interpreted. */
cudaKernel_t td_nvrtc_kernel(td_context *td, const char *source, const char *name);

/* Unloads every kernel. Nothing that launches them may be left. */
void td_nvrtc_close(td_context *td);

#endif
