/* The profile as a table: rows by module and kind of operation, and what the host does. */
#include <stdlib.h>
#include <string.h>

#include "run/machine.h"
#include "run/profile.h"

/* ---- Names of rows */

enum { NAMES_KEPT = 2 };

/* "h.3.attn.c_attn" -> `exact` "h.3.attn" and `merged` "h.*.attn": two names, numbers among them aside. */
static void shorten(const char *path, char exact[RUN_PROFILE_NAME], char merged[RUN_PROFILE_NAME])
{
    int names = 0;
    size_t e = 0, m = 0;
    for (const char *at = path; *at && names < NAMES_KEPT;) {
        size_t length = strcspn(at, ".");
        bool number = length && strspn(at, "0123456789") == length;
        if (e + length + 2 > RUN_PROFILE_NAME || m + length + 2 > RUN_PROFILE_NAME) break;
        if (e) exact[e++] = '.', merged[m++] = '.';
        memcpy(exact + e, at, length), e += length;
        if (number) merged[m++] = '*';
        else memcpy(merged + m, at, length), m += length;
        names += !number;
        at += length + (at[length] == '.');
    }
    exact[e] = merged[m] = 0;
    if (!e) strcpy(merged, "(root)");
}

/* ---- Growing arrays */

static void *grow(td_context *td, void *array, int64_t *room, int64_t count, size_t item)
{
    if (count < *room) return array;
    int64_t larger = *room ? 2 * *room : 32;
    void *memory = td_alloc(td, (size_t)larger * item, "host");
    if (!memory) return NULL;
    if (array) memcpy(memory, array, (size_t)count * item);
    td_free(td, array, (size_t)*room * item, "host");
    *room = larger;
    return memory;
}

/* ---- Gathering */

/* One module before merging, with one kind; its row. */
typedef struct run_profile_place {
    char exact[RUN_PROFILE_NAME];
    const char *module, *kind;    /* of the tasks: the same texts by address */
    int64_t row;
} run_profile_place;

static int64_t row_of(run_profile_table *t, const char *merged, const char *kind)
{
    for (int64_t r = 0; r < t->row_count; r++)
        if (t->rows[r].kind == kind && !strcmp(t->rows[r].module, merged)) return r;
    run_profile_row *rows = grow(t->td, t->rows, &t->row_room, t->row_count, sizeof *rows);
    if (!rows) return -1;
    t->rows = rows;
    rows[t->row_count] = (run_profile_row){ .kind = kind };
    strcpy(rows[t->row_count].module, merged);
    return t->row_count++;
}

static int64_t place_of(run_profile_table *t, const td_profile_task *task)
{
    char exact[RUN_PROFILE_NAME], merged[RUN_PROFILE_NAME];
    for (int64_t i = 0; i < t->place_count; i++)
        if (t->places[i].module == task->module && t->places[i].kind == task->kind) return i;
    run_profile_place *places = grow(t->td, t->places, &t->place_room, t->place_count, sizeof *places);
    if (!places) return -1;
    t->places = places;
    shorten(task->module, exact, merged);
    int64_t row = row_of(t, merged, task->kind);
    if (row < 0) return -1;
    bool known = false;
    for (int64_t i = 0; i < t->place_count && !known; i++) known = places[i].row == row && !strcmp(places[i].exact, exact);
    if (!known) t->rows[row].modules++;
    places[t->place_count] = (run_profile_place){ .module = task->module, .kind = task->kind, .row = row };
    strcpy(places[t->place_count].exact, exact);
    return t->place_count++;
}

static void add_task(run_profile_row *row, const td_profile_task *task, double ns, double floor_ns)
{
    row->calls++;
    row->flops += task->flops;
    row->bytes += task->bytes;
    row->sent += task->sent;
    row->ns += ns;
    row->phase_ns[task->phase] += ns;
    row->floor_ns += floor_ns;
}

