/* Every way in which files, sets and options can be wrong is one sentence that says what and how to mend it. */
#include "tests/data_files.h"

#include <sys/stat.h>

/* The context failed with this code and text, which is then forgotten. */
static void check_error(td_context *td, td_code code, const char *want)
{
    ck_assert_str_eq(td_error_text(td), want);
    ck_assert_int_eq(td_error(td), code);
    td_clear_error(td);
}

/* "PATH: text" */
static void check_file_error(td_context *td, td_code code, const char *path, const char *text)
{
    char want[1024];
    snprintf(want, sizeof want, "%s: %s", path, text);
    check_error(td, code, want);
}

/* ---- IDX ---- */

static void refuse_idx(td_context *td, const test_files *files, const char *file, const char *text)
{
    ck_assert_ptr_null(data_idx(td, files->dir, "train"));
    check_file_error(td, TD_ERROR_DATA, file ? file_path(files, file) : files->dir, text);
}

static const char train_images[] = "train-images-idx3-ubyte", train_labels[] = "train-labels-idx1-ubyte";

START_TEST(test_idx_files_that_are_not_there)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    ck_assert_ptr_null(data_idx(td, "no/such/directory", "train"));
    check_error(td, TD_ERROR_DATA, "no/such/directory: no such directory; give the one that holds the IDX files");
    refuse_idx(
        td, &files, NULL,
        "holds neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz; give the directory that holds the "
        "IDX files");
    idx_bytes b = idx_make(3);
    file_write(&files, train_images, b.images, b.image_bytes);
    refuse_idx(
        td, &files, NULL,
        "holds neither train-labels-idx1-ubyte nor train-labels-idx1-ubyte.gz; give the directory that holds the "
        "IDX files");
    ck_assert_ptr_null(data_idx(td, files.dir, "validation"));
    check_error(td, TD_ERROR_USAGE, "data_idx: split \"validation\" does not exist: use \"train\" or \"test\"");
    ck_assert_ptr_null(data_idx(td, NULL, "train"));
    check_error(td, TD_ERROR_USAGE, "data_idx: no directory given: name the one that holds the IDX files");
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_idx_files_of_another_kind)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    idx_bytes b = idx_make(3);
    file_write(&files, train_labels, b.labels, b.label_bytes);
    file_write(&files, train_images, b.labels, b.label_bytes);
    refuse_idx(td, &files, train_images, "not an IDX file of images: it begins with 0x00000801 instead of 0x00000803");
    file_write_text(&files, train_images, "<!DOCTYPE html>");
    refuse_idx(td, &files, train_images, "not an IDX file of images: it begins with 0x3c21444f instead of 0x00000803");
    file_write(&files, train_images, b.images, b.image_bytes);
    file_write_gzip(&files, train_labels, b.images, b.image_bytes);
    refuse_idx(td, &files, train_labels, "not an IDX file of labels: it begins with 0x00000803 instead of 0x00000801");
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_idx_files_of_another_size_than_they_say)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    idx_bytes b = idx_make(3);
    file_write(&files, train_labels, b.labels, b.label_bytes);
    file_write(&files, train_images, b.images, 0);
    refuse_idx(td, &files, train_images, "the file is empty; fetch or write it again");
    file_write(&files, train_images, b.images, 3);
    refuse_idx(td, &files, train_images, "too short: 3 bytes are no IDX header; fetch it again");
    file_write(&files, train_images, b.images, 15);
    refuse_idx(td, &files, train_images, "too short: 15 bytes are no IDX header; fetch it again");
    file_write(&files, train_images, b.images, b.image_bytes - 1);
    refuse_idx(td, &files, train_images,
               "too short: its header promises 3 images, more than its size can hold; fetch it again");
    file_write(&files, train_images, b.images, b.image_bytes + 1);
    refuse_idx(td, &files, train_images,
               "too long: bytes follow the 48 of content that its header promises; fetch it again");
    unlink(file_path(&files, train_images));

    const char *gzipped = "train-images-idx3-ubyte.gz";
    file_write_gzip(&files, gzipped, b.images, b.image_bytes - 1);
    refuse_idx(td, &files, gzipped, "too short: its header promises 48 bytes of content, it holds 47; fetch it again");
    file_write_gzip(&files, gzipped, b.images, b.image_bytes + 1);
    refuse_idx(td, &files, gzipped,
               "too long: bytes follow the 48 of content that its header promises; fetch it again");

    uint8_t hostile[16]; /* 2^96 bytes */
    idx_header(hostile, 3, (uint32_t[]){ UINT32_MAX, UINT32_MAX, UINT32_MAX });
    file_write_gzip(&files, gzipped, hostile, sizeof hostile);
    refuse_idx(td, &files, gzipped,
               "too short: its header promises 4294967295 images, more than its size can hold; fetch it again");
    idx_header(hostile, 3, (uint32_t[]){ 3, 0, 4 });
    file_write_gzip(&files, gzipped, hostile, sizeof hostile);
    refuse_idx(td, &files, gzipped, "its header says that dimension 1 is 0: it holds no images");
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_idx_labels_that_do_not_fit)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    idx_bytes b = idx_make(12), fewer = idx_make(11);
    const char *images = file_write(&files, train_images, b.images, b.image_bytes);
    const char *labels = file_write(&files, train_labels, fewer.labels, fewer.label_bytes);
    ck_assert_ptr_null(data_idx(td, files.dir, "train"));
    char want[512];
    snprintf(want, sizeof want, "%s holds 11 labels but %s holds 12 images; they must come from one data set", labels,
             images);
    check_error(td, TD_ERROR_DATA, want);
    file_write(&files, train_labels, b.labels, b.label_bytes);
    ck_assert_ptr_null(data_idx_with(td, files.dir, "train", &(data_idx_options){ .classes = 9 }));
    check_file_error(td, TD_ERROR_DATA, labels, "label 9 of sample 9 is not below the 9 classes asked for");
    files_close(&files);
    td_close(td);
}
END_TEST

