/* The context: options, memory, the first error, the log. */
#include "core/internal.h"
#include "core/onednn.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* What td_open returns when not even a context can be allocated: it has an error and nothing else. */
static const td_context out_of_memory = {
    .error = TD_ERROR_MEMORY,
    .error_text = "td_open: no memory for a context",
};

static bool is_writable(const td_context *td) { return td != &out_of_memory; }

/* ---- Memory */

enum { HUGE_PAGE = 2 << 20 };

/* What is large enough asks for huge pages, which spare streams through it misses of the TLB. The kernel may refuse. */
static void *default_get(void *user, size_t bytes, const char *kind)
{
    (void)user, (void)kind;
    void *memory = NULL;
    if (posix_memalign(&memory, bytes < HUGE_PAGE ? 64 : HUGE_PAGE, bytes) != 0) return NULL;
    if (bytes >= HUGE_PAGE) (void)madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

static void default_put(void *user, void *memory, size_t bytes, const char *kind)
{
    (void)user, (void)bytes, (void)kind;
    free(memory);
}

const td_allocator *td_allocator_default(void)
{
    static const td_allocator allocator = { .get = default_get, .put = default_put };
    return &allocator;
}

void *td_alloc(td_context *td, size_t bytes, const char *kind)
{
    if (!is_writable(td)) return NULL;
    void *memory = td->allocator.get(td->allocator.user, bytes ? bytes : 1, kind);
    if (!memory) td_fail(td, TD_ERROR_MEMORY, "out of memory: %zu bytes for %s could not be had", bytes, kind);
    return memory;
}

void td_free(td_context *td, void *memory, size_t bytes, const char *kind)
{
    if (memory) td->allocator.put(td->allocator.user, memory, bytes ? bytes : 1, kind);
}

bool td_grow(td_context *td, void **array, uint32_t *room, uint32_t needed, size_t item_bytes, const char *kind)
{
    if (needed <= *room) return true;
    uint32_t larger = *room ? *room : 16;
    while (larger < needed) larger += larger / 2 + 8;
    void *memory = td_alloc(td, larger * item_bytes, kind);
    if (!memory) return false;
    if (*array) memcpy(memory, *array, *room * item_bytes);
    td_free(td, *array, *room * item_bytes, kind);
    *array = memory;
    *room = larger;
    return true;
}

char *td_copy_text(td_context *td, const char *text, const char *kind)
{
    size_t bytes = strlen(text) + 1;
    char *copy = td_alloc(td, bytes, kind);
    if (copy) memcpy(copy, text, bytes);
    return copy;
}

/* ---- Errors and messages */

static void log_to_stderr(void *user, td_level level, const char *text)
{
    (void)user;
    static const char *const prefix[] = { "error: ", "warning: ", "", "" };
    fprintf(stderr, "%s%s\n", prefix[level], text);
}

void td_message(td_context *td, td_level level, const char *format, ...)
{
    if (!is_writable(td)) return;
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    td->options.log(td->options.log_user, level, text);
}

void td_fail(td_context *td, td_code code, const char *format, ...)
{
    if (!is_writable(td) || td->error != TD_OK) return;
    va_list args;
    va_start(args, format);
    vsnprintf(td->error_text, sizeof td->error_text, format, args);
    va_end(args);
    td->error = code;
    if (td->has_parallel && td->parallel.failed) td->parallel.failed(td->parallel.self, td->error_text);
}

td_code td_error(const td_context *td) { return td->error; }
const char *td_error_text(const td_context *td) { return td->error_text; }

/* ---- Options */

static const char *const stage_names[TD_STAGE_NAMES] = { "record", "precision", "grad", "simplify", "place",
                                                         "schedule", "fuse", "plan", "dbias", "gelu", "rows", "constants", "kept", "aside" };

/* Bits of the stages named in `list`, separated by commas, each behind `sign` if that is not 0. With a sign parts
 * of stages have names, too. */
static bool parse_stages(td_context *td, const char *what, const char *list, char sign, uint32_t *bits)
{
    for (const char *at = list; at && *at;) {
        size_t length = strcspn(at, ",");
        const char *name = at;
        size_t rest = length;
        bool signed_well = !sign || *at == sign;
        if (sign && signed_well) name++, rest--;
        int stage = 0, known = sign ? TD_STAGE_NAMES : TD_STAGES;
        while (stage < known && (strlen(stage_names[stage]) != rest || strncmp(stage_names[stage], name, rest))) stage++;
        if (stage == known || !signed_well) {
            td_fail(td, TD_ERROR_USAGE, "%s: '%.*s' is not one of %srecord precision grad simplify place schedule fuse plan%s",
                    what, (int)length, at, sign ? "'-' and " : "", sign ? ", or a part of fuse: dbias gelu rows constants kept aside; as in -fuse,-simplify" : "");
            return false;
        }
        *bits |= 1u << stage;
        at += length;
        if (*at == ',') at++;
    }
    return true;
}

bool td_stage_off(const td_context *td, td_stage stage) { return td->passes_off >> stage & 1; }
bool td_stage_printed(const td_context *td, td_stage stage) { return td->print >> stage & 1; }

static bool environment_flag(const char *name)
{
    const char *value = getenv(name);
    return value && *value && strcmp(value, "0");
}

/* Where OpenMP gives fewer than were asked for, these are the context's: libraries that count on more would compute a part only. */
static void read_threads(td_context *td)
{
    int asked = td->options.threads ? td->options.threads : (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (asked < 1) {
        td_fail(td, TD_ERROR_USAGE, "td_open: threads is %d, must be at least 1 (0 for all cores)", asked);
        return;
    }
    td->options.threads = td_threads_given(asked);
    if (td->options.threads < asked)
        td_message(td, TD_LOG_WARNING, "td_open: of %d threads OpenMP gives %d: OMP_THREAD_LIMIT, OMP_MAX_ACTIVE_LEVELS or a parallel region around limits it",
                   asked, td->options.threads);
}

static void read_options(td_context *td)
{
    td_options *o = &td->options;
    if (!o->device) o->device = "cpu";
    if (!o->print) o->print = getenv("TD_PRINT");
    if (!o->passes) o->passes = getenv("TD_PASSES");
    o->eager = o->eager || environment_flag("TD_EAGER");
    o->poison = o->poison || environment_flag("TD_POISON");
    read_threads(td);
    td->device = td->host = &td_cpu;
    bool gpu = !strncmp(o->device, "cuda", 4) && (!o->device[4] || o->device[4] == ':');
    if (!gpu) o->gpu = NULL;
    if (!o->workspace_bytes) o->workspace_bytes = gpu ? 1 << 30 : 256 << 20;
    if (!gpu && strcmp(o->device, "cpu"))
        td_fail(td, TD_ERROR_USAGE, "td_open: device '%s' is not known: \"cpu\", \"cuda\", or \"cuda:1\" for another GPU than the first", o->device);
    if (!gpu && o->dtype != TD_F32 && o->dtype != TD_F64 && o->dtype != TD_BF16 && o->dtype != TD_F16)
        td_fail(td, TD_ERROR_UNSUPPORTED, "td_open: dtype %s cannot be had on the CPU: use f32, bf16, f16 or f64", td_dtype_name(o->dtype));
    if (gpu && o->dtype != TD_F32 && o->dtype != TD_BF16 && o->dtype != TD_F16)
        td_fail(td, TD_ERROR_UNSUPPORTED, "td_open: dtype %s cannot be had on a GPU: use f32, bf16 or f16", td_dtype_name(o->dtype));
    if (!parse_stages(td, "TD_PRINT", o->print, 0, &td->print)) return;
    if (!parse_stages(td, "TD_PASSES", o->passes, '-', &td->passes_off)) return;
    uint32_t needed = 1u << TD_STAGE_GRAD | 1u << TD_STAGE_RECORD | 1u << TD_STAGE_PLACE | 1u << TD_STAGE_PLAN | 1u << TD_STAGE_PRECISION;
    if (td->passes_off & needed)
        td_fail(td, TD_ERROR_USAGE, "TD_PASSES: only -simplify, -schedule and -fuse can be left out, or of fuse -dbias, -gelu, -rows, -constants, "
                "-kept or -aside alone; the other stages are what gives the result");
}

static void open_gpu(td_context *td)
{
#ifdef TANDEM_CUDA
    const td_device *device = td->options.gpu ? td_described_open(td) : td_cuda_open(td);
    if (device) td->device = device;
#else
    td_fail(td, TD_ERROR_UNSUPPORTED, "td_open: device '%s' cannot be had: this build has no CUDA; configure it with -DTANDEM_CUDA=ON%s", td->options.device,
            td->options.gpu ? ", which needs CUDA's toolkit but no GPU: what kernels need is their own code's to say" : "");
#endif
}

td_context *td_open(const td_options *options)
{
    td_allocator allocator = options && options->allocator ? *options->allocator : *td_allocator_default();
    td_context *td = allocator.get(allocator.user, sizeof *td, "context");
    if (!td) return (td_context *)&out_of_memory; /* nothing writes to it: is_writable */
    memset(td, 0, sizeof *td);
    if (options) td->options = *options;
    td->allocator = allocator;
    td->options.allocator = NULL;
    if (!td->options.log) td->options.log = log_to_stderr;
    td->mesh = (td_mesh){ .world = 1 };
    td->recording.td = td;
    td->program = &td->recording;
    td->generation = 1;
    td_program_reset(&td->recording, td->generation);
    read_options(td);
    td->run = (td_run){ .td = td, .seed = td->options.seed, .threads = td->options.threads, .mesh = &td->mesh };
    if (td->error == TD_OK && strcmp(td->options.device, "cpu")) open_gpu(td);
    if (td->error == TD_OK && td_grow(td, (void **)&td->modules, &td->module_room, 1, sizeof *td->modules, "host")) {
        char *path = td_copy_text(td, "", "host");
        td->modules[0] = (td_module_entry){ .path = path, .hash = td_hash_text(""), .parent = TD_NONE };
        td->module_count = path != NULL;
    }
    return td;
}

/* Before each piece of owned memory; as large as the allocator's alignment. */
typedef struct td_owned {
    _Alignas(64) struct td_owned *next;
    size_t bytes;
} td_owned;

void td_close(td_context *td)
{
    if (!td || !is_writable(td)) return;
    td_profile_clear(td);
    td_step_close(td);
    td_state_close(td);
    td_program_drop(&td->recording);
    while (td->owned) td_disown(td, td->owned + 1);
    td->device->close(td);
    for (uint32_t m = 0; m < td->module_count; m++) td_free(td, td->modules[m].path, strlen(td->modules[m].path) + 1, "host");
    td_free(td, td->modules, td->module_room * sizeof *td->modules, "host");
    for (uint32_t r = 0; r < td->own_gradient_count; r++) td_free(td, td->own_gradients[r].name, strlen(td->own_gradients[r].name) + 1, "host");
    td_free(td, td->own_gradients, td->own_gradient_room * sizeof *td->own_gradients, "host");
    td_free(td, (void *)td->rules, td->rule_room * sizeof *td->rules, "host");
    td_free(td, td->inputs, td->input_room * sizeof *td->inputs, "data");
    td_free(td, td->slots, td->slot_room * sizeof *td->slots, "host");
    td_allocator allocator = td->allocator;
    allocator.put(allocator.user, td, sizeof *td, "context");
}

struct td_onednn *td_onednn_of(td_context *td)
{
    if (!td->onednn) td->onednn = td_onednn_open(td);
    return td->onednn;
}

void td_set_mode(td_context *td, td_mode mode)
{
    if (is_writable(td)) td->mode = mode;
}

td_mode td_get_mode(const td_context *td) { return td->mode; }
uint64_t td_seed(const td_context *td) { return td->options.seed; }
td_dtype td_float(const td_context *td) { return td->options.dtype == TD_F64 ? TD_F64 : TD_F32; }
int td_threads(const td_context *td) { return td->options.threads; }
int64_t td_updates(const td_context *td) { return td->run.update; }
td_report td_last_report(const td_context *td) { return td->report; }

const td_gpu *td_gpu_of(const td_context *td) { return td->device && td->device->is_gpu ? &td->gpu : NULL; }

int64_t td_device_bytes(const td_context *td, int64_t *most)
{
    if (most) *most = td->device_counts.most_bytes;
    return td->device_counts.bytes;
}

int64_t td_device_used_bytes(td_context *td) { return td->device && td->device->used ? td->device->used(td) : 0; }

void td_set_updates(td_context *td, int64_t updates)
{
    if (is_writable(td)) td->run.update = updates;
}

td_dtype td_compute_dtype(const td_context *td) { return td->options.dtype; }

bool td_is_eager(const td_context *td) { return td->options.eager; }
const char *td_passes(const td_context *td) { return td->options.passes ? td->options.passes : ""; }

void *td_own(td_context *td, size_t bytes)
{
    td_owned *o = td_alloc(td, sizeof *o + bytes, "host");
    if (!o) return NULL;
    memset(o, 0, sizeof *o + bytes);
    o->bytes = sizeof *o + bytes;
    o->next = td->owned;
    td->owned = o;
    return o + 1;
}

void td_disown(td_context *td, void *memory)
{
    for (td_owned **at = &td->owned; memory && *at; at = &(*at)->next) {
        td_owned *o = *at;
        if (o + 1 != memory) continue;
        *at = o->next;
        td_free(td, o, o->bytes, "host");
        return;
    }
}

const td_mesh *td_context_mesh(const td_context *td) { return &td->mesh; }
void *td_queue(const td_context *td) { return td->run.queue; }

/* Of what was free, less what the library's own code and handles will take. */
void td_limit_memory(td_context *td, int ranks)
{
    int64_t least = 256 << 20, most = 1 << 30, part = td->free_bytes / ranks, margin = part / 32;
    if (!part) return;
    if (margin < least) margin = least;
    if (margin > most) margin = most;
    td->options.memory_bytes = part > margin ? part - margin : 1;
}

bool td_set_parallel(td_context *td, const td_parallel *parallel)
{
    if (td->error != TD_OK) return false;
    if (td->has_parallel) {
        td_fail(td, TD_ERROR_USAGE, "td_set_parallel: the context has joined a world already");
        return false;
    }
    if (td->unit_count) {
        td_fail(td, TD_ERROR_USAGE, "td_set_parallel: state is laid out already; choose the strategy before the first step");
        return false;
    }
    td->parallel = *parallel;
    td->has_parallel = true;
    td->mesh = parallel->mesh;
    if (parallel->on_gpu > 1) td_limit_memory(td, parallel->on_gpu);
    if (parallel->transport && parallel->transport->reach) td_arenas_drop(td); /* of steps without state, which may have several pieces */
    td->run.transport = parallel->transport;
    return true;
}
