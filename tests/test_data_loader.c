/* What the loader promises: batches depend on the seed and the batch size alone, whatever ranks, micro-batches and
 * threads; static shapes; positions that continue to the bit.
 * Labels: threads
 */
#include "tests/data_files.h"

#include <time.h>

/* ---- A set of the user's own: sample i is i itself, as i32 "id" and f32 "x" (3) = i, i + .25, i + .5 ---- */

typedef struct id_set {
    data_set base;
    int64_t broken; /* every sample divisible by it fails; 0: none */
    int64_t slow;   /* every sample divisible by it takes a while; 0: none */
} id_set;

static bool id_get(const data_set *set, int64_t i, void *const *out, char *error)
{
    const id_set *ids = set->self;
    if (ids->slow && i % ids->slow == 0) nanosleep(&(struct timespec){ .tv_nsec = 200000 }, NULL);
    if (ids->broken && i % ids->broken == 0) {
        snprintf(error, DATA_ERROR_BYTES, "sample file %d is cut short", (int)i);
        return false;
    }
    *(int32_t *)out[0] = (int32_t)i;
    for (int k = 0; k < 3; k++) ((float *)out[1])[k] = (float)i + .25f * (float)k;
    return true;
}

static id_set *make_ids(td_context *td, int64_t count)
{
    id_set *ids = check_alloc(sizeof *ids);
    ids->base = (data_set){ .td = td, .name = "ids", .count = count, .columns = 2, .get = id_get, .self = ids };
    ids->base.column[0] = (data_column){ .name = "id", .dtype = TD_I32, .classes = count };
    ids->base.column[1] = (data_column){ .name = "x", .dtype = TD_F32, .shape = TD_SHAPE(3) };
    return ids;
}

static data_loader *open_loader(td_context *td, const data_set *set, data_loader_options options)
{
    data_loader *loader = data_loader_open(td, set, &options);
    ck_assert_no_error(td);
    ck_assert_ptr_nonnull(loader);
    return loader;
}

static const int32_t *ids_of(const data_batch *b) { return data_rows(b, "id", NULL); }

static const float *weights_of(const data_batch *b) { return data_rows(b, "weight", NULL); }

/* The next `count` ids this rank gets. */
static void take_ids(data_loader *loader, int64_t count, int32_t *ids)
{
    data_batch b;
    for (int64_t taken = 0; taken < count; taken += b.local_rows) {
        ck_assert(data_next(loader, &b));
        ck_assert_int_le(taken + b.local_rows, count);
        memcpy(ids + taken, ids_of(&b), (size_t)b.local_rows * sizeof *ids);
    }
}

/* ---- The order ---- */

START_TEST(test_every_epoch_is_another_permutation)
{
    td_context *td = open_cpu(TD_F32);
    for (int count = 1; count <= 130; count++) {
        id_set *ids = make_ids(td, count);
        data_loader *loader = open_loader(td, &ids->base,
                                          (data_loader_options){ .batch = count, .shuffle = true, .seed = 3 });
        int32_t epoch[2][130];
        for (int e = 0; e < 2; e++) {
            take_ids(loader, count, epoch[e]);
            bool seen[130] = { 0 };
            for (int i = 0; i < count; i++) {
                ck_assert(epoch[e][i] >= 0 && epoch[e][i] < count && !seen[epoch[e][i]]);
                seen[epoch[e][i]] = true;
            }
        }
        if (count >= 10) ck_assert_mem_ne(epoch[0], epoch[1], (size_t)count * sizeof(int32_t));
        data_loader_close(loader);
    }
    td_close(td);
}
END_TEST

START_TEST(test_the_order_is_the_same_on_every_machine)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 10);
    data_loader *loader = open_loader(td, &ids->base, (data_loader_options){ .batch = 10, .shuffle = true, .seed = 7 });
    int32_t got[20];
    take_ids(loader, 20, got);
    static const int32_t want[20] = { 8, 6, 7, 1, 2, 0, 3, 4, 5, 9, 5, 1, 9, 8, 0, 7, 3, 6, 4, 2 };
    for (int i = 0; i < 20; i++) ck_assert_int_eq(got[i], want[i]);
    data_loader_close(loader);

    loader = open_loader(td, &ids->base, (data_loader_options){ .batch = 10 });
    take_ids(loader, 20, got);
    for (int i = 0; i < 20; i++) ck_assert_int_eq(got[i], i % 10);
    data_loader_close(loader);
    td_close(td);
}
END_TEST

