/* OUT/compare.png: the curves of the runs that --plot names in one picture, drawn by gnuplot from OUT/compare.gnuplot.
 *
 * A run is called by its directory and by what its config.json has different from the others'. While training, the run
 * itself is one of them.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "run/loop.h"

enum { COMPARED_MOST = 16, LABEL_ROOM = 144 };

typedef struct compared_run {
    char dir[RUN_PATH];
    const char *name;             /* of the directory; its whole path where another run has the same */
    char label[LABEL_ROOM];       /* the name, and what is different */
    bool own;                     /* OUT of the run that trains now */
    td_json_document *config;     /* NULL: none */
    int64_t training, evaluations; /* points */
} compared_run;

typedef struct comparison {
    int count;
    compared_run run[COMPARED_MOST];
} comparison;

/* ---- Which runs */

static size_t without_slashes(const char *path, size_t length)
{
    while (length > 1 && path[length - 1] == '/') length--;
    return length;
}

/* OUT may not be there yet. */
static bool is_own(const run_loop *run, const char *dir)
{
    struct stat one, other;
    size_t length = without_slashes(run->out, strlen(run->out));
    if (run->flags.command != RUN_TRAIN) return false;
    if (!strncmp(run->out, dir, length) && !dir[length]) return true;
    return !stat(dir, &one) && !stat(run->out, &other) && one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

static bool add_run(run_loop *run, comparison *c, const char *dir, size_t length)
{
    length = without_slashes(dir, length);
    if (!length || length >= RUN_PATH - 64) {
        run_fail_usage(run, "--plot takes directories of runs with commas between them, not '%.80s'",
                       run_flags_text(&run->flags, "plot"));
        return false;
    }
    if (c->count == COMPARED_MOST) {
        run_fail_usage(run, "--plot takes at most %d runs", COMPARED_MOST);
        return false;
    }
    compared_run *r = &c->run[c->count++];
    snprintf(r->dir, RUN_PATH, "%.*s", (int)length, dir);
    r->own = is_own(run, r->dir);
    return true;
}

/* The directories named, and while training OUT. */
static bool list_runs(run_loop *run, comparison *c)
{
    const char *at = run_flags_text(&run->flags, "plot");
    bool complete = run->flags.command != RUN_TRAIN;
    for (;; at++) {
        size_t length = strcspn(at, ",");
        if (!add_run(run, c, at, length)) return false;
        complete = complete || c->run[c->count - 1].own;
        at += length;
        if (!*at) break;
    }
    return complete || add_run(run, c, run->out, strlen(run->out));
}

static FILE *open_metrics(const compared_run *r, char path[RUN_PATH])
{
    snprintf(path, RUN_PATH, "%s", r->dir);
    snprintf(path + strlen(path), RUN_PATH - strlen(path), "/metrics.jsonl");
    return fopen(path, "r");
}

/* What this run will have is yet to come. */
static void check_runs(run_loop *run, const comparison *c)
{
    char path[RUN_PATH];
    for (int i = 0; i < c->count; i++) {
        if (c->run[i].own) continue;
        FILE *from = open_metrics(&c->run[i], path);
        if (!from) run_fail_file(run, "--plot: there is no %.400s; it takes directories of runs", path);
        else fclose(from);
    }
}

void run_compare_check(run_loop *run)
{
    comparison *c = calloc(1, sizeof *c);
    if (!c) run_fail_file(run, "out of memory for --plot");
    else if (list_runs(run, c)) check_runs(run, c);
    free(c);
}

/* ---- What they are called */

/* What says nothing of a curve. */
static bool is_aside(const char *name)
{
    static const char *const names[] = { "threads", "timeout", "save-every", "log-every", "eval-every", "keep",
                                         "keep-best" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i])) return true;
    return false;
}

/* "" where there is no such value. */
static void value_text(const td_json *value, char to[64])
{
    to[0] = 0;
    if (!value) return;
    if (value->kind == TD_JSON_STRING) snprintf(to, 64, "%.40s", value->string);
    else if (value->kind == TD_JSON_BOOLEAN) snprintf(to, 64, "%s", value->boolean ? "true" : "false");
    else if (value->kind == TD_JSON_NUMBER) snprintf(to, 64, "%.9g", value->number);
}

