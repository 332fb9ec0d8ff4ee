/* JSON, read with yajl into a tree (json.h has the promises).
 *
 * The tree's memory is a list of chunks that grows through the context's allocator, so closing a document frees a
 * few blocks. yajl itself uses the C library's: it does not check what an allocator returns.
 * Numbers are read with a point whatever the program's locale says.
 */
#include "core/json.h"
#include "core/utf8.h"

#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <yajl/yajl_parse.h>

enum {
    JSON_DEPTH = 64,
    JSON_VALUES = 1 << 22,              /* so that a small hostile file cannot ask for gigabytes */
    JSON_FILE_BYTES = 100000000,
    JSON_CHUNK_BYTES = 16384,
    JSON_NUMBER_CHARS = 63,
};

/* Where it is not, *bad is the byte. */
static bool utf8_valid(const char *text, size_t bytes, size_t *bad)
{
    bool valid = true;
    for (size_t i = 0; i < bytes && valid; i += (size_t)td_utf8_step((const uint8_t *)text + i, (int64_t)(bytes - i), &valid)) *bad = i;
    return valid;
}

typedef struct json_chunk {
    struct json_chunk *before;
    size_t bytes, used;
} json_chunk;

struct td_json_document {
    td_context *td;
    json_chunk *chunks;
    td_json *root;
};

typedef struct json_parse {
    td_json_document *document;
    td_json *open[JSON_DEPTH];          /* arrays and objects the text is in */
    td_json *last[JSON_DEPTH];          /* their last child so far */
    int depth;
    int64_t values;
    const char *name;                   /* of the member whose value comes next */
    locale_t point;                     /* numbers with a decimal point */
    char problem[256];                  /* what a callback objected to */
} json_parse;

static void *json_take(td_json_document *d, size_t bytes)
{
    bytes = (bytes + 7) & ~(size_t)7;
    if (!d->chunks || d->chunks->bytes - d->chunks->used < bytes) {
        size_t size = bytes + sizeof(json_chunk) > JSON_CHUNK_BYTES ? bytes + sizeof(json_chunk) : JSON_CHUNK_BYTES;
        json_chunk *chunk = td_alloc(d->td, size, "json");
        if (!chunk) return NULL;
        *chunk = (json_chunk){ .before = d->chunks, .bytes = size, .used = sizeof(json_chunk) };
        d->chunks = chunk;
    }
    void *memory = (char *)d->chunks + d->chunks->used;
    d->chunks->used += bytes;
    return memory;
}

/* A callback that returns 0 stops yajl; the problem's text is then reported. */
static int json_refuse(json_parse *p, const char *problem)
{
    snprintf(p->problem, sizeof p->problem, "%s", problem);
    return 0;
}

static td_json *json_add(json_parse *p, td_json_kind kind)
{
    if (++p->values > JSON_VALUES) return json_refuse(p, "too many values"), NULL;
    td_json *value = json_take(p->document, sizeof *value);
    if (!value) return json_refuse(p, "no memory"), NULL;
    *value = (td_json){ .kind = kind, .name = p->name };
    p->name = NULL;
    if (p->depth == 0) {
        p->document->root = value;
        return value;
    }
    td_json *in = p->open[p->depth - 1], *before = p->last[p->depth - 1];
    if (before) before->next = value;
    else in->first = value;
    p->last[p->depth - 1] = value;
    in->count++;
    return value;
}

static const char *json_copy(json_parse *p, const unsigned char *text, size_t bytes)
{
    size_t bad;
    if (memchr(text, 0, bytes)) return json_refuse(p, "a string holds the character 0"), NULL;
    if (!utf8_valid((const char *)text, bytes, &bad))
        return json_refuse(p, "a string holds half a surrogate pair"), NULL;
    char *copy = json_take(p->document, bytes + 1);
    if (!copy) return json_refuse(p, "no memory"), NULL;
    memcpy(copy, text, bytes);
    copy[bytes] = 0;
    return copy;
}

static int json_on_null(void *user)
{
    return json_add(user, TD_JSON_NULL) != NULL;
}

static int json_on_boolean(void *user, int boolean)
{
    td_json *value = json_add(user, TD_JSON_BOOLEAN);
    if (value) value->boolean = boolean != 0;
    return value != NULL;
}