/* The number of a permutation of 5: 0 .. 119. */
static int rank_of(const int32_t *order)
{
    int rank = 0;
    for (int i = 0; i < 5; i++) {
        int smaller = 0;
        for (int k = i + 1; k < 5; k++) smaller += order[k] < order[i];
        rank = rank * (5 - i) + smaller;
    }
    return rank;
}

START_TEST(test_all_orders_of_five_are_equally_likely)
{
    enum { EPOCHS = 12000, EXPECTED = EPOCHS / 120 };
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 5);
    data_loader *loader = open_loader(td, &ids->base,
                                      (data_loader_options){ .batch = 5, .shuffle = true, .epochs = EPOCHS });
    int count[120] = { 0 };
    for (data_batch b; data_next(loader, &b);) count[rank_of(ids_of(&b))]++;
    double chi_square = 0;
    for (int i = 0; i < 120; i++) chi_square += (count[i] - EXPECTED) * (count[i] - EXPECTED) / (double)EXPECTED;
    ck_assert_double_lt(chi_square, 173); /* 119 degrees of freedom: exceeded once in 1,000; the seed is fixed */
    data_loader_close(loader);
    td_close(td);
}
END_TEST

/* In a larger set every sample comes to every position, and after every other, equally often. */
START_TEST(test_the_order_has_no_favourites)
{
    enum { N = 50, EPOCHS = 4000, EXPECTED = EPOCHS / N };
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, N);
    data_loader *loader = open_loader(td, &ids->base,
                                      (data_loader_options){ .batch = N, .shuffle = true, .epochs = EPOCHS });
    static int at[N][N], follows[N][N];
    for (data_batch b; data_next(loader, &b);) {
        const int32_t *order = ids_of(&b);
        for (int i = 0; i < N; i++) at[i][order[i]]++;
        for (int i = 1; i < N; i++) follows[order[i - 1]][order[i]]++;
    }
    double position = 0, pairs = 0;
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < N; k++) {
            position += (at[i][k] - EXPECTED) * (at[i][k] - EXPECTED) / (double)EXPECTED;
            if (i != k) pairs += (follows[i][k] - EXPECTED) * (follows[i][k] - EXPECTED) / (double)EXPECTED;
        }
    }
    /* 2,401 degrees of freedom (about as many for the pairs), deviation 69: exceeded once in 1,000 */
    ck_assert_double_lt(position, 2620);
    ck_assert_double_lt(pairs, 2620);
    data_loader_close(loader);
    td_close(td);
}
END_TEST

/* ---- Batches ---- */

/* Ranks' rows, micro-batch by micro-batch and rank by rank, are the batch as one rank has it. */
static void check_split(td_context *td, const data_set *set, int world, int64_t accumulate, int threads)
{
    enum { BATCH = 24, BATCHES = 9 };
    data_loader_options options = { .batch = BATCH, .shuffle = true, .seed = 11 };
    data_loader *one = open_loader(td, set, options);
    int32_t whole[BATCH * BATCHES], parts[BATCH * BATCHES];
    take_ids(one, BATCH * BATCHES, whole);
    data_loader_close(one);
    int64_t local = BATCH / accumulate / world;
    for (int rank = 0; rank < world; rank++) {
        options.rank = rank;
        options.world = world;
        options.accumulate = accumulate;
        options.threads = threads;
        data_loader *loader = open_loader(td, set, options);
        for (int64_t m = 0; m < BATCHES * accumulate; m++) {
            data_batch b;
            ck_assert(data_next(loader, &b));
            ck_assert_int_eq(b.local_rows, local);
            ck_assert_int_eq(b.rows, local * world);
            ck_assert_int_eq(b.micro, m % accumulate);
            ck_assert_int_eq(b.index, m / accumulate % data_batches(loader));
            ck_assert_int_eq(b.epoch, m / accumulate / data_batches(loader));
            ck_assert_int_eq(b.samples, b.rows);
            ck_assert_int_eq(b.last, b.micro == accumulate - 1);
            ck_assert_int_eq(b.last_of_epoch, b.last && b.index == data_batches(loader) - 1);
            memcpy(parts + (m * world + rank) * local, ids_of(&b), (size_t)local * sizeof *parts);
        }
        data_loader_close(loader);
    }
    ck_assert_mem_eq(whole, parts, sizeof whole);
}

