/* Byte-level BPE gives the ids that Hugging Face's tokenizers gives (golden/tokenizer.py), gives texts back, and
 * refuses what it cannot do in a sentence. */
#include "tests/data_files.h"
#include "tests/golden.h"
#include "tests/memory.h"

static const char pre_tokenizer[] =
    "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true}";

/* A pre-tokenizer that cuts by a pattern, which is written as JSON has it. */
#define CUT_BY(pattern)                                                                                                \
    "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":"          \
    "\"" pattern "\"},\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\",\"add_prefix_space\":false," \
    "\"trim_offsets\":true,\"use_regex\":false}]}"

static const char *golden_path(const char *name)
{
    char *path = check_alloc(4096);
    snprintf(path, 4096, "%s/tests/golden/%s", TANDEM_SOURCE, name);
    return path;
}

/* The text with its one `from` replaced. */
static const char *replace(const char *text, const char *from, const char *to)
{
    const char *at = strstr(text, from);
    ck_assert_msg(at, "\"%s\" is not there", from);
    ck_assert_ptr_null(strstr(at + 1, from));
    char *changed = check_alloc(strlen(text) + strlen(to) + 1);
    sprintf(changed, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return changed;
}

static data_tokenizer *open_json(td_context *td, const test_files *files, const char *json)
{
    data_tokenizer *t = data_tokenizer_open(td, file_write_text(files, "tokenizer.json", json));
    ck_assert_no_error(td);
    return t;
}

typedef struct text_bytes {
    const char *text;
    int64_t bytes;
} text_bytes;

static text_bytes golden_text(golden g, int n)
{
    char name[32];
    snprintf(name, sizeof name, "text.%d", n);
    golden_array array = golden_get(g, name);
    char *text = check_alloc((size_t)array.count);
    for (int64_t i = 0; i < array.count; i++) text[i] = (char)(uint8_t)array.values[i];
    return (text_bytes){ text, array.count };
}

static void check_ids(data_tokenizer *t, text_bytes text, const int32_t *want, int64_t count, const char *name)
{
    int32_t *got = check_alloc((size_t)(3 * text.bytes) * sizeof *got);
    int64_t ids = data_tokenizer_encode(t, text.text, text.bytes, got, 3 * text.bytes);
    ck_assert_msg(ids == count, "%s: %d ids, not %d", name, (int)ids, (int)count);
    for (int64_t i = 0; i < count; i++)
        ck_assert_msg(got[i] == want[i], "%s: id %d is %d, not %d", name, (int)i, got[i], want[i]);
}

/* Of the kind "pair", "json" or "split", twice: the second time words are remembered. */
static void check_golden(data_tokenizer *t, const char *kind, int leave_out)
{
    golden g = golden_open("tokenizer.txt");
    int count = (int)golden_get(g, "count").values[0] - leave_out;
    ck_assert_int_gt(count, 10);
    for (int n = 0; n < 2 * count; n++) {
        char name[32];
        snprintf(name, sizeof name, "%s.%d", kind, n % count);
        golden_array want = golden_get(g, name);
        check_ids(t, golden_text(g, n % count), golden_as(want, TD_I32), want.count, name);
    }
}

/* ---- Ids --------------------------------------------------------------------------------------------------- */

START_TEST(test_ids_are_those_of_hugging_face)
{
    td_context *td = open_cpu(TD_F32);
    data_tokenizer *pair = data_tokenizer_open(td, golden_path("tokenizer_pair"));
    data_tokenizer *json = data_tokenizer_open(td, golden_path("tokenizer.json"));
    ck_assert_no_error(td);
    check_golden(pair, "pair", 0);
    check_golden(json, "json", 0);
    ck_assert_int_eq(data_tokenizer_vocabulary(pair), 327);
    ck_assert_int_eq(data_tokenizer_vocabulary(json), 331);
    ck_assert_int_eq(data_tokenizer_token(json, "<|end|>"), 327);
    ck_assert_int_eq(data_tokenizer_token(pair, "<|end|>"), -1);
    ck_assert_int_eq(data_tokenizer_token(pair, "\xc3"), 127);
    data_tokenizer_close(pair);
    data_tokenizer_close(json);
    td_close(td);
}
END_TEST

START_TEST(test_a_pattern_of_its_own_cuts_as_it_says)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    const char *json = golden_open("tokenizer.json").text;
    const char *llama = CUT_BY("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| "
                               "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+");
    const char *split = replace(json, "\"ignore_merges\":false", "\"ignore_merges\":true");
    data_tokenizer *t = open_json(td, &files, replace(split, pre_tokenizer, llama));
    check_golden(t, "split", 1); /* the last text has U+180E, which PCRE2 takes for a space */
    data_tokenizer_close(t);

    /* GPT-2's pattern through PCRE2 cuts as the scanner does; in a group it is not known for what it is. */
    const char *gpt2 = CUT_BY(
        "(?:'s|'t|'re|'ve|'m|'ll|'d| ?\\\\p{L}+| ?\\\\p{N}+| ?[^\\\\s\\\\p{L}\\\\p{N}]+|\\\\s+(?!\\\\S)|"
        "\\\\s+)");
    t = open_json(td, &files, replace(json, pre_tokenizer, gpt2));
    check_golden(t, "json", 1);
    data_tokenizer_close(t);

    /* What no match covers is a word, too: "the" is merged within each. */
    t = open_json(td, &files, replace(json, pre_tokenizer, CUT_BY("[0-9]")));
    int32_t the = data_tokenizer_token(t, "the");
    ck_assert_int_gt(the, 255);
    check_ids(t, (text_bytes){ "the1the", 7 }, (int32_t[]){ the, 16, the }, 3, "between matches");
    data_tokenizer_close(t);
    files_close(&files);
    td_close(td);
}
END_TEST

