/* Tokenizers of characters and of bytes, and what all kinds share. */
#include <inttypes.h>
#include <string.h>

#include "core/utf8.h"
#include "data/tokenizer.h"

/* FNV-1a, which a prime multiplies and a mix ends. */
void data_tokenizer_stamp(data_tokenizer *t, const void *bytes, int64_t count)
{
    const uint8_t *b = bytes;
    uint64_t hash = t->fingerprint + (uint64_t)count;
    for (int64_t i = 0; i < count; i++) hash = (hash ^ b[i]) * 0x100000001b3u;
    t->fingerprint = data_mix(hash);
}

data_tokenizer *data_tokenizer_make(td_context *td, int64_t vocabulary, int64_t pool_bytes)
{
    data_tokenizer *t = td_alloc(td, sizeof *t, "data");
    if (!t) return NULL;
    *t = (data_tokenizer){ .td = td, .vocabulary = vocabulary, .pool_bytes = pool_bytes };
    t->token = td_alloc(td, (size_t)vocabulary * sizeof *t->token, "data");
    t->pool = t->token ? td_alloc(td, (size_t)pool_bytes, "data") : NULL;
    if (!t->pool) {
        data_tokenizer_close(t);
        return NULL;
    }
    for (int64_t i = 0; i < vocabulary; i++) t->token[i] = (token_text){ 0 };
    return t;
}

void data_tokenizer_close(data_tokenizer *t)
{
    if (!t) return;
    td_context *td = t->td;
    if (t->bpe) data_bpe_close(t);
    if (t->character) td_free(td, t->character, (size_t)t->characters * sizeof *t->character, "data");
    if (t->pool) td_free(td, t->pool, (size_t)t->pool_bytes, "data");
    if (t->token) td_free(td, t->token, (size_t)t->vocabulary * sizeof *t->token, "data");
    td_free(td, t, sizeof *t, "data");
}

data_tokenizer *data_tokenizer_open(td_context *td, const char *path)
{
    if (path) return data_bpe_read(td, path);
    td_fail(td, TD_ERROR_USAGE,
            "data_tokenizer_open: no path given: name a folder with tokenizer.json, or with "
            "vocab.json and merges.txt");
    return NULL;
}

data_tokenizer *data_tokenizer_bytes(td_context *td)
{
    enum { BYTES = 256 };
    data_tokenizer *t = data_tokenizer_make(td, BYTES, BYTES);
    if (!t) return NULL;
    t->kind = TOKENIZER_BYTES;
    for (int i = 0; i < BYTES; i++) {
        t->pool[i] = (char)i;
        t->token[i] = (token_text){ &t->pool[i], 1 };
    }
    data_tokenizer_stamp(t, "bytes", 5);
    return t;
}

/* ---- Characters -------------------------------------------------------------------------------------------- */

typedef struct seen {
    bool point[CODE_POINTS];
    int64_t count, bytes; /* characters, and the bytes of their UTF-8 */
    uint32_t largest;
} seen;

static void look(seen *in, const uint8_t *s, int64_t bytes)
{
    for (int64_t i = 0; i < bytes;) {
        bool valid;
        uint32_t point = REPLACEMENT;
        int step = td_utf8_step(s + i, bytes - i, &valid);
        if (valid) data_utf8_get(s + i, &point);
        i += step;
        if (in->point[point]) continue;
        in->point[point] = true;
        in->count++;
        in->bytes += data_utf8_put(point, (uint8_t[4]){ 0 });
        if (point > in->largest) in->largest = point;
    }
}

static data_tokenizer *of_seen(td_context *td, const seen *in)
{
    data_tokenizer *t = data_tokenizer_make(td, in->count, in->bytes);
    if (!t) return NULL;
    t->kind = TOKENIZER_CHARACTERS;
    t->characters = (int64_t)in->largest + 1;
    t->character = td_alloc(td, (size_t)t->characters * sizeof *t->character, "data");
    if (!t->character) {
        data_tokenizer_close(t);
        return NULL;
    }
    int32_t id = 0;
    char *to = t->pool;
    for (uint32_t point = 0; point <= in->largest; point++) {
        t->character[point] = -1;
        if (!in->point[point]) continue;
        int step = data_utf8_put(point, (uint8_t *)to);
        t->token[id] = (token_text){ to, step };
        t->character[point] = id++;
        to += step;
    }
    data_tokenizer_stamp(t, t->pool, t->pool_bytes);
    return t;
}

