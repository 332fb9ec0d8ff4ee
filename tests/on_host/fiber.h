/* Stacks that one thread of the process changes between. By hand on x86-64, where ucontext would ask the kernel for signal masks each
 * time. AddressSanitizer is not told, which would take longer than what runs on them: code that does must be compiled without its
 * detection of stack use after return. */
#ifndef TANDEM_TESTS_FIBER_H
#define TANDEM_TESTS_FIBER_H

#include <stddef.h>

typedef struct fiber {
    void *context;                            /* where it stopped */
    char *stack;                              /* its lowest byte; NULL: the process's own */
    size_t bytes;
} fiber;

/* A fiber that begins with entry(), which does not return. false: no memory. One that has been made begins anew. */
_Bool fiber_make(fiber *f, void (*entry)(void));
/* Goes from `from`, which runs, on with `to`. */
void fiber_switch(fiber *from, fiber *to);

#endif