/* merges.txt's lines, written as JSON has them. */
static const char *merges_as_texts(const char *json)
{
    const char *begin = strstr(json, "\"merges\":[");
    ck_assert_ptr_nonnull(begin);
    char *changed = check_alloc(strlen(json) + 1), *to = changed;
    memcpy(to, json, (size_t)(begin - json));
    to += begin - json;
    int depth = 0;
    for (const char *from = begin; *from; from++) {
        if (*from == '[' && ++depth == 2) continue;
        if (*from == ']' && depth-- == 2) continue;
        if (depth == 2 && strncmp(from, "\",\"", 3) == 0) {
            *to++ = ' ';
            from += 2;
            continue;
        }
        *to++ = *from;
    }
    return changed;
}

START_TEST(test_merges_may_be_texts_or_pairs)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    const char *json = golden_open("tokenizer.json").text, *texts = merges_as_texts(json);
    ck_assert_str_has(json, "[\"t\",\"h\"]");
    ck_assert_str_has(texts, "\"t h\"");
    data_tokenizer *pairs = data_tokenizer_open(td, golden_path("tokenizer.json")), *t = open_json(td, &files, texts);
    check_golden(t, "json", 0);
    ck_assert(data_tokenizer_fingerprint(t) == data_tokenizer_fingerprint(pairs));
    data_tokenizer_close(t);

    const char *other = replace(texts, "\"t h\",", "");
    t = open_json(td, &files, other);
    ck_assert(data_tokenizer_fingerprint(t) != data_tokenizer_fingerprint(pairs));
    data_tokenizer_close(t);
    t = open_json(td, &files, replace(texts, "<|end|>", "<|END|>"));
    ck_assert(data_tokenizer_fingerprint(t) != data_tokenizer_fingerprint(pairs));
    data_tokenizer_close(t);
    data_tokenizer_close(pairs);
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_long_words_are_merged_as_short_ones)
{
    enum { TIMES = 200000 };
    td_context *td = open_cpu(TD_F32);
    data_tokenizer *t = data_tokenizer_open(td, golden_path("tokenizer.json"));
    char *text = check_alloc(3 * TIMES);
    int32_t *want = check_alloc(TIMES * sizeof *want), the = data_tokenizer_token(t, "the");
    ck_assert_int_gt(the, 255);
    for (int i = 0; i < TIMES; i++) {
        memcpy(text + 3 * i, "the", 3);
        want[i] = the;
    }
    check_ids(t, (text_bytes){ text, 3 * TIMES }, want, TIMES, "a long word");
    data_tokenizer_close(t);
    td_close(td);
}
END_TEST

START_TEST(test_remembered_words_are_the_words)
{
    enum { WORDS = 100000, ROOM = 64 };
    td_context *td = open_cpu(TD_F32);
    data_tokenizer *t = data_tokenizer_open(td, golden_path("tokenizer.json"));
    for (int pass = 0; pass < 2; pass++) {
        for (int w = 0; w < WORDS; w++) { /* more than are remembered, of 1 to 40 bytes with zeros among them */
            static const char letters[] = "thersant\0\1";
            char word[ROOM];
            uint64_t seed = (uint64_t)w * 0x9e3779b97f4a7c15u;
            int bytes = 1 + (int)(seed >> 40) % 40;
            for (int i = 0; i < bytes; i++) word[i] = letters[(seed >> i) % 10];
            int32_t ids[ROOM];
            char back[ROOM];
            int64_t count = data_tokenizer_encode(t, word, bytes, ids, ROOM);
            ck_assert(count > 0 && count <= bytes);
            ck_assert_int_eq(data_tokenizer_decode(t, ids, count, back, ROOM), bytes);
            ck_assert_mem_eq(back, word, bytes);
        }
    }
    data_tokenizer_close(t);
    td_close(td);
}
END_TEST

