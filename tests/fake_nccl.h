/* An NCCL that notes what it is asked: a library for tests of transport `nccl`, loaded in place of libnccl.so.2. Nothing is sent; a rank
 * that is alone copies. A communicator's memory is gone when it has been given up or back, so that who touches it then is noticed by
 * sanitizers. */
#ifndef TANDEM_TESTS_FAKE_NCCL_H
#define TANDEM_TESTS_FAKE_NCCL_H

#include <stdatomic.h>

enum { FAKE_NCCL_LOG = 16384 };

/* The library's `fake_nccl_state`, to be set by tests. */
typedef struct fake_nccl {
    _Atomic int version;
    _Atomic int in_progress;  /* a communicator that has been called answers so often that it is in progress; -1: for ever */
    _Atomic int fails;        /* what calls give back; 0: success */
    _Atomic int async_error;  /* what communicators answer; 0: success */
    _Atomic int hangs;        /* collectives return when their communicator is given up */
    _Atomic int entered;      /* collectives called */
    _Atomic int asked;        /* times communicators have been asked after */
    _Atomic int alive;        /* communicators */
    void (*_Atomic on_error)(void); /* called when what went wrong is asked for; NULL: nothing is */
    void (*copy_log)(char *to); /* FAKE_NCCL_LOG bytes: "init c0 2 ranks as 1 blocking 0 id 7\nall_reduce c0 ...\n" */
    void (*reset)(void);      /* all of it */
} fake_nccl;

#endif