static void add_row(run_profile_row *to, const run_profile_row *row)
{
    to->calls += row->calls;
    to->flops += row->flops;
    to->bytes += row->bytes;
    to->sent += row->sent;
    to->ns += row->ns;
    to->floor_ns += row->floor_ns;
    for (int p = 0; p < 3; p++) to->phase_ns[p] += row->phase_ns[p];
}

/* Names past the last place are told together with it. */
static void add_host(run_profile_table *t, const char *name, double ns)
{
    int h = 0;
    while (h < t->host_count && strcmp(t->host[h].name, name)) h++;
    if (h == RUN_PROFILE_HOST) h--;
    else if (h == t->host_count) t->host[t->host_count++] = (run_profile_host){ .name = name };
    t->host[h].ns += ns;
    t->host_ns += ns;
}

static bool add_kinds(run_profile_table *t)
{
    for (int64_t r = 0; r < t->row_count; r++) {
        int64_t k = 0;
        while (k < t->kind_count && t->kinds[k].kind != t->rows[r].kind) k++;
        run_profile_row *kinds = grow(t->td, t->kinds, &t->kind_room, t->kind_count, sizeof *kinds);
        if (!kinds) return false;
        t->kinds = kinds;
        if (k == t->kind_count) kinds[t->kind_count++] = (run_profile_row){ .kind = t->rows[r].kind };
        add_row(&kinds[k], &t->rows[r]);
        add_row(&t->all, &t->rows[r]);
    }
    return true;
}

/* ---- What runs beside what */

static int by_begin(const void *a, const void *b)
{
    const run_span *x = a, *y = b;
    return (x->begin_ns > y->begin_ns) - (x->begin_ns < y->begin_ns);
}

double run_spans_ns(run_span *spans, int64_t count, bool computation)
{
    int64_t until = INT64_MIN, total = 0;
    qsort(spans, (size_t)count, sizeof *spans, by_begin);
    for (int64_t i = 0; i < count; i++) {
        int64_t begin = spans[i].begin_ns > until ? spans[i].begin_ns : until;
        if ((computation && spans[i].beside) || spans[i].end_ns <= begin) continue;
        total += spans[i].end_ns - begin;
        until = spans[i].end_ns;
    }
    return (double)total;
}

/* Sets what of collectives and copies is exposed; *busy: ns in which some task runs. */
static bool find_exposed(run_profile_table *t, double *busy)
{
    int64_t all = td_profile_count(t->td), count = 0;
    run_span *spans = td_alloc(t->td, (size_t)all * sizeof *spans + 1, "host");
    if (!spans) return false;
    for (int64_t i = 0; i < all; i++) {
        td_profile_event e = td_profile_at(t->td, i);
        if (!e.task) continue;
        bool beside = e.task->collective || e.task->copied > 0;
        spans[count++] = (run_span){ e.begin_ns, e.end_ns, beside };
        if (beside) t->beside_ns += (double)(e.end_ns - e.begin_ns);
    }
    *busy = run_spans_ns(spans, count, false);
    t->exposed_ns = *busy - run_spans_ns(spans, count, true);
    td_free(t->td, spans, (size_t)all * sizeof *spans + 1, "host");
    return true;
}

static int by_time(const void *a, const void *b)
{
    double x = ((const run_profile_row *)a)->ns, y = ((const run_profile_row *)b)->ns;
    return (x < y) - (x > y);
}

bool run_profile_gather(run_loop *run, run_profile_table *t)
{
    td_context *td = run->td;
    *t = (run_profile_table){ .td = td };
    double running = 0, busy;
    for (int64_t i = 0; i < td_profile_count(td); i++) {
        td_profile_event e = td_profile_at(td, i);
        double ns = (double)(e.end_ns - e.begin_ns);
        if (!e.task && !strcmp(e.name, "run")) running += ns;
        else if (!e.task) add_host(t, e.name, ns);
        if (!e.task) continue;
        int64_t place = place_of(t, e.task);
        if (place < 0) return false;
        add_task(&t->rows[t->places[place].row], e.task, ns, 1e9 * run_floor_s(&run->profile.machine, e.task));
    }
    if (!add_kinds(t) || !find_exposed(t, &busy)) return false;
    add_host(t, "between tasks", running - busy);
    if (t->row_count) qsort(t->rows, (size_t)t->row_count, sizeof *t->rows, by_time);
    if (t->kind_count) qsort(t->kinds, (size_t)t->kind_count, sizeof *t->kinds, by_time);
    return true;
}

