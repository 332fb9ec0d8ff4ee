/* Threads beside the program's own. */
#ifndef TANDEM_THREAD_H
#define TANDEM_THREAD_H

#include <pthread.h>

/* pthread_create of a thread to which no signal is delivered but its own faults: the others are for the program's own
 * threads. 0, or the error's number. */
int td_thread_start(pthread_t *thread, void *(*body)(void *argument), void *argument);

#endif
