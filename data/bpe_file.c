/* Files of byte-level BPE: vocab.json with merges.txt, and tokenizer.json.
 *
 * In both a token is written in characters that stand for its bytes: printable ones for themselves, the other 68 by
 * U+0100 and what follows. What a tokenizer.json asks for beyond that is done or refused, never passed over.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/json.h"
#include "data/tokenizer.h"

enum { LARGEST_ID = (1 << 24) - 1 };

typedef struct bpe_reader {
    td_context *td;
    const char *path;      /* of the file at fault, for errors */
    const td_json *vocab;  /* object: token, id */
    const td_json *merges; /* array, or NULL: merges.txt */
    const td_json *added;  /* array or NULL */
    bpe_options options;
    data_tokenizer *t;
    char *room; /* of the pool, not used yet */
} bpe_reader;

static bool wrong(const bpe_reader *r, const char *format, ...) TD_PRINTF(2, 3);
static bool wrong(const bpe_reader *r, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    td_fail(r->td, TD_ERROR_DATA, "%s: %s", r->path, text);
    return false;
}

/* ---- Characters that stand for bytes ----------------------------------------------------------------------- */

/* The byte of a code point; -1: it stands for none. Those that are not printable in Latin-1 come from U+0100 on. */
static int byte_of(uint32_t code)
{
    enum { SPACE_END = 0x21, DELETE = 0x7F, NO_BREAK_END = 0xA1, SOFT_HYPHEN = 0xAD, SHIFTED = 0x100 };
    if (code < SHIFTED) {
        bool other = code < SPACE_END || (code >= DELETE && code < NO_BREAK_END) || code == SOFT_HYPHEN;
        return other ? -1 : (int)code;
    }
    uint32_t n = code - SHIFTED;
    if (n < SPACE_END) return (int)n;
    n += DELETE - SPACE_END;
    if (n < NO_BREAK_END) return (int)n;
    return n == NO_BREAK_END ? SOFT_HYPHEN : -1;
}

/* Writes the bytes of [text, end), which are no more than its own; returns how many, -1: it is not written so. */
static int64_t to_bytes(const char *text, const char *end, char *to)
{
    int64_t bytes = 0;
    for (uint32_t code; text < end; bytes++) {
        text += data_utf8_get((const uint8_t *)text, &code);
        int byte = byte_of(code);
        if (byte < 0) return -1;
        to[bytes] = (char)byte;
    }
    return bytes;
}

/* The text as it stands, at the end of the pool. */
static token_text put_literal(bpe_reader *r, const char *text)
{
    token_text token = { r->room, (int64_t)strlen(text) };
    memcpy(r->room, text, (size_t)token.bytes);
    r->room += token.bytes;
    return token;
}

/* ---- Vocabulary -------------------------------------------------------------------------------------------- */

static bool count_ids(bpe_reader *r, int64_t *vocabulary, int64_t *pool)
{
    for (const td_json *token = r->vocab->first; token; token = token->next) {
        if (token->kind != TD_JSON_NUMBER || !token->whole || token->integer < 0 || token->integer > LARGEST_ID)
            return wrong(r, "the id of token \"%.64s\" is not a whole number from 0 to %d", token->name, LARGEST_ID);
        if (token->integer >= *vocabulary) *vocabulary = token->integer + 1;
        *pool += (int64_t)strlen(token->name);
    }
    for (const td_json *token = r->added ? r->added->first : NULL; token; token = token->next) {
        const char *content = td_json_get_string(token, "content");
        int64_t id = td_json_get_whole(token, "id", -1);
        if (!content || !content[0] || id < 0 || id > LARGEST_ID)
            return wrong(r, "an added token has no text or no id from 0 to %d", LARGEST_ID);
        if (id >= *vocabulary) *vocabulary = id + 1;
        *pool += (int64_t)strlen(content);
    }
    return *vocabulary > 0 || wrong(r, "the vocabulary is empty");
}

static bool add_vocabulary(bpe_reader *r)
{
    data_tokenizer *t = r->t;
    for (const td_json *token = r->vocab->first; token; token = token->next) {
        int32_t id = (int32_t)token->integer;
        if (t->token[id].text) return wrong(r, "id %d is given to two tokens, \"%.64s\" is one", id, token->name);
        int64_t bytes = to_bytes(token->name, token->name + strlen(token->name), r->room);
        if (bytes <= 0) { /* an added token: no bytes of words are written so */
            t->token[id] = put_literal(r, token->name);
            continue;
        }
        t->token[id] = (token_text){ r->room, bytes };
        r->room += bytes;
        data_bpe_add_token(t, id);
    }
    return true;
}