void run_profile_close(run_profile_table *t)
{
    if (!t->td) return;
    td_free(t->td, t->rows, (size_t)t->row_room * sizeof *t->rows, "host");
    td_free(t->td, t->kinds, (size_t)t->kind_room * sizeof *t->kinds, "host");
    td_free(t->td, t->places, (size_t)t->place_room * sizeof *t->places, "host");
}

/* ---- Printing: everything an update */

enum { LEAST_FLOOR_NS = 100 };    /* a call's: below it the clock says nothing of the distance */

static void print_row(run_loop *run, const run_profile_table *t, const char *name, const run_profile_row *row)
{
    double n = (double)run->profile.done, total = t->all.ns + t->host_ns;
    char distance[16] = "-";
    if (row->floor_ns >= LEAST_FLOOR_NS * (double)row->calls) snprintf(distance, sizeof distance, "%.2f", row->ns / row->floor_ns);
    run_say(run, "%-24s %-10s %7.5g %9.3f %6.1f %9.4f %8.1f %9.2f %7.1f %9.3f %9s", name, row->kind, (double)row->calls / n,
            1e-6 * row->ns / n, 100 * row->ns / total, 1e-9 * (double)row->flops / n, row->ns > 0 ? (double)row->flops / row->ns : 0,
            1e-6 * (double)row->bytes / n, row->ns > 0 ? (double)row->bytes / row->ns : 0, 1e-6 * row->floor_ns / n, distance);
}

static void print_rows(run_loop *run, const run_profile_table *t)
{
    for (int64_t r = 0; r < t->row_count; r++) {
        char name[RUN_PROFILE_NAME + 32];
        const run_profile_row *row = &t->rows[r];
        if (row->modules > 1) snprintf(name, sizeof name, "%s (%lld)", row->module, (long long)row->modules);
        else snprintf(name, sizeof name, "%s", row->module);
        print_row(run, t, name, row);
    }
}

static void print_machine(run_loop *run)
{
    const td_machine *m = &run->profile.machine;
    char peaks[128] = "";
    for (int d = 0, size = 0; d < TD_DTYPES; d++)
        if (m->flops[d] > 0)
            size += snprintf(peaks + size, sizeof peaks - (size_t)size, "%s %.1f GFLOP/s, ", td_dtype_name((td_dtype)d),
                             1e-9 * m->flops[d]);
    char name[96];
    snprintf(name, sizeof name, "%d thread%s%s", td_threads(run->td), td_threads(run->td) == 1 ? "" : "s", run->ranks > 1 ? " a rank" : "");
    run_say(run, "machine: %s, %smemory %.1f GB/s (over %.0f MB), measured now", *m->name ? m->name : name, peaks, 1e-9 * m->bytes,
            1e-6 * (double)m->buffer_bytes);
    run_say(run, "floor: of each call the larger of FLOPs / peak and bytes / bandwidth; distance: ms / floor. What stays in a cache "
                 "comes faster than from memory, so a distance below 1 is possible.%s",
            *m->name ? " Events between calls, whose time is in theirs, take two or three us each." : "");
}

