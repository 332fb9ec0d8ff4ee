/* The gpt binary as a user meets it: trained on small texts that the test writes, evaluated, resumed and sampled. Every mistake gives one
 * clear line and the right exit status.
 * Timeout: 600 s
 */
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/json.h"
#include "tests/shell.h"

/* One line of complaint that holds `part`. */
#define ck_assert_refused(expected, part, ...)                                                                             \
    do {                                                                                                                   \
        ck_assert_sh(expected, __VA_ARGS__);                                                                               \
        ck_assert_str_has(err_text, part);                                                                                 \
        ck_assert_msg(strchr(err_text, '\n') == err_text + strlen(err_text) - 1, "not one line: %.600s", err_text);          \
    } while (0)

/* The text of a sample. */
static const char *sample(const char *dir, const char *flags)
{
    static char kept[4][1 << 12];
    static int next;
    ck_assert_sh(0, "$GPT sample --threads 1 --out %s %s", dir, flags);
    char *to = kept[next++ % 4];
    ck_assert_int_lt(strlen(out_text), sizeof kept[0]);
    strcpy(to, out_text);
    return to;
}

static void ck_assert_same_sample(const char *dir, const char *a, const char *b)
{
    const char *one = sample(dir, a), *other = sample(dir, b);
    ck_assert_str_eq(one, other);
}

/* A number of the object that --json prints. */
static double object_number(const char *name)
{
    td_context *td = open_cpu(TD_F32);
    td_json_document *document = td_json_parse(td, out_text, strlen(out_text), "stdout");
    ck_assert_no_error(td);
    const td_json *value = td_json_get(td_json_root(document), name);
    ck_assert_msg(value != NULL, "no %s in %.600s", name, out_text);
    double number = value->number;
    td_json_close(document);
    td_close(td);
    return number;
}

/* ---- Texts and models ------------------------------------------------------------------------------------- */

static const char *const SENTENCE = "the quick brown fox jumps over the lazy dog. ";
static const char *const WIDE = "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x99\x82 na\xc3\xafve. "; /* of characters of 1 to 4 bytes */

static void put_text(const char *path, const char *sentence, int times)
{
    FILE *to = fopen(path, "w");
    ck_assert_ptr_nonnull(to);
    for (int i = 0; i < times; i++) fprintf(to, "%s\n", sentence);
    fclose(to);
}

/* A small model that trains in no time. */
#define SMALL "--layers 2 --heads 2 --width 16 --context 16 --dropout 0 --batch 4 --threads 2 "

/* Models that several tests sample from: of characters, in f64, and of bytes. */
static void enter(void)
{
    static bool entered;
    if (entered) return;
    mkdir("test_gpt_cli_files", 0777);
    ck_assert_int_eq(chdir("test_gpt_cli_files"), 0);
    ck_assert_sh(0, "rm -rf characters f64 bytes fsdp bpe");
    put_text("text.txt", SENTENCE, 40);
    put_text("wide.txt", WIDE, 60);
    ck_assert_sh(0, "$GPT train --data text.txt " SMALL "--lr 0.01 --steps 60 --out characters");
    ck_assert_sh(0, "$GPT train --data text.txt " SMALL "--dtype f64 --steps 3 --out f64");
    ck_assert_sh(0, "$GPT train --data wide.txt " SMALL "--tokenizer bytes --lr 0.01 --steps 400 --out bytes");
    entered = true;
}

/* ---- Train, eval, resume ---------------------------------------------------------------------------------- */

START_TEST(test_a_model_is_trained_evaluated_and_resumed)
{
    enter();
    ck_assert_sh(0, "rm -rf run && $GPT train --data text.txt " SMALL "--steps 4 --out run");
    ck_assert_sh(0, "$GPT eval --out run --json");
    ck_assert(object_number("steps") == 4);
    ck_assert_sh(0, "$GPT train --resume --out run --steps 6");
    ck_assert_sh(0, "$GPT eval --out run --json");
    ck_assert(object_number("steps") == 6);
    ck_assert_sh(0, "$GPT sample --out run --tokens 5");
}
END_TEST

START_TEST(test_texts_that_cannot_be_trained_on_are_refused)
{
    enter();
    put_text("short.txt", "ab", 1);
    ck_assert_refused(1, "empty", ": > empty.txt; $GPT train --data empty.txt " SMALL "--steps 1");
    ck_assert_refused(1, "short.txt", "$GPT train --data short.txt " SMALL "--steps 1");
    ck_assert_refused(1, "nowhere.txt", "$GPT train --data nowhere.txt " SMALL "--steps 1");
    ck_assert_refused(2, "--data", "$GPT train " SMALL "--steps 1");
}
END_TEST