START_TEST(test_ranks_and_micro_batches_share_the_same_batch)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 100);
    for (int world = 1; world <= 4; world++) {
        for (int64_t accumulate = 1; accumulate <= 3; accumulate++) {
            if (24 % (world * accumulate) == 0) check_split(td, &ids->base, world, accumulate, 1 + world % 3);
        }
    }
    td_close(td);
}
END_TEST

START_TEST(test_threads_do_not_change_the_order)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 60);
    ids->slow = 7;
    int32_t one[300], many[300];
    data_loader *loader = open_loader(td, &ids->base,
                                      (data_loader_options){ .batch = 5, .shuffle = true, .threads = 1 });
    take_ids(loader, 300, one);
    data_loader_close(loader);
    loader = open_loader(td, &ids->base,
                         (data_loader_options){ .batch = 5, .shuffle = true, .threads = 6, .prefetch = 9 });
    take_ids(loader, 300, many);
    data_loader_close(loader);
    ck_assert_mem_eq(one, many, sizeof one);
    td_close(td);
}
END_TEST

START_TEST(test_training_drops_a_short_last_batch)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 10);
    data_loader *loader = open_loader(td, &ids->base, (data_loader_options){ .batch = 4, .epochs = 2 });
    ck_assert_int_eq(data_batches(loader), 2);
    data_batch b;
    for (int i = 0; i < 4; i++) {
        ck_assert(data_next(loader, &b));
        ck_assert_int_eq(b.epoch, i / 2);
        ck_assert_int_eq(ids_of(&b)[0], 4 * (i % 2));
        for (int r = 0; r < 4; r++) ck_assert(weights_of(&b)[r] == 1);
    }
    ck_assert(b.last_of_epoch);
    for (int i = 0; i < 3; i++) ck_assert(!data_next(loader, &b));
    ck_assert_no_error(td);
    ck_assert_int_eq(data_tell(loader).samples, 16);
    data_loader_close(loader);
    td_close(td);
}
END_TEST

START_TEST(test_evaluation_pads_the_last_batch_with_weight_0)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 10);
    static const int32_t id[2][6] = { { 0, 1, 4, 5, 8, 9 }, { 2, 3, 6, 7, 8, 8 } };
    static const float weight[2][6] = { { 1, 1, 1, 1, 1, 1 }, { 1, 1, 1, 1, 0, 0 } };
    for (int rank = 0; rank < 2; rank++) {
        data_loader *loader = open_loader(
            td, &ids->base,
            (data_loader_options){ .batch = 4, .tail = DATA_PAD, .rank = rank, .world = 2, .epochs = 1 });
        ck_assert_int_eq(data_batches(loader), 3);
        for (int i = 0; i < 3; i++) {
            data_batch b;
            ck_assert(data_next(loader, &b));
            ck_assert_int_eq(b.samples, i < 2 ? 4 : 2);
            ck_assert_mem_eq(ids_of(&b), id[rank] + 2 * i, 2 * sizeof(int32_t));
            ck_assert_mem_eq(weights_of(&b), weight[rank] + 2 * i, 2 * sizeof(float));
        }
        ck_assert(!data_next(loader, &(data_batch){ 0 }));
        ck_assert_int_eq(data_tell(loader).samples, 10);
        data_loader_close(loader);
    }
    td_close(td);
}
END_TEST

START_TEST(test_a_batch_larger_than_the_data_can_be_padded)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 3);
    data_loader *loader = open_loader(
        td, &ids->base, (data_loader_options){ .batch = 8, .accumulate = 2, .tail = DATA_PAD, .epochs = 1 });
    data_batch b;
    ck_assert(data_next(loader, &b));
    ck_assert_int_eq(b.samples, 3);
    ck_assert_mem_eq(weights_of(&b), ((float[]){ 1, 1, 1, 0 }), 4 * sizeof(float));
    ck_assert(data_next(loader, &b));
    ck_assert_int_eq(b.samples, 0);
    ck_assert_mem_eq(weights_of(&b), ((float[]){ 0, 0, 0, 0 }), 4 * sizeof(float));
    ck_assert(!data_next(loader, &b));
    data_loader_close(loader);
    td_close(td);
}
END_TEST

