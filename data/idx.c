/* MNIST's IDX files: a magic number (two zero bytes, 8 for unsigned bytes, the number of dimensions), the dimensions as
 * big-endian 32-bit numbers, then the bytes. Images have three dimensions (N, H, W), labels one (N). */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/internal.h"

enum { MAX_IDX_DIMS = 3, IDX_UNSIGNED_BYTES = 8 };

typedef struct idx_file {
    data_file file;
    int64_t dim[MAX_IDX_DIMS];
    uint8_t *data;
    size_t bytes;
} idx_file;

static uint32_t big_endian(const uint8_t *b)
{
    return (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
}

/* The path of dir/name or dir/name.gz, whichever is there. */
static bool find_file(td_context *td, const char *dir, const char *name, char path[DATA_PATH_BYTES])
{
    if (access(dir, F_OK) != 0) {
        td_fail(td, TD_ERROR_DATA, "%s: no such directory; give the one that holds the IDX files", dir);
        return false;
    }
    const char *ending[] = { "", ".gz" };
    for (int i = 0; i < 2; i++) {
        int length = snprintf(path, DATA_PATH_BYTES, "%s/%s%s", dir, name, ending[i]);
        if (length < DATA_PATH_BYTES && access(path, F_OK) == 0) return true;
    }
    td_fail(td, TD_ERROR_DATA, "%s: holds neither %s nor %s.gz; give the directory that holds the IDX files", dir, name,
            name);
    return false;
}

/* The dimensions of the header, after checking it against the length the file can have. */
static bool read_header(idx_file *idx, int dims, const char *what)
{
    data_file *file = &idx->file;
    uint8_t header[4 + 4 * MAX_IDX_DIMS];
    int64_t header_bytes = 4 + 4 * dims, got = data_file_read(file, header, header_bytes);
    if (got < 0) return false;
    uint32_t magic = (uint32_t)IDX_UNSIGNED_BYTES << 8 | (uint32_t)dims;
    if (got >= 4 && big_endian(header) != magic) {
        td_fail(file->td, TD_ERROR_DATA, "%s: not an IDX file of %s: it begins with 0x%08x instead of 0x%08x",
                file->path, what, big_endian(header), magic);
        return false;
    }
    if (got < header_bytes) {
        td_fail(file->td, TD_ERROR_DATA, "%s: too short: %" PRId64 " bytes are no IDX header; fetch it again",
                file->path, got);
        return false;
    }
    int64_t bytes = 1;
    bool possible = true;
    for (int d = 0; d < dims; d++) {
        idx->dim[d] = big_endian(&header[4 + 4 * d]);
        if (idx->dim[d] == 0) {
            td_fail(file->td, TD_ERROR_DATA, "%s: its header says that dimension %d is 0: it holds no %s", file->path,
                    d, what);
            return false;
        }
        possible = possible && !__builtin_mul_overflow(bytes, idx->dim[d], &bytes);
    }
    if (!possible || bytes > file->limit - header_bytes) {
        td_fail(file->td, TD_ERROR_DATA,
                "%s: too short: its header promises %" PRId64 " %s, more than its size can hold; fetch it again",
                file->path, idx->dim[0], what);
        return false;
    }
    idx->bytes = (size_t)bytes;
    return true;
}

static bool read_content(idx_file *idx)
{
    data_file *file = &idx->file;
    idx->data = td_alloc(file->td, idx->bytes, "data");
    if (!idx->data) return false;
    int64_t got = data_file_read(file, idx->data, (int64_t)idx->bytes);
    if (got < 0) return false;
    if (got < (int64_t)idx->bytes) {
        td_fail(file->td, TD_ERROR_DATA,
                "%s: too short: its header promises %zu bytes of content, it holds %" PRId64 "; fetch it again",
                file->path, idx->bytes, got);
        return false;
    }
    char more;
    got = data_file_read(file, &more, 1);
    if (got > 0) {
        td_fail(file->td, TD_ERROR_DATA,
                "%s: too long: bytes follow the %zu of content that its header promises; fetch it again", file->path,
                idx->bytes);
    }
    return got == 0;
}

/* On success idx->data is the caller's. On failure nothing is left. */
static bool read_idx(td_context *td, const char *dir, const char *name, int dims, const char *what, idx_file *idx)
{
    char path[DATA_PATH_BYTES];
    *idx = (idx_file){ 0 };
    if (!find_file(td, dir, name, path) || !data_file_open(&idx->file, td, path)) return false;
    bool read = read_header(idx, dims, what) && read_content(idx);
    data_file_close(&idx->file);
    if (!read && idx->data) td_free(td, idx->data, idx->bytes, "data");
    return read;
}

/* Labels as i32, checked; NULL and an error. */
static int32_t *widen_labels(td_context *td, const idx_file *labels, int64_t classes)
{
    int64_t count = labels->dim[0];
    for (int64_t i = 0; classes && i < count; i++) {
        if (labels->data[i] < classes) continue;
        td_fail(td, TD_ERROR_DATA, "%s: label %d of sample %" PRId64 " is not below the %" PRId64 " classes asked for",
                labels->file.path, labels->data[i], i, classes);
        return NULL;
    }
    int32_t *wide = td_alloc(td, (size_t)count * sizeof *wide, "data");
    if (!wide) return NULL;
    for (int64_t i = 0; i < count; i++) wide[i] = labels->data[i];
    return wide;
}

/* Takes the images; the labels stay the caller's. */
static data_set *join(td_context *td, const idx_file *images, const idx_file *labels, int64_t classes)
{
    int64_t count = images->dim[0];
    int32_t *wide = NULL;
    if (labels->dim[0] != count) {
        td_fail(td, TD_ERROR_DATA,
                "%s holds %" PRId64 " labels but %s holds %" PRId64 " images; they must come from one data set",
                labels->file.path, labels->dim[0], images->file.path, count);
    } else {
        wide = widen_labels(td, labels, classes);
    }
    if (!wide) {
        td_free(td, images->data, images->bytes, "data");
        return NULL;
    }
    data_array arrays[] = {
        { .name = "image",
          .dtype = TD_U8,
          .shape = TD_SHAPE(count, images->dim[1], images->dim[2], 1),
          .data = images->data,
          .scale = 1 / 255.0 },
        { .name = "label", .dtype = TD_I32, .shape = TD_SHAPE(count), .data = wide },
    };
    data_owned owned[] = { { images->data, images->bytes }, { wide, (size_t)count * sizeof *wide } };
    return data_memory_owning(td, images->file.path, arrays, 2, owned);
}

data_set *data_idx_with(td_context *td, const char *dir, const char *split, const data_idx_options *options)
{
    if (!dir) {
        td_fail(td, TD_ERROR_USAGE, "data_idx: no directory given: name the one that holds the IDX files");
        return NULL;
    }
    if (!split || (strcmp(split, "train") != 0 && strcmp(split, "test") != 0)) {
        td_fail(td, TD_ERROR_USAGE, "data_idx: split \"%s\" does not exist: use \"train\" or \"test\"",
                split ? split : "");
        return NULL;
    }
    const char *prefix = strcmp(split, "train") == 0 ? "train" : "t10k";
    char image_name[64], label_name[64];
    snprintf(image_name, sizeof image_name, "%s-images-idx3-ubyte", prefix);
    snprintf(label_name, sizeof label_name, "%s-labels-idx1-ubyte", prefix);
    idx_file images, labels;
    if (!read_idx(td, dir, image_name, 3, "images", &images)) return NULL;
    if (!read_idx(td, dir, label_name, 1, "labels", &labels)) {
        td_free(td, images.data, images.bytes, "data");
        return NULL;
    }
    data_set *set = join(td, &images, &labels, options ? options->classes : 0);
    td_free(td, labels.data, labels.bytes, "data");
    return set;
}

data_set *data_idx(td_context *td, const char *dir, const char *split) { return data_idx_with(td, dir, split, NULL); }
