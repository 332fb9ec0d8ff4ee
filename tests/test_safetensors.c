/* safetensors: what is written reads back, files of other writers read, hostile ones are refused, and a write that
 * fails leaves the file that was there. */
#include "tests/check.h"
#include "tests/memory.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static const char path[] = "test_safetensors.safetensors";

/* A file as the format's page says, written independently of the library. */
static void write_raw(uint64_t length, const char *header, const void *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    fwrite(&length, 8, 1, file);
    fwrite(header, strlen(header), 1, file);
    fwrite(data, 1, bytes, file);
    ck_assert_int_eq(fclose(file), 0);
}

static td_safetensors *open_raw(td_context *td, const char *header, const void *data, size_t bytes)
{
    write_raw(strlen(header), header, data, bytes);
    return td_safetensors_open(td, path);
}

START_TEST(test_what_is_written_reads_back)
{
    td_context *td = open_cpu(TD_F32);
    float weight[6] = { 1, 2, 3, 4, 5, 6 };
    double scalar_value = 0.1;
    int32_t ids[3] = { -1, 0, 1 };
    uint8_t bytes[5] = "abcd";
    const td_safetensors_entry entries[] = {
        { "h.0.weight", TD_F32, TD_SHAPE(2, 3), weight, 24 },
        { "updates", TD_F64, { 0 }, &scalar_value, 8 },
        { "none", TD_BF16, TD_SHAPE(4, 0), NULL, 0 },
        { "bytes", TD_U8, TD_SHAPE(5), bytes, 5 },
        { "a \"name\"\n\xc3\xa9", TD_I32, TD_SHAPE(3, 1), ids, 12 },
    };
    ck_assert(td_safetensors_write(td, path, entries, 5, (const char *[]){ "format", "tandem", "step", "7", NULL }));
    td_safetensors *file = td_safetensors_open(td, path);
    ck_assert_no_error(td);
    ck_assert_int_eq(td_safetensors_count(file), 5);
    for (int i = 0; i < 5; i++) {
        td_safetensors_entry at = td_safetensors_at(file, i), found;
        ck_assert_str_eq(at.name, entries[i].name);
        ck_assert(td_safetensors_find(file, entries[i].name, &found));
        ck_assert_ptr_eq(found.data, at.data);
        ck_assert_int_eq(found.dtype, entries[i].dtype);
        ck_assert(td_shape_equal(found.shape, entries[i].shape));
        ck_assert_int_eq(found.bytes, entries[i].bytes);
        if (at.bytes > 0) ck_assert_mem_eq(at.data, entries[i].data, (size_t)at.bytes);
    }
    td_safetensors_entry absent;
    ck_assert(!td_safetensors_find(file, "h.0.weigh", &absent));
    ck_assert(!td_safetensors_find(file, "__metadata__", &absent));
    ck_assert_str_eq(td_safetensors_metadata(file, "step"), "7");
    ck_assert_ptr_null(td_safetensors_metadata(file, "epoch"));
    td_safetensors_close(file);
    td_close(td);
}
END_TEST

/* One buffer for all: what stood in it before is gone. Entry `fails` cannot be had. */
typedef struct one_at_a_time {
    td_context *td;
    float buffer[3];
    int64_t asked, fails;
} one_at_a_time;

static const void *next_tensor(void *user, int64_t index)
{
    one_at_a_time *o = user;
    ck_assert_int_eq(index, o->asked++);
    if (index == o->fails) {
        td_fail(o->td, TD_ERROR_DATA, "tensor %lld is gone", (long long)index);
        return NULL;
    }
    for (int i = 0; i < 3; i++) o->buffer[i] = (float)(10 * index + i);
    return o->buffer;
}

