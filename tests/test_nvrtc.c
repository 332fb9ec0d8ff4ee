/* Kernels that are made at run time, without a GPU: what is generated for every function, dtype and way to broadcast compiles for sm_90;
 * index arithmetic is exact; the files that keep what was compiled survive damage and each other.
 *
 * Labels: cuda
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/device_cache.h"
#include "core/device_nvrtc.h"
#include "core/ops/device_fused.h"
#include "core/ops/divisor.h"
#include "tests/check.h"

enum { HOPPER = 90 };

/* False, and the test counts as skipped. */
static bool has_nvrtc(td_context *td, const char *test)
{
    size_t bytes;
    void *code = td_nvrtc_compile(td, "extern \"C\" __global__ void nothing() {}", HOPPER, &bytes);
    if (code) td_free(td, code, bytes, "host");
    if (code) return true;
    ck_assert_str_has(td_error_text(td), "libnvrtc");
    check_skip(test, "libnvrtc cannot be loaded");
    td_close(td);
    return false;
}

static void close_all(td_context *td)
{
    td_nvrtc_close(td);
    td_close(td);
}

/* ---- Chains ----------------------------------------------------------------------------------------------- */

static const td_op *const every_function[] = {
#define OPERATION(name, ...) &td_op_##name,
    TD_POINTWISE(OPERATION)
};
enum { FUNCTIONS = sizeof every_function / sizeof *every_function };

/* A kernel's operands by their shapes; the attribute is what a chain's builder has. */
typedef struct operands {
    td_arg in[TD_FUSED_INPUTS], out[TD_FUSED_OUTPUTS];
    _Alignas(8) char attr[TD_FUSED_BYTES + 8];
    td_kernel kernel;
} operands;

static td_arg arg_of(td_dtype dtype, td_shape shape) { return (td_arg){ .dtype = dtype, .shape = shape, .global = shape }; }

static td_chain chain_of(operands *o, const td_fused_builder *b)
{
    size_t bytes = td_fused_finish(b, o->attr);
    ck_assert_uint_gt(bytes, 0);
    o->kernel = (td_kernel){ .op = &td_op_fused, .attr = o->attr, .attr_bytes = bytes, .inputs = b->inputs, .outputs = b->outputs,
                             .in = o->in, .out = o->out };
    return td_chain_of(&o->kernel);
}

static void expect_compiles(td_context *td, const td_chain *c, int width)
{
    size_t bytes;
    td_text source = td_chain_source(td, c, width);
    ck_assert_no_error(td);
    char *code = td_nvrtc_compile(td, source.text, HOPPER, &bytes);
    ck_assert_msg(code != NULL, "%s\n%s", td_error_text(td), strstr(source.text, "typedef float T") ? strstr(source.text, "typedef float T") : source.text);
    ck_assert_uint_gt(bytes, 64);
    ck_assert_mem_eq(code, "\177ELF", 4);
    td_free(td, code, bytes, "host");
    td_free(td, source.text, source.room, "host");
}

/* y = f(y, b, c) for every function f in turn, in `dtype`; then y in each dtype of `to`. */
static td_chain every_function_in(operands *o, td_dtype dtype, const td_dtype *to, int count)
{
    td_fused_builder b = { 0 };
    int x[3];
    for (int i = 0; i < 3; i++) {
        x[i] = td_fused_input(&b);
        o->in[i] = arg_of(dtype, i < 2 ? TD_SHAPE(6, 32) : TD_SHAPE(32));
    }
    int y = x[0];
    for (int f = 0; f < FUNCTIONS; f++) y = td_fused_apply(&b, every_function[f], dtype, (int[]){ y, x[1], x[2] });
    for (int i = 0; i < count; i++) {
        ck_assert(td_fused_output(&b, td_fused_apply(&b, &td_op_cast, to[i], &y)));
        o->out[i] = arg_of(to[i], TD_SHAPE(6, 32));
    }
    return chain_of(o, &b);
}

