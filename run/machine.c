/* Machines: a few that are described here, a file, and this one. */
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "run/machine.h"

/* ---- By name
 *
 * H200: products and memory as measured on one (bf16 790 TFLOP/s on random data, f32 51, 4.3 TB/s read and written); f64 from NVIDIA's
 * data sheet (SXM, without sparsity). Links inside a host: bus bandwidth of reduce-scatter and all-gather measured at 100 MB without
 * multicast, on 2 and on 4; 8 are taken to do as 4. Small collectives were measured at about 40 us on 4. H100, A100: data sheets of the SXM
 * versions with 80 GB, NVLink one way. Latencies of hops (3.4 us NVLink, 9.6 us network) are those by which NVIDIA's library of collectives
 * chooses its rings. Across hosts: one adapter a device, 400 Gb/s (A100: 200 Gb/s). To the host: PCI Express 5.0 x16 (A100: 4.0), of whose
 * 63 GB/s one way seven eighths are taken to arrive; a host's memory, of two sockets with eight channels of DDR5-4800 (A100: DDR4-3200), is
 * shared by its ranks. What calls reach of the peaks is fitted to the steps and profiles of seven models on one H200 (bench/RESULTS.md):
 * products, limited by power, 94 %, attention 31 % (heads of 64; wider ones do better), what only moves memory 83 %; four
 * tenths of a product's traffic come on top of its computing; a call of a graph takes 2.7 us more. NVIDIA's library is taken to have 24 blocks for
 * a collective, each on a multiprocessor. A data sheet's peaks are a quarter (FLOP/s) and a
 * ninth (bytes/s) above what is measured. */
#define HOPS(inside_rate, across_rate)                                                               \
    .inside = { (inside_rate), 3.4e-6 }, .across = { (across_rate), 9.6e-6 }, .collective_s = 20e-6, \
    .call_s = 2.7e-6, .collective_multiprocessors = 24, .overlaps = true
/* Bytes a second to the host, and of the memory of a host with so many ranks. */
#define HOST(link, memory, ranks) .host = { (link), 10e-6 }, .host_bytes_per_s = (memory) / (ranks)
#define GPU(name_, major_, minor_, multiprocessors_, l2_mib)                                                                       \
    .gpu = { .name = "NVIDIA " name_, .major = (major_), .minor = (minor_), .multiprocessors = (multiprocessors_),                 \
             .l2_bytes = (int64_t)(l2_mib) << 20, .page_bytes = 2 << 20 }
/* Of a data sheet's peaks. */
#define SHEET .efficiency = 0.75, .attention = 0.25, .traffic = 0.74, .unhidden = 0.4
#define H200_GPU GPU("H200", 9, 0, 132, 60)
#define H200                                                                                                                       \
    H200_GPU,                                                                                                                      \
    .peak = { .flops = { [TD_F32] = 51e12, [TD_F64] = 67e12, [TD_BF16] = 790e12, [TD_F16] = 790e12 }, .bytes = 4.3e12 },           \
    .memory_bytes = 141000000000, .efficiency = 0.94, .attention = 0.31, .traffic = 0.83, .unhidden = 0.4
static const run_machine machines[] = {
    { .name = "h200x8", H200, .host_ranks = 8, HOPS(280e9, 50e9), HOST(55e9, 614e9, 8),
      .source = "8 H200 a host: measured products, memory and links of 4, one 400 Gb/s adapter each" },
    { .name = "h200x4", H200, .host_ranks = 4, HOPS(280e9, 50e9), HOST(55e9, 614e9, 4),
      .source = "4 H200 a host: measured products, memory and links, one 400 Gb/s adapter each" },
    { .name = "h200x2", H200, .host_ranks = 2, HOPS(212e9, 50e9), HOST(55e9, 614e9, 2),
      .source = "2 H200 a host: measured products, memory and links, one 400 Gb/s adapter each" },
    { .name = "h100x8", GPU("H100 80GB HBM3", 9, 0, 132, 50), .host_ranks = 8, HOPS(450e9, 50e9), HOST(55e9, 614e9, 8), .memory_bytes = 80000000000, SHEET,
      .peak = { .flops = { [TD_F32] = 67e12, [TD_F64] = 67e12, [TD_BF16] = 989e12, [TD_F16] = 989e12 }, .bytes = 3.35e12 },
      .source = "8 H100 SXM 80 GB a host: data sheet, one 400 Gb/s adapter each" },
    { .name = "a100x8", GPU("A100-SXM4-80GB", 8, 0, 108, 40), .host_ranks = 8, HOPS(300e9, 25e9), HOST(27e9, 410e9, 8), .memory_bytes = 80000000000, SHEET,
      .peak = { .flops = { [TD_F32] = 19.5e12, [TD_F64] = 19.5e12, [TD_BF16] = 312e12, [TD_F16] = 312e12 }, .bytes = 2.039e12 },
      .source = "8 A100 SXM 80 GB a host: data sheet, one 200 Gb/s adapter each" },
};
enum { MACHINES = sizeof machines / sizeof *machines };

