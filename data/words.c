/* Where a text is cut into words.
 *
 * GPT-2's pattern is matched by a scanner of our own, which is faster than a regular expression; what letters, numbers
 * and spaces are it asks PCRE2 once, for every code point. Other patterns are matched by PCRE2, whose \s has U+180E
 * still, which is no space since Unicode 6.3.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include <string.h>

#include "data/tokenizer.h"

static const char gpt2_pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

enum { OTHER, LETTER, NUMBER, SPACE, CLASS = 3, CHANGES = 4, MARK = 8 };

struct words {
    td_context *td;
    bool refused;   /* memory was, to PCRE2 */
    uint8_t *class; /* of every code point; NULL: a pattern that needs none */
    pcre2_general_context *memory;
    pcre2_code *code; /* NULL: GPT-2's pattern */
    pcre2_match_data *match;
};

/* ---- PCRE2 with the context's memory ----------------------------------------------------------------------- */

enum { HEADER_BYTES = 64 }; /* before each block, for its size; keeps it aligned */

static void *block_get(size_t bytes, void *user)
{
    words *w = user;
    char *block = td_alloc(w->td, bytes + HEADER_BYTES, "data");
    if (!block) {
        w->refused = true;
        return NULL;
    }
    memcpy(block, &bytes, sizeof bytes);
    return block + HEADER_BYTES;
}

static void block_put(void *memory, void *user)
{
    if (!memory) return;
    words *w = user;
    char *block = (char *)memory - HEADER_BYTES;
    size_t bytes;
    memcpy(&bytes, block, sizeof bytes);
    td_free(w->td, block, bytes + HEADER_BYTES, "data");
}

/* What went wrong, unless memory did: of that the context knows. */
static void fail(const words *w, const char *what, int error)
{
    PCRE2_UCHAR why[128];
    pcre2_get_error_message(error, why, sizeof why);
    if (!w->refused) td_fail(w->td, TD_ERROR_DATA, "%s: %s", what, (char *)why);
}

/* NULL and an error. */
static pcre2_code *compile(const words *w, const char *pattern, const char *source)
{
    pcre2_compile_context *context = pcre2_compile_context_create(w->memory);
    if (!context) return NULL;
    int error;
    size_t at;
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &at, context);
    pcre2_compile_context_free(context);
    if (!code) {
        char what[DATA_PATH_BYTES + 128];
        snprintf(what, sizeof what, "%s: the pattern that cuts text into words is wrong at byte %zu", source, at);
        fail(w, what, error);
        return NULL;
    }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); /* where that cannot be had, matching is slow and right */
    if (!w->refused) return code;
    pcre2_code_free(code);
    return NULL;
}

/* ---- Classes ----------------------------------------------------------------------------------------------- */

/* Group g of the pattern matches runs of characters: they get bits[g - 1]. False and an error. */
static bool mark_text(const words *w, const pcre2_code *code, pcre2_match_data *match, const uint8_t *bits,
                      const uint8_t *text, size_t bytes)
{
    const size_t *found = pcre2_get_ovector_pointer(match);
    int last; /* group that matched, and 1 */
    for (size_t at = 0; (last = pcre2_match(code, text, bytes, at, PCRE2_NO_UTF_CHECK, match, NULL)) > 1;
         at = found[1]) {
        uint32_t point;
        for (size_t i = found[0]; i < found[1];) {
            i += (size_t)data_utf8_get(text + i, &point);
            w->class[point] |= bits[last - 2];
        }
    }
    if (last == PCRE2_ERROR_NOMATCH) return true;
    fail(w, "the classes of characters cannot be found out", last);
    return false;
}

