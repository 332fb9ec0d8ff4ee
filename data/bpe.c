/* Byte-level BPE (Sennrich et al. 2016, on bytes as in GPT-2).
 *
 * A text is split at added tokens, what is between them is cut into words, and each word starts as its bytes; of all
 * pairs of neighbours the merge of lowest rank is done, the leftmost first, until none is left. A heap of candidates
 * keeps a word of n bytes at n log n. Words of up to 31 bytes and 7 ids are remembered, one in each slot of a table.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/tokenizer.h"

enum {
    CACHE_BITS = 16, /* 4 MiB */
    CACHE_SLOTS = 1 << CACHE_BITS,
    CACHE_TEXT = 31,
    CACHE_IDS = 7,
    FIRST_WORD = 1024, /* bytes for which there is room from the start */
    LARGEST_WORD = 1 << 30,
    TABLE_SLACK = 2, /* slots for each entry of a hash table */
    PAIRS = 1 << 16,
};

/* Merges of ids: an open hash table. */
typedef struct bpe_merge {
    uint64_t pair; /* left << 32 | right; EMPTY: none */
    int32_t rank, merged;
} bpe_merge;

#define EMPTY UINT64_MAX

typedef struct bpe_cached {
    uint64_t key[4]; /* the word and zeros, its length in the last byte; 0: none */
    int32_t count, ids[CACHE_IDS];
} bpe_cached;

typedef struct bpe_symbol {
    int32_t id; /* -1: merged into the one before */
    int32_t before, after;
} bpe_symbol;

/* Added tokens, by their first byte and the longest first: those of byte b are id[first[b]] up to id[first[b + 1]]. */
typedef struct bpe_specials {
    int32_t *id;
    int64_t count, first[257];
    uint64_t pair[PAIRS / 64]; /* whether a token may begin with these two bytes */
} bpe_specials;

struct bpe {
    words *words;
    bool whole_words, nfc, warned;
    int32_t byte[256]; /* id, or -1 */
    int32_t *token;    /* an open hash table of ids by text; -1: none */
    bpe_merge *merge;
    uint64_t token_slots, merge_slots; /* powers of two */
    int32_t merges;
    int64_t added; /* room in each of the specials */
    bpe_specials early, late;
    bpe_cached *cache;
    bpe_symbol *symbol; /* word_room */
    uint64_t *heap;     /* 2 * word_room */
    int64_t word_room;
};

/* ---- Tables ------------------------------------------------------------------------------------------------ */

static uint64_t slots_for(int64_t entries)
{
    uint64_t slots = 16;
    while (slots < (uint64_t)entries * TABLE_SLACK) slots *= 2;
    return slots;
}

static uint64_t hash_text(const char *text, int64_t bytes)
{
    uint64_t hash = (uint64_t)bytes;
    for (int64_t i = 0; i < bytes; i++) hash = (hash ^ (uint8_t)text[i]) * 0x100000001b3u;
    return data_mix(hash);
}

/* The slot that has the text, or the empty one where it belongs. */
static int32_t *token_slot(const data_tokenizer *t, const char *text, int64_t bytes)
{
    const bpe *b = t->bpe;
    for (uint64_t i = hash_text(text, bytes);; i++) {
        int32_t *slot = &b->token[i & (b->token_slots - 1)];
        if (*slot < 0) return slot;
        token_text token = t->token[*slot];
        if (token.bytes == bytes && memcmp(token.text, text, (size_t)bytes) == 0) return slot;
    }
}

int32_t data_bpe_find(const data_tokenizer *t, const char *text, int64_t bytes) { return *token_slot(t, text, bytes); }

void data_bpe_add_token(data_tokenizer *t, int32_t id)
{
    token_text token = t->token[id];
    *token_slot(t, token.text, token.bytes) = id;
    if (token.bytes == 1) t->bpe->byte[(uint8_t)token.text[0]] = id;
}

static bpe_merge *merge_slot(const bpe *b, int32_t left, int32_t right)
{
    uint64_t pair = (uint64_t)left << 32 | (uint32_t)right;
    for (uint64_t i = (pair * DATA_GOLDEN) >> 32;; i++) {
        bpe_merge *slot = &b->merge[i & (b->merge_slots - 1)];
        if (slot->pair == pair || slot->pair == EMPTY) return slot;
    }
}

void data_bpe_add_merge(data_tokenizer *t, int32_t left, int32_t right, int32_t merged)
{
    bpe *b = t->bpe;
    uint64_t pair = (uint64_t)left << 32 | (uint32_t)right;
    *merge_slot(b, left, right) = (bpe_merge){ .pair = pair, .rank = b->merges++, .merged = merged };
    data_tokenizer_stamp(t, (int32_t[]){ left, right, merged }, 3 * sizeof(int32_t));
}