/* ---- gzip ---- */

START_TEST(test_gzip_files_that_are_broken_anywhere)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    idx_bytes b = idx_make(60);
    file_write(&files, train_labels, b.labels, b.label_bytes);
    const char *name = "train-images-idx3-ubyte.gz", *path = file_write_gzip(&files, name, b.images, b.image_bytes);
    uint8_t whole[2048];
    FILE *file = fopen(path, "rb");
    ck_assert_ptr_nonnull(file);
    size_t bytes = fread(whole, 1, sizeof whole, file);
    fclose(file);
    ck_assert(bytes > 100 && bytes < sizeof whole);

    data_set *set = data_idx(td, files.dir, "train");
    ck_assert_no_error(td);
    data_set_close(set);
    for (size_t cut = 2; cut < bytes; cut++) {
        file_write(&files, name, whole, cut);
        refuse_idx(td, &files, name, "truncated gzip file: it ends before its compressed data does; fetch it again");
    }
    whole[bytes - 8] ^= 1; /* of the checksum */
    file_write(&files, name, whole, bytes);
    refuse_idx(td, &files, name, "damaged gzip file: its data and its checksum disagree; fetch it again");
    whole[bytes - 8] ^= 1;
    for (size_t i = 10; i < bytes - 8; i++) { /* a flipped bit anywhere is noticed by one check or another */
        whole[i] ^= 0x10;
        file_write(&files, name, whole, bytes);
        ck_assert_ptr_null(data_idx(td, files.dir, "train"));
        ck_assert_int_eq(td_error(td), TD_ERROR_DATA);
        ck_assert_str_has(td_error_text(td), path);
        td_clear_error(td);
        whole[i] ^= 0x10;
    }
    files_close(&files);
    td_close(td);
}
END_TEST

/* ---- CSV ---- */

static void refuse_csv(td_context *td, const test_files *files, const char *content, data_csv_options options,
                       const char *text)
{
    const char *path = file_write_text(files, "a.csv", content);
    ck_assert_ptr_null(data_csv(td, path, &options));
    check_file_error(td, TD_ERROR_DATA, path, text);
}

