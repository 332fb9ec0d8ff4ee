/* Texts as data sets: tokenizers of characters and bytes, files of ids, windows of them. Byte-level BPE is in
 * test_tokenizer.c.
 * Labels: threads
 */
#include "tests/data_files.h"
#include "tests/memory.h"

static void check_error(td_context *td, td_code code, const char *want)
{
    ck_assert_str_has(td_error_text(td), want);
    ck_assert_int_eq(td_error(td), code);
    td_clear_error(td);
}

static void check_ids(data_tokenizer *t, const char *text, const int32_t *want, int64_t count)
{
    int32_t ids[64];
    ck_assert_int_eq(data_tokenizer_encode(t, text, (int64_t)strlen(text), ids, 64), count);
    ck_assert_mem_eq(ids, want, (size_t)count * sizeof *want);
}

static void check_back(td_context *td, const data_tokenizer *t, const int32_t *ids, int64_t count, const char *want)
{
    char text[64];
    int64_t bytes = data_tokenizer_decode(t, ids, count, text, sizeof text);
    ck_assert_no_error(td);
    ck_assert_int_eq(bytes, (int64_t)strlen(want));
    ck_assert_mem_eq(text, want, (size_t)bytes);
}

#define IDS(...) (int32_t[]){ __VA_ARGS__ }, (int64_t)(sizeof((int32_t[]){ __VA_ARGS__ }) / sizeof(int32_t))

/* ---- Tokenizers -------------------------------------------------------------------------------------------- */

START_TEST(test_characters_have_ids_by_code_point)
{
    td_context *td = open_cpu(TD_F32);
    static const char text[] = "b a\u00e9\nb\U0001f600\u4f60a";
    data_tokenizer *t = data_tokenizer_characters(td, text, sizeof text - 1);
    ck_assert_no_error(td);
    ck_assert_int_eq(data_tokenizer_vocabulary(t), 7);
    check_ids(t, text, IDS(3, 1, 2, 4, 0, 3, 6, 5, 2));
    check_back(td, t, IDS(6, 4, 0), "\U0001f600\u00e9\n");
    ck_assert_int_eq(data_tokenizer_token(t, "\u00e9"), 4);
    ck_assert_int_eq(data_tokenizer_token(t, "z"), -1);

    int64_t bytes;
    const char *alphabet = data_tokenizer_alphabet(t, &bytes);
    ck_assert_int_eq(bytes, 4 + 2 + 3 + 4);
    ck_assert_mem_eq(alphabet, "\n ab\u00e9\u4f60\U0001f600", 13);
    data_tokenizer *again = data_tokenizer_characters(td, alphabet, bytes),
                   *other = data_tokenizer_characters(td, "ab", 2);
    ck_assert(data_tokenizer_fingerprint(again) == data_tokenizer_fingerprint(t));
    ck_assert(data_tokenizer_fingerprint(other) != data_tokenizer_fingerprint(t));
    check_ids(again, text, IDS(3, 1, 2, 4, 0, 3, 6, 5, 2));

    int32_t ids[4];
    ck_assert_int_eq(data_tokenizer_encode(t, "abz", 3, ids, 4), -1);
    check_error(td, TD_ERROR_DATA, "the character U+007A \"z\", which is none of the 7 of the vocabulary");
    ck_assert_int_eq(data_tokenizer_encode(t, "a\xff", 2, ids, 4), -1);
    check_error(td, TD_ERROR_DATA, "the character U+FFFD");
    ck_assert_int_eq(data_tokenizer_decode(t, ids, 0, NULL, 0), 0);
    ck_assert_int_eq(data_tokenizer_decode(t, IDS(7), NULL, 0), -1);
    check_error(td, TD_ERROR_USAGE, "id 7 at place 0 is none of the vocabulary's, which are below 7");
    ck_assert_ptr_null(data_tokenizer_characters(td, "", 0));
    check_error(td, TD_ERROR_USAGE, "the text is empty");
    data_tokenizer_close(t);
    data_tokenizer_close(again);
    data_tokenizer_close(other);
    td_close(td);
}
END_TEST

