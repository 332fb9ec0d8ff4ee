/* See fiber.h. */
#include "tests/on_host/fiber.h"

#include <sanitizer/asan_interface.h>
#include <string.h>
#include <sys/mman.h>

enum { STACK_BYTES = 512 << 10, GUARD_BYTES = 64 << 10 };

/* ---- Stacks */

static void *top_of(const fiber *f) { return f->stack + f->bytes; }

/* Overflow meets memory that cannot be touched. */
static _Bool make_stack(fiber *f)
{
    if (f->stack) return 1;
    char *memory = mmap(NULL, STACK_BYTES + GUARD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return 0;
    mprotect(memory, GUARD_BYTES, PROT_NONE);
    f->stack = memory + GUARD_BYTES;
    f->bytes = STACK_BYTES;
    return 1;
}

/* ---- Going from one to another */

#if defined(__x86_64__)

/* Saves what a call preserves, and goes on where `to` was saved: as if this call returned there. */
void fiber_exchange(void **from, void *to);
__asm__(".text\n"
        ".globl fiber_exchange\n"
        ".type fiber_exchange, @function\n"
        "fiber_exchange:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".size fiber_exchange, . - fiber_exchange\n");

enum { SAVED = 6 };

/* The stack as a call of `entry` finds it: a return address, to nowhere, at 8 bytes from a multiple of 16. */
static void set_entry(fiber *f, void (*entry)(void))
{
    void **at = (void **)top_of(f) - 1;
    *at = NULL;
    memcpy(--at, &entry, sizeof entry);
    at -= SAVED;
    memset(at, 0, SAVED * sizeof *at);
    f->context = at;
}

void fiber_switch(fiber *from, fiber *to) { fiber_exchange(&from->context, to->context); }

#else

#include <stdlib.h>
#include <ucontext.h>

static void set_entry(fiber *f, void (*entry)(void))
{
    ucontext_t *c = f->context ? f->context : malloc(sizeof *c);
    if (!c) abort();
    getcontext(c);
    c->uc_stack.ss_sp = f->stack;
    c->uc_stack.ss_size = f->bytes;
    makecontext(c, entry, 0);
    f->context = c;
}

void fiber_switch(fiber *from, fiber *to)
{
    if (!from->context && !(from->context = malloc(sizeof(ucontext_t)))) abort();
    swapcontext(from->context, to->context);
}

#endif

_Bool fiber_make(fiber *f, void (*entry)(void))
{
    if (!make_stack(f)) return 0;
    ASAN_UNPOISON_MEMORY_REGION(f->stack, f->bytes); /* calls that were left there do not end */
    set_entry(f, entry);
    return 1;
}