/* ---- Added tokens ------------------------------------------------------------------------------------------ */

void data_bpe_add_special(data_tokenizer *t, int32_t id, bool late)
{
    bpe_specials *s = late ? &t->bpe->late : &t->bpe->early;
    s->id[s->count++] = id;
    data_tokenizer_stamp(t, (int32_t[]){ id, late }, 2 * sizeof(int32_t));
}

static int by_first_and_length(const void *a, const void *b, void *tokenizer)
{
    const data_tokenizer *t = tokenizer;
    const token_text *x = &t->token[*(const int32_t *)a], *y = &t->token[*(const int32_t *)b];
    if (x->text[0] != y->text[0]) return (uint8_t)x->text[0] < (uint8_t)y->text[0] ? -1 : 1;
    return (x->bytes < y->bytes) - (x->bytes > y->bytes);
}

static void specials_ready(data_tokenizer *t, bpe_specials *s)
{
    if (s->count == 0) return;
    qsort_r(s->id, (size_t)s->count, sizeof *s->id, by_first_and_length, t);
    int64_t i = 0;
    for (int byte = 0; byte <= 256; byte++) {
        s->first[byte] = i;
        while (i < s->count && (uint8_t)t->token[s->id[i]].text[0] == byte) i++;
    }
    for (i = 0; i < s->count; i++) {
        const uint8_t *text = (const uint8_t *)t->token[s->id[i]].text;
        bool one = t->token[s->id[i]].bytes == 1;
        for (int second = 0; second < 256; second++) {
            int pair = text[0] << 8 | second;
            if (one || text[1] == second) s->pair[pair / 64] |= (uint64_t)1 << pair % 64;
        }
    }
}

/* The first of the tokens in [s, end), of several there the longest; end and -1: none. */
static const uint8_t *find_special(const data_tokenizer *t, const bpe_specials *specials, const uint8_t *s,
                                   const uint8_t *end, int32_t *id)
{
    *id = -1;
    if (specials->count == 0) return end;
    for (; s < end; s++) {
        int pair = s + 1 < end ? s[0] << 8 | s[1] : -1;
        if (pair >= 0 && !(specials->pair[pair / 64] >> pair % 64 & 1)) continue;
        for (int64_t i = specials->first[*s]; i < specials->first[*s + 1]; i++) {
            token_text token = t->token[specials->id[i]];
            if (token.bytes > end - s || memcmp(token.text, s, (size_t)token.bytes) != 0) continue;
            *id = specials->id[i];
            return s;
        }
    }
    return end;
}

/* ---- Words ------------------------------------------------------------------------------------------------- */

static void release_word(td_context *td, bpe *b)
{
    size_t room = (size_t)b->word_room;
    if (b->symbol) td_free(td, b->symbol, room * sizeof *b->symbol, "data");
    if (b->heap) td_free(td, b->heap, 2 * room * sizeof *b->heap, "data");
    b->symbol = NULL;
    b->heap = NULL;
    b->word_room = 0;
}

static bool room_for_word(data_tokenizer *t, int64_t bytes)
{
    bpe *b = t->bpe;
    if (bytes <= b->word_room) return true;
    if (bytes > LARGEST_WORD) {
        td_fail(t->td, TD_ERROR_DATA,
                "data_tokenizer_encode: the text has a word of %" PRId64 " bytes, more than 1 GiB", bytes);
        return false;
    }
    int64_t room = bytes > 2 * b->word_room ? bytes : 2 * b->word_room;
    release_word(t->td, b);
    b->word_room = room;
    b->symbol = td_alloc(t->td, (size_t)b->word_room * sizeof *b->symbol, "data");
    b->heap = b->symbol ? td_alloc(t->td, 2 * (size_t)b->word_room * sizeof *b->heap, "data") : NULL;
    if (b->heap) return true;
    release_word(t->td, b);
    return false;
}

static void heap_push(uint64_t *heap, int64_t *count, uint64_t value)
{
    int64_t i = (*count)++;
    for (; i > 0 && heap[(i - 1) / 2] > value; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = value;
}

static uint64_t heap_pop(uint64_t *heap, int64_t *count)
{
    uint64_t top = heap[0], value = heap[--*count];
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < *count; i = child) {
        if (child + 1 < *count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= value) break;
        heap[i] = heap[child];
    }
    heap[i] = value;
    return top;
}

/* Puts the merge of symbol `at` with the one after it on the heap, by rank and then place. */
static void consider(const bpe *b, int64_t *count, int32_t at)
{
    int32_t after = at < 0 ? -1 : b->symbol[at].after;
    if (after < 0) return;
    const bpe_merge *merge = merge_slot(b, b->symbol[at].id, b->symbol[after].id);
    if (merge->pair != EMPTY) heap_push(b->heap, count, (uint64_t)merge->rank << 32 | (uint32_t)at);
}

