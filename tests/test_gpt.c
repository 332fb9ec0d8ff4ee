/* The GPT in both forms: against PyTorch in f64 to 1e-9 and in f32 (tests/golden/gpt.py), its parameters, every strategy,
 * recomputation.
 *
 * Labels: threads
 * Timeout: 300 s
 */
#include "tests/golden.h"

#include <tandem/optim.h>
#include <tandem/parallel.h>

#include "models/gpt/gpt.h"

enum { STEPS = 10, CURVE_STEPS = 20, ROWS = 24, MAX_PARAMETERS = 64 };

static const gpt_size size_a = { .layers = 2, .heads = 2, .width = 8, .context = 6, .vocabulary = 11 };
static const gpt_size size_b = { .layers = 1, .heads = 3, .width = 12, .context = 5, .vocabulary = 7,
                                 .has_bias = true, .tanh_gelu = true };
static const gpt_size size_c = { .form = GPT_LLAMA, .layers = 2, .heads = 4, .kv_heads = 2, .width = 24, .hidden = 20, .context = 7,
                                 .vocabulary = 13 };
static const gpt_size size_d = { .form = GPT_LLAMA, .layers = 1, .heads = 3, .kv_heads = 1, .width = 24, .hidden = 17, .context = 9,
                                 .vocabulary = 10, .untied = true, .theta = 810000, .rope_factor = 8 };

/* ---- PyTorch ---------------------------------------------------------------------------------------------- */

/* A network that starts as the golden one of this name. */
typedef struct net {
    td_context *td;
    golden file;
    const char *name;
    gpt gpt;
} net;

static golden_array array_of(const net *n, const char *what)
{
    char key[256];
    snprintf(key, sizeof key, "%s.%s", n->name, what);
    return golden_get(n->file, key);
}

static net open_net(const char *name, gpt_size size, td_dtype dtype)
{
    net n = { .td = open_cpu(dtype), .file = golden_open(size.form == GPT_LLAMA ? "gpt_llama.txt" : "gpt.txt"), .name = name };
    char prefix[64];
    gpt_make(&n.gpt, td_root(n.td), size);
    snprintf(prefix, sizeof prefix, "%s.initial", name);
    golden_write_parameters(n.file, prefix, n.td);
    return n;
}

static td_tensor ids(const net *n, const char *what)
{
    golden_array a = array_of(n, what);
    return td_input(n->td, what, TD_I32, a.shape, golden_as(a, TD_I32));
}

/* After the step, of what was kept before it: f64 element by element to 1e-9, f32 by relative norm to 1e-4. */
static void assert_golden(const net *n, td_tensor kept, const char *what)
{
    golden_array want = array_of(n, what);
    const double *got = check_read(kept, what, __FILE__, __LINE__);
    if (td_float(n->td) == TD_F64) {
        check_near(got, want.values, want.count, 1e-9, what, __FILE__, __LINE__);
        return;
    }
    double off = 0, all = 0;
    for (int64_t i = 0; i < want.count; i++) {
        off += (got[i] - want.values[i]) * (got[i] - want.values[i]);
        all += want.values[i] * want.values[i];
    }
    ck_assert_msg(all > 0 && sqrt(off / all) <= 1e-4, "%s.%s: off by %g of its norm", n->name, what, sqrt(off / all));
}

static void check_first_step(const char *name, gpt_size size, td_dtype dtype)
{
    net n = open_net(name, size, dtype);
    td_tensor logits = gpt_logits(&n.gpt, ids(&n, "x")), loss = td_cross_entropy(logits, ids(&n, "y")), gradient[MAX_PARAMETERS];
    int64_t parameters = td_state_count(n.td);
    ck_assert_int_le(parameters, MAX_PARAMETERS);
    ck_assert(td_shape_equal(td_shape_at(logits), array_of(&n, "logits").shape));
    td_keep(logits);
    td_keep(loss);
    for (int64_t i = 0; i < parameters; i++) {
        gradient[i] = td_gradient(loss, td_use(td_state_at(n.td, i)));
        td_keep(gradient[i]);
    }
    ck_assert_msg(td_step(n.td), "%s", td_error_text(n.td));
    assert_golden(&n, loss, "loss");
    assert_golden(&n, logits, "logits");
    for (int64_t i = 0; i < parameters; i++) {
        char what[128];
        snprintf(what, sizeof what, "gradient.%s", td_state_name(td_state_at(n.td, i)));
        assert_golden(&n, gradient[i], what);
    }
    td_close(n.td);
}

