/* What data/ promises of sets: they hold what their files say. What is refused is in test_data_errors.c, the loader in
 * test_data_loader.c. */
#include "tests/data_files.h"

#include <locale.h>

static const char fashion_mnist[] = "/usr/share/datasets/fashion-mnist";

/* ---- IDX ---- */

static void check_idx(td_context *td, const char *dir, const char *split)
{
    data_set *set = data_idx_with(td, dir, split, &(data_idx_options){ .classes = 10 });
    ck_assert_no_error(td);
    ck_assert_int_eq(set->count, 40);
    ck_assert_int_eq(set->columns, 2);
    ck_assert_str_eq(set->column[0].name, "image");
    ck_assert_int_eq(set->column[0].dtype, TD_F32);
    ck_assert(td_shape_equal(set->column[0].shape, TD_SHAPE(4, 4, 1)));
    ck_assert_str_eq(set->column[1].name, "label");
    ck_assert_int_eq(set->column[1].dtype, TD_I32);
    ck_assert_int_eq(set->column[1].shape.rank, 0);
    ck_assert_int_eq(set->column[1].classes, 10);
    for (int i = 0; i < 40; i++) {
        float image[16];
        int32_t label = -1;
        char error[DATA_ERROR_BYTES];
        ck_assert(set->get(set, i, (void *[]){ image, &label }, error));
        for (int k = 0; k < 16; k++) ck_assert(image[k] == (float)((16 * i + k) % 256) / 255.0f);
        ck_assert_int_eq(label, i % 10);
    }
    data_set_close(set);
}

START_TEST(test_idx_files_are_read_plain_and_gzipped)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    idx_bytes b = idx_make(40);
    file_write(&files, "train-images-idx3-ubyte", b.images, b.image_bytes);
    file_write_gzip(&files, "train-labels-idx1-ubyte.gz", b.labels, b.label_bytes);
    file_write_gzip(&files, "t10k-images-idx3-ubyte.gz", b.images, b.image_bytes);
    file_write(&files, "t10k-labels-idx1-ubyte", b.labels, b.label_bytes);
    check_idx(td, files.dir, "train");
    check_idx(td, files.dir, "test");
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_fashion_mnist_is_what_it_is)
{
    if (access(fashion_mnist, F_OK) != 0) SKIP("no Fashion-MNIST (Debian's dataset-fashion-mnist)");
    td_context *td = open_cpu(TD_F32);
    data_set *train = data_idx(td, fashion_mnist, "train"), *test = data_idx(td, fashion_mnist, "test");
    ck_assert_no_error(td);
    ck_assert_int_eq(train->count, 60000);
    ck_assert_int_eq(test->count, 10000);
    ck_assert(td_shape_equal(train->column[0].shape, TD_SHAPE(28, 28, 1)));
    data_loader *loader = data_loader_open(td, train,
                                           &(data_loader_options){ .batch = 100, .shuffle = true, .epochs = 1 });
    int64_t of_class[10] = { 0 };
    double sum = 0;
    for (data_batch b; data_next(loader, &b);) {
        const float *image = data_rows(&b, "image", NULL);
        const int32_t *label = data_rows(&b, "label", NULL);
        for (int64_t k = 0; k < b.local_rows * 784; k++) sum += image[k];
        for (int64_t r = 0; r < b.local_rows; r++) of_class[label[r]]++;
    }
    ck_assert_no_error(td);
    for (int c = 0; c < 10; c++) ck_assert_int_eq(of_class[c], 6000);
    double mean = sum / (60000.0 * 784);
    ck_assert_double_eq_tol(mean, 0.2860406, 1e-6); /* the mean that recipes for Fashion-MNIST quote as 0.2860 */
    data_loader_close(loader);
    data_set_close(test);
    data_set_close(train);
    td_close(td);
}
END_TEST

/* ---- CSV ---- */