void run_machine_names(char *to, size_t room)
{
    size_t at = 0;
    for (int i = 0; i < MACHINES && at < room; i++) at += (size_t)snprintf(to + at, room - at, "%s, ", machines[i].name);
    if (at < room) snprintf(to + at, room - at, "cpu");
}

/* ---- From a file */

typedef struct member {
    const char *name;
    double *to;
    double factor;                /* from the file's unit */
    bool needed, zero;            /* must be there; may be 0 */
} member;

static bool refuse(run_loop *run, const char *path, const char *name, const char *what)
{
    run_fail_file(run, "--machine %.300s: \"%s\" %s", path, name, what);
    return false;
}

/* Reads the numbers of an object; members that `others` (with blanks around each) names are left alone. */
static bool read_numbers(run_loop *run, const char *path, const td_json *object, const member *table, int count, const char *others)
{
    for (const td_json *m = object->first; m; m = m->next) {
        char word[80];
        int known = -1;
        for (int i = 0; i < count; i++)
            if (!strcmp(table[i].name, m->name)) known = i;
        snprintf(word, sizeof word, " %.70s ", m->name);
        if (known < 0 && !strstr(others, word)) return refuse(run, path, m->name, "is not known");
        if (known < 0) continue;
        bool fits = m->kind == TD_JSON_NUMBER && isfinite(m->number) && (m->number > 0 || (table[known].zero && m->number == 0));
        if (!fits) return refuse(run, path, m->name, table[known].zero ? "must be a number of at least 0" : "must be a number above 0");
        *table[known].to = m->number * table[known].factor;
    }
    for (int i = 0; i < count; i++)
        if (table[i].needed && !td_json_get(object, table[i].name)) return refuse(run, path, table[i].name, "is missing");
    return true;
}

static bool read_object(run_loop *run, const char *path, const td_json *root, const char *name, bool needed, const td_json **to)
{
    *to = td_json_get(root, name);
    if (!*to && needed) return refuse(run, path, name, "is missing");
    if (*to && (*to)->kind != TD_JSON_OBJECT) return refuse(run, path, name, "must be an object");
    return true;
}

static bool read_link(run_loop *run, const char *path, const td_json *root, const char *name, bool needed, run_link *to)
{
    const td_json *object;
    const member table[] = { { "bytes_per_s", &to->bytes_per_s, 1, true, false }, { "latency_us", &to->latency_s, 1e-6, false, true } };
    if (!read_object(run, path, root, name, needed, &object)) return false;
    return !object || read_numbers(run, path, object, table, 2, "");
}

static bool read_host(run_loop *run, const char *path, const td_json *root, run_machine *to)
{
    const td_json *object;
    const member table[] = { { "bytes_per_s", &to->host.bytes_per_s, 1, true, false }, { "latency_us", &to->host.latency_s, 1e-6, false, true },
                             { "memory_bytes_per_s", &to->host_bytes_per_s, 1, true, false } };
    if (!read_object(run, path, root, "host", false, &object)) return false;
    return !object || read_numbers(run, path, object, table, 3, "");
}

