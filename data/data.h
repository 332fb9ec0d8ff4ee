/* Data: data sets that answer `count` and `get(i)`, and the loader that makes batches of static shape from them.
 *
 *     data_set *train = data_idx(td, "/usr/share/datasets/fashion-mnist", "train");
 *     data_loader *loader = data_loader_open(td, train, &(data_loader_options){ .batch = 144, .shuffle = true });
 *     for (data_batch b; data_next(loader, &b);)
 *         ... data_get(&b, "image") ... data_get(&b, "label") ... td_step(td);
 *     data_loader_close(loader);
 *     data_set_close(train);
 *
 * Images are f32 in [0, 1], (H, W, C) a sample; labels are i32 scalars. Every batch has a column "weight", 1 on samples
 * and 0 on padding, which losses take.
 *
 * Errors go to the context and say which file, line or option is at fault and how to mend it. A constructor that fails
 * returns NULL, and every function here takes that NULL: a program may check once, after data_next has returned false.
 *
 * Memory: all of it comes from td_alloc, kind "data", when a set or a loader is opened; none is taken later. A set must
 * outlive its loaders and subsets, the context must outlive all of them.
 */
#ifndef TANDEM_DATA_H
#define TANDEM_DATA_H

#include <tandem/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Data sets ------------------------------------------------------------------------------------------ */

enum { DATA_MAX_COLUMNS = 8, DATA_NAME_BYTES = 256, DATA_ERROR_BYTES = 256 };

typedef struct data_column {
    const char *name; /* "image"; lives as long as the set. "weight" is the loader's own */
    td_dtype dtype;   /* of what get writes */
    td_shape shape;   /* of one sample; rank 0: a scalar. At most TD_MAX_DIMS - 1 dimensions */
    int64_t classes;  /* of an integer column: values are in [0, classes); 0: not known */
} data_column;

/* A set of one's own fills in this struct (often as the first member of a larger one) and passes it to a loader. */
typedef struct data_set data_set;
struct data_set {
    td_context *td;             /* owns the memory */
    char name[DATA_NAME_BYTES]; /* for messages: a file, say */
    int64_t count;              /* samples */
    int columns;
    data_column column[DATA_MAX_COLUMNS];
    void *self; /* for get and close */
    /* Writes sample i, 0 <= i < count: column c to out[c]. Called by several threads at once; the same i gives the same
     * bytes. On failure returns false after writing one sentence to error (DATA_ERROR_BYTES of room). */
    bool (*get)(const data_set *set, int64_t i, void *const *out, char *error);
    void (*close)(data_set *set); /* frees what the set holds and the set; NULL: nothing to free */
};

TD_API void data_set_close(data_set *set); /* NULL is allowed */

/* MNIST's files in directory dir, split "train" or "test": {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or
 * with .gz. Columns "image" f32 (H, W, 1) in [0, 1] and "label" i32. Kept in memory as bytes.
 * Errors: a file that is missing, truncated, of another kind or of another size than its header says; labels
 * and images that differ in number. */
TD_API data_set *data_idx(td_context *td, const char *dir, const char *split);

typedef struct data_idx_options {
    int64_t classes; /* labels must be below; 0: any */
} data_idx_options;
TD_API data_set *data_idx_with(td_context *td, const char *dir, const char *split, const data_idx_options *options);

typedef enum data_header {
    DATA_HEADER_AUTO, /* the first line is a header if none of its cells is a number */
    DATA_HEADER_YES,
    DATA_HEADER_NO,
} data_header;

typedef enum data_target {
    DATA_LABEL, /* column "label" i32, a scalar: integers from 0 */
    DATA_VALUE, /* column "y" (1), of the features' dtype */
} data_target;

typedef struct data_csv_options {
    data_header header;
    char separator; /* 0: a comma */
    data_target target;
    int64_t target_column; /* 1 is the first; 0: the last */
    int64_t classes;       /* labels must be below; 0: any */
    double scale;          /* features are multiplied by it: 1 / 255.0 for bytes; 0: 1 */
    td_dtype dtype;        /* of the features: TD_F32 (default) or TD_F64 */
} data_csv_options;