START_TEST(test_float_columns_follow_the_context_or_the_option)
{
    td_context *wide = open_cpu(TD_F64), *narrow = open_cpu(TD_F32);
    static const double exact[2] = { .1, .2 };
    data_set *set = data_memory(narrow, &(data_array){ "x", TD_F64, TD_SHAPE(2), exact, 0 }, 1);
    id_set *ids = make_ids(narrow, 4);
    struct {
        td_context *td;
        td_dtype option, want;
    } cases[] = { { wide, TD_F32, TD_F64 }, { narrow, TD_F64, TD_F64 }, { narrow, TD_F32, TD_F32 } };
    for (int i = 0; i < 3; i++) {
        data_loader *a = open_loader(cases[i].td, &ids->base,
                                     (data_loader_options){ .batch = 4, .dtype = cases[i].option });
        data_loader *c = open_loader(cases[i].td, set, (data_loader_options){ .batch = 2, .dtype = cases[i].option });
        data_batch b, d;
        data_column x, weight, id;
        ck_assert(data_next(a, &b) && data_next(c, &d));
        const void *rows = data_rows(&b, "x", &x), *weights = data_rows(&b, "weight", &weight);
        const void *converted = data_rows(&d, "x", NULL);
        data_rows(&b, "id", &id);
        ck_assert(x.dtype == cases[i].want && weight.dtype == cases[i].want && id.dtype == TD_I32);
        ck_assert(td_shape_equal(x.shape, TD_SHAPE(3)) && id.classes == 4);
        for (int k = 0; k < 12; k++) {
            double want = k / 3 + .25 * (k % 3);
            ck_assert((x.dtype == TD_F64 ? ((const double *)rows)[k] : (double)((const float *)rows)[k]) == want);
        }
        ck_assert((x.dtype == TD_F64 ? ((const double *)weights)[3] : (double)((const float *)weights)[3]) == 1);
        if (x.dtype == TD_F64) ck_assert(((const double *)converted)[1] == .2);
        else ck_assert(((const float *)converted)[1] == .2f);
        data_loader_close(a);
        data_loader_close(c);
    }
    data_set_close(set);
    td_close(wide);
    td_close(narrow);
}
END_TEST

START_TEST(test_data_get_records_the_batch_as_an_input)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 8);
    data_loader *loader = open_loader(td, &ids->base, (data_loader_options){ .batch = 4 });
    data_batch b;
    ck_assert(data_next(loader, &b) && data_next(loader, &b));
    td_tensor x = data_get(&b, "x"), id = data_get(&b, "id"), weight = data_get(&b, "weight");
    ck_assert_no_error(td);
    ck_assert(td_shape_equal(td_shape_at(x), TD_SHAPE(4, 3)) && td_dtype_at(x) == TD_F32);
    ck_assert(td_shape_equal(td_shape_at(id), TD_SHAPE(4)) && td_dtype_at(id) == TD_I32);
    ck_assert(td_shape_equal(td_shape_at(weight), TD_SHAPE(4)) && td_dtype_at(weight) == TD_F32);
    float read[12];
    ck_assert(td_read(x, read));
    for (int k = 0; k < 12; k++) ck_assert(read[k] == (float)(4 + k / 3) + .25f * (float)(k % 3));
    ck_assert(td_step(td));
    data_loader_close(loader);
    td_close(td);
}
END_TEST

/* ---- Memory ---- */

START_TEST(test_batches_stay_valid_until_the_next_call_but_one)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 1000);
    data_loader *loader = open_loader(td, &ids->base,
                                      (data_loader_options){ .batch = 10, .prefetch = 1, .threads = 3 });
    data_batch before = { 0 }, b;
    for (int i = 0; i < 300; i++, before = b) {
        ck_assert(data_next(loader, &b));
        ck_assert_int_eq(ids_of(&b)[9], i * 10 % 1000 + 9);
        if (i) ck_assert_int_eq(ids_of(&before)[0], (i - 1) * 10 % 1000);
    }
    data_loader_close(loader);

    loader = open_loader(td, &ids->base, (data_loader_options){ .batch = 10, .hold = 5, .prefetch = 1 });
    data_batch held[5];
    for (int i = 0; i < 5; i++) ck_assert(data_next(loader, &held[i]));
    for (int i = 0; i < 5; i++) ck_assert_int_eq(ids_of(&held[i])[3], 10 * i + 3);
    data_loader_close(loader);
    td_close(td);
}
END_TEST

typedef struct counted {
    int64_t bytes, calls, fail_at; /* the call that fails, from 0; -1: none */
} counted;

