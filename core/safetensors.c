/* safetensors: a file of named tensors. Reading believes nothing before it is checked; writing loses nothing.
 *
 *     u64 n | n bytes of JSON | data
 *     {"__metadata__": {"key": "text", ...}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
 *
 * All little-endian; offsets count from the start of the data, and the tensors cover it without gap or overlap. The
 * format is that of github.com/huggingface/safetensors, version 0.4, with its limit of 100 MB on the header.
 * A file is mapped: cutting it short while it is open is beyond what can be reported.
 */
#include "core/file.h"
#include "core/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors are little-endian and mapped as they are");

enum { HEADER_BYTES = 100000000, LENGTH_BYTES = 8 };

static const char *const dtype_names[TD_DTYPES] = {
    [TD_F32] = "F32", [TD_F64] = "F64", [TD_BF16] = "BF16", [TD_F16] = "F16", [TD_I32] = "I32", [TD_I64] = "I64",
    [TD_U8] = "U8",
};

/* The bytes of a tensor; false when its size does not fit an int64_t (sizes of 0 do not hide that). */
static bool tensor_bytes(td_dtype dtype, td_shape shape, int64_t *bytes)
{
    int64_t all = td_dtype_size(dtype);
    *bytes = all;
    for (int64_t i = 0; i < shape.rank; i++) {
        int64_t size = shape.dim[i];
        if (size < 0 || __builtin_mul_overflow(all, size > 0 ? size : 1, &all)) return false;
        *bytes *= size;
    }
    return true;
}

/* ---- Reading -------------------------------------------------------------------------------------------- */

struct td_safetensors {
    td_context *td;
    char *path;
    size_t path_bytes;
    unsigned char *map;                  /* the whole file */
    size_t map_bytes;
    const unsigned char *data;
    int64_t data_bytes;
    td_json_document *header;
    const td_json *metadata;
    td_safetensors_entry *entries;       /* in order of offset */
    int32_t *by_name;
    int64_t count;
    size_t room;                         /* entries, at least 1 */
};

static bool refuse(const td_safetensors *f, const char *problem)
{
    td_fail(f->td, TD_ERROR_DATA, "%s: %s", f->path, problem);
    return false;
}

static bool refuse_tensor(const td_safetensors *f, const char *name, const char *problem)
{
    td_fail(f->td, TD_ERROR_DATA, "%s: tensor '%.200s': %s", f->path, name, problem);
    return false;
}

static bool map_file(td_safetensors *f)
{
    int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return refuse(f, strerror(errno));
    struct stat status;
    bool ok = fstat(fd, &status) == 0;
    if (!ok) refuse(f, strerror(errno));
    else if (!S_ISREG(status.st_mode)) ok = refuse(f, "not a regular file");
    else if (status.st_size < LENGTH_BYTES) ok = refuse(f, "not a safetensors file: shorter than 8 bytes");
    if (ok) {
        void *map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        ok = map != MAP_FAILED;
        if (ok) f->map = map;
        if (ok) f->map_bytes = (size_t)status.st_size;
        if (!ok) refuse(f, strerror(errno));
    }
    close(fd);
    return ok;
}

static bool parse_header(td_safetensors *f)
{
    uint64_t bytes;
    memcpy(&bytes, f->map, LENGTH_BYTES);
    if (bytes > HEADER_BYTES) {
        td_fail(f->td, TD_ERROR_DATA, "%s: not a safetensors file: a header of %llu bytes, of at most 100000000",
                f->path, (unsigned long long)bytes);
        return false;
    }
    if (bytes > f->map_bytes - LENGTH_BYTES) {
        td_fail(f->td, TD_ERROR_DATA, "%s: cut short: a header of %llu bytes in a file of %zu", f->path,
                (unsigned long long)bytes, f->map_bytes);
        return false;
    }
    const char *text = (const char *)f->map + LENGTH_BYTES;
    if (bytes == 0 || text[0] != '{') return refuse(f, "not a safetensors file: the header does not begin with {");
    f->data = f->map + LENGTH_BYTES + bytes;
    f->data_bytes = (int64_t)(f->map_bytes - LENGTH_BYTES - bytes);
    f->header = td_json_parse(f->td, text, (size_t)bytes, f->path);
    return f->header != NULL;
}

