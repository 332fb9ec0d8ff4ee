/* The bf16 copies of weights that sampling reads: they change no bit of the logits. */
#include "models/gpt/gpt.h"
#include "tests/check.h"

enum { BATCH = 2, CONTEXT = 6, VOCABULARY = 11 };

static const int32_t ids[BATCH * CONTEXT] = { 1, 4, 10, 0, 3, 3, 7, 7, 2, 9, 5, 1 };

static void read_logits(td_context *td, const gpt *g, float *to)
{
    td_tensor logits = gpt_logits(g, td_input(td, "ids", TD_I32, TD_SHAPE(BATCH, CONTEXT), ids));
    td_keep(logits);
    td_step(td);
    td_read(logits, to);
    ck_assert_no_error(td);
}

static void check_narrow(gpt_size size)
{
    float before[BATCH * CONTEXT * VOCABULARY], after[BATCH * CONTEXT * VOCABULARY];
    static gpt g;
    td_context *td = open_cpu(TD_BF16);
    gpt_make(&g, td_root(td), size);
    read_logits(td, &g, before);
    int64_t parameters = td_parameter_elements(td);
    ck_assert(gpt_narrow(&g));
    ck_assert_int_eq(td_state_dtype(g.block[0].mlp.in.weight), TD_BF16);
    ck_assert_int_eq(td_state_dtype(g.head.weight), TD_BF16);
    read_logits(td, &g, after);
    ck_assert_mem_eq(before, after, sizeof before);
    ck_assert_int_eq(td_parameter_elements(td), parameters);
    td_close(td);
}

START_TEST(test_logits_of_gpt2s_form_stay_the_same)
{
    if (!has_bf16_products()) SKIP("no bf16 products here");
    check_narrow((gpt_size){ .form = GPT_2, .layers = 2, .heads = 2, .width = 12, .context = CONTEXT, .vocabulary = VOCABULARY, .has_bias = true });
}
END_TEST

START_TEST(test_logits_of_llamas_form_stay_the_same)
{
    if (!has_bf16_products()) SKIP("no bf16 products here");
    check_narrow((gpt_size){ .form = GPT_LLAMA, .layers = 2, .heads = 4, .kv_heads = 2, .width = 16, .hidden = 20, .context = CONTEXT,
                             .vocabulary = VOCABULARY, .theta = 10000, .untied = true });
}
END_TEST

TESTS("narrow", test_logits_of_gpt2s_form_stay_the_same, test_logits_of_llamas_form_stay_the_same)