/* ---- Bytes ------------------------------------------------------------------------------------------------- */

START_TEST(test_ids_give_the_text_back)
{
    td_context *td = open_cpu(TD_F32);
    data_tokenizer *t = data_tokenizer_open(td, golden_path("tokenizer.json"));
    golden g = golden_open("tokenizer.txt");
    int count = (int)golden_get(g, "count").values[0], exact = 0;
    for (int n = 0; n < count; n++) {
        text_bytes text = golden_text(g, n);
        int32_t ids[512];
        char back[1024], part[1024];
        int64_t have = data_tokenizer_encode(t, text.text, text.bytes, ids, 512);
        ck_assert(have >= 0 && have <= 512);
        int64_t bytes = data_tokenizer_decode(t, ids, have, back, sizeof back);
        bool same = bytes == text.bytes && memcmp(back, text.text, (size_t)bytes) == 0;
        bool replaced = bytes >= 0 && memmem(back, (size_t)bytes, "\xef\xbf\xbd", 3) != NULL;
        ck_assert_msg(same != replaced, "text %d", n);
        exact += same;
        /* Room for less: the same count, and the beginning. */
        memset(part, '#', sizeof part);
        ck_assert_int_eq(data_tokenizer_decode(t, ids, have, part, bytes / 2), bytes);
        ck_assert_mem_eq(part, back, bytes / 2);
        ck_assert_int_eq(part[bytes / 2], '#');
        int32_t few[512] = { 0 };
        ck_assert_int_eq(data_tokenizer_encode(t, text.text, text.bytes, few, have / 2), have);
        ck_assert_mem_eq(few, ids, (size_t)(have / 2) * sizeof *few);
        ck_assert_int_eq(few[have / 2], 0);
    }
    ck_assert_int_eq(exact, count - 1);
    data_tokenizer_close(t);
    td_close(td);
}
END_TEST

START_TEST(test_bytes_that_are_no_utf8_are_replaced)
{
    td_context *td = open_cpu(TD_F32);
    data_tokenizer *t = data_tokenizer_open(td, golden_path("tokenizer_pair"));
    const struct {
        const char *text;
        int replaced; /* how many U+FFFD */
    } cases[] = {
        { "\x80", 1 },         { "\xff\xfe", 2 },     { "\xc0\xaf", 2 },     { "\xe2\x82", 1 },
        { "\xe2\xe2\x82", 2 }, { "\xe0\x80\x80", 3 }, { "\xed\xa0\x80", 3 }, { "\xf0\x9f\x98", 1 },
        { "\xf0\x80\x80", 3 }, { "\xf4\x8f\xbf", 1 }, { "\xf4\x90\x80", 3 }, { "\xf5\x80", 2 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char want[16], got[16];
        for (int k = 0; k < cases[i].replaced; k++) memcpy(want + 3 * k, "\xef\xbf\xbd", 3);
        int32_t ids[16];
        int64_t count = data_tokenizer_encode(t, cases[i].text, (int64_t)strlen(cases[i].text), ids, 16);
        ck_assert_int_eq(data_tokenizer_decode(t, ids, count, got, sizeof got), 3 * cases[i].replaced);
        ck_assert_mem_eq(got, want, 3 * (size_t)cases[i].replaced);
    }
    data_tokenizer_close(t);
    td_close(td);
}
END_TEST

START_TEST(test_text_in_another_form_than_nfc_is_warned_of_once)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    const char *json = golden_open("tokenizer.json").text;
    data_tokenizer *t = open_json(td, &files,
                                  replace(json, "\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}"));
    const char *composed[] = { "\u00e9t\u00e9", "\ud55c\uad6d", "\u0939\u093f\u0928\u094d\u0926\u0940", "abc",
                               "\u0e01\u0e34" };
    const char *others[] = { "e\u0301", "\u212b", "\u1112\u1161\u11ab", "a\u0316\u0300", "\u0958" };
    int32_t ids[64];
    for (int i = 0; i < 5; i++)
        ck_assert_int_gt(data_tokenizer_encode(t, composed[i], (int64_t)strlen(composed[i]), ids, 64), 0);
    ck_assert_str_eq(log_text(), "");
    data_tokenizer_close(t);
    for (int i = 0; i < 5; i++) {
        t = data_tokenizer_open(td, files.dir);
        size_t before = strlen(log_text());
        ck_assert_int_gt(data_tokenizer_encode(t, others[i], (int64_t)strlen(others[i]), ids, 64), 0);
        size_t after = strlen(log_text());
        ck_assert_str_has(log_text() + before, "Unicode's form NFC");
        data_tokenizer_encode(t, others[i], (int64_t)strlen(others[i]), ids, 64);
        ck_assert_uint_eq(strlen(log_text()), after);
        data_tokenizer_close(t);
    }
    ck_assert_no_error(td);
    files_close(&files);
    td_close(td);
}
END_TEST