/* Row i of a set with columns x (n, in the dtype of T) and a target. */
#define ck_assert_csv_row(set, i, T, n, target, ...)                                                                   \
    do {                                                                                                               \
        T x_[n], want_[n] = { __VA_ARGS__ };                                                                           \
        char error_[DATA_ERROR_BYTES];                                                                                 \
        ck_assert((set)->get((set), (i), (void *[]){ x_, (target) }, error_));                                         \
        for (int k_ = 0; k_ < (n); k_++) ck_assert(x_[k_] == want_[k_]);                                               \
    } while (0)

static data_set *read_csv(td_context *td, const char *path, data_csv_options options)
{
    data_set *set = data_csv(td, path, &options);
    ck_assert_no_error(td);
    ck_assert_ptr_nonnull(set);
    return set;
}

START_TEST(test_csv_gives_features_and_labels)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    const char *path = file_write_text(&files, "a.csv", "height, width ,kind\r\n1.5,-2e1,0\r\n\r\n .25 ,+4,2\r\n7,8,1");
    data_set *set = data_csv(td, path, NULL);
    ck_assert_no_error(td);
    ck_assert_str_eq(set->name, path);
    ck_assert_int_eq(set->count, 3);
    ck_assert(td_shape_equal(set->column[0].shape, TD_SHAPE(2)));
    ck_assert_str_eq(set->column[1].name, "label");
    ck_assert_int_eq(set->column[1].classes, 3);
    int32_t label;
    ck_assert_csv_row(set, 0, float, 2, &label, 1.5f, -20);
    ck_assert_int_eq(label, 0);
    ck_assert_csv_row(set, 1, float, 2, &label, .25f, 4);
    ck_assert_int_eq(label, 2);
    ck_assert_csv_row(set, 2, float, 2, &label, 7, 8);
    ck_assert_int_eq(label, 1);
    data_set_close(set);
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_csv_options_choose_target_scale_and_dtype)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    const char *path = file_write_text(&files, "a.tsv", "0\t1\t2\n10\t.1\t20\n");
    data_set *set = read_csv(td, path,
                             (data_csv_options){ .header = DATA_HEADER_YES,
                                                 .separator = '\t',
                                                 .scale = .5,
                                                 .target = DATA_VALUE,
                                                 .target_column = 2,
                                                 .dtype = TD_F64 });
    ck_assert_int_eq(set->count, 1);
    ck_assert_str_eq(set->column[1].name, "y");
    ck_assert_int_eq(set->column[1].dtype, TD_F64);
    ck_assert(td_shape_equal(set->column[1].shape, TD_SHAPE(1)));
    double y;
    ck_assert_csv_row(set, 0, double, 2, &y, 5, 10);
    ck_assert(y == .1);
    data_set_close(set);

    set = read_csv(td, path, (data_csv_options){ .separator = '\t', .target = DATA_VALUE });
    ck_assert_int_eq(set->count, 2);
    float narrow;
    ck_assert_csv_row(set, 1, float, 2, &narrow, 10, .1f);
    ck_assert(narrow == 20);
    data_set_close(set);
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_csv_of_many_lines_is_read_from_gzip)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    enum { LINES = 20000 };
    char *text = check_alloc((size_t)LINES * 32);
    int used = 0;
    for (int i = 0; i < LINES; i++) used += sprintf(text + used, "%d.5,%d,%d\n", i, -i, i % 7);
    data_set *set = data_csv(td, file_write_gzip(&files, "a.csv.gz", text, (size_t)used), NULL);
    ck_assert_no_error(td);
    ck_assert_int_eq(set->count, LINES);
    for (int i = 0; i < LINES; i++) {
        int32_t label;
        ck_assert_csv_row(set, i, float, 2, &label, (float)i + .5f, (float)-i);
        ck_assert_int_eq(label, i % 7);
    }
    data_set_close(set);
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_csv_numbers_have_a_point_whatever_the_locale)
{
    const char *before = setlocale(LC_NUMERIC, NULL);
    ck_assert_str_eq(before, "C");
    if (!setlocale(LC_NUMERIC, "de_DE.UTF-8") && !setlocale(LC_NUMERIC, "fr_FR.UTF-8")) SKIP("no locale with a comma");
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    data_set *set = data_csv(td, file_write_text(&files, "a.csv", "1.5,1\n"), NULL);
    ck_assert_no_error(td);
    int32_t label;
    ck_assert_csv_row(set, 0, float, 1, &label, 1.5f);
    ck_assert_str_eq(localeconv()->decimal_point, ",");
    setlocale(LC_NUMERIC, "C");
    data_set_close(set);
    files_close(&files);
    td_close(td);
}
END_TEST