/* Each merge takes a candidate off the heap and adds at most two: it never has more than twice the symbols. */
static void merge_symbols(const bpe *b, int64_t symbols)
{
    int64_t count = 0;
    for (int64_t i = 0; i + 1 < symbols; i++) consider(b, &count, (int32_t)i);
    while (count > 0) {
        uint64_t top = heap_pop(b->heap, &count);
        bpe_symbol *left = &b->symbol[(uint32_t)top];
        if (left->id < 0 || left->after < 0) continue;
        bpe_symbol *right = &b->symbol[left->after];
        const bpe_merge *merge = merge_slot(b, left->id, right->id);
        if (merge->pair == EMPTY || (uint64_t)merge->rank != top >> 32) continue; /* the pair is gone */
        left->id = merge->merged;
        left->after = right->after;
        right->id = -1;
        if (left->after >= 0) b->symbol[left->after].before = (int32_t)(left - b->symbol);
        consider(b, &count, left->before);
        consider(b, &count, (int32_t)(left - b->symbol));
    }
}

static bool encode_new_word(data_tokenizer *t, const uint8_t *s, int64_t bytes, id_sink *sink)
{
    bpe *b = t->bpe;
    if (b->whole_words) {
        int32_t id = data_bpe_find(t, (const char *)s, bytes);
        if (id >= 0) return data_id_put(sink, id), true;
    }
    if (!room_for_word(t, bytes)) return false;
    for (int64_t i = 0; i < bytes; i++) {
        int32_t id = b->byte[s[i]], place = (int32_t)i;
        if (id < 0) {
            td_fail(t->td, TD_ERROR_DATA,
                    "data_tokenizer_encode: the text holds the byte 0x%02x, for which the vocabulary has no token; use "
                    "a vocabulary with all 256 bytes",
                    s[i]);
            return false;
        }
        b->symbol[i] = (bpe_symbol){ .id = id, .before = place - 1, .after = i + 1 < bytes ? place + 1 : -1 };
    }
    merge_symbols(b, bytes);
    for (int32_t i = 0; i >= 0; i = b->symbol[i].after) data_id_put(sink, b->symbol[i].id);
    return true;
}

/* The key of a word of `bytes` <= CACHE_TEXT at s, which is 32 bytes or more before `end` or is copied. */
static void word_key(const uint8_t *s, int64_t bytes, const uint8_t *end, uint64_t key[4])
{
    memset(key, 0, 4 * sizeof *key);
    if (end - s < (int64_t)(4 * sizeof *key)) {
        memcpy(key, s, (size_t)bytes);
    } else {
        memcpy(key, s, 4 * sizeof *key);
        for (int i = 0; i < 4; i++) {
            int64_t own = bytes - 8 * i;
            key[i] &= own >= 8 ? UINT64_MAX : own <= 0 ? 0 : ((uint64_t)1 << 8 * own) - 1;
        }
    }
    key[3] |= (uint64_t)bytes << 56;
}

static bool encode_word(data_tokenizer *t, const uint8_t *s, int64_t bytes, const uint8_t *end, id_sink *sink)
{
    if (bytes > CACHE_TEXT) return encode_new_word(t, s, bytes, sink);
    uint64_t key[4];
    word_key(s, bytes, end, key);
    uint64_t hash = key[0] ^ key[1] * 0xbf58476d1ce4e5b9u ^ key[2] * 0x94d049bb133111ebu ^ key[3] * 0xd6e8feb86659fd93u;
    bpe_cached *cached = &t->bpe->cache[hash * DATA_GOLDEN >> (64 - CACHE_BITS)];
    if (cached->key[0] != key[0] || cached->key[1] != key[1] || cached->key[2] != key[2] || cached->key[3] != key[3]) {
        int32_t ids[CACHE_TEXT];
        id_sink found = { .ids = ids, .room = CACHE_TEXT };
        if (!encode_new_word(t, s, bytes, &found)) return false;
        if (found.count > CACHE_IDS) {
            for (int64_t i = 0; i < found.count; i++) data_id_put(sink, ids[i]);
            return true;
        }
        memcpy(cached->key, key, sizeof key);
        memcpy(cached->ids, ids, (size_t)found.count * sizeof *ids);
        cached->count = (int32_t)found.count;
    }
    for (int32_t i = 0; i < cached->count; i++) data_id_put(sink, cached->ids[i]);
    return true;
}

static bool encode_words(data_tokenizer *t, const uint8_t *s, const uint8_t *end, id_sink *sink)
{
    const uint8_t *begin = s;
    while (s < end) {
        const uint8_t *next = data_words_next(t->bpe->words, begin, s, end);
        if (!next || !encode_word(t, s, next - s, end, sink)) return false;
        s = next;
    }
    return true;
}

