/* NVRTC, and the kernels that it compiled for a context: see device_nvrtc.h. */
#include "core/device_nvrtc.h"

#include "core/device_cache.h"
#include "core/device_cuda.h"

#include <dlfcn.h>
#include <nvrtc.h>
#include <stdio.h>
#include <string.h>

typedef struct nvrtc_kernel {
    uint64_t hash;                            /* of the source */
    char *source;
    cudaLibrary_t library;
    cudaKernel_t kernel;
} nvrtc_kernel;

struct td_nvrtc {
    void *library;
    __typeof__(&nvrtcVersion) version;
    __typeof__(&nvrtcGetErrorString) error_string;
    __typeof__(&nvrtcCreateProgram) create;
    __typeof__(&nvrtcDestroyProgram) destroy;
    __typeof__(&nvrtcCompileProgram) compile;
    __typeof__(&nvrtcGetProgramLogSize) log_size;
    __typeof__(&nvrtcGetProgramLog) log;
    __typeof__(&nvrtcGetCUBINSize) code_size;
    __typeof__(&nvrtcGetCUBIN) code;
    int major, minor;
    nvrtc_kernel *kernels;
    uint32_t count, room;
};

static const char without[] = "TD_PASSES=-fuse runs without kernels made at run time";

/* ---- The library ---------------------------------------------------------------------------------------- */

static bool load_functions(struct td_nvrtc *n)
{
    const struct {
        const char *name;
        void **to;
    } functions[] = {
        { "nvrtcVersion", (void **)&n->version },
        { "nvrtcGetErrorString", (void **)&n->error_string },
        { "nvrtcCreateProgram", (void **)&n->create },
        { "nvrtcDestroyProgram", (void **)&n->destroy },
        { "nvrtcCompileProgram", (void **)&n->compile },
        { "nvrtcGetProgramLogSize", (void **)&n->log_size },
        { "nvrtcGetProgramLog", (void **)&n->log },
        { "nvrtcGetCUBINSize", (void **)&n->code_size },
        { "nvrtcGetCUBIN", (void **)&n->code },
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!(*functions[i].to = dlsym(n->library, functions[i].name))) return false;
    return n->version(&n->major, &n->minor) == NVRTC_SUCCESS;
}

/* The context's NVRTC, loaded the first time; NULL and an error. */
static struct td_nvrtc *nvrtc_of(td_context *td)
{
    if (td->nvrtc) return td->nvrtc;
    struct td_nvrtc *n = td_alloc(td, sizeof *n, "host");
    if (!n) return NULL;
    *n = (struct td_nvrtc){ .library = NULL };
    char name[32];
    snprintf(name, sizeof name, "libnvrtc.so.%d", CUDART_VERSION / 1000);
    n->library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE); /* unloaded, it leaks what its C++ runtime holds */
    if (n->library && load_functions(n)) return td->nvrtc = n;
    const char *reason = dlerror();
    td_fail(td, TD_ERROR_DEVICE, "kernels cannot be compiled: %s cannot be loaded (%s): install CUDA's NVRTC of version %d; %s", name,
            reason ? reason : "it fails", CUDART_VERSION / 1000, without);
    if (n->library) dlclose(n->library);
    td_free(td, n, sizeof *n, "host");
    return NULL;
}

void td_nvrtc_close(td_context *td)
{
    struct td_nvrtc *n = td->nvrtc;
    if (!n) return;
    for (uint32_t i = 0; i < n->count; i++) {
        (void)cudaLibraryUnload(n->kernels[i].library); /* fails where the device does, and then holds nothing */
        td_free(td, n->kernels[i].source, strlen(n->kernels[i].source) + 1, "host");
    }
    td_free(td, n->kernels, n->room * sizeof *n->kernels, "host");
    dlclose(n->library);
    td_free(td, n, sizeof *n, "host");
    td->nvrtc = NULL;
}

/* ---- Compiling ------------------------------------------------------------------------------------------ */

/* Multiplications and additions of different operations are not to be contracted: each result is rounded. */
static const char *const options[] = { "--std=c++17", "--fmad=false", "--minimal" };
enum { OPTIONS = sizeof options / sizeof *options };

/* The first line of what NVRTC says of a program that does not compile. */
static void read_log(td_context *td, const struct td_nvrtc *n, nvrtcProgram program, char *to, size_t room)
{
    size_t bytes = 0;
    *to = 0;
    char *log = n->log_size(program, &bytes) == NVRTC_SUCCESS && bytes ? td_alloc(td, bytes, "host") : NULL;
    if (log && n->log(program, log) == NVRTC_SUCCESS) snprintf(to, room, "%.*s", (int)strcspn(log, "\n"), log);
    td_free(td, log, bytes, "host");
}