static bool read_flops(run_loop *run, const char *path, const td_json *root, double *flops)
{
    const td_json *object;
    const member table[] = { { "f32", &flops[TD_F32], 1, false, false }, { "f64", &flops[TD_F64], 1, false, false },
                             { "bf16", &flops[TD_BF16], 1, false, false }, { "f16", &flops[TD_F16], 1, false, false } };
    if (!read_object(run, path, root, "flops", true, &object) || !read_numbers(run, path, object, table, 4, "")) return false;
    if (flops[TD_F32] > 0 || flops[TD_F64] > 0) return true;
    return refuse(run, path, "flops", "needs f32 or f64, which every step computes in somewhere");
}

static bool read_flag(run_loop *run, const char *path, const td_json *root, const char *name, bool *to)
{
    const td_json *value = td_json_get(root, name);
    if (value && value->kind != TD_JSON_BOOLEAN) return refuse(run, path, name, "must be true or false");
    if (value) *to = value->boolean;
    return true;
}

/* What is not said is as on an H200. */
static bool read_gpu(run_loop *run, const char *path, const td_json *root, td_gpu *to)
{
    const td_json *object;
    const run_machine like = { H200_GPU };
    double capability = 9, count = 132, l2 = (double)like.gpu.l2_bytes, page = (double)like.gpu.page_bytes;
    const member table[] = { { "compute_capability", &capability, 1, false, false }, { "multiprocessors", &count, 1, false, false },
                             { "l2_bytes", &l2, 1, false, false }, { "page_bytes", &page, 1, false, false } };
    if (!read_object(run, path, root, "gpu", false, &object) || !object) return !run_failed(run);
    if (!read_numbers(run, path, object, table, 4, " name ")) return false;
    const char *name = td_json_get_string(object, "name");
    if (!name || !*name) return refuse(run, path, "name", "is missing from \"gpu\": what the GPU calls itself, as NVIDIA H200");
    if (capability > 99 || count > 65536 || l2 > 1e12 || page > 1e12 || page < 1) return refuse(run, path, "gpu", "says more than a GPU can have");
    *to = (td_gpu){ .major = (int)(capability + 0.01), .minor = (int)lround(10 * (capability - floor(capability + 0.01))),
                    .multiprocessors = (int)count, .l2_bytes = (int64_t)l2, .page_bytes = (int64_t)page };
    snprintf(to->name, sizeof to->name, "%.63s", name);
    return true;
}

static bool read_machine(run_loop *run, const char *path, const td_json *root, run_machine *to)
{
    double memory = 0, ranks = 1, multiprocessors = 0;
    const member table[] = {
        { "memory_bytes", &memory, 1, true, false },         { "memory_bytes_per_s", &to->peak.bytes, 1, true, false },
        { "efficiency", &to->efficiency, 1, false, false },  { "call_us", &to->call_s, 1e-6, false, true },
        { "attention_efficiency", &to->attention, 1, false, false }, { "memory_efficiency", &to->traffic, 1, false, false },
        { "unhidden", &to->unhidden, 1, false, true },
        { "collective_us", &to->collective_s, 1e-6, false, true }, { "host_ranks", &ranks, 1, true, false },
        { "collective_multiprocessors", &multiprocessors, 1, false, false },
    };
    if (root->kind != TD_JSON_OBJECT) return refuse(run, path, "{", "must be what the file begins with");
    if (!read_numbers(run, path, root, table, sizeof table / sizeof *table, " name source flops inside across host overlap gpu ")) return false;
    if (ranks != floor(ranks) || ranks > 65536) return refuse(run, path, "host_ranks", "must be a whole number of at most 65536");
    if (to->efficiency > 1) return refuse(run, path, "efficiency", "must be at most 1");
    if (to->attention > 1) return refuse(run, path, "attention_efficiency", "must be at most 1");
    if (to->traffic > 1) return refuse(run, path, "memory_efficiency", "must be at most 1");
    if (to->unhidden > 1) return refuse(run, path, "unhidden", "must be at most 1");
    if (multiprocessors != floor(multiprocessors) || multiprocessors > 65536)
        return refuse(run, path, "collective_multiprocessors", "must be a whole number of at most 65536");
    if (memory > 9e18) return refuse(run, path, "memory_bytes", "is more than there can be");
    to->memory_bytes = (int64_t)memory;
    to->host_ranks = (int)ranks;
    to->collective_multiprocessors = (int)multiprocessors;
    if (!read_flops(run, path, root, to->peak.flops) || !read_link(run, path, root, "inside", true, &to->inside)) return false;
    to->across = to->inside;
    if (!read_link(run, path, root, "across", false, &to->across) || !read_host(run, path, root, to) ||
        !read_flag(run, path, root, "overlap", &to->overlaps) || !read_gpu(run, path, root, &to->gpu))
        return false;
    const char *name = td_json_get_string(root, "name"), *source = td_json_get_string(root, "source");
    snprintf(to->name, sizeof to->name, "%s", name ? name : strrchr(path, '/') ? strrchr(path, '/') + 1 : path);
    snprintf(to->source, sizeof to->source, "%s", source ? source : path);
    return true;
}