START_TEST(test_csv_files_that_cannot_be_read)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    ck_assert_ptr_null(data_csv(td, "no/such/file.csv", NULL));
    check_error(td, TD_ERROR_DATA, "no/such/file.csv: cannot be opened: No such file or directory");
    ck_assert_ptr_null(data_csv(td, files.dir, NULL));
    check_file_error(td, TD_ERROR_DATA, files.dir, "is a directory, a file is needed");
    char *longest = check_alloc(5000);
    memset(longest, 'a', 4999);
    ck_assert_ptr_null(data_csv(td, longest, NULL));
    ck_assert_str_has(td_error_text(td), "aaaa...: the path is longer than 4095 bytes");
    td_clear_error(td);
    refuse_csv(td, &files, "", (data_csv_options){ 0 }, "the file is empty; fetch or write it again");
    refuse_csv(td, &files, "\n \r\n\n", (data_csv_options){ 0 }, "holds no line of numbers");
    refuse_csv(td, &files, "a,b\n", (data_csv_options){ 0 }, "holds no line of numbers");
    refuse_csv(td, &files, "1,2\n", (data_csv_options){ .header = DATA_HEADER_YES }, "holds no line of numbers");
    if (geteuid() != 0) { /* root may read everything */
        const char *path = file_write_text(&files, "secret.csv", "1,2\n");
        ck_assert_int_eq(chmod(path, 0), 0);
        ck_assert_ptr_null(data_csv(td, path, NULL));
        check_file_error(td, TD_ERROR_DATA, path, "cannot be opened: Permission denied");
    }
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_csv_cells_that_are_no_numbers)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    data_csv_options none = { 0 }, bare = { .header = DATA_HEADER_NO };
    const struct {
        const char *content, *text;
        data_csv_options options;
    } cases[] = {
        { "a,b\n1,2\n3,x4\n", "line 3, column 2: \"x4\" is not a finite number", none },
        { "1,2\n\n3,4 5\n", "line 3, column 2: \"4 5\" is not a finite number", none },
        { "1,2\n,2\n", "line 2, column 1: the cell is empty", none },
        { "1,2\n3,4,\n", "line 2, column 3: the cell is empty", none },
        { "1,2\nnan,2\n", "line 2, column 1: \"nan\" is not a finite number", none },
        { "1,2\n-inf,2\n", "line 2, column 1: \"-inf\" is not a finite number", none },
        { "1,2\n1e400,2\n", "line 2, column 1: \"1e400\" is not a finite number", none },
        { "1,2\n1e39,2\n", "line 2, column 1: 9.9999999999999994e+38 is too large for f32", none },
        { "1,2\n\"3\",4\n", "line 2, column 1: \"\"3\"\" is not a finite number", none },
        { "1,2\n3;4\n", "line 2, column 1: \"3;4\" is not a finite number", none },
        { "1,2\n\1\t\2,4\n", "line 2, column 1: \"???\" is not a finite number", none },
        { "a,b\n", "line 1, column 1: \"a\" is not a finite number", bare },
        { "1,2,b\n", "line 1, column 3: \"b\" is not a finite number; if the line is a header, say so (option header)",
          none },
        { "a,1,2\n",
          "line 1, column 1 is not a finite number, though column 2 is; if the line is a header, say so (option "
          "header)",
          none },
        { "1,2\n1000000000000000000000000000000000000000000000000000000000000000000000,2\n",
          "line 2, column 1: \"100000000000000000000000000000000000000000000000000000000000000\" is not a finite "
          "number",
          none },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        refuse_csv(td, &files, cases[i].content, cases[i].options, cases[i].text);
    }
    const char *path = file_write(&files, "a.csv", "1,2\n3\0,4\n", 9);
    ck_assert_ptr_null(data_csv(td, path, NULL));
    check_file_error(td, TD_ERROR_DATA, path, "line 2, column 1: \"3?\" is not a finite number");
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_csv_lines_and_labels_that_do_not_fit)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    data_csv_options none = { 0 };
    refuse_csv(td, &files, "1,2,3\n4,5\n", none, "line 2 has 2 columns, the lines before have 3");
    refuse_csv(td, &files, "1,2\n3,4\n5,6,7\n", none, "line 3 has 3 columns, the lines before have 2");
    refuse_csv(td, &files, "1;2;3\n", (data_csv_options){ .header = DATA_HEADER_YES, .separator = ';' },
               "holds no line of numbers");
    refuse_csv(td, &files, "1\n", none, "line 1 has one cell; features and a target are needed, separated by ','");
    refuse_csv(td, &files, "1,2\n1,.5\n", none, "line 2, column 2: 0.5 is not a class: classes are integers from 0");
    refuse_csv(td, &files, "1,2\n1,-1\n", none, "line 2, column 2: -1 is not a class: classes are integers from 0");
    refuse_csv(td, &files, "1,2\n1,1e10\n", none,
               "line 2, column 2: 10000000000 is not a class: classes are integers from 0");
    refuse_csv(td, &files, "2,1\n3,1\n", (data_csv_options){ .target_column = 1, .classes = 3 },
               "line 2, column 1: label 3 is not below the 3 classes asked for");

    const char *path = file_write_text(&files, "a.csv", "1,2\n");
    ck_assert_ptr_null(data_csv(td, path, &(data_csv_options){ .target_column = 3 }));
    check_file_error(td, TD_ERROR_USAGE, path, "target column 3 asked for, but line 1 has 2 columns");
    const struct {
        data_csv_options options;
        const char *text;
    } cases[] = {
        { { .target_column = -1 }, "data_csv: target_column counts from 1; 0 is the last" },
        { { .classes = -1 }, "data_csv: classes must not be negative" },
        { { .dtype = TD_BF16 }, "data_csv: dtype must be f32 or f64" },
        { { .scale = INFINITY }, "data_csv: scale must be finite" },
        { { .separator = '.' }, "data_csv: the separator cannot be part of a number or end a line" },
        { { .separator = '\n' }, "data_csv: the separator cannot be part of a number or end a line" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert_ptr_null(data_csv(td, path, &cases[i].options));
        check_error(td, TD_ERROR_USAGE, cases[i].text);
    }
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_truncated_csv_gzip)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    char *text = check_alloc(1 << 20), *packed = check_alloc(1 << 20);
    int used = 0;
    for (int i = 0; i < 30000; i++) used += sprintf(text + used, "%d,%d.25,%d\n", i, i * 7919 % 10007, i % 3);
    const char *path = file_write_gzip(&files, "a.csv.gz", text, (size_t)used);
    FILE *file = fopen(path, "rb");
    ck_assert_ptr_nonnull(file);
    size_t bytes = fread(packed, 1, 1 << 20, file);
    fclose(file);
    for (size_t cut = bytes - 1; cut > 2; cut /= 3) {
        file_write(&files, "a.csv.gz", packed, cut);
        ck_assert_ptr_null(data_csv(td, path, NULL));
        check_file_error(td, TD_ERROR_DATA, path,
                         "truncated gzip file: it ends before its compressed data does; fetch it again");
    }
    files_close(&files);
    td_close(td);
}
END_TEST

