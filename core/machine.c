/* What the machine can do at best: the fastest of a few large matrix products, and a triad over memory beyond the caches; on a GPU a copy.
 * Products are of random numbers: of equal ones a GPU computes faster than it ever does in a step. */
#include "core/internal.h"

#include <unistd.h>

enum { LEAST_SIDE = 256, MOST_SIDE = 2048, GPU_LEAST_SIDE = 2048, GPU_MOST_SIDE = 8192, TRIES = 3, TRIADS = 4 };
static const int64_t LONG_ENOUGH_NS = 8000000; /* eight times the work takes at most a tenth of a second */

static void quiet(void *user, td_level level, const char *text) { (void)user, (void)level, (void)text; }

/* ---- Matrix products */

/* The product's task of the profile's last step. */
static bool last_product(const td_context *td, td_profile_event *out)
{
    for (int64_t i = td_profile_count(td) - 1; i >= 0; i--) {
        *out = td_profile_at(td, i);
        if (out->task && out->task->op == td_op_matmul.name) return true;
    }
    return false;
}

/* A square matrix of numbers in [-1/2, 1/2). */
static td_tensor matrix(td_context *td, int64_t side)
{
    td_tensor from_0 = td_uniform(td, TD_SHAPE(side, side));
    td_tensor half = td_scalar(td, 0.5);
    return td_sub(from_0, half);
}

/* One product of two square matrices, timed as any task is. 0 after an error. */
static int64_t time_product(td_context *td, int64_t side, int64_t *flops)
{
    td_profile_event e;
    td_tensor a = matrix(td, side);
    td_tensor b = matrix(td, side);
    td_keep(td_matmul(a, b));
    if (!td_step(td) || !last_product(td, &e)) return 0;
    *flops = e.task->flops;
    return e.end_ns - e.begin_ns;
}

static double best_product(td_context *td)
{
    double best = 0;
    int64_t ns = 0, flops = 0;
    int64_t least = td->device->is_gpu ? GPU_LEAST_SIDE : LEAST_SIDE, most = td->device->is_gpu ? GPU_MOST_SIDE : MOST_SIDE;
    td_profile_begin(td, 1);
    for (int64_t side = least; side <= most && ns < LONG_ENOUGH_NS; side *= 2)
        for (int t = 0; t < TRIES; t++) {
            ns = time_product(td, side, &flops);
            if (ns > 0 && 1e9 * (double)flops / (double)ns > best) best = 1e9 * (double)flops / (double)ns;
        }
    return best;
}

/* A context of its own leaves no plan in `of`. Where the larger products find no memory the smaller ones stand. */
static bool measure_products(td_context *of, td_dtype dtype, double *flops)
{
    td_context *td = td_open(&(td_options){ .dtype = dtype, .device = of->options.device, .threads = of->options.threads, .log = quiet });
    *flops = best_product(td);
    bool good = td_error(td) == TD_OK || (td_error(td) == TD_ERROR_MEMORY && *flops > 0);
    if (!good) td_fail(of, td_error(td), "measuring the machine: %.900s", td_error_text(td));
    td_close(td);
    return good;
}

/* ---- Memory */

typedef struct triad {
    double *a;
    const double *b, *c;
    double scale;
} triad;

static void triad_part(void *user, int64_t begin, int64_t end)
{
    const triad *t = user;
    for (int64_t i = begin; i < end; i++) t->a[i] = t->b[i] + t->scale * t->c[i];
}

static void touch_part(void *user, int64_t begin, int64_t end)
{
    double *memory = user;
    for (int64_t i = begin; i < end; i++) memory[i] = 1;
}

/* Twice the last cache, as far as that is known and reasonable. */
static int64_t buffer_bytes(int share)
{
    int64_t cache = sysconf(_SC_LEVEL3_CACHE_SIZE), least = 96 << 20, most = 640 << 20;
    int64_t bytes = cache < least / 2 ? least : 2 * cache > most ? most : 2 * cache;
    return bytes / share;
}

static bool measure_memory(td_context *td, int share, td_machine *out)
{
    int64_t count = buffer_bytes(share) / (3 * (int64_t)sizeof(double));
    size_t bytes = (size_t)(3 * count) * sizeof(double);
    double *memory = td_alloc(td, bytes, "host");
    if (!memory) return false;
    triad t = { memory, memory + count, memory + 2 * count, 0.5 };
    for (int i = 0; i < 3; i++) td_parallel_for(&td->run, count, 1, touch_part, memory + i * count); /* each by who reads it */
    for (int i = 0; i < TRIADS; i++) {
        int64_t begin = td_profile_now();
        td_parallel_for(&td->run, count, 1, triad_part, &t);
        double rate = 1e9 * (double)bytes / (double)(td_profile_now() - begin);
        if (rate > out->bytes) out->bytes = rate;
    }
    out->buffer_bytes = (int64_t)bytes;
    td_free(td, memory, bytes, "host");
    return true;
}

bool td_machine_measure(td_context *td, int share, td_machine *out)
{
    *out = (td_machine){ 0 };
    td_dtype product = td_compute_dtype(td), other = td_float(td);
    if (td_error(td) != TD_OK || !measure_products(td, product, &out->flops[product])) return false;
    if (other != product && !measure_products(td, other, &out->flops[other])) return false;
    return td->device->is_gpu ? td->device->measure(td, out) : measure_memory(td, share, out);
}