static bool encode_between(data_tokenizer *t, const uint8_t *s, const uint8_t *end, id_sink *sink)
{
    while (s < end) {
        int32_t id;
        const uint8_t *next = find_special(t, &t->bpe->late, s, end, &id);
        if (!encode_words(t, s, next, sink)) return false;
        if (id >= 0) data_id_put(sink, id);
        s = id >= 0 ? next + t->token[id].bytes : end;
    }
    return true;
}

static void warn_of_other_forms(data_tokenizer *t, const uint8_t *s, int64_t bytes)
{
    bpe *b = t->bpe;
    if (!b->nfc || b->warned || !data_words_may_change(b->words, s, s + bytes)) return;
    b->warned = true;
    td_message(t->td, TD_LOG_WARNING,
               "the tokenizer asks for text in Unicode's form NFC, and this text may not be in it: it is encoded as it "
               "is; bring it into that form first if its letters and marks come in pairs (\"uconv -x nfc\" does)");
}

bool data_bpe_encode(data_tokenizer *t, const uint8_t *s, int64_t bytes, id_sink *sink)
{
    warn_of_other_forms(t, s, bytes);
    const uint8_t *end = s + bytes;
    while (s < end) {
        int32_t id;
        const uint8_t *next = find_special(t, &t->bpe->early, s, end, &id);
        if (!encode_between(t, s, next, sink)) return false;
        if (id >= 0) data_id_put(sink, id);
        s = id >= 0 ? next + t->token[id].bytes : end;
    }
    return true;
}

/* ---- Opening ----------------------------------------------------------------------------------------------- */

bool data_bpe_open(data_tokenizer *t, const bpe_options *options)
{
    td_context *td = t->td;
    bpe *b = td_alloc(td, sizeof *b, "data");
    if (!b) return false;
    memset(b, 0, sizeof *b);
    t->bpe = b;
    t->kind = TOKENIZER_BPE;
    b->whole_words = options->whole_words;
    b->nfc = options->words.nfc;
    b->token_slots = slots_for(t->vocabulary);
    b->merge_slots = slots_for(options->merges);
    b->added = options->added;
    b->words = data_words_open(td, &options->words);
    if (!b->words) return false;
    b->token = td_alloc(td, b->token_slots * sizeof *b->token, "data");
    b->merge = td_alloc(td, b->merge_slots * sizeof *b->merge, "data");
    b->cache = td_alloc(td, CACHE_SLOTS * sizeof *b->cache, "data");
    size_t added_bytes = (size_t)b->added * sizeof(int32_t);
    if (added_bytes) {
        b->early.id = td_alloc(td, added_bytes, "data");
        b->late.id = td_alloc(td, added_bytes, "data");
    }
    if (!b->token || !b->merge || !b->cache || (added_bytes && (!b->early.id || !b->late.id))) return false;
    if (!room_for_word(t, FIRST_WORD)) return false;

    for (uint64_t i = 0; i < b->token_slots; i++) b->token[i] = -1;
    for (uint64_t i = 0; i < b->merge_slots; i++) b->merge[i].pair = EMPTY;
    for (int i = 0; i < 256; i++) b->byte[i] = -1;
    memset(b->cache, 0, CACHE_SLOTS * sizeof *b->cache);
    const char *pattern = options->words.pattern ? options->words.pattern : "";
    data_tokenizer_stamp(t, pattern, (int64_t)strlen(pattern));
    data_tokenizer_stamp(t, (bool[]){ b->whole_words, b->nfc }, 2 * sizeof(bool));
    return true;
}

void data_bpe_ready(data_tokenizer *t)
{
    specials_ready(t, &t->bpe->early);
    specials_ready(t, &t->bpe->late);
    for (int64_t i = 0; i < t->vocabulary; i++) data_tokenizer_stamp(t, t->token[i].text, t->token[i].bytes);
}

void data_bpe_close(data_tokenizer *t)
{
    td_context *td = t->td;
    bpe *b = t->bpe;
    release_word(td, b);
    size_t added_bytes = (size_t)b->added * sizeof(int32_t);
    if (b->early.id) td_free(td, b->early.id, added_bytes, "data");
    if (b->late.id) td_free(td, b->late.id, added_bytes, "data");
    if (b->cache) td_free(td, b->cache, CACHE_SLOTS * sizeof *b->cache, "data");
    if (b->merge) td_free(td, b->merge, b->merge_slots * sizeof *b->merge, "data");
    if (b->token) td_free(td, b->token, b->token_slots * sizeof *b->token, "data");
    data_words_close(b->words);
    td_free(td, b, sizeof *b, "data");
}
