/* SIGINT and SIGTERM set a flag that the loop looks at after each update; a second SIGINT ends the process at once. A second SIGTERM
 * does not: at the end of a job's time Slurm and its srun send one each, as do a launcher and whoever ends all of a job's processes.
 * SIGUSR1 sets another: a checkpoint is wanted.
 */
#include <signal.h>
#include <stddef.h>

#include "run/loop.h"

/* A signal handler can reach nothing else: the only mutable globals. */
static volatile sig_atomic_t came, save_wanted;

static void note(int number) { came = number; }

static void note_save(int number)
{
    (void)number;
    save_wanted = 1;
}

static void set(int number, void (*handler)(int), int flags)
{
    struct sigaction action = { .sa_handler = handler, .sa_flags = flags };
    sigemptyset(&action.sa_mask);
    sigaction(number, &action, NULL);
}

/* A file over the limit of its size is then an error of write. */
void run_signals_ignore(void) { set(SIGXFSZ, SIG_IGN, 0); }

/* Before there is anything to save, and when all is saved, that is no reason to end the process. */
void run_signals_ignore_save(void) { set(SIGUSR1, SIG_IGN, 0); }

void run_signals_catch(void)
{
    came = save_wanted = 0;
    set(SIGINT, note, SA_RESTART | SA_RESETHAND);
    set(SIGTERM, note, SA_RESTART);
    set(SIGUSR1, note_save, SA_RESTART);
    set(SIGPIPE, SIG_IGN, 0); /* who reads the progress does not decide over the run */
}

void run_signals_release(void)
{
    static const int numbers[] = { SIGINT, SIGTERM, SIGPIPE, SIGXFSZ };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) set(numbers[i], SIG_DFL, 0);
    run_signals_ignore_save();
    came = save_wanted = 0;
}

int run_signal(void) { return came; }

bool run_signal_save(void)
{
    bool wanted = save_wanted != 0;
    if (wanted) save_wanted = 0; /* a signal that comes meanwhile is met by the same save */
    return wanted;
}
