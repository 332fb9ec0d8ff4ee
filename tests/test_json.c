/* JSON as it is read (every malformed text refused, with the line) and written. */
#include "core/json.h"
#include "tests/check.h"
#include "tests/memory.h"

#include <locale.h>

static td_json_document *parse(td_context *td, const char *text)
{
    return td_json_parse(td, text, strlen(text), "test");
}

START_TEST(test_a_nested_text_becomes_a_tree)
{
    td_context *td = open_cpu(TD_F32);
    td_json_document *document = parse(td, "{\"lr\": 1e-3, \"steps\": 20, \"layers\": [1024, 512],\n"
                                           " \"name\": \"a\\u00e9\\n\\\"b\", \"eval\": {\"loss\": -0.25}, \"on\": true,"
                                           " \"none\": null, \"empty\": {}, \"off\": false}");
    ck_assert_no_error(td);
    const td_json *root = td_json_root(document);
    ck_assert_int_eq(root->kind, TD_JSON_OBJECT);
    ck_assert_int_eq(root->count, 9);
    const td_json *lr = td_json_get(root, "lr"), *steps = td_json_get(root, "steps");
    ck_assert(lr->kind == TD_JSON_NUMBER && lr->number == 1e-3 && !lr->whole);
    ck_assert(steps->kind == TD_JSON_NUMBER && steps->number == 20 && steps->whole && steps->integer == 20);
    const td_json *layers = td_json_get(root, "layers");
    ck_assert(layers->kind == TD_JSON_ARRAY && layers->count == 2);
    ck_assert(layers->first->integer == 1024 && layers->first->next->integer == 512 && !layers->first->next->next);
    ck_assert_ptr_null(layers->first->name);
    ck_assert_str_eq(td_json_get(root, "name")->string, "a\xc3\xa9\n\"b");
    ck_assert(td_json_get(td_json_get(root, "eval"), "loss")->number == -0.25);
    ck_assert(td_json_get(root, "on")->boolean && !td_json_get(root, "off")->boolean);
    ck_assert_int_eq(td_json_get(root, "none")->kind, TD_JSON_NULL);
    ck_assert_ptr_null(td_json_get(root, "empty")->first);
    ck_assert_ptr_null(td_json_get(root, "absent"));
    ck_assert_ptr_null(td_json_get(td_json_get(root, "absent"), "loss"));
    ck_assert_ptr_null(td_json_get(lr, "loss"));
    td_json_close(document);
    td_close(td);
}
END_TEST

START_TEST(test_whole_numbers_are_exact_to_64_bits)
{
    td_context *td = open_cpu(TD_F32);
    td_json_document *document = parse(td, "[9223372036854775807,-9223372036854775808,9223372036854775808,1.0,1e2]");
    const td_json *n = td_json_root(document)->first;
    ck_assert(n->whole && n->integer == INT64_MAX);
    n = n->next;
    ck_assert(n->whole && n->integer == INT64_MIN);
    n = n->next;
    ck_assert(!n->whole && n->number == 0x1p63);
    n = n->next;
    ck_assert(!n->whole && n->number == 1);
    n = n->next;
    ck_assert(!n->whole && n->number == 100);
    td_json_close(document);
    td_close(td);
}
END_TEST

static const struct {
    const char *text, *error;
} malformed[] = {
    { "", "test: line 1: not JSON: parse error: premature EOF" },
    { "{", "test: line 1: not JSON: parse error: premature EOF" },
    { "{\"a\": 1,\n\n \"b\": }", "test: line 3: not JSON: parse error: unallowed token at this point in JSON text" },
    { "{\"a\": 1} x", "test: line 1: not JSON: parse error: trailing garbage" },
    { "{} {}", "test: line 1: not JSON: parse error: trailing garbage" },
    { "[1,]", "test: line 1: not JSON: parse error: unallowed token at this point in JSON text" },
    { "{a: 1}", "test: line 1: not JSON: lexical error: invalid char in json text." },
    { "/* a comment */ 1", "test: line 1: not JSON: lexical error: probable comment found in input text, comments are "
                           "not enabled." },
    { "[01]", "test: line 1: not JSON: parse error: after array element, I expect ',' or ']'" },
    { "NaN", "test: line 1: not JSON: lexical error: invalid char in json text." },
    { "{\"a\": 1, \"b\": {\"a\": 2, \"a\": 3}}", "test: line 1: the name 'a' appears twice in one object" },
    { "\"\xff\"", "test: not UTF-8 at byte 1" },
    { "\"a\xc0\xaf\"", "test: not UTF-8 at byte 2" },
    { "\"\xed\xa0\x80\"", "test: not UTF-8 at byte 1" },
    { "\"\\udc00\"", "test: line 1: a string holds half a surrogate pair" },
    { "\"a\\u0000b\"", "test: line 1: a string holds the character 0" },
    { "[1e999]", "test: line 1: a number is too large for a double" },
    { "[1000000000000000000000000000000000000000000000000000000000000000000]",
      "test: line 1: a number has more than 63 characters" },
};

