/* Compares parallel strategies on one model, every cell beside what its plan foretells, or on several, one after another:
 *
 *     strategies --model gpt --size 10m --strategies all --ranks 1,2,4 --device cpu --out DIR
 *     strategies --model mlp --data DIR --strategies all --ranks 1,2,3 --check --out DIR
 *     strategies --model all --ranks 1,2 --device cuda --out DIR
 *
 * Without --check each cell is `MODEL bench` as child processes; with it `MODEL train` in f64, whose first losses must be those of one
 * rank. Every rank has as many threads on one rank as on many, and with --rank-batch as many rows, so that efficiency says what more ranks
 * give. Flags not listed here go to the model.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench/strategies/strategies.h"

enum { CHECK_STEPS = 20 };

static const char help[] =
    "Compares parallel strategies on one model.\n\nusage: strategies --model NAME [flags] [the model's own flags]\n\n"
    "  --model NAME,...|all  a reference model: gpt, mlp; or a shape of one by its name: gpt2-124m, gpt-10m, llama1b, llama8b,\n"
    "                        gpt2-1558m (all: these), in bf16, with the strategies and the rows a rank that others are measured with\n"
    "  --strategies A,B|all  which (all; those of a shape)\n"
    "  --ranks N,N,...       on how many ranks (1,2)\n"
    "  --device cpu|cuda     where (cpu); cuda: a GPU for each rank, cuda:K: one for all, to try it\n"
    "  --machine NAME|FILE   whose plan each figure stands beside, as of plan (cpu; of GPUs h200x2, h200x4 or h200x8, by the most ranks)\n"
    "  --rank-batch N        rows of each rank, so that the batch grows with the ranks (a shape's; else one batch on any ranks)\n"
    "  --steps N             updates timed (100), or with --check trained (20)\n"
    "  --rank-threads N      CPU threads of each rank (cores / the most ranks)\n"
    "  --rehearse            the first rank of each cell alone: what the others would send takes the time that --machine says\n"
    "  --check               train, and compare losses with those of one rank: to 1e-10 in f64, 1e-5 in f32\n"
    "  --dtype NAME          (f32; with --check f64)\n"
    "  --json                an object a model on stdout, and the table on stderr\n"
    "  --out DIR             results.json and plots, of several models in DIR/NAME; with --check, the runs\n";

typedef struct options {
    const char *model, *strategies, *ranks, *device, *machine, *out, *dtype, *steps, *rank_threads, *rank_batch;
    bool checks, rehearses, helps, prints_json;
} options;

static int usage(const char *format, const char *what)
{
    fprintf(stderr, "strategies: ");
    fprintf(stderr, format, what);
    fprintf(stderr, "; see 'strategies --help'\n");
    return 2;
}

/* Takes the flags that are ours; the others are the model's. 0, or the exit status after a message. */
static int read_options(int argc, char **argv, options *o, bench *b)
{
    const struct { const char *flag; const char **to; } table[] = {
        { "--model", &o->model },     { "--strategies", &o->strategies }, { "--ranks", &o->ranks }, { "--device", &o->device },
        { "--machine", &o->machine }, { "--out", &o->out },               { "--dtype", &o->dtype }, { "--steps", &o->steps },
        { "--rank-threads", &o->rank_threads }, { "--rank-batch", &o->rank_batch },
    };
    for (int i = 1; i < argc; i++) {
        const char **to = NULL, *equals = strchr(argv[i], '=');
        size_t length = equals ? (size_t)(equals - argv[i]) : strlen(argv[i]);
        for (size_t k = 0; k < sizeof table / sizeof *table; k++)
            if (strlen(table[k].flag) == length && !strncmp(table[k].flag, argv[i], length)) to = table[k].to;
        if (to && !equals && i + 1 == argc) return usage("%s needs a value behind it", argv[i]);
        if (to) *to = equals ? equals + 1 : argv[++i];
        else if (!strcmp(argv[i], "--check")) o->checks = true;
        else if (!strcmp(argv[i], "--rehearse")) o->rehearses = true;
        else if (!strcmp(argv[i], "--json")) o->prints_json = true;
        else if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) o->helps = true;
        else if (b->word_count == WORDS) return usage("%s is one flag too many", argv[i]);
        else b->words[b->word_count++] = argv[i];
    }
    return 0;
}

/* A whole number from 1 on; 0: it is none. */
static int count_of(const char *text)
{
    char *end;
    long n = strtol(text, &end, 10);
    return *end || end == text || n < 1 || n > 1000000 ? 0 : (int)n;
}