static bool check_metadata(td_safetensors *f)
{
    f->metadata = td_json_get(td_json_root(f->header), "__metadata__");
    if (!f->metadata) return true;
    if (f->metadata->kind != TD_JSON_OBJECT) return refuse(f, "__metadata__ is not an object");
    for (const td_json *pair = f->metadata->first; pair; pair = pair->next) {
        if (pair->kind != TD_JSON_STRING) return refuse(f, "a value in __metadata__ is not a string");
    }
    return true;
}

static bool read_dtype(const td_safetensors *f, const td_json *tensor, td_safetensors_entry *e)
{
    const td_json *dtype = td_json_get(tensor, "dtype");
    if (!dtype || dtype->kind != TD_JSON_STRING) return refuse_tensor(f, e->name, "has no dtype");
    for (int i = 0; i < TD_DTYPES; i++) {
        if (strcmp(dtype->string, dtype_names[i]) != 0) continue;
        e->dtype = (td_dtype)i;
        return true;
    }
    td_fail(f->td, TD_ERROR_DATA, "%s: tensor '%.200s': dtype '%.40s' is not one of F32, F64, BF16, F16, I32, I64, U8",
            f->path, e->name, dtype->string);
    return false;
}

static bool read_shape(const td_safetensors *f, const td_json *tensor, td_safetensors_entry *e)
{
    const td_json *shape = td_json_get(tensor, "shape");
    if (!shape || shape->kind != TD_JSON_ARRAY) return refuse_tensor(f, e->name, "has no shape");
    if (shape->count > TD_MAX_DIMS) return refuse_tensor(f, e->name, "has more than 6 dimensions");
    for (const td_json *size = shape->first; size; size = size->next) {
        if (size->kind != TD_JSON_NUMBER || !size->whole || size->integer < 0)
            return refuse_tensor(f, e->name, "a size of its shape is not a whole number from 0");
        e->shape.dim[e->shape.rank++] = size->integer;
    }
    if (!tensor_bytes(e->dtype, e->shape, &e->bytes)) return refuse_tensor(f, e->name, "its size overflows");
    return true;
}

static bool read_offsets(const td_safetensors *f, const td_json *tensor, td_safetensors_entry *e)
{
    const td_json *pair = td_json_get(tensor, "data_offsets");
    if (!pair || pair->kind != TD_JSON_ARRAY || pair->count != 2)
        return refuse_tensor(f, e->name, "has no pair of data_offsets");
    const td_json *begin = pair->first, *end = begin->next;
    bool whole = begin->kind == TD_JSON_NUMBER && begin->whole && end->kind == TD_JSON_NUMBER && end->whole;
    if (!whole || begin->integer < 0 || end->integer < begin->integer || end->integer > f->data_bytes) {
        td_fail(f->td, TD_ERROR_DATA, "%s: tensor '%.200s': its data_offsets are not within the %lld bytes of data",
                f->path, e->name, (long long)f->data_bytes);
        return false;
    }
    if (end->integer - begin->integer != e->bytes) {
        td_fail(f->td, TD_ERROR_DATA, "%s: tensor '%.200s': %lld bytes of data, its shape and dtype need %lld", f->path,
                e->name, (long long)(end->integer - begin->integer), (long long)e->bytes);
        return false;
    }
    e->data = f->data + begin->integer;
    return true;
}

static bool read_tensor(const td_safetensors *f, const td_json *tensor, td_safetensors_entry *e)
{
    *e = (td_safetensors_entry){ .name = tensor->name };
    if (tensor->kind != TD_JSON_OBJECT) return refuse_tensor(f, e->name, "its entry is not an object");
    if (tensor->count > 3) return refuse_tensor(f, e->name, "has more than dtype, shape and data_offsets");
    return read_dtype(f, tensor, e) && read_shape(f, tensor, e) && read_offsets(f, tensor, e);
}

static int by_offset(const void *a, const void *b)
{
    const td_safetensors_entry *x = a, *y = b;
    const char *x_begin = x->data, *y_begin = y->data;
    if (x_begin != y_begin) return x_begin < y_begin ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;      /* empty ones first */
    return strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b, void *entries)
{
    const td_safetensors_entry *all = entries;
    return strcmp(all[*(const int32_t *)a].name, all[*(const int32_t *)b].name);
}