static bool boolean(const td_json *object, const char *name, bool otherwise)
{
    const td_json *value = td_json_get(object, name);
    return value && value->kind == TD_JSON_BOOLEAN ? value->boolean : otherwise;
}

static bool add_special(bpe_reader *r, const td_json *added)
{
    data_tokenizer *t = r->t;
    const char *content = td_json_get_string(added, "content");
    int32_t id = (int32_t)td_json_get_whole(added, "id", -1);
    static const char *const refused[] = { "single_word", "lstrip", "rstrip" };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        if (boolean(added, refused[i], false))
            return wrong(r, "added token \"%.64s\" has \"%s\", which is not supported", content, refused[i]);
    }
    token_text before = t->token[id];
    token_text token = put_literal(r, content);
    if (before.text && (before.bytes != token.bytes || memcmp(before.text, token.text, (size_t)token.bytes) != 0))
        return wrong(r, "added token \"%.64s\" has id %d, which another token has", content, id);
    t->token[id] = token;
    data_bpe_add_special(t, id, boolean(added, "normalized", false));
    return true;
}

/* ---- Merges ------------------------------------------------------------------------------------------------ */

typedef struct merge_part {
    const char *text, *end;
} merge_part;

/* what, number: "line" 3, say. */
static bool add_merge(bpe_reader *r, merge_part left, merge_part right, const char *what, int64_t number)
{
    enum { LARGEST_TOKEN = 4096 };
    char bytes[2 * LARGEST_TOKEN];
    int32_t id[3] = { -1, -1, -1 };
    if (left.end - left.text <= LARGEST_TOKEN && right.end - right.text <= LARGEST_TOKEN) {
        int64_t l = to_bytes(left.text, left.end, bytes);
        int64_t second = l > 0 ? to_bytes(right.text, right.end, bytes + l) : -1;
        if (second > 0) {
            id[0] = data_bpe_find(r->t, bytes, l);
            id[1] = data_bpe_find(r->t, bytes + l, second);
            id[2] = data_bpe_find(r->t, bytes, l + second);
        }
    }
    if (id[0] >= 0 && id[1] >= 0 && id[2] >= 0) {
        data_bpe_add_merge(r->t, id[0], id[1], id[2]);
        return true;
    }
    return wrong(r,
                 "%s %" PRId64 ": \"%.*s\", \"%.*s\" or the two joined is not in the vocabulary; the vocabulary and "
                 "the merges must come from one tokenizer",
                 what, number, (int)(left.end - left.text), left.text, (int)(right.end - right.text), right.text);
}

static bool add_written_merge(bpe_reader *r, const char *text, const char *end, const char *what, int64_t number)
{
    const char *space = memchr(text, ' ', (size_t)(end - text));
    if (!space || space == text || space + 1 == end || memchr(space + 1, ' ', (size_t)(end - space - 1)))
        return wrong(r, "%s %" PRId64 " is not two tokens with a space between: \"%.*s\"", what, number,
                     (int)(end - text < 64 ? end - text : 64), text);
    return add_merge(r, (merge_part){ text, space }, (merge_part){ space + 1, end }, what, number);
}

static merge_part whole(const td_json *string)
{
    return (merge_part){ string->string, string->string + strlen(string->string) };
}

static bool add_json_merges(bpe_reader *r)
{
    int64_t number = 1;
    for (const td_json *merge = r->merges->first; merge; merge = merge->next, number++) {
        if (merge->kind == TD_JSON_STRING) {
            if (!add_written_merge(r, whole(merge).text, whole(merge).end, "merge", number)) return false;
            continue;
        }
        const td_json *left = merge->kind == TD_JSON_ARRAY && merge->count == 2 ? merge->first : NULL;
        if (!left || left->kind != TD_JSON_STRING || left->next->kind != TD_JSON_STRING)
            return wrong(r, "merge %" PRId64 " is neither a text nor two", number);
        if (!add_merge(r, whole(left), whole(left->next), "merge", number)) return false;
    }
    return true;
}

