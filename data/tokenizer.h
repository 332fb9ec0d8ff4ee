/* What the files of text share: UTF-8, character classes, words, byte-level BPE, the tokenizer behind the three kinds.
 * Every text below data_tokenizer_encode is valid UTF-8. */
#ifndef TANDEM_DATA_TOKENIZER_H
#define TANDEM_DATA_TOKENIZER_H

#include "data/internal.h"

/* ---- unicode.c --------------------------------------------------------------------------------------------- */

enum { CODE_POINTS = 0x110000, REPLACEMENT = 0xFFFD };

int64_t data_utf8_valid_prefix(const uint8_t *s, int64_t bytes); /* bytes up to the first that is no UTF-8 */
/* The text with U+FFFD for what is no UTF-8; returns its bytes, and writes them where `to` is not NULL. */
int64_t data_utf8_replace(const uint8_t *s, int64_t bytes, uint8_t *to);
int data_utf8_put(uint32_t code, uint8_t to[4]); /* returns its bytes */

/* The character of valid UTF-8 at s; returns its bytes. */
static inline int data_utf8_get(const uint8_t *s, uint32_t *code)
{
    if (s[0] < 0x80) return *code = s[0], 1;
    if (s[0] < 0xE0) return *code = (s[0] & 0x1Fu) << 6 | (s[1] & 0x3Fu), 2;
    if (s[0] < 0xF0) return *code = (s[0] & 0x0Fu) << 12 | (s[1] & 0x3Fu) << 6 | (s[2] & 0x3Fu), 3;
    return *code = (s[0] & 0x07u) << 18 | (s[1] & 0x3Fu) << 12 | (s[2] & 0x3Fu) << 6 | (s[3] & 0x3Fu), 4;
}

/* ---- words.c: where a text is cut into words ---------------------------------------------------------------- */

typedef struct words words;

typedef struct words_options {
    const char *pattern; /* NULL: GPT-2's */
    bool nfc;            /* data_words_may_change will be asked */
    const char *source;  /* names the file in errors */
} words_options;

words *data_words_open(td_context *td, const words_options *options);
void data_words_close(words *w); /* NULL is allowed */

/* Whether NFC could change the text: with characters that it never leaves as they are, or that it may join to the one
 * before, or with two marks in a row, which it may swap. */
bool data_words_may_change(const words *w, const uint8_t *s, const uint8_t *end);

/* The end of the word at s < end, of the text [begin, end). What lies between a pattern's matches is a word, too. NULL
 * and an error: the pattern needs too much time or memory. */
const uint8_t *data_words_next(const words *w, const uint8_t *begin, const uint8_t *s, const uint8_t *end);

/* ---- The tokenizer ------------------------------------------------------------------------------------------ */

/* Where ids go: as many as there is room for, all counted. */
typedef struct id_sink {
    int32_t *ids;
    int64_t room, count;
} id_sink;

static inline void data_id_put(id_sink *sink, int32_t id)
{
    if (sink->count < sink->room) sink->ids[sink->count] = id;
    sink->count++;
}

typedef struct token_text {
    const char *text; /* NULL: the id is not used */
    int64_t bytes;
} token_text;

typedef struct bpe bpe;

struct data_tokenizer {
    td_context *td;
    int64_t vocabulary;
    token_text *token; /* vocabulary entries */
    uint64_t fingerprint;
    char *pool; /* what the tokens' texts are in */
    int64_t pool_bytes;
    enum { TOKENIZER_BYTES, TOKENIZER_CHARACTERS, TOKENIZER_BPE } kind;
    int32_t *character; /* CHARACTERS: id of each code point below `characters`, or -1 */
    int64_t characters;
    bpe *bpe; /* BPE */
};

/* tokenizer.c: a tokenizer of unused ids and a pool; NULL and an error. */
data_tokenizer *data_tokenizer_make(td_context *td, int64_t vocabulary, int64_t pool_bytes);
/* The fingerprint depends on these bytes, too. */
void data_tokenizer_stamp(data_tokenizer *t, const void *bytes, int64_t count);

/* ---- text.c ------------------------------------------------------------------------------------------------- */

struct data_ids {
    td_context *td;
    char name[DATA_NAME_BYTES];
    int64_t count, vocabulary;
    int bits; /* of an id: 16 or 32 */
    const void *data;
    size_t bytes; /* of data */
    bool mapped;  /* data is a mapped file: ids may lie outside the vocabulary */
};

/* The content of a file, freed with td_free(td, text, *room, "data"). NULL and an error: missing, empty, unreadable. */
char *data_text_load(td_context *td, const char *path, int64_t *bytes, size_t *room);

/* ---- bpe.c: encoding ---------------------------------------------------------------------------------------- */

typedef struct bpe_options {
    words_options words;
    bool whole_words; /* a word that is a token is that token, whatever the merges ("ignore_merges") */
    int64_t merges, added;
} bpe_options;

/* Makes t->bpe; the tokens come next, then merges in the order of their rank, then added tokens. False and an error. */
bool data_bpe_open(data_tokenizer *t, const bpe_options *options);
void data_bpe_close(data_tokenizer *t);

/* The id, whose text t->token has, becomes one that words may have. */
void data_bpe_add_token(data_tokenizer *t, int32_t id);
/* The id data_bpe_add_token was given for these bytes; -1: none. */
int32_t data_bpe_find(const data_tokenizer *t, const char *text, int64_t bytes);
void data_bpe_add_merge(data_tokenizer *t, int32_t left, int32_t right, int32_t merged);
/* The id becomes one whose text is found in texts before they are cut; `late`: only between those that are not. */
void data_bpe_add_special(data_tokenizer *t, int32_t id, bool late);
void data_bpe_ready(data_tokenizer *t); /* after the last */

/* Valid UTF-8 to ids. False and an error. */
bool data_bpe_encode(data_tokenizer *t, const uint8_t *s, int64_t bytes, id_sink *sink);

/* ---- bpe_file.c: reading ------------------------------------------------------------------------------------ */

data_tokenizer *data_bpe_read(td_context *td, const char *path);

#endif