START_TEST(test_every_function_compiles_in_every_dtype)
{
    static const td_dtype all[] = { TD_F32, TD_BF16, TD_F16, TD_U8, TD_I32, TD_I64, TD_F64 }; /* the last three compute in f64 */
    td_context *td = open_cpu(TD_F32);
    if (!has_nvrtc(td, __func__)) return;
    for (int from = 0; from < 7; from++) {
        operands o;
        td_chain c = every_function_in(&o, all[from], all, from < 4 ? 4 : 7);
        ck_assert_int_eq(c.wide, from >= 4);
        expect_compiles(td, &c, td_chain_width(&c));
    }
    close_all(td);
}
END_TEST

/* x + w for each of the inputs after the first, whose shape is the output's. */
static td_chain sum_of(operands *o, td_dtype dtype, int count, const td_shape *shapes)
{
    td_fused_builder b = { 0 };
    int y = td_fused_input(&b);
    o->in[0] = arg_of(dtype, shapes[0]);
    for (int i = 1; i < count; i++) {
        int w = td_fused_input(&b);
        o->in[i] = arg_of(dtype, shapes[i]);
        y = td_fused_apply(&b, &td_op_add, dtype, (int[]){ y, w });
    }
    ck_assert(td_fused_output(&b, y));
    o->out[0] = arg_of(dtype, shapes[0]);
    return chain_of(o, &b);
}

START_TEST(test_dimensions_that_inputs_share_are_one)
{
    operands o;
    td_chain c = sum_of(&o, TD_F32, 2, (td_shape[]){ TD_SHAPE(2, 3, 5), TD_SHAPE(2, 3, 5) });
    ck_assert_int_eq(c.rank, 1);
    ck_assert_int_eq(c.size[0], 30);
    ck_assert(c.dense[0] && c.dense[1]);

    c = sum_of(&o, TD_F32, 3, (td_shape[]){ TD_SHAPE(2, 3, 5), TD_SHAPE(5), TD_SHAPE(2, 3, 1) }); /* a row, a column */
    ck_assert_int_eq(c.rank, 2);
    ck_assert_int_eq(c.size[0], 5);
    ck_assert_int_eq(c.size[1], 6);
    ck_assert_int_eq(c.steps[1], 1);
    ck_assert_int_eq(c.stride[1][0], 1);
    ck_assert_int_eq(c.stride[1][1], 0);
    ck_assert_int_eq(c.steps[2], 2);
    ck_assert_int_eq(c.stride[2][1], 1);

    c = sum_of(&o, TD_F32, 3, (td_shape[]){ TD_SHAPE(2, 3, 1, 5), TD_SHAPE(2, 1, 1, 5), TD_SHAPE(1, 1) }); /* around a dimension; one element */
    ck_assert_int_eq(c.rank, 3);
    ck_assert_int_eq(c.size[0], 5);
    ck_assert_int_eq(c.size[1], 3);
    ck_assert_int_eq(c.size[2], 2);
    ck_assert_int_eq(c.steps[1], 5);
    ck_assert_int_eq(c.stride[1][2], 5);
    ck_assert_int_eq(c.stride[0][2], 15);
    ck_assert_int_eq(c.steps[2], 0);

    c = sum_of(&o, TD_F32, 2, (td_shape[]){ TD_SHAPE(1, 1), { .rank = 0 } }); /* one element in all */
    ck_assert_int_eq(c.rank, 1);
    ck_assert_int_eq(c.size[0], 1);
    ck_assert(c.dense[0] && c.dense[1]);
}
END_TEST