static bool differs(const comparison *c, const char *name)
{
    char first[64], other[64];
    value_text(td_json_get(td_json_root(c->run[0].config), name), first);
    for (int i = 1; i < c->count; i++) {
        value_text(td_json_get(td_json_root(c->run[i].config), name), other);
        if (strcmp(first, other)) return true;
    }
    return false;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

static void name_run(const comparison *c, compared_run *r)
{
    const char *base = base_name(r->dir), *before = " (";
    r->name = base;
    for (int i = 0; i < c->count; i++)
        if (&c->run[i] != r && !strcmp(base_name(c->run[i].dir), base)) r->name = r->dir;
    size_t at = (size_t)snprintf(r->label, sizeof r->label, "%.90s", r->name);
    const td_json *root = td_json_root(r->config);
    for (const td_json *member = root && root->kind == TD_JSON_OBJECT ? root->first : NULL; member; member = member->next) {
        char text[64];
        value_text(member, text);
        if (!*text || is_aside(member->name) || !differs(c, member->name)) continue;
        size_t more = strlen(before) + strlen(member->name) + 1 + strlen(text);
        if (at + more + sizeof ", ...)" > sizeof r->label) {
            at += (size_t)snprintf(r->label + at, sizeof r->label - at, "%s...", before);
            before = ", ";
            break;
        }
        at += (size_t)snprintf(r->label + at, sizeof r->label - at, "%s%s %s", before, member->name, text);
        before = ", ";
    }
    if (*before == ',') snprintf(r->label + at, sizeof r->label - at, ")");
}

static bool name_runs(run_loop *run, comparison *c)
{
    for (int i = 0; i < c->count; i++) {
        char path[RUN_PATH];
        struct stat status;
        if (!run_path(run->td, path, "%s/config.json", c->run[i].dir)) return false;
        if (stat(path, &status)) continue; /* its name says enough */
        c->run[i].config = td_json_read(run->td, path);
        if (!c->run[i].config) return false;
    }
    for (int i = 0; i < c->count; i++) name_run(c, &c->run[i]);
    return true;
}

/* ---- The picture */

static const char script_head[] =
    "# Draws compare.png: gnuplot compare.gnuplot\n"
    "set output 'compare.png'\n"
    "set xlabel 'step'\n"
    "set ylabel 'loss'\n"
    "set grid\n"
    "set key below left vertical Left reverse maxcols 1 noenhanced\n";

/* As gnuplot takes a text between single quotes. */
static void put_quoted(FILE *to, const char *text)
{
    for (; *text; text++) {
        if (*text == '\'') fputc('\'', to);
        fputc((unsigned char)*text < ' ' ? ' ' : *text, to);
    }
}

static bool put_curves(run_loop *run, compared_run *r, int number, FILE *to)
{
    char path[RUN_PATH];
    FILE *from = open_metrics(r, path);
    if (!from) {
        td_fail(run->td, TD_ERROR_DATA, "--plot: there is no %.900s; it takes directories of runs", path);
        return false;
    }
    fprintf(to, "$training%d << EOD\n", number);
    bool ok = run_put_points(run, from, path, to, false, &r->training);
    fprintf(to, "EOD\n$evaluation%d << EOD\n", number);
    ok = ok && run_put_points(run, from, path, to, true, &r->evaluations);
    fputs("EOD\n", to);
    fclose(from);
    if (ok && !r->training) td_fail(run->td, TD_ERROR_DATA, "--plot: %.900s holds no loss; leave it out", path);
    return ok && r->training;
}

/* One colour a run; evaluations are thick, with points. */
static void put_plot(const comparison *c, FILE *to)
{
    for (int i = 0; i < c->count; i++) {
        const compared_run *r = &c->run[i];
        fprintf(to, "%s$training%d using 1:2 with lines linecolor %d title '", i ? ", \\\n     " : "plot ", i, i + 1);
        put_quoted(to, r->label);
        fputs("'", to);
        if (!r->evaluations) continue;
        fprintf(to, ", \\\n     $evaluation%d using 1:2 with linespoints linewidth 2 pointtype 7 linecolor %d title '", i, i + 1);
        put_quoted(to, r->name);
        fputs(": evaluation'", to);
    }
    fputs("\n", to);
}

static bool write_script(run_loop *run, comparison *c)
{
    char path[RUN_PATH], *text = NULL;
    size_t bytes = 0;
    FILE *to = open_memstream(&text, &bytes);
    bool ok = to != NULL;
    if (to) fputs(script_head, to);
    if (to) fprintf(to, "set terminal pngcairo size 1200,%d\n", 640 + 36 * c->count); /* two lines of the key each */
    for (int i = 0; ok && i < c->count; i++) ok = put_curves(run, &c->run[i], i, to);
    if (ok) put_plot(c, to);
    if (!to || fclose(to)) {
        td_fail(run->td, TD_ERROR_MEMORY, "out of memory while drawing curves");
        ok = false;
    }
    ok = ok && run_path(run->td, path, "%s/compare.gnuplot", run->out) && run_write_file(run->td, path, text, bytes);
    free(text);
    return ok;
}

static void compare(run_loop *run, comparison *c)
{
    char why[RUN_PATH + 128];
    if (!list_runs(run, c) || !name_runs(run, c) || !run_make_directory(run->td, run->out) || !write_script(run, c)) return;
    if (run_draw(run, "compare", why)) run_say(run, "comparison: %s/compare.png", run->out);
    else if (run->flags.command == RUN_TRAIN) run_say(run, "%s", why);
    else td_fail(run->td, TD_ERROR_UNSUPPORTED, "%s", why); /* it was to do nothing else */
}

bool run_compare(run_loop *run)
{
    if (!run_flags_text(&run->flags, "plot") || run->rank != 0 || run_failed(run)) return !run_failed(run);
    comparison *c = calloc(1, sizeof *c);
    if (!c) {
        td_fail(run->td, TD_ERROR_MEMORY, "out of memory while drawing curves");
        return false;
    }
    compare(run, c);
    for (int i = 0; i < c->count; i++) td_json_close(c->run[i].config);
    free(c);
    return !run_failed(run);
}