START_TEST(test_bytes_are_their_own_ids)
{
    td_context *td = open_cpu(TD_F32);
    data_tokenizer *t = data_tokenizer_bytes(td);
    ck_assert_int_eq(data_tokenizer_vocabulary(t), 256);
    check_ids(t, "a\xff\x01", IDS('a', 255, 1));
    check_back(td, t, IDS('a', 255, 1), "a\xff\x01");
    int64_t bytes;
    ck_assert_ptr_null(data_tokenizer_alphabet(t, &bytes));
    ck_assert_int_eq(data_tokenizer_encode(t, "", 0, NULL, 0), 0);
    data_tokenizer_close(t);
    td_close(td);
}
END_TEST

START_TEST(test_what_could_not_be_opened_gives_nothing)
{
    td_context *td = open_cpu(TD_F32);
    int64_t bytes;
    data_tokenizer_close(NULL);
    data_ids_close(NULL);
    ck_assert_int_eq(data_tokenizer_vocabulary(NULL), 0);
    ck_assert_int_eq(data_tokenizer_encode(NULL, "a", 1, NULL, 0), -1);
    ck_assert_int_eq(data_tokenizer_decode(NULL, NULL, 0, NULL, 0), -1);
    ck_assert_int_eq(data_tokenizer_token(NULL, "a"), -1);
    ck_assert_ptr_null(data_tokenizer_alphabet(NULL, &bytes));
    ck_assert_ptr_null(data_text(td, "no/such/file", NULL));
    ck_assert_ptr_null(data_windows(td, NULL, NULL));
    ck_assert_int_eq(data_ids_count(NULL), 0);
    ck_assert_no_error(td); /* the first failure has said why */
    td_close(td);
}
END_TEST

/* ---- Windows ----------------------------------------------------------------------------------------------- */

static void check_window(const data_set *set, int64_t i, const int32_t *x, const int32_t *y, int64_t context)
{
    int32_t got_x[16], got_y[16];
    char error[DATA_ERROR_BYTES];
    ck_assert(set->get(set, i, (void *[]){ got_x, got_y }, error));
    ck_assert_mem_eq(got_x, x, (size_t)context * sizeof *x);
    ck_assert_mem_eq(got_y, y, (size_t)context * sizeof *y);
}