/* x times a mask, of an operand whose last dimension is cut among three ranks, or not. */
static td_chain drop_of(operands *o, td_dtype dtype, bool cut)
{
    td_fused_builder b = { 0 };
    int x = td_fused_input(&b), mask = td_fused_mask(&b, dtype, (td_fused_draw){ .p = 0.2, .key = 5 });
    ck_assert(td_fused_output(&b, td_fused_apply(&b, &td_op_mul, dtype, (int[]){ x, mask })));
    o->in[0] = o->out[0] = arg_of(dtype, TD_SHAPE(6, 32));
    if (cut) o->out[0].global = TD_SHAPE(6, 96);
    return chain_of(o, &b);
}

START_TEST(test_draws_compile)
{
    static const td_dtype dtypes[] = { TD_F32, TD_BF16, TD_F16, TD_F64 };
    td_context *td = open_cpu(TD_F32);
    if (!has_nvrtc(td, __func__)) return;
    for (int i = 0; i < 4; i++)
        for (int cut = 0; cut < 2; cut++) {
            operands o;
            td_chain c = drop_of(&o, dtypes[i], cut);
            ck_assert_int_eq(td_chain_width(&c), 8); /* what a block of random numbers is for */
            ck_assert_int_eq(c.rank, 1 + cut);
            for (int width = 8; width > 0; width /= 2) expect_compiles(td, &c, width);
        }
    close_all(td);
}
END_TEST

START_TEST(test_numbers_of_draws)
{
    operands o;
    td_chain_numbers numbers;
    uint64_t words[TD_CHAIN_DRAWS];
    td_chain c = drop_of(&o, TD_F32, true);
    ck_assert_int_eq(td_chain_draws_of(&c, words), 6);
    ck_assert_uint_eq(words[0], 6 * 96);             /* elements of the global value */
    ck_assert_uint_eq(words[1], 0);                  /* this rank's first */
    ck_assert_uint_eq(words[2], 5);                  /* the key */
    ck_assert_uint_eq(words[4], 13107);              /* 0.2 of 2^16 */
    ck_assert_mem_eq(&words[5], &(double){ 1.25 }, sizeof(double));
    ck_assert(td_chain_numbers_of(&c, 8, &numbers));
    ck_assert_int_eq(numbers.count, 5);
    ck_assert_uint_eq(numbers.at[4], 96);            /* between rows */
    c.draw_stride[1] = (int64_t)1 << 32;
    ck_assert(!td_chain_numbers_of(&c, 8, &numbers));
}
END_TEST

/* The sum of x x w over the trailing dimensions, the largest, and x x beside them if it is `kept`. */
static td_chain rows_of(operands *o, td_dtype dtype, td_shape shape, int dims, bool kept)
{
    td_fused_builder b = { 0 };
    int x = td_fused_input(&b), w = td_fused_input(&b), square = td_fused_apply(&b, &td_op_square, dtype, &x);
    int y = td_fused_apply(&b, &td_op_mul, dtype, (int[]){ square, w });
    td_shape rows = shape;
    for (int d = 0; d < dims; d++) rows.dim[--rows.rank] = 0;
    b.rows.shape = shape;
    b.rows.dims = dims;
    o->in[0] = o->out[0] = arg_of(dtype, shape);
    o->in[1] = arg_of(dtype, TD_SHAPE(shape.dim[shape.rank - 1]));
    if (kept) ck_assert(td_fused_output(&b, square));
    ck_assert(td_fused_reduce(&b, TD_FUSED_SUM, y) && td_fused_reduce(&b, TD_FUSED_MAX, y));
    o->out[kept] = arg_of(td_is_narrow(dtype) ? TD_F32 : dtype, rows);
    o->out[kept + 1] = arg_of(dtype, rows);
    return chain_of(o, &b);
}

START_TEST(test_rows_compile)
{
    static const td_dtype dtypes[] = { TD_F32, TD_BF16, TD_F16, TD_F64 };
    const td_shape shapes[] = { TD_SHAPE(300, 16), TD_SHAPE(50, 40), TD_SHAPE(9, 17), TD_SHAPE(3000, 768), TD_SHAPE(3, 50000) };
    td_context *td = open_cpu(TD_F32);
    if (!has_nvrtc(td, __func__)) return;
    for (int i = 0; i < 4; i++)
        for (int s = 0; s < 5; s++) {
            operands o;
            td_chain c = rows_of(&o, dtypes[i], shapes[s], 1 + (s == 2), s % 2);
            for (int width = td_chain_width(&c); width > 0; width /= 2) expect_compiles(td, &c, width);
        }
    close_all(td);
}
END_TEST