static bool machine_from_file(run_loop *run, const char *path, run_machine *to)
{
    td_json_document *document = td_json_read(run->td, path);
    *to = (run_machine){ .efficiency = 1, .overlaps = true };
    bool read = document && read_machine(run, path, td_json_root(document), to);
    td_json_close(document);
    return read;
}

/* ---- This machine: its cores and memory are shared by all ranks, and collectives are computed by them too */

/* With the threads of all ranks together. */
static bool measure_peak(run_loop *run, td_machine *to)
{
    td_context *td = td_open(&(td_options){ .dtype = td_compute_dtype(run->td), .threads = run_threads(run) });
    bool good = td_machine_measure(td, 1, to);
    if (!good) td_fail(run->td, td_error(td), "%s", td_error_text(td));
    td_close(td);
    return good;
}

static bool measured(run_loop *run, run_machine *to)
{
    par_link link = { 0 };
    double ranks = run->ranks;
    *to = (run_machine){ .name = "cpu", .source = "this machine, measured now, memory beyond its caches", .efficiency = 1,
                         .host_ranks = run->ranks };
    if (!measure_peak(run, &to->peak) || (run->ranks > 1 && !par_measure(run->td, run->ranks, &link))) return false;
    for (int d = 0; d < TD_DTYPES; d++) to->peak.flops[d] /= ranks;
    to->peak.bytes /= ranks;
    to->memory_bytes = (int64_t)((double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) / ranks);
    to->collective_s = link.latency_s;
    to->inside.bytes_per_s = run->ranks > 4 ? 4 * link.bytes_per_s / ranks : link.bytes_per_s;
    to->across = to->inside;
    to->host.bytes_per_s = to->peak.bytes / 2; /* read and written */
    to->host_bytes_per_s = to->peak.bytes;
    return true;
}

/* ---- Which */

static bool is_this(const char *name) { return name && !strcmp(name, "cpu"); }

/* One that is described. */
static bool find_machine(run_loop *run, const char *name, run_machine *to)
{
    char names[256];
    for (int i = 0; i < MACHINES; i++) {
        if (strcmp(machines[i].name, name)) continue;
        *to = machines[i];
        return true;
    }
    if (strchr(name, '/') || strchr(name, '.') || access(name, R_OK) == 0) return machine_from_file(run, name, to);
    run_machine_names(names, sizeof names);
    run_fail_usage(run, "--machine '%.80s' is not known: it is one of %s, or a JSON file that describes one", name, names);
    return false;
}

bool run_machine_gpu(run_loop *run, td_gpu *to, bool *said)
{
    const char *name = run_flags_text(&run->flags, "machine");
    run_machine m = { H200_GPU };
    *to = m.gpu;
    *said = false;
    if (!name || is_this(name)) return true;
    if (!find_machine(run, name, &m)) return false;
    *said = *m.gpu.name != 0;
    if (*said) *to = m.gpu;
    return true;
}

bool run_machine_of(run_loop *run, run_machine *to)
{
    const char *name = run_flags_text(&run->flags, "machine");
    *to = (run_machine){ .host_ranks = run->ranks };
    if (name && !(is_this(name) ? measured(run, to) : find_machine(run, name, to))) return false;
    int64_t host_ranks = run_flags_whole(&run->flags, "host-ranks");
    if (host_ranks) to->host_bytes_per_s *= (double)to->host_ranks / (double)host_ranks;
    if (host_ranks) to->host_ranks = (int)host_ranks;
    return true;
}