START_TEST(test_sizes_that_do_not_fit_are_refused)
{
    enter();
    ck_assert_refused(2, "--width 16 cannot be divided among --heads 3", "$GPT train --data text.txt " SMALL "--heads 3 --steps 1");
    ck_assert_refused(2, "--heads 4 cannot share --kv-heads 3 evenly",
                      "$GPT train --data text.txt " SMALL "--form llama --heads 4 --kv-heads 3 --steps 1");
    ck_assert_refused(2, "give a --vocabulary as large", "$GPT train --data text.txt " SMALL "--vocabulary 5 --steps 1");
    ck_assert_refused(2, "--theta has no effect on the form gpt2", "$GPT train --data text.txt " SMALL "--theta 5 --steps 1");
}
END_TEST

/* ---- Samples ---------------------------------------------------------------------------------------------- */

START_TEST(test_one_seed_gives_one_text)
{
    enter();
    const char *one = sample("characters", "--seed 7 --tokens 60"), *again = sample("characters", "--seed 7 --tokens 60");
    ck_assert_str_eq(one, again);
    ck_assert_str_ne(one, sample("characters", "--seed 8 --tokens 60"));
    ck_assert_int_eq(strlen(one), 61); /* and a line's end */
}
END_TEST

/* The context is 16: the text passes its end several times. */
START_TEST(test_a_cache_changes_no_text)
{
    enter();
    ck_assert_same_sample("f64", "--seed 3 --tokens 100 --prompt the", "--seed 3 --tokens 100 --prompt the --no-cache");
    ck_assert_same_sample("f64", "--seed 3 --tokens 20 --prompt 'the quick brown fox jumps over'",
                          "--seed 3 --tokens 20 --prompt 'the quick brown fox jumps over' --no-cache");
    ck_assert_same_sample("f64", "--temperature 0 --tokens 60", "--temperature 0 --tokens 60 --no-cache");
}
END_TEST

/* With one token to draw a prompt longer than the context is its end, half a context long: 8 ids from position 0 on. */
START_TEST(test_of_a_prompt_longer_than_the_context_the_end_counts)
{
    enter();
    static const char *const prompts[][2] = {
        { "zzzzzzzzzzzaqzjqzb x", "qzjqzb x" }, { "the quick brown foxxx", "wn foxxx" }, { "dog over the lazy thqqt", "zy thqqt" },
        { "qqqqqqqqqqqqqqqq.uzkmm.wo", "uzkmm.wo" }, { "jumps over jumps overxyzoo", "verxyzoo" }, { "aaaaaaaaaaaabbbbbbbb", "bbbbbbbb" },
    };
    for (size_t i = 0; i < sizeof prompts / sizeof *prompts; i++) {
        char flags[200];
        snprintf(flags, sizeof flags, "--temperature 0 --tokens 1 --prompt '%s'", prompts[i][0]);
        const char *one = sample("characters", flags);
        snprintf(flags, sizeof flags, "--temperature 0 --tokens 1 --prompt '%s'", prompts[i][1]);
        const char *other = sample("characters", flags);
        ck_assert_int_eq(strlen(one), strlen(prompts[i][0]) + 2);
        ck_assert_msg(one[strlen(prompts[i][0])] == other[strlen(prompts[i][1])], "prompt %zu: %s and %s", i, one, other);
    }
}
END_TEST

START_TEST(test_greedy_is_temperature_0_top_k_1_and_a_tiny_top_p)
{
    enter();
    const char *greedy = sample("characters", "--temperature 0 --tokens 50");
    ck_assert_str_eq(greedy, sample("characters", "--top-k 1 --tokens 50 --seed 9"));
    ck_assert_str_eq(greedy, sample("characters", "--top-p 1e-9 --tokens 50 --seed 4"));
    ck_assert_str_ne(greedy, sample("characters", "--tokens 50 --temperature 2"));
}
END_TEST

START_TEST(test_a_prompt_comes_first_be_it_a_flag_or_a_file)
{
    enter();
    const char *flag = sample("characters", "--prompt 'lazy dog' --tokens 20");
    ck_assert(!strncmp(flag, "lazy dog", 8));
    ck_assert_sh(0, "printf 'lazy dog' > prompt.txt");
    ck_assert_str_eq(flag, sample("characters", "--prompt-file prompt.txt --tokens 20"));
    ck_assert_refused(1, "nowhere", "$GPT sample --out characters --prompt-file nowhere");
    ck_assert_refused(2, "give one of them", "$GPT sample --out characters --prompt a --prompt-file prompt.txt");
    ck_assert_refused(2, "--prompt takes a text that is not empty", "$GPT sample --out characters --prompt ''");
}
END_TEST

