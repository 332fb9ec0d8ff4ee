/* An allocator that counts what is held and refuses its nth call: every allocation of a piece of code fails in turn.
 *
 *     memory_test memory = { .refused = -1 };
 *     td_context *td = open_with(&memory);
 *     for (memory_refuse(&memory, 0); !works(td); memory_refuse(&memory, memory.refused + 1)) ...
 */
#ifndef TANDEM_TESTS_MEMORY_H
#define TANDEM_TESTS_MEMORY_H

#include "tests/check.h"

typedef struct memory_test {
    int calls, refused;     /* since memory_refuse; which of them is refused, -1: none */
    int held;               /* blocks */
} memory_test;

static inline void *memory_get(void *user, size_t bytes, const char *kind)
{
    memory_test *m = user;
    (void)kind;
    if (m->calls++ == m->refused) return NULL;
    m->held++;
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static inline void memory_put(void *user, void *memory, size_t bytes, const char *kind)
{
    (void)bytes, (void)kind;
    ((memory_test *)user)->held--;
    free(memory);
}

static inline void memory_refuse(memory_test *m, int call)
{
    m->calls = 0;
    m->refused = call;
}

static inline td_context *open_with(memory_test *memory)
{
    td_allocator allocator = { .user = memory, .get = memory_get, .put = memory_put };
    td_context *td = td_open(&(td_options){ .seed = 1, .threads = 2, .log = check_log_line, .allocator = &allocator });
    ck_assert_no_error(td);
    return td;
}

#endif