static void check_every_form(td_dtype dtype)
{
    check_first_step("a", size_a, dtype);
    check_first_step("b", size_b, dtype);
    check_first_step("c", size_c, dtype);
    check_first_step("d", size_d, dtype);
}

START_TEST(test_loss_logits_and_every_gradient)
{
    check_every_form(TD_F64);
}
END_TEST

START_TEST(test_loss_logits_and_every_gradient_in_f32)
{
    check_every_form(TD_F32);
}
END_TEST

static void check_ten_updates(const char *name, gpt_size size)
{
    net n = open_net(name, size, TD_F64);
    char prefix[64];
    opt_optimizer *opt = opt_adamw(td_root(n.td), &(opt_adamw_options){
        .beta2 = 0.99, .max_norm = 1, .groups = &(opt_group){ .min_rank = 2, .decay = 0.1 }, .group_count = 1 });
    double losses[STEPS], norms[STEPS];
    for (int s = 0; s < STEPS; s++) {
        td_tensor loss = td_cross_entropy(gpt_logits(&n.gpt, ids(&n, "x")), ids(&n, "y"));
        td_backward(loss);
        opt_step(opt, 1e-3);
        ck_assert_msg(td_step(n.td), "%s", td_error_text(n.td));
        losses[s] = td_item(loss);
        norms[s] = td_item(opt_gradient_norm(opt));
    }
    ck_assert_near(losses, array_of(&n, "adamw.losses").values, STEPS, 1e-9);
    ck_assert_near(norms, array_of(&n, "adamw.norms").values, STEPS, 1e-9);
    snprintf(prefix, sizeof prefix, "%s.adamw", name);
    golden_check_parameters(n.file, prefix, n.td, 1e-9);
    opt_close(opt);
    td_close(n.td);
}

START_TEST(test_ten_clipped_adamw_updates_that_decay_matrices_only)
{
    check_ten_updates("a", size_a);
    check_ten_updates("c", size_c);
}
END_TEST

/* ---- Parameters ------------------------------------------------------------------------------------------- */

START_TEST(test_the_10m_size_has_its_parameters)
{
    td_context *td = open_cpu(TD_F32);
    gpt g;
    gpt_make(&g, td_root(td), (gpt_size){ .layers = 6, .heads = 6, .width = 384, .context = 256, .vocabulary = 65, .dropout = 0.2 });
    ck_assert_no_error(td);
    ck_assert_int_eq(td_parameter_elements(td), 10745088);
    ck_assert_int_eq(td_parameter_elements(td) - td_shape_elements(td_state_shape(g.positions.weight)), 10646784);
    td_close(td);
}
END_TEST

/* MODELS: 1,235,814,400 of Llama 3.2 1B, 3,212,749,824 of its 3B, 8,030,261,248 of Llama 3.1 8B; nothing is allocated for them. */
START_TEST(test_llama_sizes_have_their_parameters)
{
    static const struct { gpt_size size; int64_t parameters; } llamas[] = {
        { { .layers = 16, .heads = 32, .width = 2048, .hidden = 8192 }, 1235814400 },
        { { .layers = 28, .heads = 24, .width = 3072, .hidden = 8192 }, 3212749824 },
        { { .layers = 32, .heads = 32, .width = 4096, .hidden = 14336, .untied = true }, 8030261248 },
    };
    for (int i = 0; i < 3; i++) {
        td_context *td = open_cpu(TD_F32);
        gpt_size size = llamas[i].size;
        size.form = GPT_LLAMA;
        size.kv_heads = 8;
        size.vocabulary = 128256;
        size.context = 2048;
        gpt *g = check_alloc(sizeof *g);
        gpt_make(g, td_root(td), size);
        ck_assert_no_error(td);
        ck_assert_int_eq(td_parameter_elements(td), llamas[i].parameters);
        td_close(td);
    }
}
END_TEST

