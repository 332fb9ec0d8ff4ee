/* Long sequences of ids: a text file encoded, or a file of ids mapped into memory. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/tokenizer.h"

enum { FIRST_ROOM = 1 << 20, SHORT_IDS = 1 << 16 /* ids of so small a vocabulary take 16 bits */ };

char *data_text_load(td_context *td, const char *path, int64_t *bytes, size_t *room)
{
    data_file file;
    if (!data_file_open(&file, td, path)) return NULL;
    *room = file.limit < FIRST_ROOM ? (size_t)file.limit + 1 : FIRST_ROOM;
    char *text = td_alloc(td, *room, "data");
    *bytes = 0;
    while (text) {
        int64_t got = data_file_read(&file, text + *bytes, (int64_t)*room - *bytes);
        if (got > 0) *bytes += got;
        bool full = *bytes == (int64_t)*room;
        if (got < 0 || (!full && *bytes == 0)) {
            if (got == 0) td_fail(td, TD_ERROR_DATA, "%s: the file is empty; fetch or write it again", path);
            td_free(td, text, *room, "data");
            text = NULL;
        }
        if (!text || !full) break;
        char *larger = td_alloc(td, 2 * *room, "data");
        if (larger) memcpy(larger, text, *room);
        td_free(td, text, *room, "data");
        text = larger;
        *room *= 2;
    }
    data_file_close(&file);
    return text;
}

static data_ids *make(td_context *td, const char *path, int64_t vocabulary)
{
    data_ids *ids = td_alloc(td, sizeof *ids, "data");
    if (!ids) return NULL;
    *ids = (data_ids){ .td = td, .vocabulary = vocabulary };
    snprintf(ids->name, sizeof ids->name, "%s", path);
    return ids;
}

int64_t data_ids_count(const data_ids *ids) { return ids ? ids->count : 0; }

void data_ids_close(data_ids *ids)
{
    if (!ids) return;
    if (ids->data && ids->mapped) munmap((void *)ids->data, ids->bytes);
    if (ids->data && !ids->mapped) td_free(ids->td, (void *)ids->data, ids->bytes, "data");
    td_free(ids->td, ids, sizeof *ids, "data");
}

/* ---- Encoded text ------------------------------------------------------------------------------------------ */

/* All ids of the text; the memory has *room of them. */
static int32_t *encode(data_tokenizer *t, const char *text, int64_t bytes, int64_t *count, int64_t *room)
{
    /* English has a token for 4 bytes; of denser text the count is known after a first try. */
    *room = t->kind == TOKENIZER_BPE ? bytes / 3 + 1 : bytes;
    for (int try = 0; try < 2; try++, *room = *count) {
        int32_t *ids = td_alloc(t->td, (size_t)*room * sizeof *ids, "data");
        if (!ids) return NULL;
        *count = data_tokenizer_encode(t, text, bytes, ids, *room);
        if (*count >= 0 && *count <= *room) return ids;
        td_free(t->td, ids, (size_t)*room * sizeof *ids, "data");
        if (*count < 0) return NULL;
    }
    return NULL;
}

/* The ids in memory of their size and width. */
static bool keep(data_ids *to, const int32_t *ids, int64_t count)
{
    to->bits = to->vocabulary <= SHORT_IDS ? 16 : 32;
    to->count = count;
    to->bytes = (size_t)count * (size_t)(to->bits / 8);
    void *data = td_alloc(to->td, to->bytes, "data");
    to->data = data;
    if (!data) return false;
    if (to->bits == 32) {
        memcpy(data, ids, to->bytes);
        return true;
    }
    for (int64_t i = 0; i < count; i++) ((uint16_t *)data)[i] = (uint16_t)ids[i];
    return true;
}

data_ids *data_text(td_context *td, const char *path, data_tokenizer *tokenizer)
{
    if (!tokenizer) return NULL;
    int64_t bytes, count = 0, room = 0;
    size_t text_room;
    char *text = data_text_load(td, path, &bytes, &text_room);
    if (!text) return NULL;
    int32_t *all = encode(tokenizer, text, bytes, &count, &room);
    td_free(td, text, text_room, "data");
    if (!all) return NULL;
    data_ids *ids = make(td, path, tokenizer->vocabulary);
    bool good = ids && keep(ids, all, count);
    td_free(tokenizer->td, all, (size_t)room * sizeof *all, "data");
    if (good) return ids;
    data_ids_close(ids);
    return NULL;
}

/* ---- Mapped files ------------------------------------------------------------------------------------------ */

static bool map(data_ids *ids, const char *path)
{
    td_context *td = ids->td;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) {
        td_fail(td, TD_ERROR_DATA, "%s: cannot be opened: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        return false;
    }
    int64_t bytes = status.st_size, width = ids->bits / 8;
    bool good = false;
    if (!S_ISREG(status.st_mode)) {
        td_fail(td, TD_ERROR_DATA, "%s: is not a regular file, a file of token ids is needed", path);
    } else if (bytes == 0) {
        td_fail(td, TD_ERROR_DATA, "%s: the file is empty; fetch or write it again", path);
    } else if (bytes % width != 0) {
        td_fail(td, TD_ERROR_DATA,
                "%s: %" PRId64 " bytes are not whole ids of %d bits; it is cut off, or of another kind", path, bytes,
                ids->bits);
    } else {
        void *data = mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED, fd, 0);
        good = data != MAP_FAILED;
        if (good) ids->data = data;
        else td_fail(td, TD_ERROR_DATA, "%s: cannot be mapped into memory: %s", path, strerror(errno));
    }
    close(fd);
    ids->bytes = (size_t)bytes;
    ids->count = bytes / width;
    return good;
}

data_ids *data_tokens(td_context *td, const char *path, const data_tokens_options *options)
{
    data_tokens_options o = options ? *options : (data_tokens_options){ 0 };
    if (o.bits == 0) o.bits = 16;
    int64_t most = o.bits == 16 ? SHORT_IDS : (int64_t)INT32_MAX + 1;
    if (o.vocabulary == 0) o.vocabulary = most;
    if ((o.bits != 16 && o.bits != 32) || o.vocabulary < 1 || o.vocabulary > (int64_t)INT32_MAX + 1) {
        td_fail(td, TD_ERROR_USAGE,
                "data_tokens: ids of %d bits below %" PRId64
                " asked for; 16 and 32 bits can be had, ids below 1 to 2^31",
                o.bits, o.vocabulary);
        return NULL;
    }
    data_ids *ids = make(td, path, o.vocabulary);
    if (!ids) return NULL;
    ids->mapped = true;
    ids->bits = o.bits;
    if (map(ids, path)) return ids;
    data_ids_close(ids);
    return NULL;
}
