/* What came of the cells: a table while they are measured, results.json, and three plots drawn by gnuplot. */
#include <errno.h>
#include <string.h>

#include "bench/strategies/strategies.h"

/* ---- The table: a figure and, in brackets, its prediction, where asked for with prediction / figure */

enum { FIGURE = 64, COMPARED = FIGURE + 32 };

static void figure(char to[FIGURE], double value, double planned, double factor, int digits)
{
    char a[24] = "-", p[24] = "-";
    if (!isnan(value)) snprintf(a, sizeof a, "%.*f", digits, factor * value);
    if (!isnan(planned)) snprintf(p, sizeof p, "%.*f", digits, factor * planned);
    snprintf(to, FIGURE, "%s (%s)", a, p);
}

static void compared(char to[COMPARED], double value, double planned, double factor, int digits)
{
    char both[FIGURE], ratio[16] = "-";
    figure(both, value, planned, factor, digits);
    if (planned / value > 0) snprintf(ratio, sizeof ratio, "%.2f", planned / value);
    snprintf(to, COMPARED, "%.*s, %s)", (int)strlen(both) - 1, both, ratio);
}

/* Tokens, or items, of an item a second. */
static double units(const bench *b) { return b->shape ? b->shape->tokens : 1; }

void report_begin(const bench *b)
{
    char rows[48] = "", rate[24];
    if (b->rank_rows) snprintf(rows, sizeof rows, ", %d rows a rank", b->rank_rows);
    snprintf(rate, sizeof rate, "%s/s", b->shape ? "tokens" : "items");
    fprintf(b->table, "%s on %s%s%s%s, %d thread%s a rank; figures %s (planned for %s, planned / measured)\n", b->model, b->device,
            b->dtype ? ", " : "", b->dtype ? b->dtype : "", rows, b->rank_threads, b->rank_threads == 1 ? "" : "s", b->rehearses ? "of rehearsals" : "measured", b->machine);
    fprintf(b->table, "%5s %-12s %22s %10s %26s %30s %22s %16s %10s\n", "ranks", "strategy", rate, "efficiency", "ms a step", "MiB a rank",
            "MB sent a step", "exposed ms", "of a step");
    fflush(b->table);
}

void report_cell(const bench *b, const cell *c)
{
    char rate[FIGURE], ms[COMPARED], mib[COMPARED], mb[FIGURE], exposed[FIGURE], efficiency[24] = "-", part[24] = "-";
    const figures *m = &c->measured, *p = &c->planned;
    if (*c->error) {
        fprintf(b->table, "%5d %-12s %s\n", c->ranks, c->strategy, c->error);
        fflush(b->table);
        return;
    }
    figure(rate, m->items_per_s, p->items_per_s, units(b), 0);
    compared(ms, m->step_ms, p->step_ms, 1, 2);
    compared(mib, m->peak_bytes, p->peak_bytes, 1.0 / (1 << 20), 2);
    figure(mb, m->comm_bytes, p->comm_bytes, 1e-6, 3);
    figure(exposed, m->exposed_ms, p->exposed_ms, 1, 2);
    if (!isnan(c->efficiency)) snprintf(efficiency, sizeof efficiency, "%.3f", c->efficiency);
    if (!isnan(m->exposed_ms)) snprintf(part, sizeof part, "%.1f %%", 100 * m->exposed_ms / m->step_ms);
    fprintf(b->table, "%5d %-12s %22s %10s %26s %30s %22s %16s %10s\n", c->ranks, c->strategy, rate, efficiency, ms, mib, mb, exposed, part);
    fflush(b->table);
}

/* ---- results.json */