static void check_names(gpt_size size, const char *const *names, int64_t count)
{
    td_context *td = open_cpu(TD_F32);
    gpt g;
    gpt_make(&g, td_root(td), size);
    ck_assert_no_error(td);
    ck_assert_int_eq(td_state_count(td), count);
    for (int64_t i = 0; i < count; i++) ck_assert_str_eq(td_state_name(td_state_at(td, i)), names[i]);
    td_close(td);
}

START_TEST(test_parameters_are_named_as_published)
{
    static const char *const names[] = {
        "wte.weight", "wpe.weight",
        "h.0.ln_1.weight", "h.0.ln_1.bias",
        "h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias", "h.0.attn.c_proj.weight", "h.0.attn.c_proj.bias",
        "h.0.ln_2.weight", "h.0.ln_2.bias",
        "h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.bias", "h.0.mlp.c_proj.weight", "h.0.mlp.c_proj.bias",
        "ln_f.weight", "ln_f.bias",
    };
    static const char *const without_bias[] = {
        "wte.weight", "wpe.weight",
        "h.0.ln_1.weight", "h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight",
        "h.0.ln_2.weight", "h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight",
        "ln_f.weight",
    };
    gpt_size size = size_a;
    size.layers = 1;
    check_names(size, without_bias, sizeof without_bias / sizeof *without_bias);
    size.has_bias = true;
    check_names(size, names, sizeof names / sizeof *names);
    static const char *const llama[] = {
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight", "lm_head.weight",
    };
    size.form = GPT_LLAMA;
    size.untied = true;
    check_names(size, llama, sizeof llama / sizeof *llama);
}
END_TEST

/* ---- Strategies and recomputation ------------------------------------------------------------------------- */

typedef struct job {
    const gpt_size *size;
    const char *strategy;
    int accumulate;
    bool recompute;
    double losses[CURVE_STEPS];
    td_report report; /* of the last step */
    char error[512];
} job;

static const gpt_size curve_size = { .layers = 3, .heads = 2, .width = 16, .context = 8, .vocabulary = 67, .dropout = 0.1 };
static const gpt_size llama_curve_size = { .form = GPT_LLAMA, .layers = 2, .heads = 4, .kv_heads = 2, .width = 16, .hidden = 20,
                                           .context = 8, .vocabulary = 67, .dropout = 0.1, .untied = true, .rope_factor = 8 };

/* Row r of the batch: a walk through the vocabulary; y is x's next id. */
static int32_t id_at(int64_t row, int64_t position) { return (int32_t)((row * 7 + position * (row % 5 + 1)) % 67); }

/* One micro-batch, of which this rank has its rows; the step ends with the last. */
static bool micro_step(const gpt *g, opt_optimizer *opt, const job *j, par_world *world, int rank, int k, double *mean)
{
    td_context *td = td_module_context(g->tokens.at);
    int64_t length = g->size.context, rows = ROWS / j->accumulate, own = rows / par_world_size(world), first = k * rows + rank * own;
    int32_t x[ROWS * 8], y[ROWS * 8];
    for (int64_t r = 0; r < own; r++)
        for (int64_t t = 0; t < length; t++) {
            x[r * length + t] = id_at(first + r, t);
            y[r * length + t] = id_at(first + r, t + 1);
        }
    td_tensor loss = td_cross_entropy(gpt_logits(g, td_batch(td, "x", TD_I32, TD_SHAPE(rows, length), x)),
                                      td_batch(td, "y", TD_I32, TD_SHAPE(rows, length), y));
    td_keep(loss);
    td_backward(td_scale(loss, 1.0 / j->accumulate));
    if (k + 1 == j->accumulate) opt_step(opt, 3e-3);
    if (!td_step(td)) return false;
    *mean += td_item(loss) / j->accumulate;
    return true;
}

/* What all ranks read, and where rank 0 writes. */
typedef struct run_of {
    const job *asked;
    job *done;
} run_of;

