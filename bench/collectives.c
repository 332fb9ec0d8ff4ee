/* What collectives take between ranks, through the transport and the plans that training has, in a step's graph on GPUs, beside the library
 * that connects GPUs called bare:
 *
 *     collectives --ranks 2 --device cuda
 *     collectives --ranks 2 --sizes 4K,1M --dtype bf16 --json
 *
 * A step is a chain of calls of one kind. Sizes are those of the largest buffer that a rank has in a call. Rates are bus bandwidths: what a
 * rank sends where all stand in a ring, over the time of a call, so that they can be held against links whatever the kind and the number of
 * ranks. The two ways take turns; figures are medians over rounds.
 *
 * It starts its ranks itself, or is started as them by a launcher of the system.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <tandem/parallel.h>
#include <tandem/rewrite.h>

#include "core/json.h"

enum { SIZES = 64, MOST_ROUNDS = 99, MOST_CALLS = 30, STEP_BYTES = 16 << 20, MOST_STEPS = 20, WARM_STEPS = 4, ALIGN = 8 };

static const char help[] =
    "What collectives between ranks take.\n\nusage: collectives --ranks N [flags]\n\n"
    "  --ranks N             processes on this machine, unless a launcher has started them\n"
    "  --device cpu|cuda     where (cpu); cuda: a GPU for each rank, cuda:K: one for all, to try it\n"
    "  --sizes N,N,...       bytes, as 64K, 4M, 1G (1K to 16M; with a GPU each up to 1G)\n"
    "  --dtype NAME          f32, bf16 or f64 (f32)\n"
    "  --calls N             in a step, at most 30 (20)\n"
    "  --rounds N            (5)\n"
    "  --timeout S           seconds a rank waits for another (60)\n"
    "  --json                one object on stdout, and the table on stderr\n";

typedef struct options {
    int ranks, calls, rounds, size_count;
    const char *device;
    td_dtype dtype;
    int64_t size[SIZES];
    double timeout_s;
    bool json, helps;
} options;

/* ---- Flags */

static bool usage(const char *format, const char *what)
{
    char text[300];
    snprintf(text, sizeof text, format, what);
    if (par_tells_error(NULL, 0)) fprintf(stderr, "collectives: %s; see 'collectives --help'\n", text);
    return false;
}

static bool read_count(const char *flag, const char *text, int most, int *to)
{
    char *end, format[96];
    long n = strtol(text, &end, 10);
    snprintf(format, sizeof format, "%s takes a whole number from 1 to %d, not '%%.80s'", flag, most);
    if (*end || end == text || n < 1 || n > most) return usage(format, text);
    *to = (int)n;
    return true;
}

static bool read_sizes(const char *text, options *o)
{
    o->size_count = 0;
    for (const char *at = text; *at; at += *at == ',') {
        char *end;
        double bytes = strtod(at, &end);
        int unit = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
        bool good = end != at && bytes >= 1 && bytes <= 0x1p40 && o->size_count < SIZES;
        at = end + (unit > 0);
        if (!good || (*at && *at != ',') || !strcmp(at, ",")) return usage("--sizes takes bytes with commas between them, as 64K,4M,1G, not '%.80s'", text);
        o->size[o->size_count++] = (int64_t)ldexp(bytes, unit);
    }
    return o->size_count > 0 || usage("--sizes names no size%s", text);
}

/* What every transport sums and the sums of many calls fit into. */
static bool read_dtype(const char *value, td_dtype *to)
{
    bool known = td_dtype_named(value, to) && (*to == TD_F32 || *to == TD_BF16 || *to == TD_F64);
    return known || usage("--dtype takes f32, bf16 or f64, not '%.80s'", value);
}

static bool take(const char *flag, const char *value, options *o)
{
    if (!strcmp(flag, "--ranks")) return read_count(flag, value, 256, &o->ranks);
    if (!strcmp(flag, "--calls")) return read_count(flag, value, MOST_CALLS, &o->calls);
    if (!strcmp(flag, "--rounds")) return read_count(flag, value, MOST_ROUNDS, &o->rounds);
    if (!strcmp(flag, "--sizes")) return read_sizes(value, o);
    if (!strcmp(flag, "--timeout")) return (o->timeout_s = strtod(value, NULL)) > 0 || usage("--timeout takes seconds, not '%.80s'", value);
    if (!strcmp(flag, "--dtype")) return read_dtype(value, &o->dtype);
    if (strcmp(flag, "--device")) return usage("'%.80s' is no flag", flag);
    o->device = value;
    return true;
}

