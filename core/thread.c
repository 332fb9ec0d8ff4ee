/* Starting threads (thread.h has the promise). */
#include "core/thread.h"

#include <signal.h>
#include <stddef.h>

int td_thread_start(pthread_t *thread, void *(*body)(void *argument), void *argument)
{
    static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL };
    sigset_t most, before;
    sigfillset(&most);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&most, faults[i]);
    pthread_sigmask(SIG_SETMASK, &most, &before);
    int status = pthread_create(thread, NULL, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}
