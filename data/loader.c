/* The loader as its user sees it: options checked and laid out once, then micro-batches in order from a ring of slots.
 *
 * Threads (decode.c) fill slots ahead of data_next; data_next waits for the one whose turn it is and lets go of the one
 * given `hold` calls ago. Everything is allocated at open.
 */
#include <inttypes.h>
#include <string.h>

#include "data/internal.h"

enum {
    SLOT_ALIGN = 64,
    DEFAULT_THREADS = 2,
    DEFAULT_PREFETCH = 4,
    DEFAULT_HOLD = 2,
    MAX_THREADS = 1024,
    MAX_SLOTS = 1 << 20
};

static int64_t align(int64_t bytes) { return (bytes + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN; }

/* ---- Options ---- */

static bool at_least(td_context *td, const char *name, int64_t value, int64_t least)
{
    if (value >= least) return true;
    td_fail(td, TD_ERROR_USAGE, "data_loader: %s is %" PRId64 ", it must be at least %" PRId64, name, value, least);
    return false;
}

static bool at_most(td_context *td, const char *name, int64_t value, int64_t most)
{
    if (value <= most) return true;
    td_fail(td, TD_ERROR_USAGE, "data_loader: %s is %" PRId64 ", it must be at most %" PRId64, name, value, most);
    return false;
}

static void fill_defaults(data_loader_options *o)
{
    if (o->accumulate == 0) o->accumulate = 1;
    if (o->world == 0) o->world = 1;
    if (o->threads == 0) o->threads = DEFAULT_THREADS;
    if (o->prefetch == 0) o->prefetch = DEFAULT_PREFETCH;
    if (o->hold == 0) o->hold = DEFAULT_HOLD;
}

static bool values_fit(td_context *td, const data_loader_options *o)
{
    if (o->dtype != TD_F32 && o->dtype != TD_F64) {
        td_fail(td, TD_ERROR_USAGE, "data_loader: dtype is %s, float columns can be f32 or f64",
                td_dtype_name(o->dtype));
        return false;
    }
    return at_least(td, "batch", o->batch, 1) && at_least(td, "accumulate", o->accumulate, 1) &&
           at_least(td, "world", o->world, 1) && at_least(td, "rank", o->rank, 0) &&
           at_most(td, "rank", o->rank, o->world - 1) && at_least(td, "epochs", o->epochs, 0) &&
           at_least(td, "threads", o->threads, 1) && at_most(td, "threads", o->threads, MAX_THREADS) &&
           at_least(td, "prefetch", o->prefetch, 1) && at_most(td, "prefetch", o->prefetch, MAX_SLOTS) &&
           at_least(td, "hold", o->hold, 1) && at_most(td, "hold", o->hold, MAX_SLOTS);
}

static bool batch_divides(td_context *td, const data_loader_options *o)
{
    int64_t parts = 0;
    bool fits = !__builtin_mul_overflow(o->accumulate, (int64_t)o->world, &parts);
    if (fits && o->batch % parts == 0) return true;
    if (!fits || parts > o->batch) {
        td_fail(td, TD_ERROR_USAGE,
                "data_loader: batch %" PRId64 " cannot be shared by %d ranks x %" PRId64 " micro-batches: it has "
                "fewer samples than there are parts",
                o->batch, o->world, o->accumulate);
        return false;
    }
    int64_t below = o->batch / parts * parts;
    td_fail(td, TD_ERROR_USAGE,
            "data_loader: batch %" PRId64 " does not divide by %d ranks x %" PRId64 " micro-batches: use %" PRId64
            " or %" PRId64,
            o->batch, o->world, o->accumulate, below, below + parts);
    return false;
}

static bool batch_fits_data(td_context *td, const data_set *set, const data_loader_options *o)
{
    if (o->tail == DATA_PAD || o->batch <= set->count) return true;
    td_fail(td, TD_ERROR_USAGE, "data_loader: batch %" PRId64 " is larger than the data: %s holds %" PRId64 " samples",
            o->batch, set->name, set->count);
    return false;
}

/* ---- The set's columns ---- */

enum { LARGEST_ELEMENT = 8 };
#define LARGEST_TOTAL 0x1p60 /* bytes of the ring, and micro-batches of all epochs: sums stay far from overflow */

static bool column_fits(td_context *td, const data_set *set, int c)
{
    const data_column *column = &set->column[c];
    const char *wrong = NULL;
    if (!column->name || !column->name[0]) wrong = "has no name";
    else if (strcmp(column->name, "weight") == 0)
        wrong = "has the name of the column that the loader adds; give it another";
    else if ((unsigned)column->dtype >= TD_DTYPES) wrong = "has a dtype that does not exist";
    else if (column->shape.rank < 0 || column->shape.rank >= TD_MAX_DIMS) wrong = "has too many dimensions";
    for (int64_t d = 0; !wrong && d < column->shape.rank; d++) {
        if (column->shape.dim[d] < 1) wrong = "has a dimension of no size";
    }
    for (int e = 0; !wrong && e < c; e++) {
        if (strcmp(set->column[e].name, column->name) == 0) wrong = "has the name of another column";
    }
    if (wrong) {
        td_fail(td, TD_ERROR_USAGE, "data_loader: column %d of %s (\"%s\") %s", c, set->name,
                column->name ? column->name : "", wrong);
    }
    return !wrong;
}

static bool set_fits(td_context *td, const data_set *set)
{
    if (!set) {
        td_fail(td, TD_ERROR_USAGE, "data_loader: no data set given");
        return false;
    }
    if (!set->get || set->count < 1 || set->columns < 1 || set->columns > DATA_MAX_COLUMNS) {
        td_fail(td, TD_ERROR_USAGE,
                "data_loader: %s has %" PRId64 " samples, %d columns and %s function get; it needs samples, 1 to %d "
                "columns and the function",
                set->name, set->count, set->columns, set->get ? "a" : "no", DATA_MAX_COLUMNS);
        return false;
    }
    for (int c = 0; c < set->columns; c++) {
        if (!column_fits(td, set, c)) return false;
    }
    return true;
}

/* In floating point, which does not overflow: whether the integers that follow will not either. */
static bool sizes_fit(td_context *td, const data_set *set, const data_loader_options *o)
{
    double row = LARGEST_ELEMENT;
    for (int c = 0; c < set->columns; c++) {
        double bytes = LARGEST_ELEMENT;
        for (int64_t d = 0; d < set->column[c].shape.rank; d++) bytes *= (double)set->column[c].shape.dim[d];
        row += bytes;
    }
    double ring = row * ((double)o->prefetch + o->hold) * ((double)o->batch / (double)o->accumulate / o->world + 1);
    double places = (double)o->epochs * (double)o->accumulate * ((double)set->count / (double)o->batch + 1);
    if (ring < LARGEST_TOTAL && places < LARGEST_TOTAL && (double)set->count < LARGEST_TOTAL) return true;
    td_fail(td, TD_ERROR_USAGE,
            "data_loader: batch %" PRId64 ", %" PRId64 " epochs and the %" PRId64 " samples of %s are more than can be "
            "counted; use fewer",
            o->batch, o->epochs, set->count, set->name);
    return false;
}

static loader_column lay_column(data_loader *l, const data_column *from)
{
    loader_column to = { .name = from->name,
                         .source = from->dtype,
                         .dtype = from->dtype,
                         .shape = from->shape,
                         .classes = from->classes,
                         .elements = td_shape_elements(from->shape) };
    if (loader_is_float(from->dtype)) to.dtype = l->dtype;
    to.bytes = to.elements * td_dtype_size(to.dtype);
    to.offset = l->slot_bytes;
    l->slot_bytes += align(l->local_rows * to.bytes);
    if (to.dtype != to.source) {
        to.scratch = l->scratch_bytes;
        l->scratch_bytes += align(to.elements * td_dtype_size(to.source));
    }
    return to;
}

static void lay_out(data_loader *l)
{
    const data_loader_options *o = &l->options;
    l->dtype = o->dtype == TD_F64 ? TD_F64 : td_float(l->td);
    l->micro_rows = o->batch / o->accumulate;
    l->local_rows = l->micro_rows / o->world;
    l->batches = l->set->count / o->batch;
    if (o->tail == DATA_PAD && l->set->count % o->batch != 0) l->batches++;
    l->slots = (int64_t)o->prefetch + o->hold;
    l->scratch_bytes = SLOT_ALIGN; /* never none, and no two threads in one cache line */
    l->columns = l->set->columns + 1;
    for (int c = 0; c < l->set->columns; c++) l->column[c] = lay_column(l, &l->set->column[c]);
    l->column[l->set->columns] = lay_column(l, &(data_column){ .name = "weight", .dtype = l->dtype });
}

/* ---- Open and close ---- */

static size_t slot_table_bytes(const data_loader *l) { return (size_t)l->slots * sizeof *l->slot; }
static size_t worker_table_bytes(const data_loader *l) { return (size_t)l->options.threads * sizeof *l->worker; }
static size_t scratch_bytes(const data_loader *l) { return (size_t)(l->options.threads * l->scratch_bytes); }

static bool take_memory(data_loader *l)
{
    if (!(l->slot = td_alloc(l->td, slot_table_bytes(l), "data"))) return false;
    memset(l->slot, 0, slot_table_bytes(l));
    return (l->worker = td_alloc(l->td, worker_table_bytes(l), "data")) &&
           (l->memory = td_input_memory(l->td, l->slots * l->slot_bytes)) &&
           (l->scratch = td_alloc(l->td, scratch_bytes(l), "data"));
}

static bool make_locks(data_loader *l)
{
    if (pthread_mutex_init(&l->lock, NULL) == 0) {
        if (pthread_cond_init(&l->work, NULL) == 0) {
            l->locks = pthread_cond_init(&l->done, NULL) == 0;
            if (!l->locks) pthread_cond_destroy(&l->work);
        }
        if (!l->locks) pthread_mutex_destroy(&l->lock);
    }
    if (!l->locks) td_fail(l->td, TD_ERROR_MEMORY, "data_loader: the system has no room for a lock");
    return l->locks;
}

data_loader *data_loader_open(td_context *td, const data_set *set, const data_loader_options *options)
{
    data_loader_options o = options ? *options : (data_loader_options){ 0 };
    fill_defaults(&o);
    if (!set_fits(td, set) || !values_fit(td, &o) || !batch_divides(td, &o) || !batch_fits_data(td, set, &o) ||
        !sizes_fit(td, set, &o)) {
        return NULL;
    }
    data_loader *l = td_alloc(td, sizeof *l, "data");
    if (!l) return NULL;
    memset(l, 0, sizeof *l);
    l->td = td;
    l->set = set;
    l->options = o;
    lay_out(l);
    if (o.shapes_only) return l;
    if (take_memory(l) && make_locks(l) && data_start_threads(l)) return l;
    data_loader_close(l);
    return NULL;
}

void data_loader_close(data_loader *l)
{
    if (!l) return;
    data_stop_threads(l);
    if (l->locks) {
        pthread_cond_destroy(&l->done);
        pthread_cond_destroy(&l->work);
        pthread_mutex_destroy(&l->lock);
    }
    if (l->scratch) td_free(l->td, l->scratch, scratch_bytes(l), "data");
    if (l->memory) td_input_memory_free(l->td, l->memory, l->slots * l->slot_bytes);
    if (l->worker) td_free(l->td, l->worker, worker_table_bytes(l), "data");
    if (l->slot) td_free(l->td, l->slot, slot_table_bytes(l), "data");
    td_free(l->td, l, sizeof *l, "data");
}

int64_t data_batches(const data_loader *l) { return l ? l->batches : 0; }

int64_t data_skipped(const data_loader *l) { return l ? l->skipped : 0; }

/* ---- Batches ---- */

/* Real rows among the first `rows` entries of the epoch. */
static int64_t real_rows(const data_loader *l, int64_t rows) { return rows < l->set->count ? rows : l->set->count; }

static data_batch describe(data_loader *l, int64_t sequence)
{
    loader_where at = data_locate(l, loader_place(l, sequence));
    int64_t begin = at.batch * l->options.batch + at.micro * l->micro_rows;
    bool last = at.micro == l->options.accumulate - 1;
    return (data_batch){
        .loader = l,
        .epoch = at.epoch,
        .index = at.batch,
        .micro = at.micro,
        .sequence = sequence,
        .rows = l->micro_rows,
        .local_rows = l->local_rows,
        .samples = real_rows(l, begin + l->micro_rows) - real_rows(l, begin),
        .last = last,
        .last_of_epoch = last && at.batch == l->batches - 1,
    };
}

/* Waits until what goes by with the next call may be written again: a GPU may still have to read it. */
static bool wait_for_readers(const data_loader *l, int64_t released)
{
    bool good = true;
    for (int64_t s = l->released; s < released && good; s++)
        good = td_input_wait(l->td, l->memory + s % l->slots * l->slot_bytes, l->slot_bytes);
    return good;
}

/* Waits for the slot of the next sequence, after letting go of what has gone by; a copy of its state. */
static loader_slot wait_for_next(data_loader *l, int64_t released)
{
    pthread_mutex_lock(&l->lock);
    if (released > l->released) {
        l->released = released;
        pthread_cond_signal(&l->work);
    }
    const loader_slot *slot = &l->slot[l->given % l->slots];
    while (l->claimed <= l->given || !slot->ready) pthread_cond_wait(&l->done, &l->lock);
    loader_slot copy = *slot;
    pthread_mutex_unlock(&l->lock);
    return copy;
}

bool data_next(data_loader *l, data_batch *b)
{
    *b = (data_batch){ 0 };
    if (!l || td_error(l->td) != TD_OK || loader_place(l, l->given) >= loader_end_place(l)) return false;
    if (l->options.shapes_only) {
        *b = describe(l, l->given++);
        return true;
    }
    int64_t released = l->given - l->options.hold + 1;
    if (!wait_for_readers(l, released)) return false;
    loader_slot slot = wait_for_next(l, released);
    if (slot.failed) {
        td_fail(l->td, TD_ERROR_DATA, "%s: sample %" PRId64 ": %s", l->set->name, slot.sample, slot.error);
        return false;
    }
    if (slot.skipped && l->skipped == 0) {
        td_message(l->td, TD_LOG_WARNING, "%s: sample %" PRId64 " is skipped: %s; more are counted without a message",
                   l->set->name, slot.sample, slot.error);
    }
    l->skipped += slot.skipped;
    *b = describe(l, l->given);
    l->given++;
    return true;
}

/* ---- Position ---- */

data_position data_tell(const data_loader *l)
{
    if (!l) return (data_position){ 0 };
    loader_where at = data_locate(l, loader_place(l, l->given));
    int64_t epoch_samples = real_rows(l, l->batches * l->options.batch);
    return (data_position){
        .epoch = at.epoch,
        .batch = at.batch,
        .micro = at.micro,
        .samples = at.epoch * epoch_samples + real_rows(l, at.batch * l->options.batch + at.micro * l->micro_rows),
        .seed = l->options.seed,
        .count = l->set->count,
        .batch_rows = l->options.batch,
        .shuffle = l->options.shuffle,
    };
}

static bool position_fits(const data_loader *l, const data_position *p)
{
    const data_loader_options *o = &l->options;
    if (p->count != l->set->count || p->batch_rows != o->batch || p->shuffle != o->shuffle ||
        (o->shuffle && p->seed != o->seed)) {
        td_fail(l->td, TD_ERROR_USAGE,
                "data_seek: the position was saved with %" PRId64 " samples, batch %" PRId64 ", seed %" PRIu64
                ", %s, but the loader has %" PRId64 " samples, batch %" PRId64 ", seed %" PRIu64
                ", %s; the order would differ",
                p->count, p->batch_rows, p->seed, p->shuffle ? "shuffled" : "in order", l->set->count, o->batch,
                o->seed, o->shuffle ? "shuffled" : "in order");
        return false;
    }
    if (p->micro != 0) {
        td_fail(l->td, TD_ERROR_USAGE,
                "data_seek: the position is inside a batch (micro-batch %" PRId64 "); save it after a batch's "
                "last micro-batch",
                p->micro);
        return false;
    }
    int64_t last_epoch = o->epochs ? o->epochs : INT64_MAX / l->batches / o->accumulate - 1;
    bool there = p->epoch >= 0 && p->batch >= 0 && p->batch < l->batches && p->epoch <= last_epoch &&
                 !(o->epochs && p->epoch == o->epochs && p->batch > 0);
    if (!there) {
        td_fail(l->td, TD_ERROR_USAGE,
                "data_seek: there is no batch %" PRId64 " of epoch %" PRId64 ": an epoch has %" PRId64
                " batches, and %" PRId64 " epochs are asked for (0: endless)",
                p->batch, p->epoch, l->batches, o->epochs);
    }
    return there;
}

bool data_seek(data_loader *l, const data_position *position)
{
    if (!l || (position && !position_fits(l, position))) return false;
    int64_t batch = position ? position->epoch * l->batches + position->batch : 0;
    if (l->options.shapes_only) {
        l->first_sequence = l->given;
        l->first_place = batch * l->options.accumulate;
        return true;
    }
    pthread_mutex_lock(&l->lock);
    l->paused = true;
    while (l->active) pthread_cond_wait(&l->done, &l->lock);
    l->first_sequence = l->claimed = l->given; /* what was decoded ahead is forgotten */
    l->first_place = batch * l->options.accumulate;
    l->paused = false;
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->lock);
    return true;
}