static bool read_options(int argc, char **argv, options *o)
{
    char nothing[512];
    int rank;
    *o = (options){ .calls = 20, .rounds = 5, .device = "cpu", .timeout_s = 60 };
    for (int i = 1; i < argc; i++) {
        bool alone = !strcmp(argv[i], "--json") || !strcmp(argv[i], "--help");
        if (alone) *(argv[i][2] == 'j' ? &o->json : &o->helps) = true;
        else if (i + 1 == argc) return usage("%.80s needs a value behind it", argv[i]);
        else if (!take(argv[i], argv[i + 1], o)) return false;
        i += !alone;
    }
    if (o->helps) return true;
    if (!o->size_count && !read_sizes(strcmp(o->device, "cuda") ? "1K,16K,256K,1M,4M,16M" : "1K,16K,256K,1M,4M,25M,100M,400M,1G", o)) return false;
    if (!o->ranks) par_scheduled(&rank, &o->ranks, nothing, sizeof nothing);
    return o->ranks > 1 || usage("--ranks N is needed, of 2 or more%s", "");
}

/* ---- A call, as an operation of a plan: all_reduce (data), the others (data), or (what the call before gave, whose memory is used again; data) */

typedef struct call_attr {
    int64_t kind, elements;       /* of what it gives */
} call_attr;

static bool call_shape(td_call *call)
{
    call->out[0].shape = TD_SHAPE(((const call_attr *)call->attr)->elements);
    call->out[0].dtype = call->in[0]->dtype;
    return true;
}

/* Every rank has operands of its own, whole as far as plans know. */
static void call_place(const td_program *p, const td_node *n, td_place_rule *rule) { (void)p, (void)n, (void)rule; }

static int64_t elements(const td_arg *a) { return td_shape_elements(a->shape); }

static bool call_prepare(td_context *td, const td_kernel *k, td_preparation *out)
{
    const td_transport *t = k->run->transport;
    const td_arg *in = &k->in[k->inputs - 1];
    (void)td, (void)out;
    return !t->expect || t->expect(t->self, elements(in) * td_dtype_size(in->dtype), elements(&k->out[0]) * td_dtype_size(in->dtype));
}

static void call_run(const td_kernel *k)
{
    const td_transport *t = k->run->transport;
    const td_arg *in = &k->in[k->inputs - 1], *out = &k->out[0];
    int64_t parts = k->run->mesh->world;
    switch (((const call_attr *)k->attr)->kind) {
    case PAR_ALL_REDUCE:
        if (in->data == out->data) t->all_reduce(t->self, 0, out->data, elements(out), out->dtype);
        else td_fail(k->run->td, TD_ERROR_UNSUPPORTED, "all_reduce: its result has memory of its own");
        break;
    case PAR_REDUCE_SCATTER: t->reduce_scatter(t->self, 0, in->data, out->data, elements(out), out->dtype); break;
    case PAR_ALL_GATHER: t->all_gather(t->self, 0, in->data, out->data, elements(in), out->dtype); break;
    case PAR_ALL_TO_ALL: t->all_to_all(t->self, 0, in->data, out->data, elements(in) / parts, out->dtype); break;
    }
}

#define CALL(more)                                                                                                       \
    { .name = "call", .inputs = -1, .flags = TD_OP_COLLECTIVE | (more), .attr_bytes = sizeof(call_attr), .shape = call_shape, .place = call_place, \
      .prepare = call_prepare, .cpu = call_run, .cuda = { .run = call_run, .prepare = call_prepare } }
static const td_op call_op = CALL(0), in_place_op = CALL(TD_OP_INPLACE);

/* ---- Measuring */

typedef struct rank {
    par_world *world;
    td_context *td;
    int rank, ranks;
} rank;

/* One size of one kind; elements of the largest buffer, of which ranks have equal parts. */
typedef struct chain {
    par_collective kind;
    int64_t whole;
    td_dtype dtype;
    int calls, ranks;
} chain;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Sums of sums grow by the number of ranks with each call: from far below 1 to far above. */
static double first_value(const chain *c) { return c->kind == PAR_ALL_REDUCE ? pow(c->ranks, -c->calls / 2) : 1; }

static double last_value(const chain *c)
{
    if (c->kind == PAR_ALL_REDUCE) return first_value(c) * pow(c->ranks, c->calls);
    return c->kind == PAR_REDUCE_SCATTER ? c->ranks : 1;
}

/* The last element of what the last call gives, kept. Nothing else is computed but what the first one reads: by a factor, so that a sum may take
 * its memory, which that of a fill may not be. */
