/* The loader's threads: each takes the next micro-batch in order, decodes it into its slot and marks it ready. What a
 * slot holds depends on its place alone, so the order is the same for any number of threads. */
#include <stdio.h>
#include <string.h>

#include "core/thread.h"
#include "data/internal.h"

static void *column_row(const data_loader *l, const loader_column *column, int64_t slot, int64_t row)
{
    return l->memory + slot * l->slot_bytes + column->offset + row * column->bytes;
}

static void set_weight(const data_loader *l, int64_t slot, int64_t row, double weight)
{
    const loader_column *column = &l->column[l->columns - 1];
    void *to = column_row(l, column, slot, row);
    if (column->dtype == TD_F64) *(double *)to = weight;
    else *(float *)to = (float)weight;
}

static void convert(const loader_column *column, const void *from, void *to)
{
    if (column->dtype == TD_F64) {
        for (int64_t i = 0; i < column->elements; i++) ((double *)to)[i] = ((const float *)from)[i];
    } else {
        for (int64_t i = 0; i < column->elements; i++) ((float *)to)[i] = (float)((const double *)from)[i];
    }
}

/* Sample i to a row of the slot. */
static bool decode_row(const data_loader *l, int64_t i, int64_t slot, int64_t row, char *scratch, char *error)
{
    void *out[DATA_MAX_COLUMNS];
    for (int c = 0; c < l->set->columns; c++) {
        const loader_column *column = &l->column[c];
        out[c] = column->dtype == column->source ? column_row(l, column, slot, row) : scratch + column->scratch;
    }
    error[0] = 0;
    if (!l->set->get(l->set, i, out, error)) return false;
    for (int c = 0; c < l->set->columns; c++) {
        const loader_column *column = &l->column[c];
        if (column->dtype != column->source) convert(column, out[c], column_row(l, column, slot, row));
    }
    return true;
}

static void clear_row(const data_loader *l, int64_t slot, int64_t row)
{
    for (int c = 0; c < l->columns; c++) memset(column_row(l, &l->column[c], slot, row), 0, (size_t)l->column[c].bytes);
}

loader_where data_locate(const data_loader *l, int64_t place)
{
    int64_t batch = place / l->options.accumulate;
    return (loader_where){ batch / l->batches, batch % l->batches, place % l->options.accumulate };
}

void data_decode(const data_loader *l, int64_t place, int64_t slot, char *scratch)
{
    const data_loader_options *o = &l->options;
    loader_where at = data_locate(l, place);
    loader_slot *s = &l->slot[slot];
    data_order order = data_order_make(l->set->count, o->shuffle, o->seed, at.epoch);
    int64_t begin = at.batch * o->batch;
    int64_t mine = begin + at.micro * l->micro_rows + o->rank * l->local_rows;
    for (int64_t row = 0; row < l->local_rows; row++) {
        bool real = mine + row < l->set->count;
        int64_t sample = data_order_at(&order, real ? mine + row : begin);
        char error[DATA_ERROR_BYTES];
        if (decode_row(l, sample, slot, row, scratch, error)) {
            set_weight(l, slot, row, real ? 1 : 0);
            continue;
        }
        bool stop = o->policy == DATA_STOP;
        if (stop || (real && s->skipped == 0)) {
            s->sample = sample;
            snprintf(s->error, sizeof s->error, "%s", error[0] ? error : "cannot be read");
        }
        if (stop) {
            s->failed = true;
            return;
        }
        clear_row(l, slot, row);
        s->skipped += real;
    }
}

static bool can_claim(const data_loader *l)
{
    return !l->paused && l->claimed < l->released + l->slots && loader_place(l, l->claimed) < loader_end_place(l);
}

static void *work(void *argument)
{
    const loader_worker *worker = argument;
    data_loader *l = worker->loader;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        while (!l->stop && !can_claim(l)) pthread_cond_wait(&l->work, &l->lock);
        if (l->stop) break;
        int64_t place = loader_place(l, l->claimed), slot = l->claimed % l->slots;
        l->claimed++;
        l->active++;
        l->slot[slot] = (loader_slot){ 0 };
        pthread_mutex_unlock(&l->lock);
        data_decode(l, place, slot, worker->scratch);
        pthread_mutex_lock(&l->lock);
        l->slot[slot].ready = true;
        l->active--;
        pthread_cond_broadcast(&l->done);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

bool data_start_threads(data_loader *l)
{
    int status = 0;
    for (int i = 0; i < l->options.threads && status == 0; i++) {
        loader_worker *worker = &l->worker[i];
        *worker = (loader_worker){ .loader = l, .scratch = l->scratch + i * l->scratch_bytes };
        status = td_thread_start(&worker->thread, work, worker);
        if (status == 0) l->workers++;
    }
    if (status == 0) return true;
    td_fail(l->td, TD_ERROR_MEMORY, "data_loader: thread %d of %d cannot be started: %s", l->workers + 1,
            l->options.threads, strerror(status));
    return false;
}

void data_stop_threads(data_loader *l)
{
    if (!l->workers) return;
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->lock);
    for (int i = 0; i < l->workers; i++) pthread_join(l->worker[i].thread, NULL);
    l->workers = 0;
}