/* The model's binary is beside this one. */
static bool find_binary(bench *b)
{
    char own[PATH_ROOM / 2];
    const char *name = b->shape ? b->shape->binary : b->model;
    ssize_t size = readlink("/proc/self/exe", own, sizeof own - 1);
    own[size > 0 ? size : 0] = 0;
    char *slash = strrchr(own, '/');
    if (slash) *slash = 0;
    snprintf(b->binary, sizeof b->binary, "%s/%.200s", slash ? own : ".", name);
    return !strchr(name, '/') && access(b->binary, X_OK) == 0;
}

static int most_ranks(const bench *b)
{
    int most = 1;
    for (int i = 0; i < b->cell_count; i++)
        if (b->cells[i].ranks > most) most = b->cells[i].ranks;
    return most;
}

static int settle(const options *o, bench *b)
{
    if (!o->model) return usage("%s NAME is needed: the model to run", "--model");
    b->device = o->device, b->checks = o->checks, b->rehearses = o->rehearses, b->prints_json = o->prints_json;
    b->table = o->prints_json ? stderr : stdout;
    if (o->checks && o->rehearses) return usage("a rehearsal's values mean nothing to %s", "--check");
    if (o->checks && !o->out) return usage("%s needs --out DIR: where its runs go", "--check");
    if (o->out && strlen(o->out) > PATH_ROOM / 16) return usage("%s is too long a path", "--out");
    if (o->steps && !(b->steps = count_of(o->steps))) return usage("--steps takes a whole number of at least 1, not '%s'", o->steps);
    if (o->rank_threads && !(b->rank_threads = count_of(o->rank_threads)))
        return usage("--rank-threads takes a whole number of at least 1, not '%s'", o->rank_threads);
    if (o->rank_batch && !count_of(o->rank_batch)) return usage("--rank-batch takes a whole number of at least 1, not '%s'", o->rank_batch);
    return 0;
}

static int make_folder(const char *path)
{
    if (!*path || mkdir(path, 0777) == 0 || errno == EEXIST) return 0;
    fprintf(stderr, "strategies: --out %s cannot be made: %s\n", path, strerror(errno));
    return 1;
}

/* The matrix; --check begins with one rank. */
static bool make_cells(const options *o, bench *b)
{
    char ranks[512];
    const char *strategies = o->strategies ? o->strategies : b->shape ? b->shape->strategies : "all";
    bool adds_one = o->checks && strncmp(o->ranks, "1,", 2) && strcmp(o->ranks, "1");
    snprintf(ranks, sizeof ranks, "%s%.500s", adds_one ? "1," : "", o->ranks);
    b->cell_count = 0;
    if (!cells_make(b, strategies, ranks)) return false;
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN), most = most_ranks(b), at_once = b->rehearses ? 1 : most;
    if (!b->rank_threads) b->rank_threads = cores > at_once ? cores / at_once : 1;
    bool on_gpu = !strncmp(b->device, "cuda", 4);
    b->machine = o->machine ? o->machine : !on_gpu ? "cpu" : most <= 2 ? "h200x2" : most <= 4 ? "h200x4" : "h200x8";
    return true;
}

/* What is measured next: of the `length` characters of a name, one of several or not. */
static int choose_model(const options *o, bench *b, const char *name, int length, bool several)
{
    snprintf(b->model, sizeof b->model, "%.*s", length, name);
    b->shape = shape_named(b->model);
    b->dtype = o->dtype ? o->dtype : o->checks ? "f64" : b->shape ? "bf16" : NULL;
    b->rank_rows = o->rank_batch ? count_of(o->rank_batch) : b->shape ? b->shape->rows : 0;
    *b->out = 0;
    if (o->out) snprintf(b->out, sizeof b->out, "%s%s%s", o->out, several ? "/" : "", several ? b->model : "");
    if (!find_binary(b)) return usage("there is no model's binary %s: build it, or name another --model", b->binary);
    return make_cells(o, b) ? 0 : 2;
}

/* ---- Measuring */

static int measure(bench *b)
{
    int failed = 0, done = 0;
    report_begin(b);
    for (int i = 0; i < b->cell_count && !child_stopped(); i++) {
        cell_measure(b, &b->cells[i]);
        if (child_stopped()) b->cells[i].done = false;
        if (child_stopped()) break;
        report_cell(b, &b->cells[i]);
        failed += *b->cells[i].error != 0;
        done++;
    }
    b->stopped = child_stopped();
    if (b->stopped) fprintf(stderr, "strategies: stopped by a signal after %d of %d cells\n", done, b->cell_count);
    if (done && (!report_write(b) || (*b->out && !report_plot(b)))) return 1;
    if (*b->out && done) fprintf(b->table, "results: %s/results.json, throughput.png, memory.png, efficiency.png\n", b->out);
    return failed || b->stopped;
}