static int width_of_rows(operands *o, td_dtype dtype, td_shape shape)
{
    td_chain c = rows_of(o, dtype, shape, 1, false);
    return td_chain_width(&c);
}

START_TEST(test_numbers_of_rows)
{
    operands o;
    td_chain_numbers numbers;
    td_chain c = rows_of(&o, TD_BF16, TD_SHAPE(3, 12496), 1, false);
    ck_assert_int_eq(c.row, 12496);
    ck_assert_int_eq(td_chain_width(&c), 8);
    ck_assert(td_chain_numbers_of(&c, 8, &numbers));
    ck_assert_int_eq(numbers.count, 7);
    ck_assert_uint_eq(numbers.at[0], 9);             /* three parts of each row */
    ck_assert_uint_eq(numbers.at[4], 1562);          /* groups of a row */
    ck_assert_uint_eq(numbers.at[5], 640);           /* of a part: 5120 elements */
    ck_assert_uint_eq(numbers.at[6], 3);
    ck_assert_int_eq(width_of_rows(&o, TD_BF16, TD_SHAPE(8, 20)), 4); /* a row's elements are whole groups */
}
END_TEST

static int width_of(td_dtype dtype, int64_t rows, int64_t columns, int inputs)
{
    operands o;
    td_shape shapes[TD_FUSED_INPUTS] = { TD_SHAPE(rows, columns), TD_SHAPE(columns) };
    for (int i = 2; i < inputs; i++) shapes[i] = shapes[0];
    td_chain c = sum_of(&o, dtype, inputs, shapes);
    return td_chain_width(&c);
}

START_TEST(test_accesses_are_as_wide_as_rows_and_registers_allow)
{
    ck_assert_int_eq(width_of(TD_F32, 3, 64, 2), 4); /* 16 bytes */
    ck_assert_int_eq(width_of(TD_BF16, 3, 64, 2), 8);
    ck_assert_int_eq(width_of(TD_U8, 3, 64, 2), 8);
    ck_assert_int_eq(width_of(TD_I64, 3, 64, 2), 2);
    ck_assert_int_eq(width_of(TD_BF16, 8, 65, 2), 1);
    ck_assert_int_eq(width_of(TD_BF16, 8, 70, 2), 2);
    ck_assert_int_eq(width_of(TD_BF16, 3, 64, 16), 4); /* 17 registers */
}
END_TEST

START_TEST(test_every_way_to_broadcast_compiles)
{
    static const td_dtype dtypes[] = { TD_F32, TD_BF16, TD_I32 };
    td_context *td = open_cpu(TD_F32);
    if (!has_nvrtc(td, __func__)) return;
    td_shape shapes[] = { TD_SHAPE(4, 6, 8), TD_SHAPE(8), TD_SHAPE(6, 1), TD_SHAPE(1, 1, 1), TD_SHAPE(4, 1, 8), TD_SHAPE(4, 1, 1), TD_SHAPE(6, 8), TD_SHAPE(4, 6, 1) };
    for (int i = 0; i < 3; i++) {
        operands o;
        td_chain c = sum_of(&o, dtypes[i], 8, shapes);
        ck_assert_int_eq(c.rank, 3);
        for (int width = td_chain_width(&c); width > 0; width /= 2) expect_compiles(td, &c, width);
    }
    close_all(td);
}
END_TEST

