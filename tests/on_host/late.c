/* The line of late.h. One thread at a time runs it; work of it does not call the runtime, as on a GPU it must not. */
#include "late.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct waiting {
    on_host_work *work;
    struct waiting *next;
} waiting;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static waiting *first, **end = &first;
static int64_t put, ran;                      /* places */

bool late_is_asked_for(void)
{
    const char *late = getenv("ON_HOST_LATE");
    return late && !strcmp(late, "1");
}

int64_t late_put(on_host_work *work)
{
    waiting *w = malloc(sizeof *w);
    if (!w) return 0;
    *w = (waiting){ .work = work };
    pthread_mutex_lock(&lock);
    *end = w;
    end = &w->next;
    int64_t place = ++put;
    pthread_mutex_unlock(&lock);
    return place;
}

int64_t late_end(void)
{
    pthread_mutex_lock(&lock);
    int64_t place = put;
    pthread_mutex_unlock(&lock);
    return place;
}

bool late_has_run(int64_t place)
{
    pthread_mutex_lock(&lock);
    bool has = ran >= place;
    pthread_mutex_unlock(&lock);
    return has;
}

static cudaError_t run_at_most(int64_t place, int64_t count)
{
    cudaError_t status = cudaSuccess;
    pthread_mutex_lock(&lock);
    for (int64_t i = 0; i < count && ran < place; i++, ran++) {
        waiting *w = first;
        cudaError_t own = w->work->run(w->work);
        if (status == cudaSuccess) status = own;
        w->work->drop(w->work);
        first = w->next;
        if (!first) end = &first;
        free(w);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

cudaError_t late_run(int64_t place) { return run_at_most(place, INT64_MAX); }
cudaError_t late_run_one(int64_t place) { return run_at_most(place, 1); }