static bool check_coverage(const td_safetensors *f)
{
    const unsigned char *at = f->data;
    for (int64_t i = 0; i < f->count; i++) {
        const td_safetensors_entry *e = &f->entries[i];
        const unsigned char *begin = e->data;
        if (begin < at) return refuse_tensor(f, e->name, "its data overlap another tensor's");
        if (begin > at) return refuse_tensor(f, e->name, "a gap before its data belongs to no tensor");
        at += e->bytes;
    }
    int64_t left = f->data_bytes - (at - f->data);
    if (left == 0) return true;
    td_fail(f->td, TD_ERROR_DATA, "%s: %lld bytes after the last tensor belong to none", f->path, (long long)left);
    return false;
}

static bool read_tensors(td_safetensors *f)
{
    const td_json *root = td_json_root(f->header);
    f->room = (size_t)root->count + 1;
    f->entries = td_alloc(f->td, f->room * sizeof *f->entries, "safetensors");
    f->by_name = td_alloc(f->td, f->room * sizeof *f->by_name, "safetensors");
    if (!f->entries || !f->by_name) return false;
    for (const td_json *tensor = root->first; tensor; tensor = tensor->next) {
        if (tensor == f->metadata) continue;
        if (!read_tensor(f, tensor, &f->entries[f->count])) return false;
        f->count++;
    }
    qsort(f->entries, (size_t)f->count, sizeof *f->entries, by_offset);
    for (int32_t i = 0; i < f->count; i++) f->by_name[i] = i;
    qsort_r(f->by_name, (size_t)f->count, sizeof *f->by_name, by_name, f->entries);
    return check_coverage(f);
}

td_safetensors *td_safetensors_open(td_context *td, const char *path)
{
    td_safetensors *f = td_alloc(td, sizeof *f, "safetensors");
    if (!f) return NULL;
    *f = (td_safetensors){ .td = td, .path_bytes = strlen(path) + 1 };
    f->path = td_alloc(td, f->path_bytes, "safetensors");
    if (f->path) memcpy(f->path, path, f->path_bytes);
    if (f->path && map_file(f) && parse_header(f) && check_metadata(f) && read_tensors(f)) return f;
    td_safetensors_close(f);
    return NULL;
}

void td_safetensors_close(td_safetensors *f)
{
    if (!f) return;
    td_context *td = f->td;
    td_json_close(f->header);
    td_free(td, f->entries, f->room * sizeof *f->entries, "safetensors");
    td_free(td, f->by_name, f->room * sizeof *f->by_name, "safetensors");
    if (f->map) munmap(f->map, f->map_bytes);
    td_free(td, f->path, f->path_bytes, "safetensors");
    td_free(td, f, sizeof *f, "safetensors");
}

int64_t td_safetensors_count(const td_safetensors *f)
{
    return f->count;
}

td_safetensors_entry td_safetensors_at(const td_safetensors *f, int64_t index)
{
    if (index < 0 || index >= f->count) return (td_safetensors_entry){ 0 };
    return f->entries[index];
}