static void *counted_get(void *user, size_t bytes, const char *kind)
{
    (void)kind;
    counted *c = user;
    if (c->calls++ == c->fail_at) return NULL;
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    ck_assert_ptr_nonnull(memory);
    memset(memory, 0xab, bytes); /* nothing may rely on zeros */
    c->bytes += (int64_t)bytes;
    return memory;
}

static void counted_put(void *user, void *memory, size_t bytes, const char *kind)
{
    (void)kind;
    ((counted *)user)->bytes -= (int64_t)bytes;
    free(memory);
}

static td_context *open_counted(counted *c)
{
    td_allocator allocator = { .user = c, .get = counted_get, .put = counted_put };
    return td_open(&(td_options){ .seed = 1, .threads = 1, .log = check_log_line, .allocator = &allocator });
}

START_TEST(test_nothing_is_allocated_after_opening)
{
    counted memory = { .fail_at = -1 };
    td_context *td = open_counted(&memory);
    id_set *ids = make_ids(td, 100);
    data_loader *loader = open_loader(td, &ids->base,
                                      (data_loader_options){ .batch = 10, .dtype = TD_F64, .shuffle = true });
    int64_t calls = memory.calls;
    data_batch b;
    for (int i = 0; i < 50; i++) ck_assert(data_next(loader, &b));
    ck_assert(data_seek(loader, NULL));
    ck_assert(data_next(loader, &b));
    ck_assert_int_eq(memory.calls, calls);
    data_loader_close(loader);
    td_close(td);
    ck_assert_int_eq(memory.bytes, 0);
}
END_TEST

/* Opens one of everything; false when something failed. */
static bool open_everything(td_context *td, const test_files *files)
{
    data_set *idx = data_idx(td, files->dir, "train"), *part = data_subset(td, idx, 0, 8);
    data_set *csv = data_csv(td, file_path(files, "a.csv"), NULL);
    data_set *made = data_random(td, &(data_column){ "x", TD_F32, TD_SHAPE(2), 0 }, 1, 8, 0);
    data_loader *loader = part ? data_loader_open(td, part, &(data_loader_options){ .batch = 4, .dtype = TD_F64 })
                               : NULL;
    data_batch b;
    bool all = csv && made && loader && data_next(loader, &b) && td_error(td) == TD_OK;
    data_loader_close(loader);
    data_set_close(made);
    data_set_close(csv);
    data_set_close(part);
    data_set_close(idx);
    return all;
}

START_TEST(test_each_failing_allocation_is_an_error_and_leaks_nothing)
{
    test_files files = files_open();
    idx_bytes bytes = idx_make(20);
    file_write(&files, "train-images-idx3-ubyte", bytes.images, bytes.image_bytes);
    file_write(&files, "train-labels-idx1-ubyte", bytes.labels, bytes.label_bytes);
    char *text = check_alloc(1 << 16);
    int used = 0;
    for (int i = 0; i < 2000; i++) used += sprintf(text + used, "%d,1\n", i); /* so many that its memory grows */
    file_write(&files, "a.csv", text, (size_t)used);
    counted memory = { .fail_at = -1 };
    td_context *td = open_counted(&memory);
    int64_t begin = memory.calls, begin_bytes = memory.bytes;
    ck_assert(open_everything(td, &files));
    int64_t calls = memory.calls - begin;
    ck_assert_int_gt(calls, 15);
    ck_assert_int_eq(memory.bytes, begin_bytes);
    for (int64_t i = 0; i < calls; i++) {
        memory.fail_at = memory.calls + i;
        ck_assert(!open_everything(td, &files));
        ck_assert_int_eq(td_error(td), TD_ERROR_MEMORY);
        ck_assert_str_has(td_error_text(td), "memory");
        ck_assert_int_eq(memory.bytes, begin_bytes);
        td_clear_error(td);
    }
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_a_loader_can_be_closed_at_any_time)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 50);
    ids->slow = 3;
    for (int taken = 0; taken < 20; taken++) {
        data_loader *loader = open_loader(td, &ids->base,
                                          (data_loader_options){ .batch = 5, .epochs = 1, .threads = 4 });
        data_batch b;
        for (int i = 0; i < taken; i++) ck_assert_int_eq(data_next(loader, &b), i < 10);
        data_loader_close(loader);
    }
    ck_assert_no_error(td);
    data_loader_close(NULL);
    data_set_close(NULL);
    ck_assert(!data_next(NULL, &(data_batch){ 0 }));
    td_close(td);
}
END_TEST