START_TEST(test_consecutive_windows_cover_their_part)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    const char *path = file_write_text(&files, "text", "abcdefghijabcdefghij");
    data_tokenizer *t = data_tokenizer_characters_of(td, path);
    data_ids *ids = data_text(td, path, t);
    ck_assert_no_error(td);
    data_tokenizer_close(t);
    ck_assert_int_eq(data_ids_count(ids), 20);

    data_set *all = data_windows(td, ids, &(data_windows_options){ .context = 4, .consecutive = true });
    ck_assert_no_error(td);
    ck_assert_int_eq(all->count, 4); /* the last window would want an id after the end */
    ck_assert_int_eq(all->columns, 2);
    ck_assert_str_eq(all->column[0].name, "x");
    ck_assert_str_eq(all->column[1].name, "y");
    for (int c = 0; c < 2; c++) {
        ck_assert_int_eq(all->column[c].dtype, TD_I32);
        ck_assert(td_shape_equal(all->column[c].shape, TD_SHAPE(4)));
        ck_assert_int_eq(all->column[c].classes, 10);
    }
    check_window(all, 0, (int32_t[]){ 0, 1, 2, 3 }, (int32_t[]){ 1, 2, 3, 4 }, 4);
    check_window(all, 2, (int32_t[]){ 8, 9, 0, 1 }, (int32_t[]){ 9, 0, 1, 2 }, 4);
    check_window(all, 3, (int32_t[]){ 2, 3, 4, 5 }, (int32_t[]){ 3, 4, 5, 6 }, 4);

    data_windows_options options = { .context = 3, .consecutive = true, .part = DATA_TRAIN };
    data_set *train = data_windows(td, ids, &options);
    options.part = DATA_VALIDATION;
    options.context = 1;
    data_set *validation = data_windows(td, ids, &options);
    ck_assert_int_eq(train->count, 5); /* 18 ids */
    ck_assert_int_eq(validation->count, 1);
    check_window(train, 4, (int32_t[]){ 2, 3, 4 }, (int32_t[]){ 3, 4, 5 }, 3);
    check_window(validation, 0, (int32_t[]){ 8 }, (int32_t[]){ 9 }, 1);
    options.fraction = 0.5;
    data_set *half = data_windows(td, ids, &options);
    ck_assert_int_eq(half->count, 9);
    check_window(half, 0, (int32_t[]){ 0 }, (int32_t[]){ 1 }, 1);
    data_set *sets[] = { all, train, validation, half };
    for (int i = 0; i < 4; i++) data_set_close(sets[i]);
    data_ids_close(ids);
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_crops_are_keyed_by_seed_and_sample)
{
    enum { IDS = 1000, CONTEXT = 8, CROPS = 20000, PLACES = 900 - CONTEXT };
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    uint16_t file[IDS];
    for (int i = 0; i < IDS; i++) file[i] = (uint16_t)i;
    data_ids *ids = data_tokens(td, file_write(&files, "ids", file, sizeof file), NULL);
    data_windows_options options = { .context = CONTEXT, .part = DATA_TRAIN, .seed = 7, .count = CROPS };
    data_set *set = data_windows(td, ids, &options), *same = data_windows(td, ids, &options);
    options.seed = 8;
    options.count = 0;
    data_set *other = data_windows(td, ids, &options);
    ck_assert_no_error(td);
    ck_assert_int_eq(set->count, CROPS);
    ck_assert_int_eq(other->count, (int64_t)1 << 40);
    int seen[PLACES] = { 0 }, differ = 0;
    for (int64_t i = 0; i < CROPS; i++) {
        int32_t x[CONTEXT], y[CONTEXT], z[CONTEXT];
        char error[DATA_ERROR_BYTES];
        ck_assert(set->get(set, i, (void *[]){ x, y }, error));
        ck_assert(x[0] >= 0 && x[0] < PLACES);
        seen[x[0]]++;
        for (int k = 0; k < CONTEXT; k++) ck_assert(x[k] == x[0] + k && y[k] == x[k] + 1);
        check_window(same, i, x, y, CONTEXT);
        ck_assert(other->get(other, i, (void *[]){ z, y }, error));
        differ += z[0] != x[0];
    }
    /* 22.4 crops a place: Poisson, so that one outside 1 to 60 happens in less than one of 10^8 choices of a key. */
    for (int place = 0; place < PLACES; place++) ck_assert(seen[place] >= 1 && seen[place] <= 60);
    ck_assert_int_gt(differ, CROPS * 9 / 10);
    data_set_close(set);
    data_set_close(same);
    data_set_close(other);
    data_ids_close(ids);
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_a_loader_gives_windows)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    char text[4000];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)('a' + i * i % 23);
    data_tokenizer *t = data_tokenizer_bytes(td);
    data_ids *ids = data_text(td, file_write_gzip(&files, "text.gz", text, sizeof text), t);
    data_set *set = data_windows(td, ids, &(data_windows_options){ .context = 5, .part = DATA_TRAIN, .seed = 3 });
    data_loader *loader = data_loader_open(td, set, &(data_loader_options){ .batch = 4 });
    ck_assert_no_error(td);
    data_batch b;
    for (int64_t batch = 0; batch < 20; batch++) {
        ck_assert(data_next(loader, &b));
        ck_assert_int_eq(b.epoch, 0);
        const int32_t *x = data_rows(&b, "x", NULL), *y = data_rows(&b, "y", NULL);
        ck_assert_no_error(td);
        for (int row = 0; row < 4; row++) check_window(set, 4 * batch + row, x + 5 * row, y + 5 * row, 5);
    }
    data_loader_close(loader);
    data_set_close(set);
    data_ids_close(ids);
    data_tokenizer_close(t);
    files_close(&files);
    td_close(td);
}
END_TEST

