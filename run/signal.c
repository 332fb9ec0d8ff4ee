/* SIGINT and SIGTERM set a flag that the loop looks at after each update; a second one ends the process at once. */
#include <signal.h>
#include <stddef.h>

#include "run/loop.h"

/* A signal handler can reach nothing else: the one mutable global. */
static volatile sig_atomic_t came;

static void note(int number) { came = number; }

void run_signals_catch(void)
{
    struct sigaction action = { .sa_handler = note, .sa_flags = SA_RESTART | SA_RESETHAND };
    sigemptyset(&action.sa_mask);
    came = 0;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    /* A file over the limit of its size is then an error of write, not the end of the process. */
    struct sigaction ignore = { .sa_handler = SIG_IGN };
    sigaction(SIGXFSZ, &ignore, NULL);
}

void run_signals_release(void)
{
    struct sigaction standard = { .sa_handler = SIG_DFL };
    sigaction(SIGINT, &standard, NULL);
    sigaction(SIGTERM, &standard, NULL);
    sigaction(SIGXFSZ, &standard, NULL);
}

int run_signal(void) { return came; }