/* ---- What is refused --------------------------------------------------------------------------------------- */

static void refuse(td_context *td, const char *path, const char *text)
{
    ck_assert_ptr_null(data_tokenizer_open(td, path));
    ck_assert_int_ne(td_error(td), TD_OK);
    ck_assert_str_has(td_error_text(td), text);
    td_clear_error(td);
}

START_TEST(test_tokenizers_that_cannot_be_had_are_refused)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    const char *json = golden_open("tokenizer.json").text;
    const struct {
        const char *from, *to, *text;
    } cases[] = {
        { "\"type\":\"BPE\"", "\"type\":\"Unigram\"", "its model is Unigram; BPE is supported" },
        { "\"dropout\":null", "\"dropout\":0.1", "its model has \"dropout\", which is not supported" },
        { "\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\"", "has a \"end_of_word_suffix\"" },
        { "\"vocab\":{", "\"vocabulary\":{", "with an object \"vocab\" and an array \"merges\"" },
        { "\"normalizer\":null", "\"normalizer\":{\"type\":\"Lowercase\"}", "its normalizer is Lowercase; only NFC" },
        { "\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{}]}",
          "its normalizer is without a type" },
        { pre_tokenizer, "\"pre_tokenizer\":null", "only byte-level BPE is supported" },
        { pre_tokenizer, "\"pre_tokenizer\":{\"type\":\"Whitespace\"}",
          "its pre-tokenizer Whitespace is not supported" },
        { pre_tokenizer, "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[]}", "only byte-level BPE" },
        { pre_tokenizer, "\"pre_tokenizer\":{\"type\":\"ByteLevel\"}", "\"add_prefix_space\", which is not supported" },
        { pre_tokenizer, "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}",
          "must split text once" },
        { pre_tokenizer, CUT_BY("(a"), "the pattern that cuts text into words is wrong at byte 2: missing closing" },
        { "\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false",
          "\"single_word\":false,\"lstrip\":true,\"rstrip\":false,\"normalized\":false",
          "added token \"<|end|>\" has \"lstrip\", which is not supported" },
        { "{\"id\":327,", "{\"id\":5,", "added token \"<|end|>\" has id 5, which another token has" },
        { "{\"id\":327,", "{\"id\":-1,", "an added token has no text or no id" },
        { "\"!\":0,", "\"!\":1,", "id 1 is given to two tokens" },
        { "\"!\":0,", "\"!\":0.5,", "the id of token \"!\" is not a whole number" },
        { "\"!\":0,", "\"!\":99999999999,", "the id of token \"!\" is not a whole number from 0 to 16777215" },
        { "[\"t\",\"h\"]", "[\"t\",\"q\"]", "merge 2: \"t\", \"q\" or the two joined is not in the vocabulary" },
        { "[\"t\",\"h\"]", "[\"t\"]", "merge 2 is neither a text nor two" },
        { "[\"t\",\"h\"]", "\"th\"", "merge 2 is not two tokens with a space between: \"th\"" },
        { "[\"t\",\"h\"]", "\"t h e\"", "merge 2 is not two tokens with a space between: \"t h e\"" },
        { "{\"version\"", "{version\"", "not JSON" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        file_write_text(&files, "tokenizer.json", replace(json, cases[i].from, cases[i].to));
        refuse(td, files.dir, cases[i].text);
    }
    file_write_text(&files, "tokenizer.json", "[]");
    refuse(td, files.dir, "with an object \"vocab\"");
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_broken_pairs_of_files_are_refused)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    ck_assert_ptr_null(data_tokenizer_open(td, NULL));
    td_clear_error(td);
    refuse(td, "no/such/folder", "no/such/folder");
    refuse(td, files.dir, "holds neither tokenizer.json nor vocab.json and merges.txt");
    file_write_text(&files, "vocab.json", "{\"t\":0,\"h\":1,\"th\":2,\"\\u0120\":3}");
    refuse(td, files.dir, "holds neither tokenizer.json nor vocab.json and merges.txt");
    file_write_text(&files, "merges.txt", "#version: 0.2\n\nt h\nth e\n");
    refuse(td, files.dir, "merges.txt: line 4: \"th\", \"e\" or the two joined is not in the vocabulary");
    file_write_text(&files, "merges.txt", "#version: 0.2\nt h \n");
    refuse(td, files.dir, "merges.txt: line 2 is not two tokens");
    file_write_text(&files, "merges.txt", "t h\n\xff t\n");
    refuse(td, files.dir, "merges.txt: not UTF-8 at byte 4");
    file_write_text(&files, "merges.txt", "");
    refuse(td, files.dir, "merges.txt: the file is empty");

    file_write_text(&files, "merges.txt", "t h\r\n");
    data_tokenizer *t = data_tokenizer_open(td, files.dir);
    ck_assert_no_error(td);
    check_ids(t, (text_bytes){ "th ht", 5 }, (int32_t[]){ 2, 3, 1, 0 }, 4, "few bytes");
    int32_t ids[8];
    ck_assert_int_eq(data_tokenizer_encode(t, "thx", 3, ids, 8), -1);
    ck_assert_str_has(td_error_text(td), "the text holds the byte 0x78, for which the vocabulary has no token");
    td_clear_error(td);
    ck_assert_int_eq(data_tokenizer_decode(t, (int32_t[]){ 1, 4 }, 2, NULL, 0), -1);
    ck_assert_str_has(td_error_text(td), "id 4 at place 1 is none of the vocabulary's, which are below 4");
    td_clear_error(td);
    ck_assert_int_eq(data_tokenizer_decode(t, (int32_t[]){ -1 }, 1, NULL, 0), -1);
    td_clear_error(td);
    data_tokenizer_close(t);

    file_write_text(&files, "vocab.json", "[]");
    refuse(td, files.dir, "vocab.json: not an object of tokens and their ids");
    file_write_text(&files, "vocab.json", "{}");
    refuse(td, files.dir, "vocab.json: the vocabulary is empty");
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_a_file_cut_anywhere_is_refused)
{
    td_context *td = open_cpu(TD_F32);
    test_files files = files_open();
    const char *json = golden_open("tokenizer.json").text;
    size_t whole = strrchr(json, '}') - json;
    for (size_t cut = 1; cut <= whole; cut += check_all() ? 1 : 37)
        refuse(td, file_write(&files, "cut.json", json, cut), "cut.json: line 1: ");
    files_close(&files);
    td_close(td);
}
END_TEST