static void put_figures(td_json_writer *w, const bench *b, const char *name, const figures *f)
{
    td_json_open_object(w, name);
    td_json_put_number(w, "items_per_s", f->items_per_s);
    if (b->shape) td_json_put_number(w, "tokens_per_s", units(b) * f->items_per_s);
    td_json_put_number(w, "step_ms", f->step_ms);
    td_json_put_number(w, "peak_bytes", f->peak_bytes);
    td_json_put_number(w, "comm_bytes_per_step", f->comm_bytes);
    td_json_put_number(w, "exposed_comm_ms", f->exposed_ms);
    td_json_close_object(w);
}

static void put_cell(td_json_writer *w, const bench *b, const cell *c)
{
    td_json_open_object(w, NULL);
    td_json_put_string(w, "strategy", c->strategy);
    td_json_put_integer(w, "world", c->ranks);
    td_json_put_string(w, "error", *c->error ? c->error : NULL);
    if (b->checks) {
        td_json_put_number(w, "largest_difference", c->difference);
        td_json_put_integer(w, "at_step", c->difference_step);
    } else {
        td_json_put_number(w, "efficiency", c->efficiency);
        put_figures(w, b, "measured", &c->measured);
        put_figures(w, b, "planned", &c->planned);
        td_json_put_number(w, "own_plan_bytes", c->measured.own_plan_bytes);
        td_json_put_number(w, "planned_per_measured_ms", c->planned.step_ms / c->measured.step_ms);
        td_json_put_number(w, "planned_per_measured_bytes", c->planned.peak_bytes / c->measured.peak_bytes);
    }
    td_json_close_object(w);
}

static bool write_file(const bench *b, const char *name, const char *text)
{
    char path[PATH_ROOM];
    snprintf(path, sizeof path, "%s/%s", b->out, name);
    FILE *to = fopen(path, "w");
    bool written = to && fputs(text, to) >= 0;
    if (to && fclose(to) != 0) written = false;
    if (!written) fprintf(stderr, "strategies: %s cannot be written: %s\n", path, strerror(errno));
    return written;
}

bool report_write(const bench *b)
{
    td_json_writer w = td_json_begin(b->td);
    td_json_open_object(&w, NULL);
    td_json_put_string(&w, "model", b->model);
    td_json_put_string(&w, "device", b->device);
    td_json_put_string(&w, "machine", b->machine);
    td_json_put_boolean(&w, "rehearsed", b->rehearses);
    td_json_put_string(&w, "dtype", b->dtype);
    if (b->rank_rows) td_json_put_integer(&w, "rows_a_rank", b->rank_rows);
    td_json_put_integer(&w, "threads_a_rank", b->rank_threads);
    td_json_open_array(&w, "flags");
    for (int i = 0; i < b->word_count; i++) td_json_put_string(&w, NULL, b->words[i]);
    td_json_close_array(&w);
    td_json_put_boolean(&w, "stopped", b->stopped);
    td_json_open_array(&w, "cells");
    for (int i = 0; i < b->cell_count; i++)
        if (b->cells[i].done) put_cell(&w, b, &b->cells[i]);
    td_json_close_array(&w);
    td_json_close_object(&w);
    const char *text = td_json_text(&w);
    bool written = text && (!*b->out || write_file(b, b->checks ? "check.json" : "results.json", text));
    if (text && b->prints_json) written = printf("%s\n", text) > 0 && fflush(stdout) == 0 && written;
    td_json_end(&w);
    return written;
}

/* ---- Plots: a line a strategy over the ranks, and a dashed one of what was planned */

typedef struct plot {
    const char *name, *label;
    double (*value)(const cell *c, bool planned);
} plot;

static double throughput(const cell *c, bool planned) { return planned ? c->planned.items_per_s : c->measured.items_per_s; }
static double memory(const cell *c, bool planned) { return (planned ? c->planned.peak_bytes : c->measured.peak_bytes) / (1 << 20); }
static double efficiency(const cell *c, bool planned) { return planned ? (double)NAN : c->efficiency; }

static const plot plots[] = { { "throughput", "items/s", throughput }, { "memory", "MiB a rank", memory },
                              { "efficiency", "scaling efficiency", efficiency } };