bool td_safetensors_find(const td_safetensors *f, const char *name, td_safetensors_entry *out)
{
    for (int64_t low = 0, high = f->count; low < high;) {
        int64_t middle = low + (high - low) / 2;
        int order = strcmp(name, f->entries[f->by_name[middle]].name);
        if (order == 0) *out = f->entries[f->by_name[middle]];
        if (order == 0) return true;
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return false;
}

const char *td_safetensors_metadata(const td_safetensors *f, const char *key)
{
    const td_json *value = td_json_get(f->metadata, key);
    return value ? value->string : NULL;
}

/* ---- Writing -------------------------------------------------------------------------------------------- */

static void write_entry(td_json_writer *w, const td_safetensors_entry *e, int64_t offset)
{
    td_json_open_object(w, e->name);
    td_json_put_string(w, "dtype", dtype_names[e->dtype]);
    td_json_open_array(w, "shape");
    for (int64_t i = 0; i < e->shape.rank; i++) td_json_put_integer(w, NULL, e->shape.dim[i]);
    td_json_close_array(w);
    td_json_open_array(w, "data_offsets");
    td_json_put_integer(w, NULL, offset);
    td_json_put_integer(w, NULL, offset + e->bytes);
    td_json_close_array(w);
    td_json_close_object(w);
}

static void write_metadata(td_json_writer *w, const char *const *metadata)
{
    td_json_open_object(w, "__metadata__");
    for (int i = 0; metadata[i]; i += 2) td_json_put_string(w, metadata[i], metadata[i + 1]);
    td_json_close_object(w);
}

/* The header, padded with spaces so that the data start at a multiple of 8; NULL after td_fail. */
static const char *build_header(td_json_writer *w, const char *path, const td_safetensors_entry *entries, int64_t count,
                                const char *const *metadata)
{
    int64_t offset = 0;
    td_json_open_object(w, NULL);
    if (metadata) write_metadata(w, metadata);
    for (int64_t i = 0; i < count; i++) {
        const td_safetensors_entry *e = &entries[i];
        int64_t needed, end;
        bool sized = e->shape.rank >= 0 && e->shape.rank <= TD_MAX_DIMS && (unsigned)e->dtype < TD_DTYPES &&
                     tensor_bytes(e->dtype, e->shape, &needed) && needed == e->bytes;
        if (!sized || __builtin_add_overflow(offset, e->bytes, &end)) {
            td_fail(w->td, TD_ERROR_USAGE, "%s: tensor '%.200s': %lld bytes are not what its shape and dtype need",
                    path, e->name, (long long)e->bytes);
            return NULL;
        }
        write_entry(w, e, offset);
        offset = end;
    }
    td_json_close_object(w);
    return td_json_text(w);
}

/* What would not read back as it was given (a name twice, or one that is not UTF-8) is not written. */
static bool check_header(td_context *td, const char *path, const char *text, size_t bytes,
                         const td_safetensors_entry *entries, bool has_metadata)
{
    if (bytes > HEADER_BYTES - LENGTH_BYTES) {
        td_fail(td, TD_ERROR_USAGE, "%s: a header of %zu bytes, of at most 100000000", path, bytes);
        return false;
    }
    td_json_document *header = td_json_parse(td, text, bytes, path);
    if (!header) return false;
    const td_json *member = td_json_root(header)->first;
    if (has_metadata) member = member->next;
    bool same = true;
    for (; member && same; member = member->next) {
        const char *name = entries++->name;
        same = strcmp(member->name, name) == 0 && strcmp(name, "__metadata__") != 0;
        if (!same) td_fail(td, TD_ERROR_USAGE, "%s: '%.200s' cannot be a tensor's name", path, name);
    }
    td_json_close(header);
    return same;
}

/* What a file is made of. */
typedef struct content {
    const char *header;
    size_t header_bytes;
    const td_safetensors_entry *entries;
    int64_t count;
    td_safetensors_get get;
    void *user;
} content;

static bool put_content(int fd, const void *user)
{
    const content *c = user;
    size_t padding = (8 - c->header_bytes % 8) % 8;
    uint64_t length = c->header_bytes + padding;
    bool ok = td_file_put(fd, &length, LENGTH_BYTES) && td_file_put(fd, c->header, (int64_t)c->header_bytes) &&
              td_file_put(fd, "        ", (int64_t)padding);
    for (int64_t i = 0; i < c->count && ok; i++) {
        const void *data = c->get(c->user, i);
        ok = data && td_file_put(fd, data, c->entries[i].bytes);
    }
    return ok;
}

bool td_safetensors_write_from(td_context *td, const char *path, const td_safetensors_entry *entries, int64_t count,
                               const char *const *metadata, td_safetensors_get get, void *user)
{
    td_json_writer w = td_json_begin(td);
    const char *header = build_header(&w, path, entries, count, metadata);
    content all = { .header = header, .header_bytes = w.bytes, .entries = entries, .count = count, .get = get, .user = user };
    bool ok = header && check_header(td, path, header, w.bytes, entries, metadata != NULL) &&
              td_file_replace(td, path, put_content, &all);
    td_json_end(&w);
    return ok;
}

static const void *data_of(void *user, int64_t index)
{
    const td_safetensors_entry *e = (const td_safetensors_entry *)user + index;
    return e->bytes ? e->data : ""; /* of no elements there may be no data */
}

bool td_safetensors_write(td_context *td, const char *path, const td_safetensors_entry *entries, int64_t count,
                          const char *const *metadata)
{
    return td_safetensors_write_from(td, path, entries, count, metadata, data_of, (void *)entries);
}
