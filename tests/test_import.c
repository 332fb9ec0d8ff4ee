/* gpt import and export: what transformers saved gives their logits, a round trip gives the same bits, and files that cannot be are
 * refused by name before anything is made.
 * Timeout: 300 s
 */
#include <errno.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/json.h"
#include "models/gpt/gpt.h"
#include "tests/golden.h"

/* ---- Running a command ------------------------------------------------------------------------------------ */

/* stdout and stderr of the last command. */
static char out_text[1 << 16], err_text[1 << 14];

static void read_text(const char *path, char *to, size_t room)
{
    FILE *from = fopen(path, "r");
    ck_assert_msg(from != NULL, "%s: %s", path, strerror(errno));
    to[fread(to, 1, room - 1, from)] = 0;
    fclose(from);
}

/* Runs a shell command in the folder of this test; $GPT and $HF are set. Returns its exit status. */
static int sh(const char *format, ...) TD_PRINTF(1, 2);
static int sh(const char *format, ...)
{
    char command[2048], whole[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    snprintf(whole, sizeof whole, "GPT='%s/gpt'; HF='%s/tests/golden'; { %s; } >stdout.txt 2>stderr.txt", TANDEM_BIN, TANDEM_SOURCE, command);
    int status = system(whole);
    read_text("stdout.txt", out_text, sizeof out_text);
    read_text("stderr.txt", err_text, sizeof err_text);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

#define ck_assert_sh(expected, ...)                                                                                            \
    do {                                                                                                                       \
        int status_ = sh(__VA_ARGS__);                                                                                         \
        ck_assert_msg(status_ == (expected), "status %d, not %d; stderr: %.900s; stdout: %.900s", status_, (expected), err_text, out_text); \
    } while (0)

static void enter(void)
{
    static bool entered;
    if (!entered) ck_assert_int_eq(system("rm -rf test_import_files && mkdir test_import_files"), 0);
    if (!entered) ck_assert_int_eq(chdir("test_import_files"), 0);
    entered = true;
}

static td_json_document *open_json(td_context *td, const char *path)
{
    td_json_document *document = td_json_read(td, path);
    ck_assert_no_error(td);
    return document;
}

/* A number or text of a JSON file. */
static void ck_member(const td_json *root, const char *key, double want)
{
    ck_assert_msg(td_json_get_number(root, key, -1) == want, "\"%s\" is %g, not %g", key, td_json_get_number(root, key, -1), want);
}
static void ck_member_text(const td_json *root, const char *key, const char *want)
{
    const char *got = td_json_get_string(root, key);
    ck_assert_msg(got && !strcmp(got, want), "\"%s\" is '%s', not '%s'", key, got ? got : "(none)", want);
}

/* ---- transformers ----------------------------------------------------------------------------------------- */

/* What tests/golden/transformers_models.py made. */
static const struct {
    const char *name;
    gpt_size size;
} published[] = {
    { "hf_gpt2", { .layers = 2, .heads = 3, .width = 18, .hidden = 40, .context = 9, .vocabulary = 23, .has_bias = true, .tanh_gelu = true } },
    { "hf_llama", { .form = GPT_LLAMA, .layers = 2, .heads = 4, .kv_heads = 2, .width = 24, .hidden = 20, .context = 16384, .vocabulary = 29,
                    .untied = true, .theta = 3.4e8, .rope_factor = 8 } },
    { "hf_llama_tied", { .form = GPT_LLAMA, .layers = 2, .heads = 3, .kv_heads = 1, .width = 18, .hidden = 20, .context = 16384, .vocabulary = 29 } },
};
enum { PUBLISHED = sizeof published / sizeof *published };

/* All parameters from the one file of the checkpoint. */
static void fill_parameters(td_context *td, const char *path)
{
    td_safetensors *file = td_safetensors_open(td, path);
    ck_assert_no_error(td);
    ck_assert_int_eq(td_safetensors_count(file), td_state_count(td));
    for (int64_t i = 0; i < td_state_count(td); i++) {
        td_state s = td_state_at(td, i);
        td_safetensors_entry e;
        ck_assert_msg(td_safetensors_find(file, td_state_name(s), &e), "no %s", td_state_name(s));
        ck_assert(td_shape_equal(e.shape, td_state_shape(s)) && e.dtype == td_state_dtype(s));
        ck_assert(td_state_write(s, 0, td_shape_elements(e.shape), e.data));
    }
    td_safetensors_close(file);
}

START_TEST(test_an_imported_model_gives_the_logits_of_transformers)
{
    enter();
    for (int i = 0; i < PUBLISHED; i++) {
        const char *name = published[i].name;
        char path[256];
        ck_assert_sh(0, "rm -rf logits && $GPT import --from $HF/%s --out logits", name);
        ck_assert_str_has(out_text, "imported ");
        td_context *td = open_cpu(TD_F32);
        gpt *g = check_alloc(sizeof *g);
        gpt_make(g, td_root(td), published[i].size);
        fill_parameters(td, "logits/checkpoints/step-0/rank-0.safetensors");
        snprintf(path, sizeof path, "%s/logits.txt", name);
        golden file = golden_open(path);
        golden_array ids = golden_get(file, "ids"), want = golden_get(file, "logits");
        td_tensor logits = gpt_logits(g, td_input(td, "ids", TD_I32, ids.shape, golden_as(ids, TD_I32)));
        ck_assert_tensor_near(logits, td_input(td, "want", TD_F32, want.shape, golden_as(want, TD_F32)), 1e-5);
        td_close(td);
    }
}
END_TEST

START_TEST(test_the_sizes_of_config_json_become_flags)
{
    enter();
    td_context *td = open_cpu(TD_F32);
    ck_assert_sh(0, "rm -rf flags-a flags-b && $GPT import --from $HF/hf_gpt2 --out flags-a && $GPT import --from $HF/hf_llama --out flags-b");
    td_json_document *document = open_json(td, "flags-a/config.json");
    const td_json *a = td_json_root(document);
    ck_member_text(a, "form", "gpt2");
    ck_member(a, "layers", 2), ck_member(a, "heads", 3), ck_member(a, "width", 18), ck_member(a, "hidden", 40);
    ck_member(a, "context", 9), ck_member(a, "vocabulary", 23), ck_member(a, "eps", 1e-5), ck_member(a, "dropout", 0.1);
    ck_member_text(a, "bias", "yes"), ck_member_text(a, "gelu", "tanh"), ck_member_text(a, "head", "tied");
    td_json_close(document);
    document = open_json(td, "flags-b/config.json");
    const td_json *b = td_json_root(document);
    ck_member_text(b, "form", "llama");
    ck_member(b, "layers", 2), ck_member(b, "heads", 4), ck_member(b, "kv-heads", 2), ck_member(b, "width", 24);
    ck_member(b, "hidden", 20), ck_member(b, "context", 16384), ck_member(b, "vocabulary", 29), ck_member(b, "eps", 1e-5);
    ck_member(b, "theta", 3.4e8), ck_member(b, "rope-factor", 8), ck_member(b, "dropout", 0), ck_member(b, "lr", 0.0016);
    ck_member_text(b, "head", "own");
    td_json_close(document);
    td_close(td);
}
END_TEST

/* ---- Round trips ------------------------------------------------------------------------------------------ */

START_TEST(test_what_is_exported_imports_to_the_same_bits)
{
    enter();
    for (int i = 0; i < PUBLISHED; i++) {
        const char *name = published[i].name;
        ck_assert_sh(0, "rm -rf one two three && $GPT import --from $HF/%s --out one && $GPT export --out one --to two && "
                        "$GPT import --from two --out three", name);
        ck_assert_sh(0, "cmp one/checkpoints/step-0/rank-0.safetensors three/checkpoints/step-0/rank-0.safetensors");
        ck_assert_sh(0, "for k in layers heads kv-heads width hidden vocabulary context eps theta rope-factor head gelu bias dropout; do "
                        "grep -o \"\\\"$k\\\":[^,]*\" one/config.json >a; grep -o \"\\\"$k\\\":[^,]*\" three/config.json >b; cmp a b || exit 1; done");
    }
    /* keys, shapes and bytes are those that transformers wrote */
    td_context *td = open_cpu(TD_F32);
    ck_assert_sh(0, "rm -rf one two && $GPT import --from $HF/hf_gpt2 --out one && $GPT export --out one --to two");
    td_safetensors *ours = td_safetensors_open(td, "two/model.safetensors"), *theirs;
    theirs = td_safetensors_open(td, TANDEM_SOURCE "/tests/golden/hf_gpt2/model.safetensors");
    ck_assert_no_error(td);
    ck_assert_int_eq(td_safetensors_count(ours), td_safetensors_count(theirs));
    for (int64_t i = 0; i < td_safetensors_count(theirs); i++) {
        td_safetensors_entry want = td_safetensors_at(theirs, i), got;
        ck_assert_msg(td_safetensors_find(ours, want.name, &got), "no %s", want.name);
        ck_assert(td_shape_equal(got.shape, want.shape) && got.dtype == want.dtype);
        ck_assert_mem_eq(got.data, want.data, (size_t)want.bytes);
    }
    td_safetensors_close(ours);
    td_safetensors_close(theirs);
    td_close(td);
}
END_TEST

/* A text of 61 characters, one line 40 times. */
#define TEXT "for i in $(seq 40); do echo 'abcdefghijklmnopqrstuvwxyz the quick brown fox jumps ' $i; done >text.txt; "
#define SMALL "--data text.txt --layers 2 --heads 2 --width 12 --context 8 --dropout 0 --batch 24 --log-every 1 "

static double eval_loss(td_context *td, const char *flags)
{
    ck_assert_sh(0, "$GPT eval --json %s >eval.json", flags);
    td_json_document *document = open_json(td, "eval.json");
    double loss = td_json_get_number(td_json_get(td_json_root(document), "eval"), "loss", -1);
    td_json_close(document);
    ck_assert(loss > 0);
    return loss;
}

/* Written by three ranks in parts, read as one, in the form whose biases transformers would have to make up. */
START_TEST(test_a_run_in_parts_is_exported_whole)
{
    enter();
    td_context *td = open_cpu(TD_F32);
    ck_assert_sh(0, TEXT "rm -rf parts hf back && $GPT train " SMALL "--ranks 3 --strategy fsdp --steps 3 --out parts && "
                         "test -e parts/checkpoints/step-3/rank-2.safetensors && $GPT export --out parts --to hf && "
                         "$GPT import --from hf --out back");
    double before = eval_loss(td, "--out parts --ranks 1 --strategy single"), after = eval_loss(td, "--out back --data text.txt --tokenizer characters --batch 24");
    ck_assert_msg(before == after, "%.17g is not %.17g", after, before);
    ck_assert_sh(2, "$GPT export --out parts --to hf");
    ck_assert_str_has(err_text, "hf/model.safetensors is there already and stays as it is: choose another --to");
    ck_assert_sh(2, "$GPT export --out parts");
    ck_assert_str_has(err_text, "export needs --to DIR");
    td_close(td);
}
END_TEST

START_TEST(test_bf16_is_exported_where_it_is_asked_for)
{
    enter();
    td_context *td = open_cpu(TD_F32);
    ck_assert_sh(0, "rm -rf one two && $GPT import --from $HF/hf_llama --out one && $GPT export --out one --to two --dtype bf16 && "
                    "grep -q '\"torch_dtype\":\"bfloat16\"' two/config.json");
    td_safetensors *ours = td_safetensors_open(td, "two/model.safetensors"), *theirs;
    theirs = td_safetensors_open(td, TANDEM_SOURCE "/tests/golden/hf_llama/model.safetensors");
    ck_assert_no_error(td);
    for (int64_t i = 0; i < td_safetensors_count(theirs); i++) {
        td_safetensors_entry want = td_safetensors_at(theirs, i), got;
        int64_t count = td_shape_elements(want.shape);
        uint16_t *rounded = check_alloc((size_t)count * 2);
        td_convert(TD_BF16, rounded, TD_F32, want.data, count);
        ck_assert(td_safetensors_find(ours, want.name, &got) && got.dtype == TD_BF16);
        ck_assert_mem_eq(got.data, rounded, (size_t)count * 2);
    }
    td_safetensors_close(ours);
    td_safetensors_close(theirs);
    td_close(td);
}
END_TEST

/* ---- Training on ------------------------------------------------------------------------------------------ */

static int losses_of(td_context *td, const char *path, double *losses, int room)
{
    FILE *from = fopen(path, "r");
    ck_assert_ptr_nonnull(from);
    char line[4096];
    int count = 0;
    while (fgets(line, sizeof line, from)) {
        td_json_document *document = td_json_parse(td, line, strlen(line), path);
        ck_assert_no_error(td);
        ck_assert_int_lt(count, room);
        losses[count++] = td_json_get_number(td_json_root(document), "loss", -1);
        td_json_close(document);
    }
    fclose(from);
    return count;
}

START_TEST(test_training_begins_with_imported_weights_on_any_world)
{
    enter();
    td_context *td = open_cpu(TD_F32);
    double one[8], three[8];
    ck_assert_sh(0, TEXT "rm -rf run hf single shared && $GPT train " SMALL "--steps 20 --lr 0.01 --out run && $GPT export --out run --to hf && "
                         "$GPT import --from hf --dtype f64 --out single && cp -r single shared");
    const char *go_on = "--resume --data text.txt --tokenizer characters --batch 24 --log-every 1 --steps 4 --seed 9";
    ck_assert_sh(0, "$GPT train %s --out single", go_on);
    ck_assert_str_has(out_text, "single holds weights alone: moments, schedule and data start anew");
    ck_assert_sh(0, "$GPT train %s --ranks 3 --strategy fsdp --out shared", go_on);
    ck_assert_int_eq(losses_of(td, "single/metrics.jsonl", one, 8), 4);
    ck_assert_int_eq(losses_of(td, "shared/metrics.jsonl", three, 8), 4);
    ck_assert_near(three, one, 4, 1e-10);
    td_close(td);
}
END_TEST

TESTS("import", test_an_imported_model_gives_the_logits_of_transformers, test_the_sizes_of_config_json_become_flags,
      test_what_is_exported_imports_to_the_same_bits, test_a_run_in_parts_is_exported_whole, test_bf16_is_exported_where_it_is_asked_for,
      test_training_begins_with_imported_weights_on_any_world)