static bool mark(const words *w, const char *pattern, const uint8_t *bits)
{
    enum { BLOCK = 1 << 13, SURROGATE = 0xD800, SURROGATE_END = 0xE000, TEXT_BYTES = 4 * BLOCK };
    pcre2_code *code = compile(w, pattern, "character classes");
    pcre2_match_data *match = code ? pcre2_match_data_create_from_pattern(code, w->memory) : NULL;
    uint8_t *text = match ? td_alloc(w->td, TEXT_BYTES, "data") : NULL;
    bool good = text != NULL;
    for (uint32_t first = 0; good && first < CODE_POINTS; first += BLOCK) {
        size_t bytes = 0;
        for (uint32_t c = first; c < first + BLOCK; c++) {
            if (c < SURROGATE || c >= SURROGATE_END) bytes += (size_t)data_utf8_put(c, text + bytes);
        }
        good = mark_text(w, code, match, bits, text, bytes);
    }
    if (text) td_free(w->td, text, TEXT_BYTES, "data");
    pcre2_match_data_free(match);
    pcre2_code_free(code);
    return good;
}

/* Code points that NFC never leaves as they are, and those it may join to the one before (NFC_Quick_Check is No or
 * Maybe in Unicode 14); PCRE2 knows no such property. */
static const char changing[] =
    "([\\x{300}-\\x{304}\\x{306}-\\x{30C}\\x{30F}\\x{311}\\x{313}\\x{314}\\x{31B}\\x{323}-\\x{328}\\x{32D}\\x{32E}"
    "\\x{330}\\x{331}\\x{338}\\x{340}-\\x{345}\\x{374}\\x{37E}\\x{387}\\x{653}-\\x{655}\\x{93C}\\x{958}-\\x{95F}"
    "\\x{9BE}\\x{9D7}\\x{9DC}\\x{9DD}\\x{9DF}\\x{A33}\\x{A36}\\x{A59}-\\x{A5B}\\x{A5E}\\x{B3E}\\x{B56}\\x{B57}\\x{B5C}"
    "\\x{B5D}\\x{BBE}\\x{BD7}\\x{C56}\\x{CC2}\\x{CD5}\\x{CD6}\\x{D3E}\\x{D57}\\x{DCA}\\x{DCF}\\x{DDF}\\x{F43}\\x{F4D}"
    "\\x{F52}\\x{F57}\\x{F5C}\\x{F69}\\x{F73}\\x{F75}\\x{F76}\\x{F78}\\x{F81}\\x{F93}\\x{F9D}\\x{FA2}\\x{FA7}\\x{FAC}"
    "\\x{FB9}\\x{102E}\\x{1161}-\\x{1175}\\x{11A8}-\\x{11C2}\\x{1B35}\\x{1F71}\\x{1F73}\\x{1F75}\\x{1F77}\\x{1F79}"
    "\\x{1F7B}\\x{1F7D}\\x{1FBB}\\x{1FBE}\\x{1FC9}\\x{1FCB}\\x{1FD3}\\x{1FDB}\\x{1FE3}\\x{1FEB}\\x{1FEE}\\x{1FEF}"
    "\\x{1FF9}\\x{1FFB}\\x{1FFD}\\x{2000}\\x{2001}\\x{2126}\\x{212A}\\x{212B}\\x{2329}\\x{232A}\\x{2ADC}\\x{3099}"
    "\\x{309A}\\x{F900}-\\x{FA0D}\\x{FA10}\\x{FA12}\\x{FA15}-\\x{FA1E}\\x{FA20}\\x{FA22}\\x{FA25}\\x{FA26}"
    "\\x{FA2A}-\\x{FA6D}\\x{FA70}-\\x{FAD9}\\x{FB1D}\\x{FB1F}\\x{FB2A}-\\x{FB36}\\x{FB38}-\\x{FB3C}\\x{FB3E}\\x{FB40}"
    "\\x{FB41}\\x{FB43}\\x{FB44}\\x{FB46}-\\x{FB4E}\\x{110BA}\\x{11127}\\x{1133E}\\x{11357}\\x{114B0}\\x{114BA}"
    "\\x{114BD}\\x{115AF}\\x{11930}\\x{1D15E}-\\x{1D164}\\x{1D1BB}-\\x{1D1C0}\\x{2F800}-\\x{2FA1D}]+)";