START_TEST(test_malformed_text_is_refused_with_its_line)
{
    for (size_t i = 0; i < sizeof malformed / sizeof malformed[0]; i++) {
        td_context *td = open_cpu(TD_F32);
        ck_assert_ptr_null(parse(td, malformed[i].text));
        ck_assert_str_eq(td_error_text(td), malformed[i].error);
        ck_assert_int_eq(td_error(td), TD_ERROR_DATA);
        td_close(td);
    }
}
END_TEST

START_TEST(test_depth_is_limited)
{
    char text[131] = { 0 };
    td_context *td = open_cpu(TD_F32);
    memset(text, '[', 64);
    memset(text + 64, ']', 64);
    td_json_close(parse(td, text));
    ck_assert_no_error(td);
    memset(text, '[', 65);
    memset(text + 65, ']', 65);
    ck_assert_ptr_null(parse(td, text));
    ck_assert_str_eq(td_error_text(td), "test: line 1: more than 64 levels deep");
    td_close(td);
}
END_TEST

START_TEST(test_a_text_of_too_many_values_is_refused)
{
    size_t values = 1 << 22, bytes = 2 * values + 1;
    char *text = check_alloc(bytes);
    td_context *td = open_cpu(TD_F32);
    for (size_t i = 0; i < bytes; i++) text[i] = i == 0 ? '[' : i == bytes - 1 ? ']' : i % 2 ? '1' : ',';
    ck_assert_ptr_null(td_json_parse(td, text, bytes, "test"));
    ck_assert_str_eq(td_error_text(td), "test: line 1: too many values");
    td_close(td);
}
END_TEST

START_TEST(test_what_is_written_reads_as_expected)
{
    td_context *td = open_cpu(TD_F32);
    td_json_writer w = td_json_begin(td);
    td_json_open_object(&w, NULL);
    td_json_put_string(&w, "model", "m\"l\\p\n\t\x01\x7f");
    td_json_put_string(&w, "out", NULL);
    td_json_put_integer(&w, "steps", INT64_MIN);
    td_json_put_number(&w, "lr", 0.1);
    td_json_put_number(&w, "loss", NAN);
    td_json_put_number(&w, "best", INFINITY);
    td_json_put_boolean(&w, "done", true);
    td_json_open_object(&w, "eval");
    td_json_close_object(&w);
    td_json_open_array(&w, "curve");
    td_json_put_number(&w, NULL, 1);
    td_json_put_number(&w, NULL, -2.5e-300);
    td_json_open_array(&w, NULL);
    td_json_close_array(&w);
    td_json_close_array(&w);
    td_json_close_object(&w);
    ck_assert_str_eq(td_json_text(&w),
                     "{\"model\":\"m\\\"l\\\\p\\n\\t\\u0001\\u007f\",\"out\":null,\"steps\":-9223372036854775808,"
                     "\"lr\":0.1,\"loss\":null,\"best\":null,\"done\":true,\"eval\":{},"
                     "\"curve\":[1,-2.5e-300,[]]}");
    td_json_close(parse(td, td_json_text(&w)));
    ck_assert_no_error(td);
    td_json_end(&w);
    td_close(td);
}
END_TEST

START_TEST(test_bytes_that_are_not_utf8_are_replaced)
{
    td_context *td = open_cpu(TD_F32);
    td_json_writer w = td_json_begin(td);
    td_json_put_string(&w, NULL, "a\xff\xc3\xa9\xe2\x82 \xf0\x9f\x98\x80");
    ck_assert_str_eq(td_json_text(&w), "\"a\xef\xbf\xbd\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd \xf0\x9f\x98\x80\"");
    td_json_end(&w);
    td_close(td);
}
END_TEST

