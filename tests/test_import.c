/* gpt import and export: what transformers saved gives their logits, a round trip gives the same bits, and files that cannot be are
 * refused by name before anything is made.
 * Timeout: 300 s
 */
#include <sys/stat.h>
#include <unistd.h>

#include "core/json.h"
#include "models/gpt/gpt.h"
#include "tests/golden.h"
#include "tests/shell.h"

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
    { "hf_gpt2", { .layers = 2, .heads = 3, .width = 18, .hidden = 40, .context = 9, .vocabulary = 23, .has_bias = true,
                   .tanh_gelu = true } },
    { "hf_llama", { .form = GPT_LLAMA, .layers = 2, .heads = 4, .kv_heads = 2, .width = 24, .hidden = 20, .context = 16384,
                    .vocabulary = 29, .untied = true, .theta = 3.4e8, .rope_factor = 8 } },
    { "hf_llama_tied", { .form = GPT_LLAMA, .layers = 2, .heads = 3, .kv_heads = 1, .width = 18, .hidden = 20, .context = 16384,
                         .vocabulary = 29 } },
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
        ck_assert_sh(0, "rm -rf logits && $GPT import --from $GOLDEN/%s --out logits", name);
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
    ck_assert_sh(0, "rm -rf flags-a flags-b && $GPT import --from $GOLDEN/hf_gpt2 --out flags-a && "
                    "$GPT import --from $GOLDEN/hf_llama --out flags-b");
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
        ck_assert_sh(0, "rm -rf one two three && $GPT import --from $GOLDEN/%s --out one && $GPT export --out one --to two && "
                        "$GPT import --from two --out three", name);
        ck_assert_sh(0, "cmp one/checkpoints/step-0/rank-0.safetensors three/checkpoints/step-0/rank-0.safetensors");
        ck_assert_sh(0, "for k in layers heads kv-heads width hidden vocabulary context eps theta rope-factor head gelu bias dropout; do "
                        "grep -o \"\\\"$k\\\":[^,]*\" one/config.json >a; grep -o \"\\\"$k\\\":[^,]*\" three/config.json >b; "
                        "cmp a b || exit 1; done");
    }
    /* keys, shapes and bytes are those that transformers wrote */
    td_context *td = open_cpu(TD_F32);
    ck_assert_sh(0, "rm -rf one two && $GPT import --from $GOLDEN/hf_gpt2 --out one && $GPT export --out one --to two");
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

/* With --ema the averages are what is evaluated, and so what is published: under the parameters' keys, and nothing else. */
START_TEST(test_averages_are_what_is_exported)
{
    enter();
    td_context *td = open_cpu(TD_F32);
    ck_assert_sh(0, TEXT "rm -rf averaged hf back && $GPT train " SMALL "--steps 3 --ema 0.7 --out averaged && $GPT export --out averaged --to hf && "
                         "! grep -q ema hf/model.safetensors && $GPT import --from hf --out back");
    double before = eval_loss(td, "--out averaged"), after = eval_loss(td, "--out back --data text.txt --tokenizer characters --batch 24");
    ck_assert_msg(before == after, "%.17g is not %.17g", after, before);
    td_close(td);
}
END_TEST

/* Written by three ranks in parts, read as one, in the form whose biases transformers would have to make up. */
START_TEST(test_a_run_in_parts_is_exported_whole)
{
    enter();
    td_context *td = open_cpu(TD_F32);
    ck_assert_sh(0, TEXT "rm -rf parts hf hf-again back && $GPT train " SMALL "--ranks 3 --strategy fsdp --steps 3 --out parts && "
                         "test -e parts/checkpoints/step-3/rank-2.safetensors && $GPT export --out parts --to hf && "
                         "$GPT import --from hf --out back");
    double before = eval_loss(td, "--out parts --ranks 1 --strategy single");
    double after = eval_loss(td, "--out back --data text.txt --tokenizer characters --batch 24");
    ck_assert_msg(before == after, "%.17g is not %.17g", after, before);
    ck_assert_sh(2, "$GPT export --out parts --to hf");
    ck_assert_str_has(err_text, "hf/model.safetensors is there already and stays as it is: choose another --to");
    ck_assert_sh(0, "$GPT export --out parts --to hf-again --json >report.json && cmp hf/model.safetensors hf-again/model.safetensors");
    td_json_document *report = open_json(td, "report.json");
    ck_member_text(td_json_root(report), "command", "export"), ck_member_text(td_json_root(report), "dtype", "f32");
    ck_member(td_json_root(report), "params", 4068);
    td_json_close(report);
    ck_assert_sh(2, "$GPT export --out parts");
    ck_assert_str_has(err_text, "export needs --to DIR");
    td_close(td);
}
END_TEST