START_TEST(test_tensors_may_be_made_one_at_a_time)
{
    td_context *td = open_cpu(TD_F32);
    const td_safetensors_entry entries[] = {
        { .name = "b", .dtype = TD_F32, .shape = TD_SHAPE(3), .bytes = 12 },
        { .name = "a", .dtype = TD_F32, .shape = TD_SHAPE(1, 2), .bytes = 8 },
    };
    one_at_a_time source = { .td = td, .fails = -1 };
    ck_assert(td_safetensors_write_from(td, path, entries, 2, NULL, next_tensor, &source));
    td_safetensors *file = td_safetensors_open(td, path);
    ck_assert_no_error(td);
    ck_assert_int_eq(td_safetensors_count(file), 2);
    ck_assert_mem_eq(td_safetensors_at(file, 0).data, ((float[]){ 0, 1, 2 }), 12);
    ck_assert_mem_eq(td_safetensors_at(file, 1).data, ((float[]){ 10, 11 }), 8);
    td_safetensors_close(file);
    source = (one_at_a_time){ .td = td, .fails = 1 };
    ck_assert(!td_safetensors_write_from(td, path, entries, 2, NULL, next_tensor, &source));
    ck_assert_str_eq(td_error_text(td), "tensor 1 is gone");
    td_clear_error(td);
    file = td_safetensors_open(td, path);
    ck_assert_msg(file != NULL, "the file that was there is kept");
    td_safetensors_close(file);
    td_close(td);
}
END_TEST

START_TEST(test_elements_convert_from_and_to_any_alignment)
{
    static const uint16_t f16[] = { 0x3C00, 0xC100, 0x0001, 0x7C00 }, bf16[] = { 0x3F80, 0xC020, 0x0001, 0xFF80 };
    unsigned char bytes[1 + 8 * 700], *odd = bytes + 1;
    double wide[700];
    memcpy(odd, f16, sizeof f16);
    td_convert(TD_F64, wide, TD_F16, odd, 4);
    ck_assert(wide[0] == 1 && wide[1] == -2.5 && wide[2] == 0x1p-24 && wide[3] == HUGE_VAL);
    memcpy(odd, bf16, sizeof bf16);
    td_convert(TD_F64, wide, TD_BF16, odd, 4);
    ck_assert(wide[0] == 1 && wide[1] == -2.5 && wide[2] == 0x1p-133 && wide[3] == -HUGE_VAL);
    const float ties[] = { 1 + 0x1p-8f, 1 + 0x3p-8f, 1 + 0x1.8p-8f };
    const uint16_t rounded[] = { 0x3F80, 0x3F82, 0x3F81 };
    td_convert(TD_BF16, odd, TD_F32, ties, 3);
    ck_assert_mem_eq(odd, rounded, sizeof rounded);
    for (int i = 0; i < 700; i++) wide[i] = i / 3.0;
    td_convert(TD_F32, odd, TD_F64, wide, 700);
    for (int i = 0; i < 700; i++) {
        float got;
        memcpy(&got, odd + 4 * i, sizeof got);
        ck_assert(got == (float)(i / 3.0));
    }
    const uint32_t signalling = 0x7F800001;
    td_convert(TD_F32, odd, TD_F32, &signalling, 1);
    ck_assert_mem_eq(odd, &signalling, 4);
}
END_TEST

START_TEST(test_the_bytes_are_those_of_the_format)
{
    static const char header[] = "{\"__metadata__\":{\"k\":\"v\"},"
                                 "\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";
    td_context *td = open_cpu(TD_F32);
    float w[2] = { 1, -2 };
    ck_assert(td_safetensors_write(td, path, &(td_safetensors_entry){ "w", TD_F32, TD_SHAPE(2), w, 8 }, 1,
                                   (const char *[]){ "k", "v", NULL }));
    char bytes[256];
    FILE *file = fopen(path, "rb");
    size_t count = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    size_t length = (sizeof header - 1 + 7) / 8 * 8;
    ck_assert_uint_eq(count, 8 + length + 8);
    ck_assert_mem_eq(bytes, &(uint64_t){ length }, 8);
    ck_assert_mem_eq(bytes + 8, header, sizeof header - 1);
    for (size_t i = 8 + sizeof header - 1; i < 8 + length; i++) ck_assert_int_eq(bytes[i], ' ');
    ck_assert_mem_eq(bytes + 8 + length, "\0\0\x80\x3f\0\0\0\xc0", 8);
    td_close(td);
}
END_TEST