/* Lines of "left right"; those that are empty or begin with "#version" are none. */
static bool add_text_merges(bpe_reader *r, const char *text, int64_t bytes)
{
    static const char version[] = "#version";
    int64_t valid = data_utf8_valid_prefix((const uint8_t *)text, bytes), line = 1;
    if (valid < bytes) return wrong(r, "not UTF-8 at byte %" PRId64, valid);
    for (const char *end = text + bytes, *next; text < end; text = next, line++) {
        const char *stop = memchr(text, '\n', (size_t)(end - text));
        next = stop ? stop + 1 : end;
        if (!stop) stop = end;
        if (stop > text && stop[-1] == '\r') stop--;
        if (stop == text) continue;
        if (stop - text >= (int64_t)sizeof version - 1 && memcmp(text, version, sizeof version - 1) == 0) continue;
        if (!add_written_merge(r, text, stop, "line", line)) return false;
    }
    return true;
}

/* ---- What a tokenizer.json asks for ------------------------------------------------------------------------ */

static const char *type_of(const td_json *object)
{
    const char *type = td_json_get_string(object, "type");
    return type ? type : "without a type";
}

static bool absent(const td_json *value) { return !value || value->kind == TD_JSON_NULL; }

/* The parts of a "Sequence", or the object itself as a list of one. */
static const td_json *parts_of(const td_json *object, const char *list, int64_t *count)
{
    *count = 1;
    if (strcmp(type_of(object), "Sequence") != 0) return object;
    const td_json *parts = td_json_get(object, list);
    *count = parts && parts->kind == TD_JSON_ARRAY ? parts->count : 0;
    return *count > 0 ? parts->first : NULL;
}

static bool read_normalizer(bpe_reader *r, const td_json *normalizer)
{
    if (absent(normalizer)) return true;
    int64_t count;
    const td_json *part = parts_of(normalizer, "normalizers", &count);
    for (; count > 0; count--, part = part->next) {
        if (strcmp(type_of(part), "NFC") != 0)
            return wrong(r, "its normalizer is %.64s; only NFC is supported", type_of(part));
        r->options.words.nfc = true;
    }
    return true;
}

static bool read_split(bpe_reader *r, const td_json *split)
{
    const char *pattern = td_json_get_string(td_json_get(split, "pattern"), "Regex");
    const char *behavior = td_json_get_string(split, "behavior");
    if (!pattern || !behavior || strcmp(behavior, "Isolated") != 0 || boolean(split, "invert", false))
        return wrong(r, "its pre-tokenizer Split is supported with a \"Regex\" and behavior \"Isolated\" only");
    if (r->options.words.pattern) return wrong(r, "it has two pre-tokenizers that split text; one is supported");
    r->options.words.pattern = pattern;
    return true;
}

static bool read_pre_tokenizer(bpe_reader *r, const td_json *pre_tokenizer)
{
    bool byte_level = false;
    int64_t count = 0;
    const td_json *part = absent(pre_tokenizer) ? NULL : parts_of(pre_tokenizer, "pretokenizers", &count);
    for (; count > 0; count--, part = part->next) {
        const char *type = type_of(part);
        if (strcmp(type, "Split") == 0 && !byte_level) {
            if (!read_split(r, part)) return false;
            continue;
        }
        if (strcmp(type, "ByteLevel") != 0 || byte_level)
            return wrong(r, "its pre-tokenizer %.64s is not supported: ByteLevel is, alone or after one Split", type);
        if (boolean(part, "add_prefix_space", true))
            return wrong(r, "its pre-tokenizer ByteLevel has \"add_prefix_space\", which is not supported");
        bool split = r->options.words.pattern != NULL;
        if (boolean(part, "use_regex", true) == split)
            return wrong(r,
                         "its pre-tokenizer must split text once, by ByteLevel's \"use_regex\" or a Split before it");
        byte_level = true;
    }
    return byte_level || wrong(r, "it has no pre-tokenizer ByteLevel: only byte-level BPE is supported");
}

