/* A device for tests that is the host: a queue is a thread that does what it was given in order, as a GPU does; what is captured in a graph
 * is kept and can be replayed.
 */
#ifndef TANDEM_TESTS_STAGED_H
#define TANDEM_TESTS_STAGED_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/internal.h"
#include "parallel/staged.h"

enum { STREAM_ROOM = 4096 };

typedef struct stream_work {
    void (*function)(void *user);             /* NULL: a copy */
    void *user, *to;
    const void *from;
    int64_t bytes;
} stream_work;

typedef struct stream_graph {
    int count;
    stream_work work[64];
} stream_graph;

typedef struct stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    stream_work work[STREAM_ROOM];            /* in turn */
    int64_t given, done;
    bool closing;
    stream_graph *graph;                      /* being captured; NULL: none is */
    uint64_t key;                             /* of its device */
} stream;

static _Atomic int64_t streams_got;           /* pieces of page-locked memory, of all streams */

static void do_work(const stream_work *w)
{
    if (w->function) w->function(w->user);
    else memcpy(w->to, w->from, (size_t)w->bytes);
}

static void *stream_thread(void *argument)
{
    stream *s = argument;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->done == s->given && !s->closing) pthread_cond_wait(&s->moved, &s->lock);
        if (s->done == s->given) break;
        stream_work w = s->work[s->done % STREAM_ROOM];
        pthread_mutex_unlock(&s->lock);
        do_work(&w);
        pthread_mutex_lock(&s->lock);
        s->done++;
        pthread_cond_broadcast(&s->moved);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static bool stream_give(void *queue, stream_work w)
{
    stream *s = queue;
    if (s->graph) {
        s->graph->work[s->graph->count++] = w;
        return true;
    }
    pthread_mutex_lock(&s->lock);
    while (s->given - s->done == STREAM_ROOM) pthread_cond_wait(&s->moved, &s->lock);
    s->work[s->given++ % STREAM_ROOM] = w;
    pthread_cond_broadcast(&s->moved);
    pthread_mutex_unlock(&s->lock);
    return true;
}

static bool stream_wait(void *queue)
{
    stream *s = queue;
    pthread_mutex_lock(&s->lock);
    while (s->done < s->given) pthread_cond_wait(&s->moved, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return true;
}

static bool stream_copy(void *queue, void *to, const void *from, int64_t bytes)
{
    return stream_give(queue, (stream_work){ .to = to, .from = from, .bytes = bytes });
}

static bool stream_call(void *queue, void (*function)(void *user), void *user)
{
    return stream_give(queue, (stream_work){ .function = function, .user = user });
}

static void *stream_get(int64_t bytes)
{
    atomic_fetch_add(&streams_got, 1);
    return malloc((size_t)bytes);
}

static uint64_t stream_key(void *queue) { return ((stream *)queue)->key; }
static int stream_number(void *queue) { return (int)((stream *)queue)->key - 1; }

static const par_device stream_device = {
    .key = stream_key, .number = stream_number, .get_host = stream_get, .put_host = free, .to_host = stream_copy, .to_device = stream_copy,
    .call = stream_call, .wait = stream_wait,
};

/* The context's queue is a new stream of a device with this key. */
static stream *stream_open(td_context *td, uint64_t key)
{
    stream *s = calloc(1, sizeof *s);
    if (!s) exit(1);
    s->key = key;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->moved, NULL);
    if (pthread_create(&s->thread, NULL, stream_thread, s) != 0) exit(1);
    td->run.queue = s;
    return s;
}

static void stream_close(stream *s)
{
    pthread_mutex_lock(&s->lock);
    s->closing = true;
    pthread_cond_broadcast(&s->moved);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->moved);
    free(s);
}

#endif