/* ---- Sets in memory ---- */

START_TEST(test_arrays_and_ranges_that_do_not_fit)
{
    td_context *td = open_cpu(TD_F32);
    static const float x[6];
    data_array a = { "x", TD_F32, TD_SHAPE(3, 2), x, 0 }, b = { "y", TD_F32, TD_SHAPE(2), x, 0 };
    ck_assert_ptr_null(data_memory(td, (data_array[]){ a, b }, 2));
    check_error(td, TD_ERROR_USAGE, "data_memory: \"y\" has 2 samples but \"x\" has 3");
    ck_assert_ptr_null(data_memory(td, &a, 0));
    check_error(td, TD_ERROR_USAGE, "data_memory: 0 arrays given, 1 to 8 can be had");
    a.scale = 2;
    ck_assert_ptr_null(data_memory(td, &a, 1));
    check_error(td, TD_ERROR_USAGE,
                "data_memory: array 0 (x) needs a name, data, a shape that begins with the number of samples, and no "
                "scale unless it is u8");
    a.scale = 0;
    data_set *set = data_memory(td, &a, 1);
    ck_assert_ptr_null(data_subset(td, set, 2, 2));
    check_error(td, TD_ERROR_USAGE, "data_subset: 2 samples from 2 are not in arrays in memory, which has 3");
    ck_assert_ptr_null(data_subset(td, set, INT64_MAX, 1));
    check_error(td, TD_ERROR_USAGE,
                "data_subset: 1 samples from 9223372036854775807 are not in arrays in memory, which has 3");
    ck_assert_ptr_null(data_random(td, &(data_column){ "t", TD_BF16, { 0 }, 0 }, 1, 1, 0));
    check_error(td, TD_ERROR_USAGE,
                "data_random: column \"t\" of dtype bf16 with 0 classes cannot be made; f32, f64, i32, i64 and u8 can, "
                "with classes that fit");
    ck_assert_ptr_null(data_random(td, &(data_column){ "t", TD_F32, { 0 }, 0 }, 1, 0, 0));
    check_error(td, TD_ERROR_USAGE,
                "data_random: 1 columns and 0 samples asked for; 1 to 8 columns and at least 1 sample can be had");
    data_set_close(set);
    td_close(td);
}
END_TEST

/* ---- The loader ---- */

static bool get_nothing(const data_set *set, int64_t i, void *const *out, char *error)
{
    (void)set;
    error[0] = 0;
    *(float *)out[0] = (float)i;
    return true;
}

