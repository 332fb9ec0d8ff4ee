/* A transport whose ranks reach into one another's memory (td_reach), as far as core sees it: what it is told, a thread. */
#ifndef TANDEM_TESTS_REACH_H
#define TANDEM_TESTS_REACH_H

#include "core/rewrite.h"

typedef struct reach_notes {
    bool others_grow, says_changed;           /* what it answers */
    void (*look)(const td_settled *where);    /* called with each; NULL: nothing is */
    td_settled last;
    int settled, left, left_alone;            /* times; alone: as a context that closes */
} reach_notes;
static _Thread_local reach_notes reach_now;

static bool reach_grows(void *self, bool own, bool *any)
{
    (void)self;
    *any = own || reach_now.others_grow;
    return true;
}

static bool reach_settle(void *self, const td_settled *where, bool *changed)
{
    (void)self;
    if (reach_now.look) reach_now.look(where);
    reach_now.last = *where;
    reach_now.settled++;
    *changed = reach_now.says_changed;
    return true;
}

static bool reach_leave(void *self, bool together)
{
    (void)self;
    reach_now.left++;
    reach_now.left_alone += !together;
    return true;
}

static const td_reach reach_noted = { .grows = reach_grows, .settle = reach_settle, .leave = reach_leave };

#endif