/* ---- Samples that cannot be read ---- */

START_TEST(test_a_broken_sample_stops_where_its_turn_is)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 100);
    ids->broken = 37;
    data_set *good = data_subset(td, &ids->base, 1, 99);
    data_loader *loader = open_loader(td, good, (data_loader_options){ .batch = 10, .threads = 3, .prefetch = 8 });
    data_batch b;
    for (int i = 0; i < 3; i++) {
        ck_assert(data_next(loader, &b));
        ck_assert_int_eq(ids_of(&b)[0], 10 * i + 1);
    }
    for (int again = 0; again < 2; again++) {
        ck_assert(!data_next(loader, &b));
        ck_assert_int_eq(td_error(td), TD_ERROR_DATA);
        ck_assert_str_eq(td_error_text(td), "ids: sample 36: sample file 37 is cut short");
        ck_assert_int_eq(data_tell(loader).batch, 3);
        td_clear_error(td);
    }
    data_loader_close(loader);
    data_set_close(good);
    td_close(td);
}
END_TEST

START_TEST(test_broken_samples_can_be_skipped_and_are_counted)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 22);
    ids->broken = 5; /* 0 5 10 15 20 */
    data_loader *loader = open_loader(
        td, &ids->base,
        (data_loader_options){ .batch = 4, .policy = DATA_SKIP, .tail = DATA_PAD, .epochs = 1, .threads = 3 });
    double sum = 0;
    int at = 0;
    for (data_batch b; data_next(loader, &b); at += 4) {
        for (int r = 0; r < 4; r++) {
            bool padding = at + r >= 22, whole = (at + r) % 5 != 0;
            const float *x = data_rows(&b, "x", NULL);
            ck_assert(weights_of(&b)[r] == (float)(!padding && whole));
            ck_assert_int_eq(ids_of(&b)[r],
                             padding || !whole ? 0 : at + r); /* padding repeats sample 20, which is broken */
            ck_assert(x[3 * r + 1] == (padding || !whole ? 0 : (float)(at + r) + .25f));
            sum += weights_of(&b)[r];
        }
    }
    ck_assert_no_error(td);
    ck_assert_int_eq(at, 24);
    ck_assert(sum == 17);
    ck_assert_int_eq(data_skipped(loader), 5);
    const char *said = strstr(log_text(), "ids: "); /* behind what a context may say of its threads */
    ck_assert_ptr_nonnull(said);
    ck_assert_str_eq(said, "ids: sample 0 is skipped: sample file 0 is cut short; more are counted without a message\n");
    data_loader_close(loader);
    td_close(td);
}
END_TEST

/* ---- Position ---- */

START_TEST(test_a_saved_position_continues_to_the_bit)
{
    enum { BATCH = 12, UPDATES = 20 };
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 100);
    data_loader_options options = { .batch = BATCH, .accumulate = 3, .shuffle = true, .seed = 5, .epochs = 3 };
    data_loader *whole = open_loader(td, &ids->base, options);
    char text[UPDATES + 1][DATA_POSITION_BYTES];
    int32_t order[UPDATES * BATCH], again[UPDATES * BATCH];
    for (int u = 0; u <= UPDATES; u++) {
        data_position at = data_tell(whole);
        ck_assert_int_eq(at.epoch, u / 8);
        ck_assert_int_eq(at.batch, u % 8);
        ck_assert_int_eq(at.micro, 0);
        ck_assert_int_eq(at.samples, u * BATCH);
        data_position_text(&at, text[u]);
        if (u < UPDATES) take_ids(whole, BATCH, order + u * BATCH);
    }
    ck_assert_str_eq(text[11], "epoch 1 batch 3 micro 0 samples 132 seed 5 count 100 batch_rows 12 shuffle 1");

    for (int u = 0; u <= UPDATES; u += 5) { /* another process: other threads, other micro-batches */
        data_position at;
        ck_assert(data_position_parse(text[u], &at));
        data_loader_options other = options;
        other.threads = 1 + u % 4;
        other.accumulate = 1 + u % 2;
        data_loader *loader = open_loader(td, &ids->base, other);
        int64_t ahead = u % 3 * BATCH;
        take_ids(loader, ahead, again);
        ck_assert(data_seek(loader, &at));
        ck_assert_int_eq(data_tell(loader).samples, u * BATCH);
        take_ids(loader, (UPDATES - u) * BATCH, again);
        ck_assert_mem_eq(again, order + u * BATCH, (size_t)((UPDATES - u) * BATCH) * sizeof *order);
        data_loader_close(loader);
    }
    ck_assert(data_seek(whole, NULL));
    take_ids(whole, UPDATES * BATCH, again);
    ck_assert_mem_eq(again, order, sizeof order);
    data_loader_close(whole);
    td_close(td);
}
END_TEST