/* Numbers separated by commas, a sample a line, plain or gzip. Columns "x" (features) and "label" or "y". NULL options
 * are the defaults. Blank lines are passed over.
 * Errors: a cell that is not a finite number, a line with more or fewer cells than the first (both by line and column),
 * a label that is no class, an empty or truncated file. */
TD_API data_set *data_csv(td_context *td, const char *path, const data_csv_options *options);

/* A host array of all samples. */
typedef struct data_array {
    const char *name;
    td_dtype dtype;
    td_shape shape;   /* (samples, ...) */
    const void *data; /* the caller's; must outlive the set */
    double scale;     /* of a TD_U8 array: given as f32, multiplied by this; 0: given as it is */
} data_array;

/* The arrays as columns; all have the same number of samples. Nothing is copied. */
TD_API data_set *data_memory(td_context *td, const data_array *arrays, int count);

/* Samples [begin, begin + count) of a set. Closing it leaves the set open. */
TD_API data_set *data_subset(td_context *td, const data_set *set, int64_t begin, int64_t count);

/* Made-up samples for benchmarks, the same for the same seed: float columns are uniform in [0, 1), integer ones in
 * [0, classes), zeros where classes is 0. */
TD_API data_set *data_random(td_context *td, const data_column *columns, int column_count, int64_t count,
                             uint64_t seed);

/* ---- Loader --------------------------------------------------------------------------------------------- */

typedef enum data_tail {
    DATA_DROP, /* an epoch's last batch is left out if it would be short: training */
    DATA_PAD,  /* it is filled up with copies of its first sample at weight 0: evaluation */
} data_tail;

typedef enum data_policy {
    DATA_STOP, /* a sample that cannot be read is an error */
    DATA_SKIP, /* its row is zeros at weight 0, and it is counted; the first is reported as a warning */
} data_policy;

typedef struct data_loader_options {
    int64_t batch;      /* samples of one update, over all ranks and micro-batches; no default */
    int64_t accumulate; /* micro-batches a batch is cut into; 0: 1 */
    int rank, world;    /* this rank of so many; world 0: 1 */
    uint64_t seed;      /* of the order */
    bool shuffle;       /* a new order each epoch, keyed by (seed, epoch); else the set's own */
    data_tail tail;
    int64_t epochs; /* 0: endless */
    int threads;    /* that decode; 0: 2 */
    int prefetch;   /* micro-batches decoded ahead; 0: 4 */
    int hold;       /* micro-batches that stay valid, the newest included; 0: 2 */
    td_dtype dtype; /* of float columns and weight: TD_F64, or TD_F32 (default): td_float(td) */
    data_policy policy;
    bool shapes_only; /* batches have shapes and no rows: takes no memory for them and starts no thread. For td_plan,
                         which reads no data; a step must not run on them */
} data_loader_options;

typedef struct data_loader data_loader;

/* A batch is `batch` consecutive entries of the epoch's order, cut into `accumulate` consecutive micro-batches; a rank
 * gets consecutive rows of each. What is in a batch depends on the seed and the batch size alone, never on threads,
 * world or accumulation. Errors: a batch that does not divide by world x accumulate, or that is larger than the data
 * (DATA_DROP), values out of range. */
TD_API data_loader *data_loader_open(td_context *td, const data_set *set, const data_loader_options *options);
/* Stops the threads, at any time. NULL is allowed. */
TD_API void data_loader_close(data_loader *loader);

TD_API int64_t data_batches(const data_loader *loader); /* batches (updates) of one epoch */
TD_API int64_t data_skipped(const data_loader *loader); /* samples skipped on this rank so far (DATA_SKIP) */