void run_profile_print(run_loop *run, const run_profile_table *t)
{
    double n = (double)run->profile.done, total = t->all.ns + t->host_ns;
    run_say(run, "profile of %lld update%s: %.3f ms a step", (long long)run->profile.done, run->profile.done == 1 ? "" : "s",
            1000 * run->profile.wall_s / n);
    run_say(run, "%-24s %-10s %7s %9s %6s %9s %8s %9s %7s %9s %9s", "module", "kind", "calls", "ms", "%", "GFLOP", "GFLOP/s", "MB", "GB/s",
            "floor ms", "distance");
    print_rows(run, t);
    run_say(run, "by kind");
    for (int64_t k = 0; k < t->kind_count; k++) print_row(run, t, "", &t->kinds[k]);
    run_profile_row all = t->all;
    all.kind = "";
    print_row(run, t, "all tasks", &all);
    for (int h = 0; h < t->host_count; h++)
        run_say(run, "%-24s %-10s %7s %9.3f %6.1f", t->host[h].name, "host", "", 1e-6 * t->host[h].ns / n, 100 * t->host[h].ns / total);
    run_say(run, "forward %.3f ms, backward %.3f, update %.3f, host %.3f", 1e-6 * t->all.phase_ns[TD_PROFILE_FORWARD] / n,
            1e-6 * t->all.phase_ns[TD_PROFILE_BACKWARD] / n, 1e-6 * t->all.phase_ns[TD_PROFILE_UPDATE] / n, 1e-6 * t->host_ns / n);
    if (t->beside_ns > 0)
        run_say(run, "collectives and copies %.3f ms, of which %.3f exposed: nothing is computed meanwhile", 1e-6 * t->beside_ns / n,
                1e-6 * t->exposed_ns / n);
    print_machine(run);
}

/* ---- JSON: everything an update */

static void put_row(const run_loop *run, const run_profile_table *t, const run_profile_row *row, td_json_writer *w)
{
    double n = (double)run->profile.done;
    td_json_open_object(w, NULL);
    if (*row->module) td_json_put_string(w, "module", row->module);
    if (*row->module) td_json_put_integer(w, "modules", row->modules);
    td_json_put_string(w, "kind", row->kind);
    td_json_put_number(w, "calls", (double)row->calls / n);
    td_json_put_number(w, "ms", 1e-6 * row->ns / n);
    td_json_put_number(w, "share", row->ns / (t->all.ns + t->host_ns));
    td_json_put_number(w, "forward_ms", 1e-6 * row->phase_ns[TD_PROFILE_FORWARD] / n);
    td_json_put_number(w, "backward_ms", 1e-6 * row->phase_ns[TD_PROFILE_BACKWARD] / n);
    td_json_put_number(w, "update_ms", 1e-6 * row->phase_ns[TD_PROFILE_UPDATE] / n);
    td_json_put_number(w, "flops", (double)row->flops / n);
    td_json_put_number(w, "bytes", (double)row->bytes / n);
    td_json_put_number(w, "sent_bytes", (double)row->sent / n);
    td_json_put_number(w, "floor_ms", 1e-6 * row->floor_ns / n);
    td_json_close_object(w);
}

void run_profile_put(const run_loop *run, const run_profile_table *t, td_json_writer *w)
{
    double n = (double)run->profile.done;
    td_json_put_number(w, "task_ms", 1e-6 * t->all.ns / n);
    td_json_put_number(w, "host_ms", 1e-6 * t->host_ns / n);
    td_json_put_number(w, "beside_ms", 1e-6 * t->beside_ns / n);
    td_json_put_number(w, "exposed_ms", 1e-6 * t->exposed_ns / n);
    td_json_open_array(w, "rows");
    for (int64_t r = 0; r < t->row_count; r++) put_row(run, t, &t->rows[r], w);
    td_json_close_array(w);
    td_json_open_array(w, "kinds");
    for (int64_t k = 0; k < t->kind_count; k++) put_row(run, t, &t->kinds[k], w);
    td_json_close_array(w);
    td_json_open_array(w, "host");
    for (int h = 0; h < t->host_count; h++) {
        td_json_open_object(w, NULL);
        td_json_put_string(w, "name", t->host[h].name);
        td_json_put_number(w, "ms", 1e-6 * t->host[h].ns / n);
        td_json_close_object(w);
    }
    td_json_close_array(w);
}
