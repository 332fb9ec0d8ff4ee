/* What late streams were given and has not run yet: one line, in the order in which it was given. That is an order a GPU may take, since a
 * stream waits for nothing but what was recorded before. It moves on when the host waits, and no further than the host waits for, so that
 * memory which the host writes, frees or looks at too early shows in what is computed. */
#ifndef TANDEM_TESTS_LATE_H
#define TANDEM_TESTS_LATE_H

#include <on_host.h>

/* Whether the environment asks for late streams. */
bool late_is_asked_for(void);
/* At the end of the line, which owns it from then on; its place, from 1. 0: no memory, the work is still the caller's. */
int64_t late_put(on_host_work *work);
/* The place of what was put last. */
int64_t late_end(void);
bool late_has_run(int64_t place);
/* Runs the line up to the place, or of that what is first; the first error of what it ran. */
cudaError_t late_run(int64_t place);
cudaError_t late_run_one(int64_t place);

#endif