/* One micro-batch. */
typedef struct data_batch {
    data_loader *loader;
    int64_t epoch;      /* from 0 */
    int64_t index;      /* of its batch in the epoch, from 0 */
    int64_t micro;      /* of the micro-batch in the batch, from 0 */
    int64_t rows;       /* over all ranks: the first dimension of what data_get gives */
    int64_t local_rows; /* of this rank */
    int64_t samples;    /* rows that are not padding, over all ranks; 0 is possible with DATA_PAD and accumulation */
    bool last;          /* the last micro-batch of its batch: the update follows */
    bool last_of_epoch;
    int64_t sequence; /* the loader's own */
} data_batch;

/* The next micro-batch. False after the last epoch, and when the context has an error (of a sample, too: named here,
 * on the caller's thread). Its memory stays valid until the next call but one (`hold` calls in all). */
TD_API bool data_next(data_loader *loader, data_batch *b);

/* Records column `name` of the micro-batch as an input: (rows, ...) of which this rank gives its own. The step that
 * reads it must have run before the memory is used again (data_next). Errors: no such column, a batch gone by. */
#define data_get(b, name) data_get_at((b), (name), TD_HERE)
TD_API td_tensor data_get_at(const data_batch *b, const char *name, td_here here);

/* This rank's rows of the column in host memory (local_rows, ...), and what they are. NULL and an error as
 * data_get, and from a loader of shapes only. */
#define data_rows(b, name, column) data_rows_at((b), (name), (column), TD_HERE)
TD_API const void *data_rows_at(const data_batch *b, const char *name, data_column *column, td_here here);

/* ---- Position ------------------------------------------------------------------------------------------- */

/* Where a loader stands: what the next data_next gives. */
typedef struct data_position {
    int64_t epoch, batch, micro;
    int64_t samples; /* given since the start, over all ranks, padding not counted */
    /* What the order depends on; data_seek wants the loader's own. */
    uint64_t seed;
    int64_t count; /* samples of the set */
    int64_t batch_rows;
    bool shuffle;
} data_position;

TD_API data_position data_tell(const data_loader *loader);
/* The loader goes on as one that had come to `position` by itself, to the bit; NULL: the start. World, accumulation and
 * threads may differ. Errors: the middle of a batch (micro > 0), another seed, set or batch size, no such place. */
TD_API bool data_seek(data_loader *loader, const data_position *position);

enum { DATA_POSITION_BYTES = 256 };
/* One line of text, no newline, and back; false: not such a line. */
TD_API void data_position_text(const data_position *position, char text[DATA_POSITION_BYTES]);
TD_API bool data_position_parse(const char *text, data_position *out);

/* ---- Text: tokenizers ----------------------------------------------------------------------------------- */

/* Text to token ids (i32) and back. Used by one thread at a time: encoding remembers words.
 *
 *     data_tokenizer *tokenizer = data_tokenizer_open(td, "gpt2");
 *     data_ids *ids = data_text(td, "book.txt", tokenizer);
 *     data_set *train = data_windows(td, ids, &(data_windows_options){ .context = 64, .part = DATA_TRAIN });
 */
typedef struct data_tokenizer data_tokenizer;

/* Byte-level BPE as GPT-2 has it (Radford et al. 2019). `path` is a folder with a tokenizer.json of Hugging Face's
 * form, or with vocab.json and merges.txt; or a tokenizer.json itself. Of a tokenizer.json are understood: a BPE model;
 * the pre-tokenizers ByteLevel, and Split by a regular expression before it (matched by PCRE2); added tokens, found in
 * the text as they stand; the normalizer NFC for text that is in this form already: other text is encoded as it is,
 * after one warning. What is a letter, number or space is PCRE2's. Nothing is put before or after a text.
 * Errors: a missing file, no JSON of this form (by line or name), merges that are broken or not in the vocabulary, an
 * id given twice, a tokenizer that does what is not understood (by name). */
TD_API data_tokenizer *data_tokenizer_open(td_context *td, const char *path);
/* One id for each character of the text, in the order of their code points. Errors: an empty text. */
TD_API data_tokenizer *data_tokenizer_characters(td_context *td, const char *text, int64_t bytes);
/* The same of a text file, plain or gzip. */
TD_API data_tokenizer *data_tokenizer_characters_of(td_context *td, const char *path);
/* One id for each byte, its value. */
TD_API data_tokenizer *data_tokenizer_bytes(td_context *td);
TD_API void data_tokenizer_close(data_tokenizer *tokenizer); /* NULL is allowed */