static bool classify(words *w, bool nfc)
{
    w->class = td_alloc(w->td, CODE_POINTS, "data");
    if (!w->class) return false;
    memset(w->class, OTHER, CODE_POINTS);
    if (!mark(w, "(\\p{L}+)|(\\p{N}+)|([^\\S\\x{180E}]+)", (uint8_t[]){ LETTER, NUMBER, SPACE })) return false;
    return !nfc || (mark(w, changing, (uint8_t[]){ CHANGES }) && mark(w, "(\\p{M}+)", (uint8_t[]){ MARK }));
}

bool data_words_may_change(const words *w, const uint8_t *s, const uint8_t *end)
{
    int before = 0;
    while (s < end) {
        if (*s < 0x80) {
            before = 0;
            s++;
            continue;
        }
        uint32_t point;
        s += data_utf8_get(s, &point);
        int class = w->class[point];
        if (class & CHANGES || class & before & MARK) return true;
        before = class;
    }
    return false;
}

/* ---- GPT-2's words ----------------------------------------------------------------------------------------- */

/* Bytes of 's 't 're 've 'm 'll 'd after the apostrophe at s; 0: none. */
static int contraction(const uint8_t *s, const uint8_t *end)
{
    int64_t left = end - s;
    if (left < 2) return 0;
    uint8_t a = s[1], b = left > 2 ? s[2] : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return ((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

static inline int class_at(const uint8_t *restrict class, const uint8_t *s, int *step)
{
    if (*s < 0x80) {
        *step = 1;
        return class[*s] & CLASS;
    }
    uint32_t point;
    *step = data_utf8_get(s, &point);
    return class[point] & CLASS;
}

static const uint8_t *gpt2_next(const uint8_t *restrict class, const uint8_t *s, const uint8_t *end)
{
    int step = 0, kind = class_at(class, s, &step), skip = 0;
    if (*s == '\'') {
        int bytes = contraction(s, end);
        if (bytes) return s + bytes;
    }
    if (*s == ' ' && s + 1 < end) {
        int after = class_at(class, s + 1, &skip);
        if (after != SPACE) {
            kind = after;
            step = 1 + skip;
        }
    }
    const uint8_t *first = s, *last = s;
    while (s += step, s < end && class_at(class, s, &step) == kind) last = s;
    /* Of several spaces before a word the last is left to it. */
    return kind == SPACE && s < end && last > first ? last : s;
}

const uint8_t *data_words_next(const words *w, const uint8_t *begin, const uint8_t *s, const uint8_t *end)
{
    if (!w->code) return gpt2_next(w->class, s, end);
    int status = pcre2_match(w->code, begin, (size_t)(end - begin), (size_t)(s - begin),
                             PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, w->match, NULL);
    if (status == PCRE2_ERROR_NOMATCH) return end;
    if (status < 0) {
        fail(w, "data_tokenizer_encode: the tokenizer's pattern fails on this text", status);
        return NULL;
    }
    const size_t *found = pcre2_get_ovector_pointer(w->match);
    const uint8_t *start = begin + found[0], *stop = begin + found[1];
    return start > s ? start : stop > s ? stop : end; /* stop > s but for a pattern that moves its start with \K */
}

words *data_words_open(td_context *td, const words_options *options)
{
    words *w = td_alloc(td, sizeof *w, "data");
    if (!w) return NULL;
    *w = (words){ .td = td };
    w->memory = pcre2_general_context_create(block_get, block_put, w);
    bool gpt2 = !options->pattern || strcmp(options->pattern, gpt2_pattern) == 0;
    bool good = w->memory != NULL;
    if (good && (gpt2 || options->nfc)) good = classify(w, options->nfc);
    if (good && !gpt2) {
        w->code = compile(w, options->pattern, options->source);
        w->match = w->code ? pcre2_match_data_create_from_pattern(w->code, w->memory) : NULL;
        good = w->match != NULL;
    }
    if (good) return w;
    data_words_close(w);
    return NULL;
}

void data_words_close(words *w)
{
    if (!w) return;
    pcre2_match_data_free(w->match);
    pcre2_code_free(w->code);
    pcre2_general_context_free(w->memory);
    if (w->class) td_free(w->td, w->class, CODE_POINTS, "data");
    td_free(w->td, w, sizeof *w, "data");
}
