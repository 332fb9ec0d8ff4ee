/* Progress: on a terminal one line redrawn in place, elsewhere a plain line for each logged update.
 *
 *     1250/3750 [=========>                    ]  loss 0.4123  11,800 items/s  3:32 left
 */
#include "run/loop.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio_ext.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

double run_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void run_progress_open(run_loop *run)
{
    run_progress *p = &run->progress;
    p->to = run_flags_on(&run->flags, "json") ? stderr : stdout;
    p->quiet = run->rank != 0;
    p->terminal = isatty(fileno(p->to)) && !p->quiet && !run->scheduled; /* launchers make a terminal of everything */
    setvbuf(p->to, NULL, _IOLBF, 0);
}

static int terminal_width(const run_progress *p)
{
    struct winsize size;
    if (ioctl(fileno(p->to), TIOCGWINSZ, &size) || !size.ws_col) return 80;
    return size.ws_col;
}

/* 11800 -> "11,800" */
static void with_commas(double x, char to[32])
{
    char digits[24];
    int n = snprintf(digits, sizeof digits, "%.0f", x < 0 || x > 1e15 ? 0 : x), at = 0;
    for (int i = 0; i < n; i++) {
        if (i && (n - i) % 3 == 0) to[at++] = ',';
        to[at++] = digits[i];
    }
    to[at] = 0;
}

/* "3:32", "1:03:32" */
static void clock_text(double seconds, char to[32])
{
    long s = (long)(seconds + 0.5);
    if (s >= 3600) snprintf(to, 32, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
    else snprintf(to, 32, "%ld:%02ld", s / 60, s % 60);
}

/* The line in the width there is: the numbers first, the bar with what is left. */
static void compose(const run_loop *run, int width, char *line, size_t room)
{
    char rate[32] = "?", left[32] = "?", tail[128], head[64];
    int64_t step = run->read;
    if (run->trained_steps) {
        double seconds = run->trained_s / (double)run->trained_steps;
        with_commas((double)run->batch / seconds, rate);
        clock_text(seconds * (double)(run->steps - step), left);
    }
    snprintf(head, sizeof head, "%lld/%lld ", (long long)step, (long long)run->steps);
    int size = snprintf(tail, sizeof tail, " loss %.4g  %s items/s  %s left", run->loss, rate, left);
    int bar = width - 1 - (int)strlen(head) - size - 2;
    if (bar > 40) bar = 40;
    if (bar < 5) {
        snprintf(line, room, "%s%s", head, tail);
    } else {
        char cells[48];
        int done = run->steps ? (int)((double)bar * (double)step / (double)run->steps) : 0;
        for (int i = 0; i < bar; i++) cells[i] = i < done ? '=' : i == done ? '>' : ' ';
        cells[bar] = 0;
        snprintf(line, room, "%s[%s]%s", head, cells, tail);
    }
    if (width > 1 && (int)strlen(line) > width - 1) line[width - 1] = 0;
}

/* What could not be written is thrown away, or the end of the process would try again. */
static void flush(run_progress *p)
{
    if (!fflush(p->to) && !ferror(p->to)) return;
    p->error = errno;
    p->quiet = true;
    p->terminal = p->drawn = false;
    __fpurge(p->to);
}

void run_progress_draw(run_loop *run, bool now)
{
    run_progress *p = &run->progress;
    if (!p->terminal) return;
    double time = run_now();
    if (!now && time - p->drawn_at < 0.1) return;
    char line[512];
    compose(run, terminal_width(p), line, sizeof line);
    run_busy(run, true);
    fprintf(p->to, "\r\033[K%s", line);
    p->drawn = true;
    p->drawn_at = time;
    flush(p);
    run_busy(run, false);
}

void run_say(run_loop *run, const char *format, ...)
{
    run_progress *p = run ? &run->progress : NULL;
    if (!p || p->quiet || !p->to) return;
    run_busy(run, true);
    if (p->drawn) fprintf(p->to, "\r\033[K");
    p->drawn = false;
    va_list arguments;
    va_start(arguments, format);
    vfprintf(p->to, format, arguments);
    va_end(arguments);
    fputc('\n', p->to);
    flush(p);
    run_busy(run, false);
}

void run_progress_end(run_loop *run)
{
    run_progress *p = &run->progress;
    if (p->drawn) fputc('\n', p->to);
    p->drawn = false;
}

/* ---- stdout as a result */

bool run_print_object(run_loop *run, const td_json_writer *w)
{
    const char *text = td_json_text(w);
    if (!text) return false;
    run_busy(run, true);
    bool ok = printf("%s\n", text) >= 0 && fflush(stdout) == 0;
    if (!ok) td_fail(run->td, TD_ERROR_DATA, "cannot write to stdout: %s", strerror(errno));
    if (!ok) __fpurge(stdout);
    run_busy(run, false);
    return ok;
}

int run_stdout_status(const char *name)
{
    if (!fflush(stdout) && !ferror(stdout)) return 0;
    fprintf(stderr, "%s: cannot write to stdout: %s\n", name, strerror(errno));
    __fpurge(stdout);
    return 1;
}