static int json_on_number(void *user, const char *text, size_t bytes)
{
    json_parse *p = user;
    char digits[JSON_NUMBER_CHARS + 1];
    if (bytes > JSON_NUMBER_CHARS) return json_refuse(p, "a number has more than 63 characters");
    memcpy(digits, text, bytes);
    digits[bytes] = 0;
    td_json *value = json_add(p, TD_JSON_NUMBER);
    if (!value) return 0;
    value->number = strtod_l(digits, NULL, p->point);
    if (!isfinite(value->number)) return json_refuse(p, "a number is too large for a double");
    if (strpbrk(digits, ".eE")) return 1;
    errno = 0;
    value->integer = strtoll(digits, NULL, 10);
    value->whole = errno == 0;
    return 1;
}

static int json_on_string(void *user, const unsigned char *text, size_t bytes)
{
    const char *copy = json_copy(user, text, bytes);
    td_json *value = copy ? json_add(user, TD_JSON_STRING) : NULL;
    if (value) value->string = copy;
    return value != NULL;
}

static int json_on_name(void *user, const unsigned char *text, size_t bytes)
{
    json_parse *p = user;
    p->name = json_copy(p, text, bytes);
    return p->name != NULL;
}

static int json_open(json_parse *p, td_json_kind kind)
{
    if (p->depth == JSON_DEPTH) return json_refuse(p, "more than 64 levels deep");
    td_json *value = json_add(p, kind);
    if (!value) return 0;
    p->last[p->depth] = NULL;
    p->open[p->depth++] = value;
    return 1;
}

static int json_on_object(void *user)
{
    return json_open(user, TD_JSON_OBJECT);
}

static int json_on_array(void *user)
{
    return json_open(user, TD_JSON_ARRAY);
}

static int json_on_end(void *user)
{
    ((json_parse *)user)->depth--;
    return 1;
}

static int json_by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Objects may have a hundred thousand members (headers of large checkpoints), so names are compared sorted. */
static int json_on_object_end(void *user)
{
    json_parse *p = user;
    const td_json *object = p->open[p->depth - 1];
    json_on_end(user);
    if (object->count < 2) return 1;
    size_t bytes = (size_t)object->count * sizeof(char *);
    const char **names = td_alloc(p->document->td, bytes, "json");
    if (!names) return json_refuse(p, "no memory");
    int64_t n = 0;
    for (const td_json *member = object->first; member; member = member->next) names[n++] = member->name;
    qsort(names, (size_t)n, sizeof *names, json_by_name);
    const char *twice = NULL;
    for (int64_t i = 1; i < n && !twice; i++) if (strcmp(names[i - 1], names[i]) == 0) twice = names[i];
    if (twice) snprintf(p->problem, sizeof p->problem, "the name '%.200s' appears twice in one object", twice);
    td_free(p->document->td, names, bytes, "json");
    return twice == NULL;
}

static const yajl_callbacks json_callbacks = {
    .yajl_null = json_on_null,
    .yajl_boolean = json_on_boolean,
    .yajl_number = json_on_number,
    .yajl_string = json_on_string,
    .yajl_start_map = json_on_object,
    .yajl_map_key = json_on_name,
    .yajl_end_map = json_on_object_end,
    .yajl_start_array = json_on_array,
    .yajl_end_array = json_on_end,
};

static void json_fail(td_context *td, yajl_handle yajl, const json_parse *p, const char *text, size_t bytes,
                      const char *source)
{
    size_t at = yajl_get_bytes_consumed(yajl);
    int64_t line = 1;
    for (size_t i = 0; i < bytes && i < at; i++) line += text[i] == '\n';
    if (p->problem[0]) {
        td_fail(td, TD_ERROR_DATA, "%s: line %lld: %s", source, (long long)line, p->problem);
        return;
    }
    unsigned char *why = yajl_get_error(yajl, 0, (const unsigned char *)text, bytes);
    if (why) why[strcspn((char *)why, "\n")] = 0;
    td_fail(td, TD_ERROR_DATA, "%s: line %lld: not JSON: %s", source, (long long)line, why ? (char *)why : "no memory");
    if (why) yajl_free_error(yajl, why);
}

