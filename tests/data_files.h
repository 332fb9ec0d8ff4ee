/* Files that the tests of data/ make for themselves, in a directory of their own that goes when the test ends. */
#ifndef TANDEM_TESTS_DATA_FILES_H
#define TANDEM_TESTS_DATA_FILES_H

#include <dirent.h>
#include <unistd.h>
#include <zlib.h>

#include <tandem/data.h>

#include "tests/check.h"

typedef struct test_files {
    char dir[32];
} test_files;

static inline CHECK_UNUSED test_files files_open(void)
{
    test_files files = { "test_data_XXXXXX" };
    ck_assert_ptr_nonnull(mkdtemp(files.dir));
    return files;
}

static inline CHECK_UNUSED void files_close(const test_files *files)
{
    DIR *dir = opendir(files->dir);
    ck_assert_ptr_nonnull(dir);
    for (struct dirent *entry; (entry = readdir(dir));) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", files->dir, entry->d_name);
        if (entry->d_name[0] != '.') unlink(path);
    }
    closedir(dir);
    ck_assert_int_eq(rmdir(files->dir), 0);
}

/* dir/name, alive until the test ends. */
static inline CHECK_UNUSED const char *file_path(const test_files *files, const char *name)
{
    size_t room = strlen(files->dir) + strlen(name) + 2;
    char *path = check_alloc(room);
    snprintf(path, room, "%s/%s", files->dir, name);
    return path;
}

static inline CHECK_UNUSED const char *file_write(const test_files *files, const char *name, const void *bytes,
                                                  size_t count)
{
    const char *path = file_path(files, name);
    FILE *file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(bytes, 1, count, file), count);
    ck_assert_int_eq(fclose(file), 0);
    return path;
}

static inline CHECK_UNUSED const char *file_write_gzip(const test_files *files, const char *name, const void *bytes,
                                                       size_t count)
{
    const char *path = file_path(files, name);
    gzFile file = gzopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_eq(gzwrite(file, bytes, (unsigned)count), (int)count);
    ck_assert_int_eq(gzclose(file), Z_OK);
    return path;
}

static inline CHECK_UNUSED const char *file_write_text(const test_files *files, const char *name, const char *text)
{
    return file_write(files, name, text, strlen(text));
}

/* The first bytes of an IDX file; returns how many. */
static inline CHECK_UNUSED size_t idx_header(uint8_t *to, int dims, const uint32_t *dim)
{
    uint32_t numbers[4] = { 0x800u | (uint32_t)dims };
    for (int d = 0; d < dims; d++) numbers[d + 1] = dim[d];
    int bytes = 4 * (dims + 1);
    for (int i = 0; i < bytes; i++) to[i] = (uint8_t)(numbers[i / 4] >> (24 - 8 * (i % 4)));
    return (size_t)bytes;
}

/* `count` images of 4 x 4 whose pixel k is (16 i + k) mod 256, and labels i mod 10; buffers of header and content. */
typedef struct idx_bytes {
    uint8_t images[16 + 16 * 64], labels[8 + 64];
    size_t image_bytes, label_bytes;
} idx_bytes;

static inline CHECK_UNUSED idx_bytes idx_make(uint32_t count)
{
    idx_bytes b;
    size_t at = idx_header(b.images, 3, (uint32_t[]){ count, 4, 4 });
    for (uint32_t i = 0; i < 16 * count; i++) b.images[at++] = (uint8_t)i;
    b.image_bytes = at;
    at = idx_header(b.labels, 1, &count);
    for (uint32_t i = 0; i < count; i++) b.labels[at++] = (uint8_t)(i % 10);
    b.label_bytes = at;
    return b;
}

#endif