data_tokenizer *data_tokenizer_characters(td_context *td, const char *text, int64_t bytes)
{
    if (!text || bytes < 1) {
        td_fail(td, TD_ERROR_USAGE, "data_tokenizer_characters: the text is empty: it has no characters");
        return NULL;
    }
    seen *in = td_alloc(td, sizeof *in, "data");
    if (!in) return NULL;
    memset(in, 0, sizeof *in);
    look(in, (const uint8_t *)text, bytes);
    data_tokenizer *t = of_seen(td, in);
    td_free(td, in, sizeof *in, "data");
    return t;
}

data_tokenizer *data_tokenizer_characters_of(td_context *td, const char *path)
{
    int64_t bytes;
    size_t room;
    char *text = data_text_load(td, path, &bytes, &room);
    if (!text) return NULL;
    data_tokenizer *t = data_tokenizer_characters(td, text, bytes);
    td_free(td, text, room, "data");
    return t;
}

static bool encode_characters(data_tokenizer *t, const uint8_t *s, int64_t bytes, id_sink *sink)
{
    uint32_t point;
    for (int64_t i = 0; i < bytes;) {
        int step = data_utf8_get(s + i, &point);
        int32_t id = point < t->characters ? t->character[point] : -1;
        if (id < 0) {
            td_fail(t->td, TD_ERROR_DATA,
                    "data_tokenizer_encode: the text holds the character U+%04" PRIX32 " \"%.*s\", which is none of "
                    "the %" PRId64 " of the vocabulary; leave it out, or use a tokenizer that has it",
                    point, point < ' ' ? 0 : step, (const char *)s + i, t->vocabulary);
            return false;
        }
        data_id_put(sink, id);
        i += step;
    }
    return true;
}

/* ---- All kinds --------------------------------------------------------------------------------------------- */

int64_t data_tokenizer_vocabulary(const data_tokenizer *t) { return t ? t->vocabulary : 0; }

uint64_t data_tokenizer_fingerprint(const data_tokenizer *t) { return t ? t->fingerprint : 0; }

int32_t data_tokenizer_token(const data_tokenizer *t, const char *text)
{
    int64_t bytes = (int64_t)strlen(text);
    for (int64_t i = 0; t && i < t->vocabulary; i++) {
        const token_text *token = &t->token[i];
        if (token->text && token->bytes == bytes && memcmp(token->text, text, (size_t)bytes) == 0) return (int32_t)i;
    }
    return -1;
}

const char *data_tokenizer_alphabet(const data_tokenizer *t, int64_t *bytes)
{
    bool has = t && t->kind == TOKENIZER_CHARACTERS;
    *bytes = has ? t->pool_bytes : 0;
    return has ? t->pool : NULL;
}

/* Valid UTF-8, but for bytes. */
static bool encode(data_tokenizer *t, const uint8_t *s, int64_t bytes, id_sink *sink)
{
    switch (t->kind) {
    case TOKENIZER_CHARACTERS: return encode_characters(t, s, bytes, sink);
    case TOKENIZER_BPE: return data_bpe_encode(t, s, bytes, sink);
    default:
        for (int64_t i = 0; i < bytes; i++) data_id_put(sink, s[i]);
        return true;
    }
}

int64_t data_tokenizer_encode(data_tokenizer *t, const char *text, int64_t bytes, int32_t *ids, int64_t room)
{
    if (!t) return -1;
    const uint8_t *s = (const uint8_t *)text;
    id_sink sink = { .ids = ids, .room = room };
    if (t->kind == TOKENIZER_BYTES || data_utf8_valid_prefix(s, bytes) == bytes)
        return encode(t, s, bytes, &sink) ? sink.count : -1;
    int64_t replaced = data_utf8_replace(s, bytes, NULL);
    uint8_t *copy = td_alloc(t->td, (size_t)replaced, "data");
    if (!copy) return -1;
    data_utf8_replace(s, bytes, copy);
    bool good = encode(t, copy, replaced, &sink);
    td_free(t->td, copy, (size_t)replaced, "data");
    return good ? sink.count : -1;
}

int64_t data_tokenizer_decode(const data_tokenizer *t, const int32_t *ids, int64_t count, char *text, int64_t room)
{
    if (!t) return -1;
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        bool used = ids[i] >= 0 && ids[i] < t->vocabulary && t->token[ids[i]].text;
        if (!used) {
            td_fail(t->td, TD_ERROR_USAGE,
                    "data_tokenizer_decode: id %" PRId32 " at place %" PRId64 " is none of the vocabulary's, which are "
                    "below %" PRId64,
                    ids[i], i, t->vocabulary);
            return -1;
        }
        token_text token = t->token[ids[i]];
        int64_t fits = token.bytes < room - bytes ? token.bytes : room - bytes;
        if (fits > 0) memcpy(text + bytes, token.text, (size_t)fits);
        bytes += token.bytes;
    }
    return bytes;
}