/* ---- Files of ids ------------------------------------------------------------------------------------------ */

START_TEST(test_files_of_ids_are_read_in_both_widths)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    const char *narrow = file_write(&files, "narrow", "\x01\x00\x00\x01\xff\xff\x02\x00", 8);
    const char *wide = file_write(&files, "wide", "\x01\x00\x00\x00\x00\x00\x01\x00\xff\xff\xff\x7f", 12);
    data_ids *a = data_tokens(td, narrow, NULL), *b = data_tokens(td, wide, &(data_tokens_options){ .bits = 32 });
    ck_assert_no_error(td);
    ck_assert_int_eq(data_ids_count(a), 4);
    ck_assert_int_eq(data_ids_count(b), 3);
    data_windows_options options = { .context = 2, .consecutive = true };
    data_set *of_a = data_windows(td, a, &options), *of_b = data_windows(td, b, &options);
    check_window(of_a, 0, (int32_t[]){ 1, 256 }, (int32_t[]){ 256, 65535 }, 2);
    check_window(of_b, 0, (int32_t[]){ 1, 65536 }, (int32_t[]){ 65536, INT32_MAX }, 2);
    ck_assert_int_eq(of_a->column[0].classes, 65536);
    data_set_close(of_a);
    data_set_close(of_b);
    data_ids_close(a);

    a = data_tokens(td, narrow, &(data_tokens_options){ .vocabulary = 257 });
    of_a = data_windows(td, a, &options);
    ck_assert_no_error(td);
    int32_t x[2], y[2];
    char error[DATA_ERROR_BYTES];
    ck_assert(!of_a->get(of_a, 0, (void *[]){ x, y }, error));
    ck_assert_str_eq(error, "id 65535 at place 2 of the file is outside the vocabulary of 257");
    data_set_close(of_a);
    data_ids_close(a);
    data_ids_close(b);
    files_close(&files);
    td_close(td);
}
END_TEST

/* ---- What is refused --------------------------------------------------------------------------------------- */

static void refuse_tokens(td_context *td, const char *path, data_tokens_options options, td_code code, const char *text)
{
    ck_assert_ptr_null(data_tokens(td, path, &options));
    check_error(td, code, text);
}