static td_tensor record(td_context *td, const chain *c)
{
    int64_t part = c->whole / c->ranks, in = c->kind == PAR_ALL_GATHER ? part : c->whole, out = c->kind == PAR_REDUCE_SCATTER ? part : c->whole;
    const call_attr attr = { c->kind, out };
    td_tensor data = td_scale(td_fill(td, c->dtype, TD_SHAPE(in), 1), first_value(c)), given = data;
    bool reduces = c->kind == PAR_ALL_REDUCE;
    for (int i = 0; i < c->calls; i++) {
        td_tensor operands[] = { given, data };
        given = td_record(reduces || i ? &in_place_op : &call_op, TD_HERE, reduces || !i ? 1 : 2, operands, &attr);
    }
    td_tensor last = td_slice(given, 0, out - 1, out);
    td_keep(last);
    return last;
}

/* Runs steps one behind the other; NaN after an error. The last one is looked at, and so waited for. */
static double run_steps(td_context *td, const chain *c, int64_t steps)
{
    td_tensor last = TD_NO_TENSOR;
    double begin = seconds(), want = last_value(c), got = 0;
    for (int64_t s = 0; s < steps && td_error(td) == TD_OK; s++) {
        last = record(td, c);
        if (!td_step(td)) return (double)NAN;
    }
    if (td_error(td) == TD_OK) got = td_item(last);
    double took = seconds() - begin;
    bool exact = c->dtype == TD_F32 || c->dtype == TD_F64;
    if (td_error(td) == TD_OK && !(fabs(got - want) <= (exact ? 1e-5 : 0.1) * want))
        td_fail(td, TD_ERROR_PARALLEL, "%s of %lld %s gives %g, not %g", par_collective_name(c->kind), (long long)c->whole, td_dtype_name(c->dtype),
                got, want);
    return td_error(td) == TD_OK ? took : (double)NAN;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, by_size);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

/* Of one call. */
typedef struct figures {
    double s, bare_s;             /* bare_s NaN: there is no such library */
    double sent;                  /* bytes by one rank */
} figures;

static bool measure(const rank *r, const options *o, const chain *c, figures *to)
{
    double planned[MOST_ROUNDS], bare[MOST_ROUNDS];
    int64_t steps = STEP_BYTES / (c->whole * td_dtype_size(c->dtype)), count = c->kind == PAR_ALL_REDUCE ? c->whole : c->whole / c->ranks;
    steps = steps < 1 ? 1 : steps > MOST_STEPS ? MOST_STEPS : steps;
    if (isnan(run_steps(r->td, c, WARM_STEPS))) return false;
    int64_t before = par_sent(r->world, r->rank, NULL), calls = steps * c->calls;
    for (int i = 0; i < o->rounds; i++) {
        planned[i] = run_steps(r->td, c, steps) / (double)calls;
        if (isnan(planned[i]) || !par_measure_bare(r->td, r->world, r->rank, c->kind, count, c->dtype, (int)calls, &bare[i])) return false;
    }
    to->sent = (double)(par_sent(r->world, r->rank, NULL) - before) / (double)(o->rounds * calls);
    to->s = median(planned, o->rounds);
    to->bare_s = median(bare, o->rounds);
    return true;
}

/* ---- Telling, by the first rank */

static FILE *table_of(const options *o) { return o->json ? stderr : stdout; }

static void tell_kind(FILE *table, par_collective kind, const figures *first)
{
    fprintf(table, "\n%-14s %12s %10s", par_collective_name(kind), "us a call", "bus GB/s");
    if (!isnan(first->bare_s)) fprintf(table, " %12s %10s %10s", "bare: us", "bus GB/s", "of ours");
    fputc('\n', table);
}

static void tell(FILE *table, td_json_writer *w, int64_t bytes, const figures *f)
{
    char bare[80] = "";
    if (!isnan(f->bare_s)) snprintf(bare, sizeof bare, " %12.1f %10.2f %8.1f %%", 1e6 * f->bare_s, 1e-9 * f->sent / f->bare_s, 100 * f->bare_s / f->s);
    fprintf(table, "%14lld %12.1f %10.2f%s\n", (long long)bytes, 1e6 * f->s, 1e-9 * f->sent / f->s, bare);
    fflush(table);
    td_json_open_object(w, NULL);
    td_json_put_integer(w, "bytes", bytes);
    td_json_put_number(w, "us", 1e6 * f->s);
    td_json_put_number(w, "bus_bytes_per_s", f->sent / f->s);
    td_json_put_number(w, "bare_us", 1e6 * f->bare_s);
    td_json_put_number(w, "bare_bus_bytes_per_s", f->sent / f->bare_s);
    td_json_close_object(w);
}