START_TEST(test_a_file_of_another_writer_reads)
{
    /* In any order, with spaces, an odd header length, an unaligned tensor and empty ones between others. */
    static const char header[] = "{ \"b\": {\"data_offsets\":[1,9], \"shape\":[], \"dtype\":\"F64\"},\n"
                                 "\"e\":{\"dtype\":\"F16\",\"shape\":[0,7],\"data_offsets\":[1,1]},"
                                 "\"a\":{\"dtype\":\"U8\",\"shape\":[1,1],\"data_offsets\":[0,1]},"
                                 "\"f\":{\"dtype\":\"I64\",\"shape\":[0],\"data_offsets\":[9,9]}}   ";
    char data[9] = { 42 };
    double pi = 3.141592653589793;
    memcpy(data + 1, &pi, 8);
    td_context *td = open_cpu(TD_F32);
    td_safetensors *file = open_raw(td, header, data, 9);
    ck_assert_no_error(td);
    ck_assert_int_eq(td_safetensors_count(file), 4);
    static const char *const order[] = { "a", "e", "b", "f" };
    for (int i = 0; i < 4; i++) ck_assert_str_eq(td_safetensors_at(file, i).name, order[i]);
    td_safetensors_entry b;
    ck_assert(td_safetensors_find(file, "b", &b));
    ck_assert(b.dtype == TD_F64 && b.shape.rank == 0 && b.bytes == 8);
    ck_assert_mem_eq(b.data, &pi, 8);
    ck_assert_ptr_null(td_safetensors_metadata(file, "format"));
    ck_assert_ptr_null(td_safetensors_at(file, 4).name);
    td_safetensors_close(file);
    td_close(td);
}
END_TEST

START_TEST(test_a_file_without_tensors_reads)
{
    td_context *td = open_cpu(TD_F32);
    ck_assert(td_safetensors_write(td, path, NULL, 0, NULL));
    td_safetensors *file = td_safetensors_open(td, path);
    ck_assert_no_error(td);
    ck_assert_int_eq(td_safetensors_count(file), 0);
    td_safetensors_close(file);
    td_close(td);
}
END_TEST