START_TEST(test_numbers_of_a_launch)
{
    operands o;
    td_chain_numbers numbers;
    td_chain c = sum_of(&o, TD_F32, 4, (td_shape[]){ TD_SHAPE(4, 6, 8), TD_SHAPE(4, 1, 8), TD_SHAPE(4, 6, 1), TD_SHAPE(8) });
    ck_assert(td_chain_numbers_of(&c, 4, &numbers));
    ck_assert_int_eq(numbers.count, 9);
    ck_assert_uint_eq(numbers.at[0], 48);            /* groups of four */
    ck_assert_uint_eq(numbers.at[3], 2);             /* of a row */
    ck_assert_uint_eq(numbers.at[6], 6);             /* rows */
    ck_assert_uint_eq(numbers.at[7], 2);             /* (4, 1, 8): groups between its rows */
    ck_assert_uint_eq(numbers.at[8], 6);             /* (4, 6, 1): elements */
    c.elements = ((int64_t)1 << 31) * 4;
    ck_assert(!td_chain_numbers_of(&c, 4, &numbers));
}
END_TEST

START_TEST(test_division_by_what_is_known)
{
    static const uint32_t sizes[] = { 1, 2, 3, 5, 7, 10, 64, 65, 127, 128, 641, 1000, 50257, 65535, 65536, 65537, 1000003, 0x40000001, 0x7FFFFFFE, 0x7FFFFFFF };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint32_t size = sizes[i], whole = 0x7FFFFFFF / size * size;
        td_divisor by = td_divisor_of(size);
        uint32_t n[] = { 0, 1, size - 1, size, size + 1, whole - 1, whole, 0x7FFFFFFE, 0x7FFFFFFF, 0x12345678, 0x55555555 };
        for (size_t j = 0; j < sizeof n / sizeof *n; j++) {
            if (n[j] > 0x7FFFFFFF) continue;
            uint32_t quotient = ((uint32_t)(((uint64_t)n[j] * by.multiplier) >> 32) + n[j]) >> by.shift; /* td_quotient */
            ck_assert_msg(quotient == n[j] / size, "%u / %u is %u, not %u", n[j], size, n[j] / size, quotient);
        }
    }
}
END_TEST

/* ---- Errors ----------------------------------------------------------------------------------------------- */

START_TEST(test_what_does_not_compile_is_said)
{
    size_t bytes;
    td_context *td = open_cpu(TD_F32);
    if (!has_nvrtc(td, __func__)) return;
    ck_assert_ptr_null(td_nvrtc_compile(td, "extern \"C\" __global__ void wrong() { missing(); }", HOPPER, &bytes));
    ck_assert_str_has(td_error_text(td), "cannot compile a kernel for sm_90");
    ck_assert_str_has(td_error_text(td), "\"missing\" is undefined");
    ck_assert_str_has(td_error_text(td), "TD_PASSES=-fuse");
    td_clear_error(td);
    ck_assert_ptr_null(td_nvrtc_compile(td, "extern \"C\" __global__ void fine() {}", 10, &bytes));
    ck_assert_str_has(td_error_text(td), "cannot compile a kernel for sm_10");
    close_all(td);
}
END_TEST

/* ---- What is kept on disk --------------------------------------------------------------------------------- */

#define FOLDER "nvrtc_cache/of the test"

static td_cache_key key_of(const char *text) { return (td_cache_key){ .kind = "kernel", .data = text, .bytes = strlen(text) }; }

static void empty_folder(void)
{
    ck_assert_int_eq(system("rm -rf nvrtc_cache"), 0);
    ck_assert_int_eq(setenv("TANDEM_CACHE", FOLDER, 1), 0);
}

/* Whether `content` is what is kept under the key; "" where nothing is. */
static void expect_kept(td_context *td, const char *key, const char *content)
{
    td_cache_key k = key_of(key);
    size_t bytes;
    char *got = td_cache_get(td, &k, &bytes);
    ck_assert_no_error(td);
    if (!*content) {
        ck_assert_ptr_null(got);
        return;
    }
    ck_assert_ptr_nonnull(got);
    ck_assert_uint_eq(bytes, strlen(content));
    ck_assert_mem_eq(got, content, bytes);
    td_free(td, got, bytes, "host");
}