TD_API int64_t data_tokenizer_vocabulary(const data_tokenizer *tokenizer); /* ids are below; 0 for NULL */
/* The same for tokenizers that give the same ids, and nearly surely for no others: a checkpoint keeps it. */
TD_API uint64_t data_tokenizer_fingerprint(const data_tokenizer *tokenizer);
/* The id whose text is exactly this, "<|endoftext|>" say; -1: none. */
TD_API int32_t data_tokenizer_token(const data_tokenizer *tokenizer, const char *text);
/* The characters of data_tokenizer_characters as text, which makes the same tokenizer again; owned by it. NULL for
 * other kinds. */
TD_API const char *data_tokenizer_alphabet(const data_tokenizer *tokenizer, int64_t *bytes);

/* Returns how many ids the text has, and writes the first `room` of them; -1 and an error on failure. There are at most
 * as many as bytes of valid UTF-8. What is not UTF-8 is read as U+FFFD, in the parts that Python's errors="replace"
 * replaces, and may have three ids a byte; a tokenizer of bytes takes it as it is.
 * Errors: a character or byte outside the vocabulary, memory. */
TD_API int64_t data_tokenizer_encode(data_tokenizer *tokenizer, const char *text, int64_t bytes, int32_t *ids,
                                     int64_t room);
/* Returns how many bytes the ids have, and writes the first `room` of them, no 0 after them; -1 and an error for an id
 * outside the vocabulary. The bytes of one id need not be whole characters. */
TD_API int64_t data_tokenizer_decode(const data_tokenizer *tokenizer, const int32_t *ids, int64_t count, char *text,
                                     int64_t room);

/* ---- Text: data sets ------------------------------------------------------------------------------------ */

/* A long sequence of token ids, in memory or in a mapped file. Sets over it need it open. */
typedef struct data_ids data_ids;

/* A text file, plain or gzip, encoded; the tokenizer may be closed afterwards. Errors: as data_tokenizer_encode, and a
 * file that is missing, empty or broken. */
TD_API data_ids *data_text(td_context *td, const char *path, data_tokenizer *tokenizer);

typedef struct data_tokens_options {
    int bits;           /* of an id: 16 (default) or 32 */
    int64_t vocabulary; /* ids must be below; 0: 2^bits, for 32 bits 2^31 */
} data_tokens_options;

/* A file of unsigned little-endian ids and nothing else, mapped into memory; it must not become shorter while it is
 * open. NULL options are the defaults. Errors: a missing or empty file, a size that is not whole ids. An id outside the
 * vocabulary is an error of the sample that holds it. */
TD_API data_ids *data_tokens(td_context *td, const char *path, const data_tokens_options *options);

TD_API int64_t data_ids_count(const data_ids *ids); /* 0 for NULL */
TD_API void data_ids_close(data_ids *ids);          /* NULL is allowed */

typedef enum data_part { DATA_ALL, DATA_TRAIN, DATA_VALIDATION } data_part;

typedef struct data_windows_options {
    int64_t context;  /* ids of x, and of y; no default */
    data_part part;   /* the training part is the first floor(fraction * count) ids, validation the rest */
    double fraction;  /* 0: 0.9 */
    bool consecutive; /* sample i is window i, without overlap of x; a rest is left out. Else random crops, sample i's
                         place keyed by (seed, i) */
    uint64_t seed;    /* of crops */
    int64_t count;    /* crops the set has; 0: 2^40, so that they do not come again */
} data_windows_options;

/* Windows of the ids: columns "x" and "y", i32 (context), where y[k] is the id after x[k]; `classes` is the vocabulary.
 * Errors: a part shorter than context + 1 ids, options out of range. */
TD_API data_set *data_windows(td_context *td, const data_ids *ids, const data_windows_options *options);

#ifdef __cplusplus
}
#endif

#endif