static data_set hundred(td_context *td)
{
    return (data_set){
        .td = td, .name = "hundred", .count = 100, .columns = 1, .column = { { .name = "x" } }, .get = get_nothing
    };
}

START_TEST(test_loader_options_that_do_not_fit)
{
    td_context *td = open_cpu(TD_F32);
    data_set set = hundred(td);
    const struct {
        data_loader_options options;
        const char *text;
    } cases[] = {
        { { 0 }, "batch is 0, it must be at least 1" },
        { { .batch = -3 }, "batch is -3, it must be at least 1" },
        { { .batch = 4, .accumulate = -1 }, "accumulate is -1, it must be at least 1" },
        { { .batch = 4, .world = -2 }, "world is -2, it must be at least 1" },
        { { .batch = 4, .rank = -1 }, "rank is -1, it must be at least 0" },
        { { .batch = 4, .rank = 2, .world = 2 }, "rank is 2, it must be at most 1" },
        { { .batch = 4, .epochs = -1 }, "epochs is -1, it must be at least 0" },
        { { .batch = 4, .threads = -1 }, "threads is -1, it must be at least 1" },
        { { .batch = 4, .threads = 5000 }, "threads is 5000, it must be at most 1024" },
        { { .batch = 4, .prefetch = -1 }, "prefetch is -1, it must be at least 1" },
        { { .batch = 4, .hold = -1 }, "hold is -1, it must be at least 1" },
        { { .batch = 4, .dtype = TD_BF16 }, "dtype is bf16, float columns can be f32 or f64" },
        { { .batch = 16, .accumulate = 3, .world = 2 },
          "batch 16 does not divide by 2 ranks x 3 micro-batches: use 12 or 18" },
        { { .batch = 2, .accumulate = 3, .world = 2 },
          "batch 2 cannot be shared by 2 ranks x 3 micro-batches: it has fewer samples than there are parts" },
        { { .batch = 4, .accumulate = INT64_MAX, .world = 2 },
          "batch 4 cannot be shared by 2 ranks x 9223372036854775807 micro-batches: it has fewer samples than there "
          "are parts" },
        { { .batch = 101 }, "batch 101 is larger than the data: hundred holds 100 samples" },
        { { .batch = INT64_MAX, .tail = DATA_PAD },
          "batch 9223372036854775807, 0 epochs and the 100 samples of hundred are more than can be counted; use "
          "fewer" },
        { { .batch = 1, .epochs = INT64_MAX },
          "batch 1, 9223372036854775807 epochs and the 100 samples of hundred are more than can be counted; use "
          "fewer" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert_ptr_null(data_loader_open(td, &set, &cases[i].options));
        char want[512];
        snprintf(want, sizeof want, "data_loader: %s", cases[i].text);
        check_error(td, TD_ERROR_USAGE, want);
    }
    ck_assert_ptr_null(data_loader_open(td, NULL, &(data_loader_options){ .batch = 4 }));
    check_error(td, TD_ERROR_USAGE, "data_loader: no data set given");
    td_close(td);
}
END_TEST

START_TEST(test_sets_of_ones_own_that_are_not_whole)
{
    td_context *td = open_cpu(TD_F32);
    data_column second[] = {
        { .name = NULL },
        { .name = "weight" },
        { .name = "x" },
        { .name = "y", .dtype = TD_DTYPES },
        { .name = "y", .shape = { .rank = TD_MAX_DIMS } },
        { .name = "y", .shape = TD_SHAPE(2, 0) },
    };
    const char *text[] = {
        "(\"\") has no name",
        "(\"weight\") has the name of the column that the loader adds; give it another",
        "(\"x\") has the name of another column",
        "(\"y\") has a dtype that does not exist",
        "(\"y\") has too many dimensions",
        "(\"y\") has a dimension of no size",
    };
    for (int i = 0; i < 6; i++) {
        data_set set = hundred(td);
        set.columns = 2;
        set.column[1] = second[i];
        ck_assert_ptr_null(data_loader_open(td, &set, &(data_loader_options){ .batch = 1 }));
        char want[512];
        snprintf(want, sizeof want, "data_loader: column 1 of hundred %s", text[i]);
        check_error(td, TD_ERROR_USAGE, want);
    }
    data_set set = hundred(td);
    set.get = NULL;
    ck_assert_ptr_null(data_loader_open(td, &set, &(data_loader_options){ .batch = 1 }));
    check_error(td, TD_ERROR_USAGE,
                "data_loader: hundred has 100 samples, 1 columns and no function get; it needs samples, 1 to 8 columns "
                "and the function");
    td_close(td);
}
END_TEST

START_TEST(test_columns_that_are_not_there_and_batches_gone_by)
{
    td_context *td = open_cpu(TD_F32);
    data_set set = hundred(td);
    data_loader *loader = data_loader_open(td, &set, &(data_loader_options){ .batch = 10 });
    data_batch first, b;
    ck_assert(data_next(loader, &first));
    td_here here = { "model.c", 7 };
    td_tensor t = data_get_at(&first, "imgae", here);
    ck_assert(td_failed(t));
    check_error(td, TD_ERROR_USAGE, "data_get: no column \"imgae\"; there are x, weight (model.c:7)");
    ck_assert_ptr_null(data_rows_at(&first, NULL, NULL, here));
    check_error(td, TD_ERROR_USAGE, "data_get: no column \"\"; there are x, weight (model.c:7)");
    ck_assert(data_next(loader, &b));
    ck_assert_ptr_nonnull(data_rows(&first, "x", NULL));
    ck_assert(data_next(loader, &b));
    ck_assert(td_failed(data_get_at(&first, "x", here)));
    check_error(td, TD_ERROR_USAGE,
                "data_get: the memory of this batch has been used again: a batch stays valid until 2 data_next calls "
                "later (option hold) (model.c:7)");
    data_loader_close(loader);
    td_close(td);
}
END_TEST

START_TEST(test_positions_that_do_not_fit)
{
    td_context *td = open_cpu(TD_F32);
    data_set set = hundred(td);
    data_loader *loader = data_loader_open(
        td, &set, &(data_loader_options){ .batch = 10, .accumulate = 2, .seed = 3, .shuffle = true, .epochs = 2 });
    data_batch b;
    for (int i = 0; i < 7; i++) ck_assert(data_next(loader, &b));
    data_position inside = data_tell(loader);
    ck_assert_int_eq(inside.batch, 3);
    ck_assert_int_eq(inside.micro, 1);
    ck_assert_int_eq(inside.samples, 35);
    ck_assert(!data_seek(loader, &inside));
    check_error(td, TD_ERROR_USAGE,
                "data_seek: the position is inside a batch (micro-batch 1); save it after a batch's last micro-batch");

    data_position good = inside;
    good.micro = 0;
    data_position other = good;
    other.seed = 4;
    ck_assert(!data_seek(loader, &other));
    check_error(
        td, TD_ERROR_USAGE,
        "data_seek: the position was saved with 100 samples, batch 10, seed 4, shuffled, but the loader has 100 "
        "samples, batch 10, seed 3, shuffled; the order would differ");
    other = good;
    other.batch_rows = 20;
    ck_assert(!data_seek(loader, &other));
    ck_assert_str_has(td_error_text(td), "saved with 100 samples, batch 20, seed 3");
    td_clear_error(td);
    const struct {
        int64_t epoch, batch;
    } nowhere[] = { { -1, 0 }, { 0, -1 }, { 0, 10 }, { 2, 1 }, { 3, 0 }, { INT64_MAX, 0 } };
    for (size_t i = 0; i < sizeof nowhere / sizeof *nowhere; i++) {
        other = good;
        other.epoch = nowhere[i].epoch;
        other.batch = nowhere[i].batch;
        ck_assert(!data_seek(loader, &other));
        ck_assert_str_has(td_error_text(td), "data_seek: there is no batch");
        td_clear_error(td);
    }
    ck_assert(!data_seek(NULL, &good));
    ck_assert(data_seek(loader, &good)); /* none of those harmed the loader */
    ck_assert(data_next(loader, &b));
    ck_assert_int_eq(b.index, 3);
    data_loader_close(loader);
    td_close(td);
}
END_TEST

TESTS("data_errors", test_idx_files_that_are_not_there, test_idx_files_of_another_kind,
      test_idx_files_of_another_size_than_they_say, test_idx_labels_that_do_not_fit,
      test_gzip_files_that_are_broken_anywhere, test_csv_files_that_cannot_be_read, test_csv_cells_that_are_no_numbers,
      test_csv_lines_and_labels_that_do_not_fit, test_truncated_csv_gzip, test_arrays_and_ranges_that_do_not_fit,
      test_loader_options_that_do_not_fit, test_sets_of_ones_own_that_are_not_whole,
      test_columns_that_are_not_there_and_batches_gone_by, test_positions_that_do_not_fit)