/* Headers over 8 bytes of data, and what is said of them behind "<path>: ". */
#define ENTRY(name, dtype, shape, offsets) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
static const struct {
    const char *header, *error;
} hostile[] = {
    { "", "not a safetensors file: the header does not begin with {" },
    { "[]", "not a safetensors file: the header does not begin with {" },
    { " {}", "not a safetensors file: the header does not begin with {" },
    { "{\"w\":", "line 1: not JSON: parse error: premature EOF" },
    { "{}x", "line 1: not JSON: parse error: trailing garbage" },
    { "{\"\xff\":1}", "not UTF-8 at byte 2" },
    { "{\"w\":1}", "tensor 'w': its entry is not an object" },
    { "{\"w\":{}}", "tensor 'w': has no dtype" },
    { "{\"w\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", "tensor 'w': has no dtype" },
    { "{\"w\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", "tensor 'w': has no shape" },
    { "{\"w\":{\"dtype\":\"F32\",\"shape\":[2]}}", "tensor 'w': has no pair of data_offsets" },
    { "{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":0}}",
      "tensor 'w': has more than dtype, shape and data_offsets" },
    { "{" ENTRY("w", "Q8", "[2]", "[0,8]") "}",
      "tensor 'w': dtype 'Q8' is not one of F32, F64, BF16, F16, I32, I64, U8" },
    { "{" ENTRY("w", "f32", "[2]", "[0,8]") "}",
      "tensor 'w': dtype 'f32' is not one of F32, F64, BF16, F16, I32, I64, U8" },
    { "{" ENTRY("w", "F32", "[-2]", "[0,8]") "}", "tensor 'w': a size of its shape is not a whole number from 0" },
    { "{" ENTRY("w", "F32", "[2.0]", "[0,8]") "}", "tensor 'w': a size of its shape is not a whole number from 0" },
    { "{" ENTRY("w", "F32", "[18446744073709551618]", "[0,8]") "}",
      "tensor 'w': a size of its shape is not a whole number from 0" },
    { "{" ENTRY("w", "F32", "[\"2\"]", "[0,8]") "}", "tensor 'w': a size of its shape is not a whole number from 0" },
    { "{" ENTRY("w", "F32", "[1,1,1,1,1,1,2]", "[0,8]") "}", "tensor 'w': has more than 6 dimensions" },
    { "{" ENTRY("w", "F32", "[4611686018427387904,2]", "[0,8]") "}", "tensor 'w': its size overflows" },
    { "{" ENTRY("w", "F32", "[4611686018427387904]", "[0,0]") "}", "tensor 'w': its size overflows" },
    { "{" ENTRY("w", "U8", "[4294967296,4294967296,0]", "[0,0]") "}", "tensor 'w': its size overflows" },
    { "{" ENTRY("w", "F32", "[3]", "[0,12]") "}", "tensor 'w': its data_offsets are not within the 8 bytes of data" },
    { "{" ENTRY("w", "F32", "[2]", "[-8,0]") "}", "tensor 'w': its data_offsets are not within the 8 bytes of data" },
    { "{" ENTRY("w", "F32", "[2]", "[8,0]") "}", "tensor 'w': its data_offsets are not within the 8 bytes of data" },
    { "{" ENTRY("w", "F32", "[2]", "[9223372036854775800,9223372036854775808]") "}",
      "tensor 'w': its data_offsets are not within the 8 bytes of data" },
    { "{" ENTRY("w", "F32", "[2]", "[0.0,8]") "}", "tensor 'w': its data_offsets are not within the 8 bytes of data" },
    { "{" ENTRY("w", "F32", "[2]", "[0,4,8]") "}", "tensor 'w': has no pair of data_offsets" },
    { "{" ENTRY("w", "F32", "[1]", "[0,8]") "}", "tensor 'w': 8 bytes of data, its shape and dtype need 4" },
    { "{" ENTRY("w", "F64", "[2]", "[0,8]") "}", "tensor 'w': 8 bytes of data, its shape and dtype need 16" },
    { "{" ENTRY("w", "F32", "[2]", "[0,8]") "," ENTRY("w", "F32", "[2]", "[0,8]") "}",
      "line 1: the name 'w' appears twice in one object" },
    { "{" ENTRY("v", "F32", "[1]", "[0,4]") ",\n" ENTRY("w", "F32", "[2]", "[0,8]") "}",
      "tensor 'w': its data overlap another tensor's" },
    { "{" ENTRY("v", "U8", "[5]", "[0,5]") "," ENTRY("w", "F32", "[1]", "[4,8]") "}",
      "tensor 'w': its data overlap another tensor's" },
    { "{" ENTRY("v", "U8", "[8]", "[0,8]") "," ENTRY("w", "U8", "[0]", "[3,3]") "}",
      "tensor 'w': its data overlap another tensor's" },
    { "{" ENTRY("v", "U8", "[3]", "[0,3]") "," ENTRY("w", "F32", "[1]", "[4,8]") "}",
      "tensor 'w': a gap before its data belongs to no tensor" },
    { "{" ENTRY("w", "F32", "[1]", "[4,8]") "}", "tensor 'w': a gap before its data belongs to no tensor" },
    { "{" ENTRY("w", "F32", "[1]", "[0,4]") "}", "4 bytes after the last tensor belong to none" },
    { "{}", "8 bytes after the last tensor belong to none" },
    { "{\"__metadata__\":7," ENTRY("w", "F32", "[2]", "[0,8]") "}", "__metadata__ is not an object" },
    { "{\"__metadata__\":{\"step\":7}," ENTRY("w", "F32", "[2]", "[0,8]") "}",
      "a value in __metadata__ is not a string" },
};

START_TEST(test_hostile_headers_are_refused_by_file_and_tensor)
{
    for (size_t i = 0; i < sizeof hostile / sizeof hostile[0]; i++) {
        char expected[512];
        td_context *td = open_cpu(TD_F32);
        snprintf(expected, sizeof expected, "%s: %s", path, hostile[i].error);
        ck_assert_ptr_null(open_raw(td, hostile[i].header, "12345678", 8));
        ck_assert_str_eq(td_error_text(td), expected);
        ck_assert_int_eq(td_error(td), TD_ERROR_DATA);
        td_close(td);
    }
}
END_TEST

static void check_length_refused(uint64_t length, const char *error)
{
    char expected[512];
    td_context *td = open_cpu(TD_F32);
    write_raw(length, "{}", "", 0);
    snprintf(expected, sizeof expected, "%s: %s", path, error);
    ck_assert_ptr_null(td_safetensors_open(td, path));
    ck_assert_str_eq(td_error_text(td), expected);
    td_close(td);
}