/* ---- Sets in memory ---- */

START_TEST(test_arrays_and_ranges_of_them)
{
    td_context *td = open_cpu(TD_F32);
    static const uint8_t pixels[3][2] = { { 0, 255 }, { 1, 2 }, { 3, 51 } };
    static const double y[3] = { 1, 2, 3 };
    data_set *set = data_memory(td,
                                (data_array[]){ { "image", TD_U8, TD_SHAPE(3, 2, 1), pixels, 1 / 255.0 },
                                                { "bytes", TD_U8, TD_SHAPE(3, 2), pixels, 0 },
                                                { "y", TD_F64, TD_SHAPE(3), y, 0 } },
                                3);
    ck_assert_no_error(td);
    data_set *part = data_subset(td, set, 1, 2), *rest = data_subset(td, part, 1, 1);
    ck_assert_no_error(td);
    ck_assert_int_eq(part->count, 2);
    float image[2];
    uint8_t bytes[2];
    double target;
    char error[DATA_ERROR_BYTES];
    ck_assert(rest->get(rest, 0, (void *[]){ image, bytes, &target }, error));
    ck_assert(image[0] == 3 / 255.0f && image[1] == 0.2f && target == 3);
    ck_assert_int_eq(bytes[0], 3);
    ck_assert_int_eq(bytes[1], 51);
    data_set_close(rest);
    data_set_close(part);
    data_set_close(set);
    td_close(td);
}
END_TEST

START_TEST(test_random_samples_depend_on_the_seed_alone)
{
    td_context *td = open_cpu(TD_F32);
    data_column columns[] = { { "image", TD_F32, TD_SHAPE(50, 40, 3), 0 }, { "label", TD_I32, { 0 }, 10 } };
    data_set *a = data_random(td, columns, 2, 1000, 5), *b = data_random(td, columns, 2, 1000, 5);
    data_set *c = data_random(td, columns, 2, 1000, 6);
    ck_assert_no_error(td);
    enum { N = 50 * 40 * 3 };
    float *x = check_alloc(N * sizeof *x), *same = check_alloc(N * sizeof *x), *other = check_alloc(N * sizeof *x);
    char error[DATA_ERROR_BYTES];
    int32_t seen = 0;
    double sum = 0;
    for (int i = 0; i < 200; i++) {
        int32_t label, same_label, other_label;
        ck_assert(a->get(a, i, (void *[]){ x, &label }, error) && b->get(b, i, (void *[]){ same, &same_label }, error));
        ck_assert(c->get(c, i, (void *[]){ other, &other_label }, error));
        ck_assert_mem_eq(x, same, N * sizeof *x);
        ck_assert_mem_ne(x, other, N * sizeof *x);
        ck_assert_int_eq(label, same_label);
        ck_assert(label >= 0 && label < 10);
        seen |= 1 << label;
        float least = 1, most = 0;
        for (int k = 0; k < N; k++) {
            least = fminf(least, x[k]);
            most = fmaxf(most, x[k]);
            sum += x[k];
        }
        ck_assert(least >= 0 && most < 1);
    }
    ck_assert_int_eq(seen, 1023);
    ck_assert_double_eq_tol(sum / (200.0 * N), .5, 2e-3); /* 1.2e6 draws of deviation .29: 7 deviations of the mean */
    data_set_close(a);
    data_set_close(b);
    data_set_close(c);
    td_close(td);
}
END_TEST

TESTS("data", test_idx_files_are_read_plain_and_gzipped, test_fashion_mnist_is_what_it_is,
      test_csv_gives_features_and_labels, test_csv_options_choose_target_scale_and_dtype,
      test_csv_of_many_lines_is_read_from_gzip, test_csv_numbers_have_a_point_whatever_the_locale,
      test_arrays_and_ranges_of_them, test_random_samples_depend_on_the_seed_alone)