START_TEST(test_every_double_survives)
{
    static const double values[] = { 0, -0.0, 0.1, 1 / 3.0, 5e-324, 1.7976931348623157e308, 123456789012345680 };
    td_context *td = open_cpu(TD_F32);
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        td_json_writer w = td_json_begin(td);
        td_json_put_number(&w, NULL, values[i]);
        td_json_document *document = parse(td, td_json_text(&w));
        ck_assert_mem_eq(&td_json_root(document)->number, &values[i], sizeof(double));
        td_json_close(document);
        td_json_end(&w);
    }
    td_close(td);
}
END_TEST

START_TEST(test_a_locale_with_a_decimal_comma_changes_nothing)
{
    if (!setlocale(LC_NUMERIC, "de_DE.UTF-8") && !setlocale(LC_NUMERIC, "fr_FR.UTF-8"))
        SKIP("no locale with a decimal comma is installed");
    td_context *td = open_cpu(TD_F32);
    td_json_writer w = td_json_begin(td);
    td_json_put_number(&w, NULL, 0.5);
    td_json_document *document = parse(td, td_json_text(&w));
    setlocale(LC_NUMERIC, "C");
    ck_assert_str_eq(td_json_text(&w), "0.5");
    ck_assert(td_json_root(document)->number == 0.5);
    td_json_close(document);
    td_json_end(&w);
    td_close(td);
}
END_TEST

START_TEST(test_a_file_is_read_and_named_in_errors)
{
    td_context *td = open_cpu(TD_F32);
    FILE *file = fopen("test_json.json", "w");
    fputs("{\n\"a\": [1, 2\n}\n", file);
    fclose(file);
    ck_assert_ptr_null(td_json_read(td, "test_json.json"));
    ck_assert_str_eq(td_error_text(td),
                     "test_json.json: line 3: not JSON: parse error: after array element, I expect ',' or ']'");
    td_clear_error(td);
    ck_assert_ptr_null(td_json_read(td, "test_json.absent"));
    ck_assert_str_eq(td_error_text(td), "test_json.absent: No such file or directory");
    td_clear_error(td);
    ck_assert_ptr_null(td_json_read(td, "."));
    ck_assert_str_eq(td_error_text(td), ".: not a regular file");
    td_clear_error(td);
    file = fopen("test_json.json", "w");
    fputs("{\"a\": 3}\n", file);
    fclose(file);
    td_json_document *document = td_json_read(td, "test_json.json");
    ck_assert_int_eq(td_json_get(td_json_root(document), "a")->integer, 3);
    td_json_close(document);
    remove("test_json.json");
    td_close(td);
}
END_TEST

static td_json_document *write_and_parse(td_context *td)
{
    td_json_writer w = td_json_begin(td);
    td_json_open_object(&w, NULL);
    for (int i = 0; i < 30; i++)
        td_json_put_string(&w, (char[]){ 'a' + i % 26, 'a' + i / 26, 0 }, "twenty characters ...");
    td_json_close_object(&w);
    td_json_document *document = td_json_text(&w) ? parse(td, td_json_text(&w)) : NULL;
    td_json_end(&w);
    return document;
}

START_TEST(test_each_failing_allocation_is_an_error_and_leaks_nothing)
{
    memory_test memory = { .refused = -1 };
    td_context *td = open_with(&memory);
    int held = memory.held, failures = 0;
    for (;; failures++) {
        memory_refuse(&memory, failures);
        td_json_document *document = write_and_parse(td);
        ck_assert((document == NULL) == (td_error(td) == TD_ERROR_MEMORY));
        td_json_close(document);
        ck_assert_int_eq(memory.held, held);
        if (document) break;
        td_clear_error(td);
    }
    ck_assert_int_eq(failures, 6); /* the text, three times; the document; its values; names, to be sorted */
    td_close(td);
    ck_assert_int_eq(memory.held, 0);
}
END_TEST

TESTS("json", test_a_nested_text_becomes_a_tree, test_whole_numbers_are_exact_to_64_bits,
      test_malformed_text_is_refused_with_its_line, test_depth_is_limited, test_a_text_of_too_many_values_is_refused,
      test_what_is_written_reads_as_expected, test_bytes_that_are_not_utf8_are_replaced, test_every_double_survives,
      test_a_locale_with_a_decimal_comma_changes_nothing, test_a_file_is_read_and_named_in_errors,
      test_each_failing_allocation_is_an_error_and_leaks_nothing)