static void *compile(td_context *td, const struct td_nvrtc *n, nvrtcProgram program, int architecture, size_t *bytes)
{
    char target[48], log[256];
    const char *all[OPTIONS + 1];
    snprintf(target, sizeof target, "--gpu-architecture=sm_%d", architecture);
    memcpy(all, options, sizeof options);
    all[OPTIONS] = target;
    nvrtcResult result = n->compile(program, OPTIONS + 1, all);
    if (result == NVRTC_SUCCESS) result = n->code_size(program, bytes);
    void *code = result == NVRTC_SUCCESS ? td_alloc(td, *bytes, "host") : NULL;
    if (code) result = n->code(program, code);
    if (result == NVRTC_SUCCESS) return code;
    td_free(td, code, *bytes, "host");
    read_log(td, n, program, log, sizeof log);
    td_fail(td, TD_ERROR_DEVICE, "NVRTC %d.%d cannot compile a kernel for sm_%d (%s%s%s); %s", n->major, n->minor, architecture,
            n->error_string(result), *log ? ": " : "", log, without);
    return NULL;
}

void *td_nvrtc_compile(td_context *td, const char *source, int architecture, size_t *bytes)
{
    const struct td_nvrtc *n = nvrtc_of(td);
    nvrtcProgram program;
    *bytes = 0;
    if (!n) return NULL;
    nvrtcResult result = n->create(&program, source, "kernel.cu", 0, NULL, NULL);
    if (result != NVRTC_SUCCESS) {
        td_fail(td, TD_ERROR_DEVICE, "NVRTC %d.%d cannot begin a program (%s); %s", n->major, n->minor, n->error_string(result), without);
        return NULL;
    }
    void *code = compile(td, n, program, architecture, bytes);
    n->destroy(&program);
    return code;
}

/* ---- Kernels -------------------------------------------------------------------------------------------- */

static cudaError_t load_kernel(const void *code, const char *name, nvrtc_kernel *to)
{
    cudaError_t status = cudaLibraryLoadData(&to->library, code, NULL, NULL, 0, NULL, NULL, 0);
    if (status == cudaSuccess) {
        status = cudaLibraryGetKernel(&to->kernel, to->library, name);
        if (status != cudaSuccess) (void)cudaLibraryUnload(to->library);
    }
    (void)cudaGetLastError(); /* the caller has it */
    return status;
}

/* What is kept of an earlier run. */
static bool find_kept(td_context *td, const td_cache_key *key, const char *name, nvrtc_kernel *to)
{
    static const char elf[4] = "\177ELF"; /* anything else would be read as text, to the end of memory */
    size_t bytes = 0;
    void *code = td_cache_get(td, key, &bytes);
    bool loaded = code && bytes > sizeof elf && !memcmp(code, elf, sizeof elf) && load_kernel(code, name, to) == cudaSuccess;
    td_free(td, code, bytes, "host");
    return loaded;
}

static bool make_kernel(td_context *td, const td_cache_key *key, const char *source, const char *name, int architecture, nvrtc_kernel *to)
{
    size_t bytes;
    void *code = td_nvrtc_compile(td, source, architecture, &bytes);
    if (!code) return false;
    cudaError_t status = load_kernel(code, name, to);
    if (status == cudaSuccess)
        td_cache_keep(td, key, code, bytes);
    else
        td_fail(td, TD_ERROR_DEVICE, "a kernel compiled for sm_%d cannot be loaded (%s); %s", architecture, cudaGetErrorString(status),
                without);
    td_free(td, code, bytes, "host");
    return status == cudaSuccess;
}

static bool find_or_make(td_context *td, const char *source, const char *name, nvrtc_kernel *to)
{
    int architecture = 10 * td->gpu.major + td->gpu.minor;
    td_text key = { .td = td };
    td_text_add(&key, "nvrtc %d.%d sm_%d", td->nvrtc->major, td->nvrtc->minor, architecture);
    for (int i = 0; i < OPTIONS; i++) td_text_add(&key, " %s", options[i]);
    td_text_add(&key, "\n%s", source);
    if (td->error != TD_OK) {
        td_free(td, key.text, key.room, "host");
        return false;
    }
    td_cache_key kept = { .kind = "kernel", .data = key.text, .bytes = key.length };
    bool done = find_kept(td, &kept, name, to) || (td->error == TD_OK && make_kernel(td, &kept, source, name, architecture, to));
    td_free(td, key.text, key.room, "host");
    return done;
}

cudaKernel_t td_nvrtc_kernel(td_context *td, const char *source, const char *name)
{
    struct td_nvrtc *n = nvrtc_of(td);
    uint64_t hash = td_hash_text(source);
    for (uint32_t i = 0; n && i < n->count; i++)
        if (n->kernels[i].hash == hash && !strcmp(n->kernels[i].source, source)) return n->kernels[i].kernel;
    if (!n || !td_room(td, (void **)&n->kernels, &n->room, n->count + 1, sizeof *n->kernels, "host")) return NULL;
    nvrtc_kernel kernel = { .hash = hash, .source = td_copy_text(td, source, "host") };
    if (!kernel.source) return NULL;
    if (!find_or_make(td, source, name, &kernel)) {
        td_free(td, kernel.source, strlen(kernel.source) + 1, "host");
        return NULL;
    }
    n->kernels[n->count++] = kernel;
    return kernel.kernel;
}
