/* Times that a test holds against an aim.
 *
 * They are processor time, so that waiting for a turn is not counted; but a neighbour on the same core or caches slows
 * every instruction, to less than half the speed, for seconds on end. It only ever adds: an aim that was met once is met.
 */
#ifndef TANDEM_TESTS_TIMING_H
#define TANDEM_TESTS_TIMING_H

#include <time.h>

#include "tests/check.h"

static inline double timing_now_us(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* What `measure` returns, the least of as many calls as it takes to come under `aim`; of those of a minute, if none does. */
static inline double timing_least(double (*measure)(void), double aim)
{
    double least = measure();
    for (double start = timing_now_us(CLOCK_MONOTONIC); least >= aim && timing_now_us(CLOCK_MONOTONIC) - start < 60e6;) {
        nanosleep(&(struct timespec){ .tv_nsec = 200000000 }, NULL);
        least = fmin(least, measure());
    }
    return least;
}

#endif