/* "hsdp:4x2+tp:2" without the sizes of its groups, which are one line's: "hsdp+tp:2". */
static const char *name_of(const cell *c, char to[sizeof c->strategy])
{
    size_t length = strcspn(c->strategy, ":+");
    snprintf(to, sizeof c->strategy, "%.*s%s", (int)length, c->strategy, c->strategy + length + strcspn(c->strategy + length, "+"));
    return to;
}

static bool same_name(const cell *a, const cell *b)
{
    char one[sizeof a->strategy], other[sizeof b->strategy];
    return !strcmp(name_of(a, one), name_of(b, other));
}

static bool is_first(const bench *b, int index)
{
    for (int i = 0; i < index; i++)
        if (b->cells[i].ranks > 1 && same_name(&b->cells[i], &b->cells[index])) return false;
    return b->cells[index].ranks > 1;
}

/* One rank belongs to every strategy. */
static int put_points(const bench *b, const plot *p, const cell *of, bool planned, FILE *to)
{
    int points = 0;
    for (int i = 0; i < b->cell_count; i++) {
        const cell *c = &b->cells[i];
        double value = c->done && !*c->error && (c->ranks == 1 || same_name(c, of)) ? p->value(c, planned) : (double)NAN;
        if (!isnan(value)) fprintf(to, "%d %.9g\n", c->ranks, value), points++;
    }
    return points;
}

static void write_script(const bench *b, const plot *p, FILE *to)
{
    char lines[2 * CELLS * 96] = "";
    size_t at = 0;
    int color = 0;
    fprintf(to, "# Draws %s.png: gnuplot %s.gnuplot\nset terminal pngcairo size 960,540\nset output '%s.png'\nset xlabel 'ranks'\n"
            "set ylabel '%s'\nset grid\nset yrange [0:*]\nset key outside\nset xtics 1\nset offsets 0.2, 0.2, 0, 0\n", p->name, p->name, p->name, p->label);
    for (int i = 0; i < b->cell_count; i++) {
        const cell *c = &b->cells[i];
        char name[sizeof c->strategy];
        if (!is_first(b, i) && !(b->cell_count == 1)) continue;
        color++;
        for (int planned = 0; planned < 2; planned++) {
            fprintf(to, "$d%d_%d << EOD\n", i, planned);
            int points = put_points(b, p, c, planned, to);
            fputs("EOD\n", to);
            if (points)
                at += (size_t)snprintf(lines + at, sizeof lines - at, "%s$d%d_%d with %s lc %d %s title '%s%s'", at ? ", " : "plot ", i,
                                       planned, planned ? "lines" : "linespoints", color, planned ? "dt 2" : "pt 7", name_of(c, name),
                                       planned ? ", planned" : "");
        }
    }
    fprintf(to, "%s\n", at ? lines : "set title 'nothing was measured'\nplot [1:2] 0 notitle");
}

static bool draw(const bench *b, const plot *p)
{
    char path[PATH_ROOM], script[64], error[ERROR_ROOM];
    snprintf(script, sizeof script, "%s.gnuplot", p->name);
    snprintf(path, sizeof path, "%s/%s", b->out, script);
    FILE *to = fopen(path, "w");
    if (to) write_script(b, p, to);
    if (!to || fclose(to) != 0) {
        fprintf(stderr, "strategies: %s cannot be written: %s\n", path, strerror(errno));
        return false;
    }
    char *const argv[] = { "gnuplot", script, NULL };
    int status = child_run(b->out, argv, NULL, error);
    if (!status) return true;
    fprintf(stderr, "strategies: no %s.png: %s\n", p->name, status == 127 ? "gnuplot is not installed" : error);
    return status == 127; /* the numbers are there without it */
}

bool report_plot(const bench *b)
{
    bool drawn = true;
    for (size_t i = 0; i < sizeof plots / sizeof *plots; i++) drawn = draw(b, &plots[i]) && drawn;
    return drawn;
}