static bool read_model(bpe_reader *r, const td_json *model)
{
    const char *type = td_json_get_string(model, "type");
    if (type && strcmp(type, "BPE") != 0) return wrong(r, "its model is %.64s; BPE is supported", type);
    if (!absent(td_json_get(model, "dropout")) && td_json_get_number(model, "dropout", 1) != 0)
        return wrong(r, "its model has \"dropout\", which is not supported");
    static const char *const affixes[] = { "continuing_subword_prefix", "end_of_word_suffix" };
    for (size_t i = 0; i < sizeof affixes / sizeof *affixes; i++) {
        const char *affix = td_json_get_string(model, affixes[i]);
        if (affix && affix[0]) return wrong(r, "its model has a \"%s\", which is not supported", affixes[i]);
    }
    r->options.whole_words = boolean(model, "ignore_merges", false);
    r->vocab = td_json_get(model, "vocab");
    r->merges = td_json_get(model, "merges");
    if (!r->vocab || r->vocab->kind != TD_JSON_OBJECT || !r->merges || r->merges->kind != TD_JSON_ARRAY)
        return wrong(r, "it has no object \"model\" with an object \"vocab\" and an array \"merges\"");
    return true;
}

/* ---- Reading ----------------------------------------------------------------------------------------------- */

/* The tokenizer with its vocabulary; merges and added tokens are to come. */
static bool make(bpe_reader *r)
{
    int64_t vocabulary = 0, pool = 1;
    if (!count_ids(r, &vocabulary, &pool)) return false;
    r->t = data_tokenizer_make(r->td, vocabulary, pool);
    if (!r->t) return false;
    r->room = r->t->pool;
    return data_bpe_open(r->t, &r->options) && add_vocabulary(r);
}

static bool read_tokenizer(bpe_reader *r, const td_json *root)
{
    r->added = td_json_get(root, "added_tokens");
    if (r->added && r->added->kind != TD_JSON_ARRAY) r->added = NULL;
    if (!read_model(r, td_json_get(root, "model"))) return false;
    if (!read_normalizer(r, td_json_get(root, "normalizer"))) return false;
    if (!read_pre_tokenizer(r, td_json_get(root, "pre_tokenizer"))) return false;
    r->options.merges = r->merges->count;
    r->options.added = r->added ? r->added->count : 0;
    if (!make(r) || !add_json_merges(r)) return false;
    for (const td_json *added = r->added ? r->added->first : NULL; added; added = added->next) {
        if (!add_special(r, added)) return false;
    }
    return true;
}

static bool read_pair(bpe_reader *r, const td_json *root, const char *merges_path)
{
    r->vocab = root;
    if (root->kind != TD_JSON_OBJECT) return wrong(r, "not an object of tokens and their ids");
    int64_t bytes;
    size_t room;
    char *text = data_text_load(r->td, merges_path, &bytes, &room);
    if (!text) return false;
    for (int64_t i = 0; i < bytes; i++) r->options.merges += text[i] == '\n';
    r->options.merges++;
    bool good = make(r);
    r->path = merges_path;
    good = good && add_text_merges(r, text, bytes);
    td_free(r->td, text, room, "data");
    return good;
}

static bool there(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0 && !S_ISDIR(status.st_mode);
}

data_tokenizer *data_bpe_read(td_context *td, const char *path)
{
    char json[DATA_PATH_BYTES], merges[DATA_PATH_BYTES];
    struct stat status;
    bool folder = stat(path, &status) == 0 && S_ISDIR(status.st_mode), pair = false;
    const char *name = folder ? "/tokenizer.json" : "";
    if (snprintf(json, sizeof json, "%s%s", path, name) >= (int)sizeof json ||
        snprintf(merges, sizeof merges, "%s/merges.txt", path) >= (int)sizeof merges) {
        td_fail(td, TD_ERROR_DATA, "%.64s...: the path is longer than %d bytes", path, DATA_PATH_BYTES - 32);
        return NULL;
    }
    if (folder && !there(json)) {
        snprintf(json, sizeof json, "%s/vocab.json", path);
        pair = true;
        if (!there(json) || !there(merges)) {
            td_fail(td, TD_ERROR_DATA, "%s: holds neither tokenizer.json nor vocab.json and merges.txt", path);
            return NULL;
        }
    }
    td_json_document *document = td_json_read(td, json);
    if (!document) return NULL;
    const td_json *root = td_json_root(document);
    bpe_reader r = { .td = td, .path = json, .options.words.source = json };
    bool good = pair ? read_pair(&r, root, merges) : read_tokenizer(&r, root);
    td_json_close(document);
    if (good) {
        data_bpe_ready(r.t);
        return r.t;
    }
    data_tokenizer_close(r.t);
    return NULL;
}