static int train(par_world *world, int rank, void *user)
{
    const run_of *r = user;
    job own = *r->asked;
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .seed = 5, .threads = 1, .poison = true });
    par_attach(td, world, rank, &(par_options){ .strategy = own.strategy, .bucket_bytes = 4096 });
    gpt_size size = *own.size;
    size.recompute = own.recompute;
    gpt g;
    gpt_make(&g, td_root(td), size);
    opt_optimizer *opt = opt_adamw(td_root(td), &(opt_adamw_options){
        .beta2 = 0.99, .max_norm = 1, .groups = &(opt_group){ .min_rank = 2, .decay = 0.1 }, .group_count = 1 });
    bool good = true;
    for (int s = 0; s < CURVE_STEPS && good; s++)
        for (int k = 0; k < own.accumulate && good; k++) good = micro_step(&g, opt, &own, world, rank, k, &own.losses[s]);
    own.report = td_last_report(td);
    snprintf(own.error, sizeof own.error, "%s", td_error_text(td));
    if (rank == 0) *r->done = own;
    opt_close(opt);
    td_close(td);
    return good ? 0 : 1;
}

static job run(int ranks, job asked)
{
    job done = asked;
    int failed = par_run_threads(ranks, &(par_world_options){ .timeout_s = 20 }, train, &(run_of){ &asked, &done });
    ck_assert_msg(!failed, "%s on %d ranks: %s", asked.strategy, ranks, done.error);
    return done;
}

static void assert_same_curve(const job *got, const job *want, double tolerance, int ranks)
{
    for (int s = 0; s < CURVE_STEPS; s++) {
        double off = fabs(got->losses[s] - want->losses[s]) / fabs(want->losses[s]);
        ck_assert_msg(off <= tolerance, "%s, %d ranks, accumulation %d: loss %d is %.17g, not %.17g", got->strategy, ranks,
                      got->accumulate, s, got->losses[s], want->losses[s]);
    }
}

static void check_strategies(const gpt_size *size)
{
    job one = run(1, (job){ .size = size, .strategy = "single", .accumulate = 1 });
    ck_assert(one.losses[CURVE_STEPS - 1] < 0.95 * one.losses[0]);
    const char *const strategies[] = { "ddp", "fsdp" };
    for (int accumulate = 1; accumulate <= 2; accumulate++)
        for (int ranks = 2; ranks <= 4; ranks++)
            for (int s = 0; s < 2; s++) {
                job j = run(ranks, (job){ .size = size, .strategy = strategies[s], .accumulate = accumulate });
                assert_same_curve(&j, &one, 1e-10, ranks);
            }
}

START_TEST(test_every_strategy_gives_one_ranks_curve)
{
    check_strategies(&curve_size);
}
END_TEST

START_TEST(test_every_strategy_gives_one_ranks_curve_in_llamas_form)
{
    check_strategies(&llama_curve_size);
}
END_TEST

static void check_recompute(int ranks, const char *strategy)
{
    job kept = run(ranks, (job){ .size = &curve_size, .strategy = strategy, .accumulate = 1 });
    job again = run(ranks, (job){ .size = &curve_size, .strategy = strategy, .accumulate = 1, .recompute = true });
    assert_same_curve(&again, &kept, 0, ranks);
    ck_assert_msg(again.report.step_bytes < kept.report.step_bytes * 3 / 4, "%s: %lld bytes against %lld", strategy,
                  (long long)again.report.step_bytes, (long long)kept.report.step_bytes);
}

START_TEST(test_recomputation_gives_the_same_bits_in_less_memory)
{
    check_recompute(1, "single");
    check_recompute(2, "ddp");
    check_recompute(2, "fsdp");
}
END_TEST

TESTS("gpt", test_loss_logits_and_every_gradient, test_loss_logits_and_every_gradient_in_f32,
      test_ten_clipped_adamw_updates_that_decay_matrices_only, test_the_10m_size_has_its_parameters,
      test_llama_sizes_have_their_parameters, test_parameters_are_named_as_published, test_every_strategy_gives_one_ranks_curve,
      test_every_strategy_gives_one_ranks_curve_in_llamas_form, test_recomputation_gives_the_same_bits_in_less_memory)