/* ---- Checking */

/* Losses around 1 and above are compared by their size. */
static void compare(cell *c, const double *losses, const double *one, int count)
{
    c->difference = 0;
    for (int i = 0; i < count; i++) {
        double size = fabs(one[i]) > 1 ? fabs(one[i]) : 1, d = fabs(losses[i] - one[i]) / size;
        if (d <= c->difference) continue;
        c->difference = isnan(d) ? (double)INFINITY : d;
        c->difference_step = i + 1;
    }
}

static bool is_equal(const bench *b, const cell *c) { return c->difference <= (!strcmp(b->dtype, "f64") ? 1e-10 : 1e-5); }

static void check_cell(bench *b, cell *c, const double *one, double *losses)
{
    int count = cell_train(b, c, losses, b->steps);
    if (count) compare(c, losses, one, count);
    if (child_stopped()) return;
    if (*c->error) fprintf(b->table, "%5d %-12s %s\n", c->ranks, c->strategy, c->error);
    else
        fprintf(b->table, "%5d %-12s %18.9g %14.2g at step %-4d %s\n", c->ranks, c->strategy, losses[count - 1], c->difference, c->difference_step,
               is_equal(b, c) ? "equal" : "DIFFERS");
    fflush(b->table);
}

static int check(bench *b)
{
    int failed = 0;
    double *one = calloc(2 * (size_t)b->steps, sizeof *one);
    if (!one) return 1;
    fprintf(b->table, "%s in %s, %d updates; losses beside those of one rank\n%5s %-12s %18s %14s\n", b->model, b->dtype, b->steps, "ranks",
           "strategy", "last loss", "difference");
    for (int i = 0; i < b->cell_count && !child_stopped(); i++) {
        cell *c = &b->cells[i];
        check_cell(b, c, one, i ? one + b->steps : one);
        failed += *c->error || !is_equal(b, c);
        if (i == 0 && *c->error) break; /* nothing to compare with */
    }
    b->stopped = child_stopped();
    if (b->stopped) fprintf(stderr, "strategies: stopped by a signal\n");
    free(one);
    return !report_write(b) || failed || b->stopped;
}

/* One model after another; what is wrong with any of them is said before the first is measured. */
static int compare_models(const options *o, bench *b)
{
    char all[SHAPE_NAMES];
    const char *names = strcmp(o->model, "all") ? o->model : shape_names(all);
    bool several = strchr(names, ',') != NULL;
    int status = 0;
    if (o->checks && !b->steps) b->steps = CHECK_STEPS;
    for (int measures = 0; measures < 2; measures++) {
        for (const char *at = names, *end; *at && !b->stopped; at = *end ? end + 1 : end) {
            end = at + strcspn(at, ",");
            int wrong = choose_model(o, b, at, (int)(end - at), several);
            if (wrong || (measures && (wrong = make_folder(b->out)))) return wrong;
            if (measures) status |= o->checks ? check(b) : measure(b);
        }
        if (!measures && o->out && make_folder(o->out)) return 1;
    }
    return status;
}

static int compare_strategies(const options *o, bench *b)
{
    b->td = td_open(&(td_options){ .threads = 1 });
    child_catch_signals();
    int status = compare_models(o, b);
    td_close(b->td);
    return status;
}

/* It starts the ranks of each cell itself. */
static bool is_one_of_several(void)
{
    char message[512];
    int rank, ranks;
    bool several = par_scheduled(&rank, &ranks, message, sizeof message);
    if (several)
        snprintf(message, sizeof message, "it starts the ranks of each cell itself, but %d of it were started: start it alone, without a "
                 "launcher", ranks);
    if (*message && par_tells_error(NULL, 0)) fprintf(stderr, "strategies: %s\n", message);
    return *message != 0;
}

int main(int argc, char **argv)
{
    if (is_one_of_several()) return 2;
    options o = { .ranks = "1,2", .device = "cpu" };
    bench *b = calloc(1, sizeof *b);
    int status = b ? read_options(argc, argv, &o, b) : 1;
    if (!status && o.helps) status = fputs(help, stdout) < 0;
    else if (!status && !(status = settle(&o, b))) status = compare_strategies(&o, b);
    free(b);
    return status;
}