START_TEST(test_bf16_is_exported_where_it_is_asked_for)
{
    enter();
    td_context *td = open_cpu(TD_F32);
    ck_assert_sh(0, "rm -rf one two && $GPT import --from $GOLDEN/hf_llama --out one && $GPT export --out one --to two --dtype bf16 && "
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
    ck_assert_sh(0, TEXT "rm -rf run hf single shared && $GPT train " SMALL "--steps 20 --lr 0.01 --out run && "
                         "$GPT export --out run --to hf && $GPT import --from hf --dtype f64 --out single && cp -r single shared");
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

/* ---- Files of other writers --------------------------------------------------------------------------------- */

/* A file made of another's tensors: one left out, renamed, with other sizes or in another dtype; one added; the rest as it was. */
typedef struct change {
    const char *key;              /* what the others are about */
    bool leaves_out;
    td_shape shape;               /* rank 0: as it was */
    const char *renamed;
    const char *added;            /* a copy of `key` under this name */
    td_dtype all_as;              /* every tensor in this dtype */
    const char *without;          /* a prefix taken off every key */
    int begin, end;               /* only these tensors; end 0: all */
} change;

static void write_changed(td_context *td, const char *name, const char *path, const change *c)
{
    char from[512];
    snprintf(from, sizeof from, "%s/tests/golden/%s/model.safetensors", TANDEM_SOURCE, name);
    td_safetensors *file = td_safetensors_open(td, from);
    ck_assert_no_error(td);
    int64_t count = 0, all = td_safetensors_count(file);
    td_safetensors_entry *entries = check_alloc((size_t)(all + 1) * sizeof *entries);
    for (int64_t i = c->begin; i < (c->end ? c->end : all); i++) {
        td_safetensors_entry e = td_safetensors_at(file, i);
        bool it = c->key && !strcmp(e.name, c->key);
        if (it && c->added) entries[count] = e, entries[count++].name = c->added;
        if (it && c->leaves_out) continue;
        if (it && c->shape.rank) e.shape = c->shape;
        if (it && c->renamed) e.name = c->renamed;
        int64_t elements = td_shape_elements(e.shape);
        void *data = check_alloc((size_t)(elements * td_dtype_size(c->all_as)));
        td_convert(c->all_as, data, e.dtype, e.data, elements);
        e = (td_safetensors_entry){ e.name, c->all_as, e.shape, data, elements * td_dtype_size(c->all_as) };
        if (c->without && !strncmp(e.name, c->without, strlen(c->without))) e.name += strlen(c->without);
        entries[count++] = e;
    }
    ck_assert(td_safetensors_write(td, path, entries, count, NULL));
    td_safetensors_close(file);
}

/* in/ is the folder `name` with its weights changed. */
static void make_folder(td_context *td, const char *name, const change *c)
{
    ck_assert_sh(0, "rm -rf in out && mkdir in && cp $GOLDEN/%s/config.json in/", name);
    write_changed(td, name, "in/model.safetensors", c);
}

static void check_same_as_plain(const char *name, const char *from)
{
    ck_assert_sh(0, "rm -rf out plain && $GPT import --from %s --out out && $GPT import --from $GOLDEN/%s --out plain", from, name);
    ck_assert_sh(0, "cmp out/checkpoints/step-0/rank-0.safetensors plain/checkpoints/step-0/rank-0.safetensors");
}

START_TEST(test_keys_with_and_without_prefix_and_known_extras)
{
    enter();
    td_context *td = open_cpu(TD_F32);
    static const struct { const char *name; change change; } kinds[] = {
        { "hf_gpt2", { .without = "transformer." } },
        { "hf_gpt2", { .key = "transformer.wte.weight", .added = "lm_head.weight" } },
        { "hf_gpt2", { .key = "transformer.wpe.weight", .added = "transformer.h.0.attn.bias" } },
        { "hf_gpt2", { .key = "transformer.wpe.weight", .added = "h.1.attn.masked_bias" } },
        { "hf_llama_tied", { .without = "model." } },
        { "hf_llama_tied", { .key = "model.embed_tokens.weight", .added = "lm_head.weight" } },
        { "hf_llama", { .key = "model.norm.weight", .added = "model.layers.0.self_attn.rotary_emb.inv_freq" } },
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        make_folder(td, kinds[i].name, &kinds[i].change);
        check_same_as_plain(kinds[i].name, "in");
        check_same_as_plain(kinds[i].name, "in/model.safetensors");
    }
    td_close(td);
}
END_TEST

START_TEST(test_every_float_dtype_is_converted)
{
    enter();
    td_context *td = open_cpu(TD_F32);
    const td_dtype as[] = { TD_F16, TD_BF16, TD_F64 };
    td_safetensors *theirs = td_safetensors_open(td, TANDEM_SOURCE "/tests/golden/hf_gpt2/model.safetensors");
    for (int d = 0; d < 3; d++) {
        make_folder(td, "hf_gpt2", &(change){ .all_as = as[d] });
        ck_assert_sh(0, "$GPT import --from in --out out");
        td_safetensors *ours = td_safetensors_open(td, "out/checkpoints/step-0/rank-0.safetensors");
        td_safetensors_entry want, got;
        ck_assert(td_safetensors_find(theirs, "transformer.h.1.mlp.c_fc.weight", &want)); /* (18, 40) */
        ck_assert(td_safetensors_find(ours, "h.1.mlp.c_fc.weight", &got));
        ck_assert(got.dtype == TD_F32 && td_shape_equal(got.shape, TD_SHAPE(40, 18)));
        for (int64_t i = 0; i < 18 * 40; i++) {
            unsigned char narrow[8];
            float x;
            td_convert(as[d], narrow, TD_F32, (const float *)want.data + i, 1);
            td_convert(TD_F32, &x, as[d], narrow, 1);
            ck_assert(((const float *)got.data)[i % 40 * 18 + i / 40] == x);
        }
        td_safetensors_close(ours);
    }
    make_folder(td, "hf_gpt2", &(change){ .all_as = TD_I32 });
    ck_assert_sh(1, "$GPT import --from in --out out");
    ck_assert_str_has(err_text, "in/model.safetensors: 'transformer.wte.weight' is i32, not one of f32, f64, bf16 and f16");
    td_safetensors_close(theirs);
    td_close(td);
}
END_TEST

static void write_text(const char *path, const char *text)
{
    FILE *to = fopen(path, "w");
    ck_assert_ptr_nonnull(to);
    fputs(text, to);
    fclose(to);
}

START_TEST(test_shards_and_their_index)
{
    enter();
    td_context *td = open_cpu(TD_F32);
    td_safetensors *theirs = td_safetensors_open(td, TANDEM_SOURCE "/tests/golden/hf_llama/model.safetensors");
    int64_t all = td_safetensors_count(theirs);
    ck_assert_sh(0, "rm -rf in && mkdir in && cp $GOLDEN/hf_llama/config.json in/");
    write_changed(td, "hf_llama", "in/model-00001-of-00002.safetensors", &(change){ .end = 5 });
    write_changed(td, "hf_llama", "in/model-00002-of-00002.safetensors", &(change){ .begin = 5 });
    FILE *index = fopen("in/model.safetensors.index.json", "w");
    fprintf(index, "{\"metadata\": {\"total_size\": 31392}, \"weight_map\": {");
    for (int64_t i = 0; i < all; i++)
        fprintf(index, "%s\"%s\": \"model-0000%d-of-00002.safetensors\"", i ? ", " : "", td_safetensors_at(theirs, i).name, i < 5 ? 1 : 2);
    fprintf(index, "}}");
    fclose(index);
    check_same_as_plain("hf_llama", "in");
    ck_assert_sh(1, "rm -rf out && sed -i 's/00001-of-00002/00002-of-00002/' in/model.safetensors.index.json && "
                    "$GPT import --from in --out out");
    ck_assert_str_has(err_text, "in/model-00002-of-00002.safetensors does not hold '");
    ck_assert_sh(1, "rm in/model-00002-of-00002.safetensors; $GPT import --from in --out out");
    ck_assert_str_has(err_text, "in/model-00002-of-00002.safetensors: No such file");
    write_text("in/model.safetensors.index.json", "{\"weight_map\": {\"lm_head.weight\": \"../elsewhere.safetensors\"}}");
    ck_assert_sh(1, "$GPT import --from in --out out; status=$?; test ! -e out && exit $status");
    ck_assert_str_has(err_text, "\"weight_map\" must give each key the name of a file beside it");
    td_safetensors_close(theirs);
    td_close(td);
}
END_TEST

START_TEST(test_a_tokenizer_goes_with_the_weights)
{
    enter();
    ck_assert_sh(0, TEXT "rm -rf run hf out && $GPT train " SMALL "--tokenizer $GOLDEN/tokenizer.json --steps 2 --out run && "
                         "$GPT export --out run --to hf && cmp $GOLDEN/tokenizer.json hf/tokenizer.json && $GPT import --from hf --out out && "
                         "cmp $GOLDEN/tokenizer.json out/model/tokenizer.json");
    ck_assert_sh(0, "$GPT sample --out run --prompt the --tokens 5 >a && $GPT sample --out out --prompt the --tokens 5 >b && cmp a b");
}
END_TEST

/* ---- What cannot be --------------------------------------------------------------------------------------- */

START_TEST(test_tensors_that_do_not_fit_are_refused_by_name)
{
    enter();
    td_context *td = open_cpu(TD_F32);
    static const struct { const char *name; change change; const char *says; } bad[] = {
        { "hf_gpt2", { .key = "transformer.h.1.ln_1.bias", .leaves_out = true },
          "in/model.safetensors holds no 'h.1.ln_1.bias' and no 'transformer.h.1.ln_1.bias', as which it would do" },
        { "hf_gpt2", { .key = "transformer.h.1.ln_1.bias", .added = "transformer.h.2.ln_1.bias" },
          "in/model.safetensors holds 'transformer.h.2.ln_1.bias', which a model of these sizes has not" },
        { "hf_gpt2", { .key = "transformer.h.1.ln_1.bias", .added = "h.1.ln_1.bias" },
          "in/model.safetensors holds 'transformer.h.1.ln_1.bias', which" },
        { "hf_gpt2", { .key = "transformer.h.0.attn.c_attn.weight", .shape = { 2, { 54, 18 } } },
          "'transformer.h.0.attn.c_attn.weight' has shape (54, 18), where the sizes say (18, 54): it looks transposed" },
        { "hf_gpt2", { .key = "transformer.h.0.ln_1.weight", .shape = { 2, { 9, 2 } } },
          "'transformer.h.0.ln_1.weight' has shape (9, 2), where the sizes say (18)" },
        { "hf_llama", { .key = "model.layers.1.mlp.up_proj.weight", .shape = { 2, { 24, 20 } } },
          "'model.layers.1.mlp.up_proj.weight' has shape (24, 20), where the sizes say (20, 24): it looks transposed" },
        { "hf_llama", { .key = "lm_head.weight", .leaves_out = true }, "in/model.safetensors holds no 'lm_head.weight'" },
        { "hf_llama_tied", { .key = "model.layers.0.self_attn.q_proj.weight", .added = "lm_head.weight" },
          "'lm_head.weight' is not the table of the tokens, though \"tie_word_embeddings\" says so" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        make_folder(td, bad[i].name, &bad[i].change);
        ck_assert_sh(1, "$GPT import --from in --out out; status=$?; test ! -e out && exit $status");
        ck_assert_str_has(err_text, bad[i].says);
    }
    td_close(td);
}
END_TEST

START_TEST(test_a_config_that_does_not_fit_is_refused_by_name)
{
    enter();
    static const struct { const char *name, *sed, *says; } bad[] = {
        { "hf_gpt2", "s/\"gpt2\"/\"mistral\"/", "in/config.json: \"model_type\" is 'mistral': gpt2 and llama are known" },
        { "hf_gpt2", "/model_type/d", "in/config.json: lacks \"model_type\"" },
        { "hf_gpt2", "/\"n_head\"/d", "in/config.json: lacks \"n_head\"" },
        { "hf_gpt2", "s/\"n_head\": 3/\"n_head\": -3/", "\"n_head\" must be a whole number from 1 to 4096" },
        { "hf_gpt2", "s/\"n_head\": 3/\"n_head\": \"3\"/", "\"n_head\" must be a whole number from 1 to 4096" },
        { "hf_gpt2", "s/\"n_head\": 3/\"n_head\": 4/", "--width 18 cannot be divided among --heads 4" },
        { "hf_gpt2", "s/\"n_layer\": 2/\"n_layer\": 3/", "holds no 'h.2.ln_1.weight'" },
        { "hf_gpt2", "s/\"n_layer\": 2/\"n_layer\": 1/", "holds 'transformer.h.1." },
        { "hf_gpt2", "s/\"vocab_size\": 23/\"vocab_size\": 24/",
          "'transformer.wte.weight' has shape (23, 18), where the sizes say (24, 18)" },
        { "hf_gpt2", "s/\"n_inner\": 40/\"n_inner\": null/", "has shape (18, 40), where the sizes say (18, 72)" },
        { "hf_gpt2", "s/gelu_new/relu/", "\"activation_function\" is 'relu', a function that this form of the model has not" },
        { "hf_gpt2", "s/\"scale_attn_weights\": true/\"scale_attn_weights\": false/",
          "\"scale_attn_weights\" is false, which this model has not" },
        { "hf_gpt2", "s/\"scale_attn_by_inverse_layer_idx\": false/\"scale_attn_by_inverse_layer_idx\": true/",
          "\"scale_attn_by_inverse_layer_idx\" is true, which this model has not" },
        { "hf_llama", "s/\"llama3\"/\"yarn\"/", "\"rope_parameters\" is of the kind 'yarn': llama3 is known, or none" },
        { "hf_llama", "s/\"high_freq_factor\": 4.0/\"high_freq_factor\": 8.0/", "only 1, 4 and 8192 are known" },
        { "hf_llama", "s/\"head_dim\": 6/\"head_dim\": 8/", "\"head_dim\" is not hidden_size / num_attention_heads" },
        { "hf_llama", "s/\"attention_bias\": false/\"attention_bias\": true/", "\"attention_bias\" is true, which this model has not" },
        { "hf_llama", "s/\"tie_word_embeddings\": false/\"tie_word_embeddings\": true/",
          "'lm_head.weight' is not the table of the tokens" },
        { "hf_llama", "s/\"num_key_value_heads\": 2/\"num_key_value_heads\": 3/", "--heads 4 cannot share --kv-heads 3 evenly" },
        { "hf_llama", "$d", "in/config.json" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ck_assert_sh(0, "rm -rf in out && cp -r $GOLDEN/%s in && chmod -R u+w in && sed -i '%s' in/config.json && "
                        "! cmp -s in/config.json $GOLDEN/%s/config.json",
                     bad[i].name, bad[i].sed, bad[i].name);
        int status = sh("$GPT import --from in --out out; status=$?; test ! -e out && exit $status");
        ck_assert_msg(status == 1 || (status == 2 && !strncmp(bad[i].says, "--", 2)), "%s: status %d: %s", bad[i].sed, status, err_text);
        ck_assert_str_has(err_text, bad[i].says);
    }
}
END_TEST

/* In the form of files before transformers 5. */
START_TEST(test_rope_scaling_of_earlier_files_is_read)
{
    enter();
    ck_assert_sh(0, "rm -rf in out plain && cp -r $GOLDEN/hf_llama in && chmod -R u+w in && "
                    "sed -i 's/rope_parameters/rope_scaling/; /rope_theta/d; s/.*\"rope_type\"/\"type\"/; "
                    "s/\"use_cache\"/\"rope_theta\": 3.4e8, &/' in/config.json && "
                    "$GPT import --from in --out out && $GPT import --from $GOLDEN/hf_llama --out plain && "
                    "sed -i 's/\"from\":[^,}]*//' out/config.json plain/config.json && cmp out/config.json plain/config.json");
}
END_TEST

/* hf_gpt2's */
#define SIZES "--layers 2 --heads 3 --width 18 --hidden 40 --context 9 --bias yes --gelu tanh "

START_TEST(test_missing_and_broken_files_are_refused)
{
    enter();
    ck_assert_sh(2, "rm -rf out; $GPT import --out out");
    ck_assert_str_has(err_text, "import needs --from");
    ck_assert_sh(2, "$GPT import --from $GOLDEN/hf_gpt2");
    ck_assert_str_has(err_text, "import needs --out DIR");
    ck_assert_sh(1, "$GPT import --from nowhere --out out");
    ck_assert_str_has(err_text, "cannot read nowhere: No such file");
    ck_assert_sh(1, "rm -rf in && cp -r $GOLDEN/hf_gpt2 in && rm in/model.safetensors && $GPT import --from in --out out");
    ck_assert_str_has(err_text, "in has neither model.safetensors nor model.safetensors.index.json");
    ck_assert_sh(1, "head -c 20000 $GOLDEN/hf_gpt2/model.safetensors >in/model.safetensors; $GPT import --from in --out out");
    ck_assert_str_has(err_text, "in/model.safetensors: ");
    ck_assert_sh(1, "cp $GOLDEN/hf_gpt2/model.safetensors in/ && rm in/config.json && $GPT import --from in --out out");
    ck_assert_str_has(err_text, "in/config.json: No such file");
    ck_assert_sh(2, "$GPT import --from in/model.safetensors --out out " SIZES);
    ck_assert_str_has(err_text, "without a config.json beside the file --vocabulary is needed");
    ck_assert_sh(0, "test ! -e out && $GPT import --from in/model.safetensors --out out " SIZES "--vocabulary 23");
}
END_TEST

#define SUMS "find out -type f | sort | xargs md5sum"

START_TEST(test_a_run_in_out_stays_as_it_is)
{
    enter();
    ck_assert_sh(0, TEXT "rm -rf out && $GPT train " SMALL "--steps 2 --out out && " SUMS " >before");
    ck_assert_sh(2, "$GPT import --from $GOLDEN/hf_gpt2 --out out");
    ck_assert_str_has(err_text, "out holds a run, which stays as it is: choose another --out");
    ck_assert_sh(0, SUMS " >after && cmp before after");
    /* the checkpoint alone is one, too */
    ck_assert_sh(0, "find out -mindepth 1 -maxdepth 1 ! -name checkpoints -exec rm -rf {} + && " SUMS " >before");
    ck_assert_sh(2, "$GPT import --from $GOLDEN/hf_gpt2 --out out");
    ck_assert_sh(0, SUMS " >after && cmp before after");
    ck_assert_sh(0, "rm -rf out && mkdir out && echo mine >out/notes.txt && $GPT import --from $GOLDEN/hf_gpt2 --out out && "
                    "grep -q mine out/notes.txt");
    ck_assert_sh(1, "rm -rf out && mkdir -p out && echo file >out/checkpoints && $GPT import --from $GOLDEN/hf_gpt2 --out out");
    ck_assert_sh(0, "test ! -e out/config.json && grep -q file out/checkpoints");
}
END_TEST

/* A parameter that is not there is an error in what begins as in what goes on. */
START_TEST(test_a_beginning_lacks_no_parameter)
{
    enter();
    ck_assert_sh(0, TEXT "rm -rf run hf out && $GPT train " SMALL "--steps 2 --out run && "
                         "$GPT export --out run --to hf && $GPT import --from hf --out out && "
                         "sed -i 's/\"name\":\"ln_f.weight\"/\"name\":\"ln_f.gone\"/' out/checkpoints/step-0/manifest.json");
    ck_assert_sh(1, "$GPT train --resume --out out --data text.txt --tokenizer characters --batch 24 --steps 2");
    ck_assert_str_has(err_text, "does not hold 'ln_f.weight', which this model has");
}
END_TEST

TESTS("import", test_an_imported_model_gives_the_logits_of_transformers, test_the_sizes_of_config_json_become_flags,
      test_what_is_exported_imports_to_the_same_bits, test_averages_are_what_is_exported, test_a_run_in_parts_is_exported_whole, test_bf16_is_exported_where_it_is_asked_for,
      test_training_begins_with_imported_weights_on_any_world, test_keys_with_and_without_prefix_and_known_extras,
      test_every_float_dtype_is_converted, test_shards_and_their_index, test_a_tokenizer_goes_with_the_weights,
      test_tensors_that_do_not_fit_are_refused_by_name, test_a_config_that_does_not_fit_is_refused_by_name,
      test_rope_scaling_of_earlier_files_is_read, test_missing_and_broken_files_are_refused, test_a_run_in_out_stays_as_it_is,
      test_a_beginning_lacks_no_parameter)