START_TEST(test_a_hostile_header_length_is_refused)
{
    check_length_refused(UINT64_MAX,
                         "not a safetensors file: a header of 18446744073709551615 bytes, of at most 100000000");
    check_length_refused(100000001, "not a safetensors file: a header of 100000001 bytes, of at most 100000000");
    check_length_refused(100000000, "cut short: a header of 100000000 bytes in a file of 10");
    check_length_refused(3, "cut short: a header of 3 bytes in a file of 10");
    check_length_refused(0, "not a safetensors file: the header does not begin with {");
}
END_TEST

/* Every proper beginning of a good file is refused: a copy that was cut short never passes for the whole. */
START_TEST(test_a_file_cut_anywhere_is_refused)
{
    td_context *td = open_cpu(TD_F32);
    float w[2] = { 1, -2 };
    ck_assert(td_safetensors_write(td, path, &(td_safetensors_entry){ "w", TD_F32, TD_SHAPE(2), w, 8 }, 1, NULL));
    struct stat status;
    ck_assert_int_eq(stat(path, &status), 0);
    for (off_t bytes = status.st_size - 1; bytes >= 0; bytes--) {
        ck_assert_int_eq(truncate(path, bytes), 0);
        ck_assert_ptr_null(td_safetensors_open(td, path));
        ck_assert_str_has(td_error_text(td), path);
        if (bytes < 8) ck_assert_str_has(td_error_text(td), "shorter than 8 bytes");
        td_clear_error(td);
    }
    td_close(td);
}
END_TEST

/* Any byte of the header set to any of a few values: refused or read, never out of bounds (sanitizers watch). */
START_TEST(test_damaged_headers_do_no_harm)
{
    static const char header[] = "{" ENTRY("v", "U8", "[2,2]", "[0,4]") "," ENTRY("w", "F32", "[1]", "[4,8]") "}";
    static const char damage[] = "\0\xff\"{}[]:,-9ex ";
    char text[sizeof header];
    td_context *td = open_cpu(TD_F32);
    int read = 0, refused = 0;
    for (size_t i = 0; i < sizeof header - 1; i++) {
        for (size_t d = 0; d < sizeof damage - 1; d++) {
            memcpy(text, header, sizeof header);
            text[i] = damage[d];
            FILE *raw = fopen(path, "wb");
            fwrite(&(uint64_t){ sizeof header - 1 }, 8, 1, raw);
            fwrite(text, sizeof header - 1, 1, raw);
            fwrite("12345678", 8, 1, raw);
            fclose(raw);
            td_safetensors *file = td_safetensors_open(td, path);
            ck_assert((file == NULL) == (td_error(td) != TD_OK));
            int64_t sum = 0;
            for (int64_t t = 0; file && t < td_safetensors_count(file); t++) {
                td_safetensors_entry e = td_safetensors_at(file, t);
                for (int64_t b = 0; b < e.bytes; b++) sum += ((const unsigned char *)e.data)[b];
            }
            if (file) ck_assert_int_eq(sum, '1' + '2' + '3' + '4' + '5' + '6' + '7' + '8');
            if (file) read++;
            else refused++;
            td_safetensors_close(file);
            td_clear_error(td);
        }
    }
    ck_assert_int_gt(read, 0);
    ck_assert_int_gt(refused, read);
    td_close(td);
}
END_TEST

START_TEST(test_what_is_no_file_is_refused)
{
    td_context *td = open_cpu(TD_F32);
    ck_assert_ptr_null(td_safetensors_open(td, "absent.safetensors"));
    ck_assert_str_eq(td_error_text(td), "absent.safetensors: No such file or directory");
    td_clear_error(td);
    ck_assert_ptr_null(td_safetensors_open(td, "."));
    ck_assert_str_eq(td_error_text(td), ".: not a regular file");
    td_close(td);
}
END_TEST

static int files_beside(const char *prefix)
{
    int count = 0;
    DIR *here = opendir(".");
    for (struct dirent *e; (e = readdir(here));) count += strncmp(e->d_name, prefix, strlen(prefix)) == 0;
    closedir(here);
    return count;
}