START_TEST(test_each_failing_allocation_is_an_error_and_leaks_nothing)
{
    memory_test memory = { .refused = -1 };
    td_context *td = open_with(&memory);
    test_files files = files_open();
    const char *json = golden_open("tokenizer.json").text;
    json = replace(json, "\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}");
    const char *path = file_write_text(&files, "t.json", replace(json, pre_tokenizer, CUT_BY("the|\\\\s+|.")));
    char text[3000];
    memset(text, 'x', sizeof text);
    text[0] = (char)0xff; /* a copy is made, and a word longer than there is room for at first */
    int held = memory.held, failures = 0;
    for (;; failures++) {
        memory_refuse(&memory, failures);
        data_tokenizer *t = data_tokenizer_open(td, path);
        int64_t count = data_tokenizer_encode(t, text, sizeof text, NULL, 0);
        ck_assert((count < 0) == (td_error(td) == TD_ERROR_MEMORY));
        data_tokenizer_close(t);
        ck_assert_int_eq(memory.held, held);
        if (count >= 0) break;
        td_clear_error(td);
    }
    ck_assert_int_gt(failures, 20);
    files_close(&files);
    td_close(td);
    ck_assert_int_eq(memory.held, 0);
}
END_TEST

TESTS("tokenizer", test_ids_are_those_of_hugging_face, test_a_pattern_of_its_own_cuts_as_it_says,
      test_merges_may_be_texts_or_pairs, test_long_words_are_merged_as_short_ones, test_remembered_words_are_the_words,
      test_ids_give_the_text_back, test_bytes_that_are_no_utf8_are_replaced,
      test_text_in_another_form_than_nfc_is_warned_of_once, test_tokenizers_that_cannot_be_had_are_refused,
      test_broken_pairs_of_files_are_refused, test_a_file_cut_anywhere_is_refused,
      test_each_failing_allocation_is_an_error_and_leaks_nothing)