static bool measure_kind(const rank *r, const options *o, par_collective kind, FILE *table, td_json_writer *w)
{
    td_json_open_array(w, par_collective_name(kind));
    for (int i = 0; i < o->size_count; i++) {
        figures f;
        int64_t size = td_dtype_size(o->dtype), least = (int64_t)r->ranks * ALIGN;
        chain c = { .kind = kind, .dtype = o->dtype, .calls = o->calls, .ranks = r->ranks,
                    .whole = (o->size[i] + size * least - 1) / (size * least) * least };
        if (!measure(r, o, &c, &f)) return false;
        if (r->rank > 0) continue;
        if (i == 0) tell_kind(table, kind, &f);
        tell(table, w, c.whole * size, &f);
    }
    td_json_close_array(w);
    return true;
}

static bool measure_all(const rank *r, const options *o)
{
    char world[512];
    FILE *table = table_of(o);
    td_json_writer w = td_json_begin(r->td);
    par_world_text(r->world, world, sizeof world);
    if (r->rank == 0) fprintf(table, "%s, device %s, %s, %d calls a step\n", world, o->device, td_dtype_name(o->dtype), o->calls);
    td_json_open_object(&w, NULL);
    td_json_put_string(&w, "world", world);
    td_json_put_integer(&w, "ranks", r->ranks);
    td_json_put_string(&w, "device", o->device);
    td_json_put_string(&w, "dtype", td_dtype_name(o->dtype));
    bool good = true;
    for (par_collective kind = PAR_ALL_REDUCE; kind <= PAR_ALL_TO_ALL && good; kind++) good = measure_kind(r, o, kind, table, &w);
    td_json_close_object(&w);
    const char *text = td_json_text(&w);
    if (good && o->json && r->rank == 0) good = text && printf("%s\n", text) > 0;
    td_json_end(&w);
    return good;
}

/* ---- Ranks */

static bool join(const options *o, rank *r)
{
    char message[1024] = "this process was started as a rank, but its world is gone";
    const par_world_options options = { .timeout_s = o->timeout_s };
    r->world = par_launched() ? par_world_join(&r->rank) : par_world_scheduled(&options, &r->rank, message, sizeof message);
    if (!r->world && *message) fprintf(stderr, "collectives: %s\n", message);
    if (r->world) r->ranks = par_world_size(r->world);
    return r->world != NULL;
}

/* What ranks share, say. Errors are told when all have ended, and plans are meant to differ. */
static void log_message(void *user, td_level level, const char *text)
{
    if (level == TD_LOG_INFO) fprintf(table_of(user), "%s\n", text);
}

static void open_context(const options *o, rank *r)
{
    char name[PAR_GPU_NAME], message[512];
    int index, here = par_neighbours(r->world, r->rank, false, &index);
    bool has = par_gpu_of_rank(o->device, index, here, strcmp(o->device, "cuda") ? 0 : par_gpus(), name, message, sizeof message);
    if (!has) par_stop_world(r->world, r->rank, message);
    r->td = td_open(&(td_options){ .device = has ? name : "cpu", .threads = 1, .log = log_message, .log_user = (void *)o });
    if (!has) td_fail(r->td, TD_ERROR_USAGE, "%s", message);
    par_attach(r->td, r->world, r->rank, &(par_options){ .strategy = "ddp", .share_gpu = strchr(o->device, ':') != NULL });
}

static int run_rank(const options *o)
{
    rank r = { 0 };
    if (!join(o, &r)) return 1;
    open_context(o, &r);
    bool good = td_error(r.td) == TD_OK && measure_all(&r, o);
    if (!good) par_fail_world(r.world, r.rank, td_error_text(r.td));
    if (!good && !par_launched() && par_tells_error(r.world, r.rank)) fprintf(stderr, "collectives: %s\n", par_world_error(r.world));
    td_close(r.td);
    par_world_close(r.world);
    return !good;
}

static int start_ranks(const options *o, char **argv)
{
    char message[1024];
    bool enough = par_check_gpus(o->device, o->ranks, message, sizeof message);
    int status = !enough ? 1 : par_launch(o->ranks, argv, &(par_world_options){ .timeout_s = o->timeout_s }, message, sizeof message);
    if (*message) fprintf(stderr, "collectives: %s\n", message);
    return status;
}

int main(int argc, char **argv)
{
    options o;
    char message[512];
    int rank, ranks;
    if (!read_options(argc, argv, &o)) return 2;
    if (o.helps) return fputs(help, stdout) < 0;
    if (par_launched() || par_scheduled(&rank, &ranks, message, sizeof message)) return run_rank(&o);
    return start_ranks(&o, argv);
}
