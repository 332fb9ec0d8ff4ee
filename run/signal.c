/* SIGINT and SIGTERM set a flag that the loop looks at after each update; a second one ends the process at once. */
#include <signal.h>
#include <stddef.h>

#include "run/loop.h"

/* A signal handler can reach nothing else: the one mutable global. */
static volatile sig_atomic_t came;

static void note(int number) { came = number; }

static void set(int number, void (*handler)(int), int flags)
{
    struct sigaction action = { .sa_handler = handler, .sa_flags = flags };
    sigemptyset(&action.sa_mask);
    sigaction(number, &action, NULL);
}

/* A file over the limit of its size is then an error of write. */
void run_signals_ignore(void) { set(SIGXFSZ, SIG_IGN, 0); }

void run_signals_catch(void)
{
    came = 0;
    set(SIGINT, note, SA_RESTART | SA_RESETHAND);
    set(SIGTERM, note, SA_RESTART | SA_RESETHAND);
    set(SIGPIPE, SIG_IGN, 0); /* who reads the progress does not decide over the run */
}

void run_signals_release(void)
{
    static const int numbers[] = { SIGINT, SIGTERM, SIGPIPE, SIGXFSZ };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) set(numbers[i], SIG_DFL, 0);
    came = 0;
}

int run_signal(void) { return came; }