static bool json_run(json_parse *p, const char *text, size_t bytes, const char *source)
{
    td_context *td = p->document->td;
    size_t bad;
    if (!utf8_valid(text, bytes, &bad)) {
        td_fail(td, TD_ERROR_DATA, "%s: not UTF-8 at byte %zu", source, bad);
        return false;
    }
    p->point = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0);
    yajl_handle yajl = p->point ? yajl_alloc(&json_callbacks, NULL, p) : NULL;
    if (!yajl) {
        td_fail(td, TD_ERROR_MEMORY, "%s: no memory to read JSON", source);
        if (p->point) freelocale(p->point);
        return false;
    }
    yajl_status status = yajl_parse(yajl, (const unsigned char *)text, bytes);
    if (status == yajl_status_ok) status = yajl_complete_parse(yajl);
    if (status != yajl_status_ok) json_fail(td, yajl, p, text, bytes, source);
    yajl_free(yajl);
    freelocale(p->point);
    return status == yajl_status_ok;
}

td_json_document *td_json_parse(td_context *td, const char *text, size_t bytes, const char *source)
{
    td_json_document *document = td_alloc(td, sizeof *document, "json");
    if (!document) return NULL;
    *document = (td_json_document){ .td = td };
    json_parse parse = { .document = document };
    if (json_run(&parse, text, bytes, source)) return document;
    td_json_close(document);
    return NULL;
}

/* Reads the whole of an open file into memory of `room` bytes, one more than it has; NULL after td_fail. */
static char *json_load(td_context *td, FILE *file, const char *path, size_t *room)
{
    struct stat status;
    if (fstat(fileno(file), &status) != 0) {
        td_fail(td, TD_ERROR_DATA, "%s: %s", path, strerror(errno));
        return NULL;
    }
    if (!S_ISREG(status.st_mode)) {
        td_fail(td, TD_ERROR_DATA, "%s: not a regular file", path);
        return NULL;
    }
    if (status.st_size > JSON_FILE_BYTES) {
        td_fail(td, TD_ERROR_DATA, "%s: %lld bytes, more than the 100 MB a JSON file may have", path,
                (long long)status.st_size);
        return NULL;
    }
    *room = (size_t)status.st_size + 1;
    char *text = td_alloc(td, *room, "json");
    if (!text || fread(text, 1, *room - 1, file) == *room - 1) return text;
    td_fail(td, TD_ERROR_DATA, "%s: cannot be read: %s", path, ferror(file) ? strerror(errno) : "it became shorter");
    td_free(td, text, *room, "json");
    return NULL;
}

td_json_document *td_json_read(td_context *td, const char *path)
{
    FILE *file = fopen(path, "rbe");
    if (!file) {
        td_fail(td, TD_ERROR_DATA, "%s: %s", path, strerror(errno));
        return NULL;
    }
    size_t room = 0;
    char *text = json_load(td, file, path, &room);
    fclose(file);
    if (!text) return NULL;
    td_json_document *document = td_json_parse(td, text, room - 1, path);
    td_free(td, text, room, "json");
    return document;
}

void td_json_close(td_json_document *document)
{
    if (!document) return;
    td_context *td = document->td;
    for (json_chunk *chunk = document->chunks; chunk;) {
        json_chunk *before = chunk->before;
        td_free(td, chunk, chunk->bytes, "json");
        chunk = before;
    }
    td_free(td, document, sizeof *document, "json");
}

const td_json *td_json_root(const td_json_document *document)
{
    return document ? document->root : NULL;
}

const td_json *td_json_get(const td_json *object, const char *name)
{
    if (!object || object->kind != TD_JSON_OBJECT) return NULL;
    const td_json *member = object->first;
    while (member && strcmp(member->name, name) != 0) member = member->next;
    return member;
}

const char *td_json_get_string(const td_json *object, const char *name)
{
    const td_json *member = td_json_get(object, name);
    return member && member->kind == TD_JSON_STRING ? member->string : NULL;
}

int64_t td_json_get_whole(const td_json *object, const char *name, int64_t otherwise)
{
    const td_json *member = td_json_get(object, name);
    return member && member->kind == TD_JSON_NUMBER && member->whole ? member->integer : otherwise;
}

double td_json_get_number(const td_json *object, const char *name, double otherwise)
{
    const td_json *member = td_json_get(object, name);
    return member && member->kind == TD_JSON_NUMBER ? member->number : otherwise;
}
