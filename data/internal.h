/* What the files of data/ share: reading files, sets over arrays, the order of an epoch, the loader's parts. */
#ifndef TANDEM_DATA_INTERNAL_H
#define TANDEM_DATA_INTERNAL_H

#include <pthread.h>
#include <zlib.h>

#include <tandem/data.h>

/* ---- file.c: plain or gzip files --------------------------------------------------------------------------- */

enum { DATA_PATH_BYTES = 4096 };

typedef struct data_file {
    td_context *td;
    gzFile gz;
    int64_t limit; /* the content cannot be longer than this, in bytes */
    char path[DATA_PATH_BYTES];
} data_file;

/* False and an error that names the path: missing, a directory, empty, unreadable. */
bool data_file_open(data_file *file, td_context *td, const char *path);
/* Up to `bytes` bytes; fewer only at the end of the content. -1 and an error: truncated or damaged. */
int64_t data_file_read(data_file *file, void *to, int64_t bytes);
void data_file_close(data_file *file);

/* ---- memory.c: sets over arrays ---------------------------------------------------------------------------- */

/* Memory a set frees when it is closed. */
typedef struct data_owned {
    void *memory;
    size_t bytes;
} data_owned;

/* data_memory by another name that frees owned[0 .. count) with the set: also when it fails. */
data_set *data_memory_owning(td_context *td, const char *name, const data_array *arrays, int count,
                             const data_owned *owned);

/* ---- order.c: the permutation of an epoch ------------------------------------------------------------------- */

enum { DATA_ORDER_ROUNDS = 16 };

typedef struct data_order {
    int64_t count;
    bool shuffle;
    uint64_t left, right; /* left * right >= count */
    uint64_t key[DATA_ORDER_ROUNDS];
} data_order;

data_order data_order_make(int64_t count, bool shuffle, uint64_t seed, int64_t epoch);
/* The sample at `position` of the order, 0 <= position < count. */
int64_t data_order_at(const data_order *order, int64_t position);

/* A bijection of 64-bit numbers that leaves no pattern (the finalizer of splitmix64, Steele et al. 2014). */
static inline uint64_t data_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

#define DATA_GOLDEN 0x9e3779b97f4a7c15u

/* ---- loader.c, decode.c, batch.c ---------------------------------------------------------------------------- */

typedef struct loader_column {
    const char *name;
    td_dtype dtype;  /* as given */
    td_dtype source; /* as the set writes it */
    td_shape shape;  /* of one sample */
    int64_t classes;
    int64_t elements; /* of one sample */
    int64_t bytes;    /* of one sample, as given */
    int64_t offset;   /* of the column in a slot */
    int64_t scratch;  /* of the sample in a worker's scratch; used where dtype is not source */
} loader_column;

/* One decoded micro-batch, or the room for it. */
typedef struct loader_slot {
    bool ready;
    bool failed;
    int64_t skipped;
    int64_t sample; /* that failed or was skipped first */
    char error[DATA_ERROR_BYTES];
} loader_slot;

typedef struct loader_worker {
    data_loader *loader;
    pthread_t thread;
    char *scratch;
} loader_worker;

/* Micro-batches are numbered twice: `place` counts from the start of epoch 0; `sequence` counts what this loader has
 * given and never goes back, so that a slot (sequence % slots) is used again only after its batch has gone by. */
struct data_loader {
    td_context *td;
    const data_set *set;
    data_loader_options options; /* defaults filled in */
    td_dtype dtype;              /* of float columns */
    int columns;                 /* with weight, the last */
    loader_column column[DATA_MAX_COLUMNS + 1];
    int64_t micro_rows, local_rows;
    int64_t batches; /* of an epoch */
    int64_t slot_bytes, scratch_bytes;

    int64_t slots;
    loader_slot *slot;
    char *memory;  /* slots x slot_bytes */
    char *scratch; /* threads x scratch_bytes */
    loader_worker *worker;
    int workers; /* threads that run */

    pthread_mutex_t lock; /* of all below */
    pthread_cond_t work;  /* a slot became free, or stop */
    pthread_cond_t done;  /* a slot became ready, or a worker idle */
    bool locks;           /* the three exist */
    bool stop, paused;
    int active;             /* workers that decode */
    int64_t claimed;        /* sequences below are decoded or being decoded */
    int64_t released;       /* sequences below have gone by */
    int64_t given;          /* sequences below were given by data_next */
    int64_t first_sequence; /* has the place first_place: set by data_seek */
    int64_t first_place;
    int64_t skipped;
};

static inline int64_t loader_end_place(const data_loader *l)
{
    return l->options.epochs ? l->options.epochs * l->batches * l->options.accumulate : INT64_MAX;
}

static inline int64_t loader_place(const data_loader *l, int64_t sequence)
{
    return l->first_place + (sequence - l->first_sequence);
}

static inline bool loader_is_float(td_dtype dtype) { return dtype == TD_F32 || dtype == TD_F64; }

/* Epoch, batch and micro-batch of a place. */
typedef struct loader_where {
    int64_t epoch, batch, micro;
} loader_where;
loader_where data_locate(const data_loader *l, int64_t place);

/* Fills a slot with this rank's rows of the micro-batch at `place`. Takes no lock. */
void data_decode(const data_loader *l, int64_t place, int64_t slot, char *scratch);

/* Starts and joins the threads; false and an error when one cannot be started. */
bool data_start_threads(data_loader *l);
void data_stop_threads(data_loader *l);

#endif