static void put(const char *key, const char *content)
{
    td_cache_key k = key_of(key);
    ck_assert_msg(td_cache_put(&k, content, strlen(content)), "%s", strerror(errno));
}

/* The one file there is. */
static const char *only_file(void)
{
    static char path[256];
    FILE *list = popen("ls -A '" FOLDER "'", "r");
    char name[128], more[128];
    ck_assert_ptr_nonnull(list);
    ck_assert_ptr_nonnull(fgets(name, sizeof name, list));
    ck_assert_ptr_null(fgets(more, sizeof more, list)); /* nothing is left beside it */
    pclose(list);
    snprintf(path, sizeof path, FOLDER "/%.*s", (int)strcspn(name, "\n"), name);
    return path;
}

static void read_file(const char *path, char *to, size_t room)
{
    FILE *from = fopen(path, "r");
    ck_assert_ptr_nonnull(from);
    ck_assert_uint_gt(fread(to, 1, room, from), 0);
    fclose(from);
}

START_TEST(test_what_is_put_is_kept)
{
    td_context *td = open_cpu(TD_F32);
    empty_folder();
    expect_kept(td, "one", "");
    put("one", "first");
    put("two", "second");
    expect_kept(td, "one", "first");
    expect_kept(td, "two", "second");
    put("one", "another");
    expect_kept(td, "one", "another");
    ck_assert_int_eq(setenv("TANDEM_CACHE", "off", 1), 0);
    expect_kept(td, "one", "");
    td_cache_key k = key_of("three");
    ck_assert(!td_cache_put(&k, "third", 5));
    ck_assert_int_eq(errno, 0);
    td_close(td);
}
END_TEST

START_TEST(test_where_it_is_kept)
{
    td_context *td = open_cpu(TD_F32);
    empty_folder();
    unsetenv("TANDEM_CACHE");
    char *home = realpath(".", NULL), folder[4200];
    ck_assert_ptr_nonnull(home);
    snprintf(folder, sizeof folder, "%s/nvrtc_cache/xdg", home);
    setenv("XDG_CACHE_HOME", folder, 1);
    put("key", "there");
    ck_assert_int_eq(system("ls nvrtc_cache/xdg/tandem/kernel-* >/dev/null"), 0);
    unsetenv("XDG_CACHE_HOME");
    snprintf(folder, sizeof folder, "%s/nvrtc_cache", home);
    setenv("HOME", folder, 1);
    expect_kept(td, "key", "");
    put("key", "here");
    ck_assert_int_eq(system("ls nvrtc_cache/.cache/tandem/kernel-* >/dev/null"), 0);
    setenv("TANDEM_CACHE", "/dev/null/none", 1);
    td_cache_key k = key_of("key");
    ck_assert(!td_cache_put(&k, "third", 5));
    ck_assert_int_eq(errno, ENOTDIR);
    free(home);
    td_close(td);
}
END_TEST

START_TEST(test_a_damaged_file_is_as_if_not_there)
{
    td_context *td = open_cpu(TD_F32);
    empty_folder();
    put("the key", "the content");
    const char *path = only_file();
    struct stat whole;
    ck_assert_int_eq(stat(path, &whole), 0);
    ck_assert_int_eq(whole.st_size, 32 + 7 + 11);
    for (off_t at = 0; at < whole.st_size; at++) { /* one bit wrong */
        unsigned char byte;
        int fd = open(path, O_RDWR);
        ck_assert_int_eq(pread(fd, &byte, 1, at), 1);
        byte ^= 0x10;
        ck_assert_int_eq(pwrite(fd, &byte, 1, at), 1);
        close(fd);
        expect_kept(td, "the key", "");
        put("the key", "the content");
        expect_kept(td, "the key", "the content");
    }
    for (off_t length = 0; length < whole.st_size; length++) { /* cut */
        ck_assert_int_eq(truncate(path, length), 0);
        expect_kept(td, "the key", "");
        put("the key", "the content");
    }
    ck_assert_int_eq(truncate(path, whole.st_size + 1), 0);
    expect_kept(td, "the key", "");
    put("the key", "the content");
    ck_assert_str_eq(only_file(), path);
    td_close(td);
}
END_TEST