START_TEST(test_files_that_are_no_ids_or_texts_are_refused)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    data_tokenizer *t = data_tokenizer_characters(td, "ab", 2);
    const char *empty = file_write_text(&files, "empty", "");
    const char *odd = file_write_text(&files, "odd", "abcde");
    data_tokens_options none = { 0 };
    refuse_tokens(td, "no/such/file", none, TD_ERROR_DATA, "no/such/file: cannot be opened: No such file or directory");
    refuse_tokens(td, files.dir, none, TD_ERROR_DATA, "is not a regular file, a file of token ids is needed");
    refuse_tokens(td, empty, none, TD_ERROR_DATA, "empty: the file is empty; fetch or write it again");
    refuse_tokens(td, odd, none, TD_ERROR_DATA, "odd: 5 bytes are not whole ids of 16 bits");
    refuse_tokens(td, odd, (data_tokens_options){ .bits = 8 }, TD_ERROR_USAGE, "16 and 32 bits can be had");
    refuse_tokens(td, odd, (data_tokens_options){ .vocabulary = -1 }, TD_ERROR_USAGE, "below -1 asked for");

    ck_assert_ptr_null(data_text(td, "no/such/file", t));
    check_error(td, TD_ERROR_DATA, "no/such/file: cannot be opened");
    ck_assert_ptr_null(data_text(td, empty, t));
    check_error(td, TD_ERROR_DATA, "empty: the file is empty");
    ck_assert_ptr_null(data_text(td, file_write_gzip(&files, "empty.gz", "", 0), t));
    check_error(td, TD_ERROR_DATA, "empty.gz: the file is empty");
    ck_assert_ptr_null(data_text(td, odd, t));
    check_error(td, TD_ERROR_DATA, "the character U+0063 \"c\"");
    ck_assert_ptr_null(data_tokenizer_characters_of(td, "no/such/file"));
    check_error(td, TD_ERROR_DATA, "no/such/file: cannot be opened");
    data_tokenizer_close(t);
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_windows_that_do_not_fit_are_refused)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    uint16_t file[100] = { 0 };
    data_ids *ids = data_tokens(td, file_write(&files, "ids", file, sizeof file), NULL);
    const struct {
        data_windows_options options;
        const char *text; /* NULL: fits */
    } cases[] = {
        { { .context = 99 }, NULL },
        { { .context = 100 },
          "ids: the text has 100 ids, but a window of context 100 takes one more than its context: use" },
        { { .context = 89, .part = DATA_TRAIN }, NULL },
        { { .context = 90, .part = DATA_TRAIN },
          "the training part has 90 ids, but a window of context 90 takes one more" },
        { { .context = 9, .part = DATA_VALIDATION, .consecutive = true }, NULL },
        { { .context = 10, .part = DATA_VALIDATION },
          "the validation part has 10 ids, but a window of context 10 takes one more" },
        { { .context = 1, .part = DATA_TRAIN, .fraction = 0.001 }, "the training part has 0 ids" },
        { { .context = INT64_MAX }, "a smaller context" },
        { { 0 }, "data_windows: context 0, fraction 0.9, count 0, part 0: a context of at least 1" },
        { { .context = 1, .fraction = 1 }, "a fraction between 0 and 1" },
        { { .context = 1, .fraction = NAN }, "a fraction between 0 and 1" },
        { { .context = 1, .count = -1 }, "a count of at least 0" },
        { { .context = 1, .part = (data_part)3 }, "a part of data_part" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        data_set *set = data_windows(td, ids, &cases[i].options);
        ck_assert((set == NULL) == (cases[i].text != NULL));
        if (cases[i].text) ck_assert_str_has(td_error_text(td), cases[i].text);
        if (cases[i].text) td_clear_error(td);
        data_set_close(set);
    }
    data_ids_close(ids);
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_each_failing_allocation_is_an_error_and_leaks_nothing)
{
    memory_test memory = { .refused = -1 };
    td_context *td = open_with(&memory);
    test_files files = files_open();
    const char *path = file_write_gzip(&files, "text.gz", check_alloc(1500000),
                                       1500000); /* more than is read at first */
    int held = memory.held, failures = 0;
    for (;; failures++) {
        memory_refuse(&memory, failures);
        data_tokenizer *t = data_tokenizer_characters_of(td, path);
        data_ids *ids = data_text(td, path, t);
        data_set *set = data_windows(td, ids, &(data_windows_options){ .context = 8 });
        ck_assert((set == NULL) == (td_error(td) == TD_ERROR_MEMORY));
        bool done = set != NULL;
        data_set_close(set);
        data_ids_close(ids);
        data_tokenizer_close(t);
        ck_assert_int_eq(memory.held, held);
        if (done) break;
        td_clear_error(td);
    }
    /* Text, twice; what is seen; a tokenizer, its tokens, texts and ids; text, twice; ids twice and what they are; the
     * set. */
    ck_assert_int_eq(failures, 2 + 1 + 4 + 2 + 3 + 1);
    files_close(&files);
    td_close(td);
    ck_assert_int_eq(memory.held, 0);
}
END_TEST

TESTS("text", test_characters_have_ids_by_code_point, test_bytes_are_their_own_ids,
      test_what_could_not_be_opened_gives_nothing, test_consecutive_windows_cover_their_part,
      test_crops_are_keyed_by_seed_and_sample, test_a_loader_gives_windows, test_files_of_ids_are_read_in_both_widths,
      test_files_that_are_no_ids_or_texts_are_refused, test_windows_that_do_not_fit_are_refused,
      test_each_failing_allocation_is_an_error_and_leaks_nothing)