START_TEST(test_what_the_vocabulary_lacks_is_named)
{
    enter();
    ck_assert_refused(1, "U+00E9", "$GPT sample --out characters --prompt 'caf\xc3\xa9'");
    ck_assert_refused(1, "U+FFFD", "printf 'a\\377' > bad.txt; $GPT sample --out characters --prompt-file bad.txt");
}
END_TEST

START_TEST(test_bytes_take_any_prompt)
{
    enter();
    ck_assert_sh(0, "printf 'a\\377b' > bad.txt; $GPT sample --out bytes --prompt-file bad.txt --tokens 1 | head -c 3 | od -An -tx1");
    ck_assert_str_eq(out_text, " 61 ff 62\n");
}
END_TEST

/* Whether the text of `bytes` bytes ends within a character that what follows goes on with. */
static bool is_cut(const char *text, ssize_t bytes)
{
    ssize_t begin = bytes - 1;
    while (begin > 0 && ((unsigned char)text[begin] & 0xC0) == 0x80) begin--;
    unsigned char c = (unsigned char)text[begin];
    return ((unsigned char)text[bytes] & 0xC0) == 0x80 && bytes - begin < (c < 0xC0 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4);
}

/* Not only at the end: whatever has come by the time someone looks ends where a character does. */
START_TEST(test_characters_come_out_whole)
{
    enter();
    enum { READS = 4096 };
    static ssize_t ends[READS];
    const char *text = sample("bytes", "--temperature 0 --prompt 'caf' --tokens 40");
    ck_assert_str_has(text, "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x99\x82");
    FILE *from = popen(TANDEM_BIN "/gpt sample --threads 1 --out bytes --temperature 0 --prompt caf --tokens 2000 2>/dev/null", "r");
    ck_assert_ptr_nonnull(from);
    int reads = 0;
    ssize_t bytes = 0;
    for (ssize_t size; (size = read(fileno(from), out_text + bytes, sizeof out_text - 1 - (size_t)bytes)) > 0;) {
        ck_assert_int_lt(reads, READS);
        ends[reads++] = bytes += size;
    }
    out_text[bytes] = 0;
    ck_assert_int_eq(pclose(from), 0);
    ck_assert_int_gt(reads, 20);
    for (int i = 0; i < reads; i++) ck_assert_msg(!is_cut(out_text, ends[i]), "read %d of %d ends within a character", i, reads);
}
END_TEST

START_TEST(test_flags_out_of_range_are_refused)
{
    enter();
    static const char *const flags[][2] = {
        { "--tokens 0", "--tokens takes a whole number of at least 1" }, { "--tokens -3", "--tokens takes" },
        { "--temperature -1", "--temperature takes a number of at least 0" }, { "--temperature nan", "--temperature takes" },
        { "--top-k 0", "--top-k takes a whole number of at least 1" }, { "--top-p 0", "--top-p takes a number above 0, at most 1" },
        { "--top-p 1.5", "--top-p takes" }, { "--seed -1", "--seed takes" }, { "--ranks 2", "--ranks is no flag" },
        { "--steps 3", "--steps is no flag" },
    };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        ck_assert_refused(2, flags[i][1], "$GPT sample --out characters %s", flags[i][0]);
    ck_assert_refused(2, "--out", "$GPT sample");
    ck_assert_sh(1, "$GPT sample --out nowhere");
}
END_TEST

START_TEST(test_json_gives_one_object)
{
    enter();
    ck_assert_sh(0, "$GPT sample --out characters --prompt the --tokens 50 --json");
    ck_assert(object_number("tokens") == 50);
    ck_assert(object_number("prompt_tokens") == 3);
    ck_assert(object_number("tokens_per_s") > 0);
    ck_assert(object_number("first_token_ms") > 0);
    ck_assert_str_has(out_text, "\"text\":\"the");
    ck_assert_str_has(out_text, "\"command\":\"sample\"");
    ck_assert_sh(0, "$GPT sample --out characters --tokens 9 --json"); /* what begins the text is not counted */
    ck_assert(object_number("tokens") == 9);
    ck_assert(object_number("prompt_tokens") == 0);
}
END_TEST

START_TEST(test_two_plans_serve_any_number_of_tokens)
{
    enter();
    ck_assert_sh(0, "$GPT sample --out characters --prompt the --tokens 300 --json");
    ck_assert(object_number("plans") == 2);
    ck_assert_str_eq(err_text, "");
    ck_assert_sh(0, "$GPT sample --out characters --prompt the --tokens 3 --json");
    ck_assert(object_number("plans") == 2);
}
END_TEST

START_TEST(test_bf16_samples_too)
{
    enter();
    if (!has_bf16_products()) SKIP("no bf16 products here");
    ck_assert_sh(0, "$GPT sample --out characters --dtype bf16 --prompt the --tokens 40 --json");
    ck_assert(object_number("tokens") == 40);
    ck_assert(object_number("plans") == 2);
    ck_assert_same_sample("characters", "--dtype bf16 --seed 5 --tokens 40", "--dtype bf16 --seed 5 --tokens 40");
}
END_TEST