/* Writes contents of one key, of which each is one letter again and again, and reads whole ones. */
static int write_and_read(char letter)
{
    static char content[5000];
    td_context *td = td_open(NULL);
    td_cache_key k = key_of("shared");
    for (int round = 0; round < 100; round++) {
        size_t bytes = (size_t)(1 + (round * 37 + letter * 101) % 5000);
        memset(content, letter, bytes);
        if (!td_cache_put(&k, content, bytes)) return 1;
        char *got = td_cache_get(td, &k, &bytes);
        if (!got || bytes < 1) return 2;
        for (size_t i = 0; i < bytes; i++)
            if (got[i] != got[0]) return 3;
        td_free(td, got, bytes, "host");
    }
    td_close(td);
    return 0;
}

START_TEST(test_processes_share_a_folder)
{
    enum { PROCESSES = 4 };
    empty_folder();
    pid_t child[PROCESSES];
    for (int i = 0; i < PROCESSES; i++) {
        child[i] = fork();
        ck_assert_int_ge(child[i], 0);
        if (!child[i]) _exit(write_and_read((char)('a' + i)));
    }
    for (int i = 0; i < PROCESSES; i++) {
        int status;
        ck_assert_int_eq(waitpid(child[i], &status, 0), child[i]);
        ck_assert_int_eq(status, 0);
    }
    only_file();
}
END_TEST

/* On a GPU. */
START_TEST(test_what_is_kept_and_is_no_kernel_is_made_again)
{
    static const char source[] = "extern \"C\" __global__ void one(int *x) { *x = 1; }";
    td_context *td = td_open(&(td_options){ .device = "cuda", .log = check_log_line });
    if (td_error(td) != TD_OK) {
        td_close(td);
        SKIP("no CUDA device");
    }
    empty_folder();
    ck_assert_msg(td_nvrtc_kernel(td, source, "one") != NULL, "%s", td_error_text(td));
    td_nvrtc_close(td);

    static char file[4096]; /* a header of 32 bytes, of which 8 to 16 say how long the key is, and the key */
    uint64_t bytes;
    read_file(only_file(), file, sizeof file);
    memcpy(&bytes, file + 8, sizeof bytes);
    ck_assert_uint_lt(bytes, sizeof file - 32);
    td_cache_key key = { .kind = "kernel", .data = file + 32, .bytes = (size_t)bytes };
    size_t length;
    ck_assert(td_cache_put(&key, "no kernel", 9));
    ck_assert_msg(td_nvrtc_kernel(td, source, "one") != NULL, "%s", td_error_text(td));
    char *code = td_cache_get(td, &key, &length);
    ck_assert_ptr_nonnull(code);
    ck_assert_mem_eq(code, "\177ELF", 4);
    td_free(td, code, length, "host");
    td_close(td);
}
END_TEST

TESTS("kernels made at run time", test_every_function_compiles_in_every_dtype, test_dimensions_that_inputs_share_are_one,
      test_accesses_are_as_wide_as_rows_and_registers_allow, test_every_way_to_broadcast_compiles, test_draws_compile, test_numbers_of_draws,
      test_rows_compile, test_numbers_of_rows, test_numbers_of_a_launch,
      test_division_by_what_is_known, test_what_does_not_compile_is_said, test_what_is_put_is_kept, test_where_it_is_kept,
      test_a_damaged_file_is_as_if_not_there, test_processes_share_a_folder, test_what_is_kept_and_is_no_kernel_is_made_again)