/* A limit on the size of files stands in for a full disk. */
START_TEST(test_a_write_that_fails_keeps_the_old_file)
{
    td_context *td = open_cpu(TD_F32);
    int64_t count = 1 << 16;
    td_safetensors_entry old = { "old", TD_U8, TD_SHAPE(3), "abc", 3 };
    td_safetensors_entry large = { "large", TD_U8, TD_SHAPE(count), check_alloc((size_t)count), count };
    ck_assert(td_safetensors_write(td, path, &old, 1, NULL));

    struct rlimit limit, small;
    ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    small = limit;
    small.rlim_cur = 4096;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
    bool written = td_safetensors_write(td, path, &large, 1, NULL);
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    signal(SIGXFSZ, handler);

    ck_assert(!written);
    ck_assert_str_eq(td_error_text(td), "test_safetensors.safetensors: cannot be written: File too large");
    td_clear_error(td);
    ck_assert_int_eq(files_beside(path), 1);
    td_safetensors *file = td_safetensors_open(td, path);
    ck_assert_str_eq(td_safetensors_at(file, 0).name, "old");
    td_safetensors_close(file);
    ck_assert(td_safetensors_write(td, path, &large, 1, NULL));
    ck_assert_int_eq(files_beside(path), 1);
    td_close(td);
}
END_TEST

START_TEST(test_where_nothing_can_be_written_says_so)
{
    td_context *td = open_cpu(TD_F32);
    td_safetensors_entry w = { "w", TD_U8, TD_SHAPE(3), "abc", 3 };
    ck_assert(!td_safetensors_write(td, "absent/w.safetensors", &w, 1, NULL));
    ck_assert_str_eq(td_error_text(td), "absent/w.safetensors: cannot be written: No such file or directory");
    td_clear_error(td);
    mkdir("test_safetensors.dir", 0777);
    ck_assert(!td_safetensors_write(td, "test_safetensors.dir", &w, 1, NULL));
    ck_assert_str_eq(td_error_text(td), "test_safetensors.dir: cannot be written: Is a directory");
    ck_assert_int_eq(files_beside("test_safetensors.dir"), 1);
    rmdir("test_safetensors.dir");
    td_close(td);
}
END_TEST

static void check_not_written(const td_safetensors_entry *entries, int64_t count, const char *error)
{
    td_context *td = open_cpu(TD_F32);
    unlink(path);
    ck_assert(!td_safetensors_write(td, path, entries, count, NULL));
    ck_assert_str_eq(td_error_text(td), error);
    ck_assert_int_eq(files_beside(path), 0);
    td_close(td);
}

START_TEST(test_what_would_not_read_back_is_not_written)
{
    td_safetensors_entry twice[] = { { "w", TD_U8, TD_SHAPE(3), "abc", 3 }, { "w", TD_U8, TD_SHAPE(1), "d", 1 } };
    check_not_written(twice, 2, "test_safetensors.safetensors: line 1: the name 'w' appears twice in one object");
    check_not_written(&(td_safetensors_entry){ "w", TD_F32, TD_SHAPE(3), "abc", 3 }, 1,
                      "test_safetensors.safetensors: tensor 'w': 3 bytes are not what its shape and dtype need");
    check_not_written(&(td_safetensors_entry){ "__metadata__", TD_U8, TD_SHAPE(3), "abc", 3 }, 1,
                      "test_safetensors.safetensors: '__metadata__' cannot be a tensor's name");
    check_not_written(&(td_safetensors_entry){ "\xff", TD_U8, TD_SHAPE(3), "abc", 3 }, 1,
                      "test_safetensors.safetensors: '\xff' cannot be a tensor's name");
}
END_TEST

START_TEST(test_a_hundred_thousand_tensors_are_found_by_name)
{
    enum { COUNT = 100000 };
    td_context *td = open_cpu(TD_F32);
    td_safetensors_entry *entries = check_alloc(COUNT * sizeof *entries);
    char(*names)[16] = check_alloc(COUNT * sizeof *names);
    int32_t *values = check_alloc(COUNT * sizeof *values);
    for (int i = 0; i < COUNT; i++) {
        values[i] = i;
        snprintf(names[i], sizeof names[i], "t.%d", (i * 7919) % COUNT);
        entries[i] = (td_safetensors_entry){ names[i], TD_I32, TD_SHAPE(1), &values[i], 4 };
    }
    ck_assert(td_safetensors_write(td, path, entries, COUNT, NULL));
    td_safetensors *file = td_safetensors_open(td, path);
    ck_assert_no_error(td);
    for (int i = 0; i < COUNT; i++) {
        td_safetensors_entry found;
        ck_assert(td_safetensors_find(file, names[i], &found));
        ck_assert_mem_eq(found.data, &values[i], 4);
    }
    td_safetensors_close(file);
    remove(path);
    td_close(td);
}
END_TEST