START_TEST(test_sharded_runs_are_sampled_as_any)
{
    enter();
    ck_assert_sh(0, "$GPT train --data text.txt " SMALL "--dtype f64 --steps 3 --out fsdp --ranks 2 --strategy fsdp");
    ck_assert_str_eq(sample("fsdp", "--seed 3 --tokens 60 --dtype f64"), sample("f64", "--seed 3 --tokens 60"));
}
END_TEST

START_TEST(test_a_signal_ends_the_text_with_its_line)
{
    enter();
    ck_assert_sh(130, "$GPT sample --out characters --tokens 100000000 & sleep 1; kill -INT $!; wait $!");
    ck_assert_int_gt(strlen(out_text), 0);
    ck_assert_int_eq(out_text[strlen(out_text) - 1], '\n');
    ck_assert_ptr_nonnull(strstr(err_text, "tokens: the first after"));
}
END_TEST

/* ---- Tokenizers ------------------------------------------------------------------------------------------- */

START_TEST(test_another_tokenizer_than_the_runs_is_refused)
{
    enter();
    ck_assert_refused(2, "is not the one of characters", "$GPT sample --out characters --tokenizer bytes");
    ck_assert_refused(2, "is not the one of characters", "$GPT train --resume --out characters --steps 70 --tokenizer $GOLDEN/tokenizer.json");
    ck_assert_sh(0, "$GPT sample --out bytes --tokenizer bytes --tokens 3");
}
END_TEST

START_TEST(test_files_of_a_run_that_were_changed_are_refused)
{
    enter();
    ck_assert_refused(1, "its fingerprint is",
                      "rm -rf t && cp -r characters t && printf 'Z' >> t/model/characters.txt && $GPT sample --out t --tokens 3");
    ck_assert_refused(1, "tokens.json",
                      "rm -rf t && cp -r characters t && echo '{}' > t/model/tokens.json && $GPT sample --out t --tokens 3");
    ck_assert_refused(1, "has no tokenizer",
                      "rm -rf t && cp -r characters t && rm t/model/characters.txt && $GPT sample --out t --tokens 3");
}
END_TEST

START_TEST(test_a_bpe_is_kept_with_the_run)
{
    enter();
    ck_assert_sh(0, "rm -rf bpe && cp $GOLDEN/tokenizer.json ./ && $GPT train --data text.txt " SMALL
                    "--tokenizer tokenizer.json --steps 3 --out bpe && rm tokenizer.json");
    ck_assert_sh(0, "$GPT eval --out bpe");
    const char *text = sample("bpe", "--prompt 'the lazy' --tokens 20");
    ck_assert(!strncmp(text, "the lazy", 8));
    ck_assert_sh(0, "printf 'a\\377b' > bad.txt; $GPT sample --out bpe --prompt-file bad.txt --tokens 1 | head -c 5 | od -An -tx1");
    ck_assert_str_eq(out_text, " 61 ef bf bd 62\n"); /* U+FFFD, as the tokenizer reads what is no UTF-8 */
}
END_TEST

START_TEST(test_broken_merges_are_refused)
{
    enter();
    ck_assert_refused(1, "merges.txt",
                      "rm -rf pair && cp -r $GOLDEN/tokenizer_pair pair && chmod u+w pair/* && echo 'one two three' >> pair/merges.txt && "
                      "$GPT train --data text.txt " SMALL "--tokenizer pair --steps 1");
}
END_TEST

TESTS("gpt_cli", test_a_model_is_trained_evaluated_and_resumed, test_texts_that_cannot_be_trained_on_are_refused,
      test_sizes_that_do_not_fit_are_refused, test_one_seed_gives_one_text, test_a_cache_changes_no_text,
      test_of_a_prompt_longer_than_the_context_the_end_counts, test_greedy_is_temperature_0_top_k_1_and_a_tiny_top_p,
      test_a_prompt_comes_first_be_it_a_flag_or_a_file, test_what_the_vocabulary_lacks_is_named, test_bytes_take_any_prompt,
      test_characters_come_out_whole, test_flags_out_of_range_are_refused, test_json_gives_one_object,
      test_two_plans_serve_any_number_of_tokens, test_bf16_samples_too, test_sharded_runs_are_sampled_as_any,
      test_a_signal_ends_the_text_with_its_line, test_another_tokenizer_than_the_runs_is_refused,
      test_files_of_a_run_that_were_changed_are_refused, test_a_bpe_is_kept_with_the_run, test_broken_merges_are_refused)