START_TEST(test_seeking_to_the_end_ends_and_to_the_start_begins_again)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 8);
    data_loader *loader = open_loader(td, &ids->base,
                                      (data_loader_options){ .batch = 4, .tail = DATA_PAD, .epochs = 1 });
    for (int round = 0; round < 3; round++) {
        data_batch b;
        int64_t rows = 0;
        while (data_next(loader, &b)) rows += b.samples;
        ck_assert_int_eq(rows, 8);
        data_position end = data_tell(loader);
        ck_assert_int_eq(end.epoch, 1);
        ck_assert(data_seek(loader, &end));
        ck_assert(!data_next(loader, &b));
        ck_assert(data_seek(loader, NULL));
    }
    data_loader_close(loader);
    td_close(td);
}
END_TEST

START_TEST(test_what_threads_still_decode_when_seeking_is_forgotten)
{
    td_context *td = open_cpu(TD_F32);
    id_set *ids = make_ids(td, 120);
    ids->slow = 2;
    data_loader *loader = open_loader(td, &ids->base, (data_loader_options){ .batch = 6, .threads = 4 });
    data_position at = data_tell(loader);
    for (int i = 0; i < 40; i++) {
        int32_t got[12];
        at.batch = i * 7 % 19;
        ck_assert(data_seek(loader, &at));
        take_ids(loader, 12, got);
        for (int r = 0; r < 12; r++) ck_assert_int_eq(got[r], at.batch * 6 + r);
    }
    data_loader_close(loader);
    td_close(td);
}
END_TEST

START_TEST(test_a_position_is_read_back_exactly_or_not_at_all)
{
    data_position p = { INT64_MAX, 2, 0, 4, UINT64_MAX, 6, 7, true }, q;
    char text[DATA_POSITION_BYTES];
    data_position_text(&p, text);
    ck_assert(data_position_parse(text, &q));
    ck_assert(q.epoch == p.epoch && q.batch == 2 && q.micro == 0 && q.samples == 4 && q.seed == p.seed &&
              q.count == 6 && q.batch_rows == 7 && q.shuffle);
    const char *wrong[] = {
        "",
        "epoch 1",
        "epoch 1 batch 3 micro 0 samples 132 seed 5 count 100 batch_rows 12 shuffle",
        "epoch 1 batch 3 micro 0 samples 132 seed 5 count 100 batch_rows 12 shuffle 2",
        "epoch 1 batch 3 micro 0 samples 132 seed 5 count 100 batch_rows 12 shuffle 1 more",
        "epoch 1 batch x micro 0 samples 132 seed 5 count 100 batch_rows 12 shuffle 1",
        "epoch 99999999999999999999 batch 3 micro 0 samples 132 seed 5 count 100 batch_rows 12 shuffle 1",
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) ck_assert(!data_position_parse(wrong[i], &q));
}
END_TEST

TESTS("data_loader", test_every_epoch_is_another_permutation, test_the_order_is_the_same_on_every_machine,
      test_all_orders_of_five_are_equally_likely, test_the_order_has_no_favourites,
      test_ranks_and_micro_batches_share_the_same_batch, test_threads_do_not_change_the_order,
      test_training_drops_a_short_last_batch, test_evaluation_pads_the_last_batch_with_weight_0,
      test_a_batch_larger_than_the_data_can_be_padded, test_float_columns_follow_the_context_or_the_option,
      test_data_get_records_the_batch_as_an_input, test_batches_stay_valid_until_the_next_call_but_one,
      test_nothing_is_allocated_after_opening, test_each_failing_allocation_is_an_error_and_leaks_nothing,
      test_a_loader_can_be_closed_at_any_time, test_a_broken_sample_stops_where_its_turn_is,
      test_broken_samples_can_be_skipped_and_are_counted, test_a_saved_position_continues_to_the_bit,
      test_seeking_to_the_end_ends_and_to_the_start_begins_again,
      test_what_threads_still_decode_when_seeking_is_forgotten, test_a_position_is_read_back_exactly_or_not_at_all)