START_TEST(test_each_failing_allocation_is_an_error_and_leaks_nothing)
{
    memory_test memory = { .refused = -1 };
    td_context *td = open_with(&memory);
    td_safetensors_entry w = { "w", TD_U8, TD_SHAPE(3), "abc", 3 };
    int held = memory.held, failures = 0;
    for (;; failures++) {
        memory_refuse(&memory, failures);
        td_safetensors *file = td_safetensors_write(td, path, &w, 1, NULL) ? td_safetensors_open(td, path) : NULL;
        ck_assert((file == NULL) == (td_error(td) == TD_ERROR_MEMORY));
        td_safetensors_close(file);
        ck_assert_int_eq(memory.held, held);
        if (file) break;
        td_clear_error(td);
    }
    ck_assert_int_ge(failures, 10);
    td_close(td);
    ck_assert_int_eq(memory.held, 0);
}
END_TEST

/* The reference implementation, where its Python package is installed: reads ours, and writes what we read. */
START_TEST(test_the_reference_implementation_agrees)
{
    if (system("python3 -c 'import safetensors.numpy' 2>/dev/null") != 0)
        SKIP("Python has no packages safetensors and numpy");
    td_context *td = open_cpu(TD_F32);
    float w[6] = { 1, 2, 3, 4, 5, -6 };
    const td_safetensors_entry entries[] = {
        { "u", TD_U8, TD_SHAPE(3), "abc", 3 }, { "w", TD_F32, TD_SHAPE(2, 3), w, 24 }, { "s", TD_F32, { 0 }, w, 4 },
    };
    ck_assert(td_safetensors_write(td, path, entries, 3, (const char *[]){ "format", "pt", NULL }));
    ck_assert_int_eq(system("python3 -c '\n"
                            "import numpy\n"
                            "from safetensors.numpy import load_file, save_file\n"
                            "name = \"test_safetensors.safetensors\"\n"
                            "t = load_file(name)\n"
                            "assert t[\"u\"].tobytes() == b\"abc\" and t[\"u\"].dtype == numpy.uint8, t\n"
                            "assert t[\"w\"].tolist() == [[1, 2, 3], [4, 5, -6]] and t[\"s\"].shape == (), t\n"
                            "ours = {\"a\": numpy.array([[1, -2], [3, 4]]), \"b\": numpy.zeros(0, numpy.float16)}\n"
                            "save_file(ours, name, {\"k\": \"v\"})'"), 0);
    td_safetensors *file = td_safetensors_open(td, path);
    ck_assert_no_error(td);
    ck_assert_int_eq(td_safetensors_count(file), 2);
    ck_assert_str_eq(td_safetensors_metadata(file, "k"), "v");
    td_safetensors_entry a, b;
    ck_assert(td_safetensors_find(file, "a", &a) && td_safetensors_find(file, "b", &b));
    ck_assert(a.dtype == TD_I64 && td_shape_equal(a.shape, TD_SHAPE(2, 2)));
    ck_assert_mem_eq(a.data, ((int64_t[]){ 1, -2, 3, 4 }), 32);
    ck_assert(b.dtype == TD_F16 && td_shape_equal(b.shape, TD_SHAPE(0)));
    td_safetensors_close(file);
    td_close(td);
}
END_TEST

TESTS("safetensors", test_what_is_written_reads_back, test_tensors_may_be_made_one_at_a_time,
      test_elements_convert_from_and_to_any_alignment, test_the_bytes_are_those_of_the_format,
      test_a_file_of_another_writer_reads, test_a_file_without_tensors_reads,
      test_hostile_headers_are_refused_by_file_and_tensor, test_a_hostile_header_length_is_refused,
      test_a_file_cut_anywhere_is_refused, test_damaged_headers_do_no_harm, test_what_is_no_file_is_refused,
      test_a_write_that_fails_keeps_the_old_file, test_where_nothing_can_be_written_says_so,
      test_what_would_not_read_back_is_not_written, test_each_failing_allocation_is_an_error_and_leaks_nothing,
      test_the_reference_implementation_agrees, test_a_hundred_thousand_tensors_are_found_by_name)
