/* Tensor-parallel linear layers: parameters that patterns name are cut by a dimension along one more mesh axis, and the rules of
 * placement do the rest. An MLP and the GPT's MLP (and the heads of its attention) give one rank's curve with +tp:2 beside every
 * strategy; what is sent and held is counted; patterns that cannot be are refused.
 *
 * Labels: threads
 * Timeout: 300 s
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

#include "models/gpt/gpt.h"

enum { ROWS = 24, IN = 6, HIDDEN = 20, CLASSES = 5, LENGTH = 6, WIDTH = 16, VOCABULARY = 13, STEPS = 8, STEEP = 8 };

typedef enum model { MLP, GPT, LLAMA } model;
typedef enum clip { UNCLIPPED, CLIP_2, CLIP_INF } clip;

typedef struct job {
    model model;
    const char *strategy, *columns, *rows;
    int ranks, accumulate;
    clip clip;
    td_dtype dtype;
    double dropout;
    const char *frozen;                       /* a pattern of names; NULL: none */
    int offload, group;
    double losses[STEPS];
    double parameters;                        /* a sum over all of them at the end, each with a weight of its own */
    int64_t sent, calls, state_bytes, host_bytes; /* of the last update */
    char error[512];
} job;

typedef struct net {
    td_context *td;
    nn_linear up, down, out;
    nn_dropout drop;
    gpt gpt;
} net;

static void make_net(net *n, td_context *td, const job *j)
{
    td_module root = td_root(td);
    n->td = td;
    if (j->model != MLP) {
        gpt_make(&n->gpt, root, (gpt_size){ .form = j->model == GPT ? GPT_2 : GPT_LLAMA, .layers = 2, .heads = 4, .width = WIDTH,
                                            .context = LENGTH, .vocabulary = VOCABULARY, .has_bias = true, .dropout = j->dropout });
        return;
    }
    n->up = nn_linear_make(root, "up", IN, HIDDEN);
    n->down = nn_linear_make(root, "down", HIDDEN, HIDDEN);
    n->drop = nn_dropout_make(root, "drop", j->dropout);
    n->out = nn_linear_make(root, "out", HIDDEN, CLASSES);
}

static td_tensor mlp_logits(const net *n, td_tensor x)
{
    x = nn_dropout_apply(&n->drop, td_gelu(nn_linear_apply(&n->up, x)));
    x = nn_dropout_apply(&n->drop, nn_linear_apply(&n->down, x));
    return nn_linear_apply(&n->out, td_relu(x));
}

static double feature(int row, int i) { return check_normal((uint64_t)(row * IN + i)); }
static int32_t token(int row, int at) { return (int32_t)((row * 7 + at * (row % 5 + 1)) % VOCABULARY); }

/* This rank's rows of micro-batch k: which, by the mesh. */
typedef struct own_rows {
    void *x;
    int32_t *y;
} own_rows;

static own_rows rows_of(const net *n, const job *j, int k)
{
    int part, parts, rows = ROWS / j->accumulate;
    td_mesh_rows(td_context_mesh(n->td), &part, &parts);
    int own = rows / parts, first = k * rows + part * own, width = j->model == MLP ? IN : LENGTH;
    own_rows r = { malloc((size_t)(own * width) * sizeof(double)), malloc((size_t)(own * width) * sizeof(int32_t)) };
    if (!r.x || !r.y) exit(1);
    for (int row = 0; row < own; row++) {
        for (int i = 0; i < width; i++) {
            if (j->model != MLP) ((int32_t *)r.x)[row * width + i] = token(first + row, i);
            else if (j->dtype == TD_F64) ((double *)r.x)[row * width + i] = feature(first + row, i);
            else ((float *)r.x)[row * width + i] = (float)feature(first + row, i);
            if (j->model != MLP) r.y[row * width + i] = token(first + row, i + 1);
        }
        double class = fabs(feature(first + row, 0) - feature(first + row, 1) + feature(first + row, 3));
        if (j->model == MLP) r.y[row] = (int32_t)floor(class) % CLASSES;
    }
    return r;
}

static td_tensor loss_of(const net *n, const job *j, own_rows own)
{
    int rows = ROWS / j->accumulate;
    td_shape labels = j->model == MLP ? TD_SHAPE(rows) : TD_SHAPE(rows, LENGTH);
    td_tensor y = td_batch(n->td, "y", TD_I32, labels, own.y);
    if (j->model == MLP) return td_cross_entropy(mlp_logits(n, td_batch(n->td, "x", td_float(n->td), TD_SHAPE(rows, IN), own.x)), y);
    return td_cross_entropy(gpt_logits(&n->gpt, td_batch(n->td, "x", TD_I32, labels, own.x)), y);
}

static bool one_update(const net *n, opt_optimizer *opt, const job *j, double *mean)
{
    bool good = true;
    *mean = 0;
    for (int k = 0; k < j->accumulate && good; k++) {
        own_rows own = rows_of(n, j, k);
        td_tensor loss = loss_of(n, j, own);
        td_keep(loss);
        td_backward(td_scale(loss, (double)STEEP / j->accumulate));
        if (k + 1 == j->accumulate) opt_step(opt, 1e-2);
        good = td_step(n->td);
        if (good) *mean += td_item(loss) / j->accumulate;
        free(own.x);
        free(own.y);
    }
    return good;
}

typedef struct run_of {
    const job *asked;
    job *done;
} run_of;

static void quiet(void *user, td_level level, const char *text) { (void)user, (void)level, (void)text; }

static int train(par_world *world, int rank, void *user)
{
    const run_of *r = user;
    job own = *r->asked;
    td_context *td = td_open(&(td_options){ .dtype = own.dtype, .seed = 7, .threads = 1, .poison = true, .log = quiet });
    par_attach(td, world, rank, &(par_options){ .strategy = own.strategy, .tensor_columns = own.columns, .tensor_rows = own.rows,
                                                .whole_elements = -1, .offload = own.offload, .keep_group = own.group });
    net n = { 0 };
    make_net(&n, td, &own);
    if (own.frozen) nn_freeze(td_root(td), own.frozen);
    double norm = own.clip == CLIP_2 ? 1 : own.clip == CLIP_INF ? 0.2 : 0;
    opt_optimizer *opt = opt_sgd(td_root(td), &(opt_sgd_options){ .momentum = 0.9, .max_norm = norm, .clip_inf = own.clip == CLIP_INF });
    bool good = true;
    for (int s = 0; s < STEPS && good; s++) {
        int64_t calls, before = par_sent(world, rank, &calls);
        good = one_update(&n, opt, &own, &own.losses[s]);
        own.sent = par_sent(world, rank, &own.calls) - before;
        own.calls -= calls;
    }
    td_report report = td_last_report(td);
    own.state_bytes = report.state_bytes;
    own.host_bytes = report.host_bytes;
    own.parameters = good ? sum_of_parameters(td) : (double)NAN;
    good = td_error(td) == TD_OK;
    snprintf(own.error, sizeof own.error, "%s", td_error_text(td));
    if (rank == 0) *r->done = own;
    opt_close(opt);
    td_close(td);
    return good ? 0 : 1;
}

static job attempt(job j)
{
    if (!j.accumulate) j.accumulate = 1;
    job done = j;
    int failed = par_run_threads(j.ranks, &(par_world_options){ .timeout_s = 60 }, train, &(run_of){ &j, &done });
    if (failed && !*done.error) snprintf(done.error, sizeof done.error, "another rank failed");
    return done;
}

static job run(job j)
{
    if (!j.dtype) j.dtype = TD_F32;
    job done = attempt(j);
    ck_assert_msg(!*done.error, "%s on %d ranks: %s", j.strategy, j.ranks, done.error);
    return done;
}

static bool is_near(double got, double want, double tolerance) { return fabs(got - want) <= tolerance * fabs(want); }

static void assert_same_curve(const job *got, const job *want, double tolerance)
{
    for (int s = 0; s < STEPS; s++)
        ck_assert_msg(is_near(got->losses[s], want->losses[s], tolerance), "%s, %d ranks, accumulation %d: loss %d is %.17g, not %.17g",
                      got->strategy, got->ranks, got->accumulate, s, got->losses[s], want->losses[s]);
    ck_assert_msg(is_near(got->parameters, want->parameters, 10 * tolerance), "%s, %d ranks: parameters sum to %.17g, not %.17g",
                  got->strategy, got->ranks, got->parameters, want->parameters);
}

/* ---- One curve -------------------------------------------------------------------------------------------- */

static const struct { const char *strategy; int ranks; } worlds[] = {
    { "ddp+tp:2", 2 },   { "single+tp:2", 2 }, { "ddp+tp:2", 4 },       { "zero1+tp:2", 4 }, { "zero2+tp:2", 4 },
    { "zero3+tp:2", 4 }, { "fsdp+tp:2", 4 },   { "hsdp:1x2+tp:2", 4 },  { "ddp+tp:4", 4 },   { "fsdp+tp:2", 2 },
};
enum { WORLDS = sizeof worlds / sizeof *worlds };

static void check_curves(job like)
{
    job one[3];
    for (int c = UNCLIPPED; c <= CLIP_INF; c++) {
        job j = like;
        j.strategy = "single", j.columns = j.rows = NULL, j.ranks = 1, j.clip = (clip)c;
        one[c] = run(j);
        ck_assert(c == UNCLIPPED || !is_near(one[c].losses[STEPS - 1], one[0].losses[STEPS - 1], 1e-4)); /* it clips */
    }
    for (int w = 0; w < WORLDS; w++)
        for (int c = 0; c < (check_all() ? 6 : 2); c++) {
            int choice = check_all() ? c : (w + 3 * c) % 6;
            job j = like;
            j.strategy = worlds[w].strategy, j.ranks = worlds[w].ranks, j.clip = (clip)(choice % 3), j.accumulate = choice < 3 ? 1 : 3;
            j.offload = (w + c) & 3;
            job done = run(j);
            assert_same_curve(&done, &one[j.clip], 1e-10);
        }
}

START_TEST(test_mlp_by_columns_and_rows)
{
    check_curves((job){ .model = MLP, .dtype = TD_F64, .columns = "up", .rows = "down", .dropout = 0.2 });
}
END_TEST

START_TEST(test_gpt_mlp_by_columns_and_rows)
{
    check_curves((job){ .model = GPT, .dtype = TD_F64, .columns = "h.*.mlp.c_fc", .rows = "h.*.mlp.c_proj", .dropout = 0.1 });
}
END_TEST

/* Queries, keys and values apart are cut by heads, which the ranks must divide: attention keeps them, and the output layer contracts
 * them. Packed ones are correct too, but gathered: blocks of columns are no heads. Tables are cut as any other parameter. */
START_TEST(test_whatever_is_cut_the_curve_is_the_same)
{
    static const struct { model model; const char *columns, *rows; } cut[] = {
        { LLAMA, "model.layers.*.self_attn.q_proj,model.layers.*.self_attn.k_proj,model.layers.*.self_attn.v_proj,"
                 "model.layers.*.mlp.up_proj,model.layers.*.mlp.gate_proj",
          "model.layers.*.self_attn.o_proj,model.layers.*.mlp.down_proj" },
        { GPT, "h.*.attn.c_attn", "h.*.attn.c_proj" },
        { GPT, "h.*.mlp.c_proj", "wte,h.0.mlp.c_fc" },
        { MLP, "up.bias", "out" },
        { MLP, "down", NULL },
    };
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
        job j = { .model = cut[i].model, .dtype = TD_F64, .dropout = 0.1, .ranks = 1, .strategy = "single", .clip = CLIP_2 };
        job one = run(j);
        j.columns = cut[i].columns, j.rows = cut[i].rows;
        for (int w = 0; w < 2; w++) {
            j.ranks = 4, j.strategy = w ? "fsdp+tp:2" : "ddp+tp:2";
            job done = run(j);
            assert_same_curve(&done, &one, 1e-10);
        }
    }
}
END_TEST

/* (2, 6) in three ways along its columns: blocks of two columns one after another. */
START_TEST(test_storage_has_blocks_one_after_another)
{
    static const int64_t element[] = { 0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11 };
    const td_cut columns = { .ways = 3, .dim = 1 }, rows = { .ways = 2, .dim = 0 };
    int64_t run;
    for (int64_t at = 0; at < 12; at++) {
        ck_assert_int_eq(td_cut_element(columns, TD_SHAPE(2, 6), at, &run), element[at]);
        ck_assert_int_eq(run, 2 - at % 2);
        ck_assert_int_eq(td_cut_position(columns, TD_SHAPE(2, 6), element[at], &run), at);
        ck_assert_int_eq(run, 2 - at % 2);
        ck_assert_int_eq(td_cut_element(rows, TD_SHAPE(2, 6), at, &run), at);
        ck_assert_int_eq(td_cut_position((td_cut){ 0 }, TD_SHAPE(2, 6), at, &run), at);
        ck_assert_int_eq(run, 12 - at);
    }
}
END_TEST

/* ---- What is sent and held --------------------------------------------------------------------------------- */

static int64_t all_reduce_bytes(int64_t bytes, int ranks) { return (2 * (ranks - 1) * bytes + ranks - 1) / ranks; }

/* A pair of a layer cut by columns and one cut by rows takes a sum of its output (rows of this rank's group, features) in the forward, and
 * of its input's gradient in the backward. */
START_TEST(test_a_pair_of_layers_takes_two_sums_of_activations)
{
    enum { LAYERS = 2, TP = 2 };
    int64_t activation = ROWS * LENGTH * WIDTH * 4;
    job j = { .model = GPT, .strategy = "single+tp:2", .ranks = TP, .columns = "h.*.mlp.c_fc", .rows = "h.*.mlp.c_proj" };
    job done = run(j);
    ck_assert_int_eq(done.calls, 2 * LAYERS);
    ck_assert_int_eq(done.sent, 2 * LAYERS * all_reduce_bytes(activation, TP));
    j.accumulate = 3; /* each micro-batch a third of it */
    done = run(j);
    ck_assert_int_eq(done.calls, 3 * 2 * LAYERS);
    ck_assert_int_eq(done.sent, 2 * LAYERS * all_reduce_bytes(activation, TP));
    j.accumulate = 1;
    j.columns = "h.*.attn.c_attn,h.*.mlp.c_fc", j.rows = "h.*.attn.c_proj,h.*.mlp.c_proj"; /* packed: gathered between, both ways */
    job packed = run(j);
    ck_assert_int_gt(packed.sent, 4 * LAYERS * all_reduce_bytes(activation, TP));
    j.model = LLAMA;
    j.columns = "model.layers.*.self_attn.q_proj,model.layers.*.self_attn.k_proj,model.layers.*.self_attn.v_proj,"
                "model.layers.*.mlp.up_proj,model.layers.*.mlp.gate_proj";
    j.rows = "model.layers.*.self_attn.o_proj,model.layers.*.mlp.down_proj";
    job apart = run(j);
    ck_assert_int_eq(apart.calls, 4 * LAYERS);
    ck_assert_int_eq(apart.sent, 4 * LAYERS * all_reduce_bytes(activation, TP));
}
END_TEST

/* Parameters and momentum of what is cut are there once among the ranks that share it, and gradients are reduced over the others only. */
START_TEST(test_what_is_cut_is_held_in_parts)
{
    enum { UP = IN * HIDDEN + HIDDEN, DOWN = HIDDEN * HIDDEN, REST = HIDDEN + HIDDEN * CLASSES + CLASSES };
    job j = { .model = MLP, .strategy = "ddp+tp:2", .ranks = 2, .columns = "up", .rows = "down" };
    job two = run(j);
    ck_assert_int_ge(two.state_bytes, 2 * 4 * ((UP + DOWN) / 2 + REST));
    ck_assert_int_le(two.state_bytes, 2 * 4 * ((UP + DOWN) / 2 + REST + 6 * 32)); /* padding of six members */
    j.ranks = 4;
    job four = run(j);
    int64_t gradients = four.sent - two.sent / 2; /* half the rows of activations */
    int64_t least = all_reduce_bytes(4 * ((UP + DOWN) / 2 + REST), 2);
    ck_assert_int_ge(gradients, least);
    ck_assert_int_le(gradients, least + 4 * 3 * 64);
    j.strategy = "fsdp+tp:2";
    job sharded = run(j);
    ck_assert_int_le(sharded.state_bytes, 2 * 4 * ((UP + DOWN) / 2 + REST + 6 * 64) / 2);
    j.clip = CLIP_2; /* the norm is one number, summed along both axes at once */
    job clipped = run(j);
    ck_assert_int_eq(clipped.calls - sharded.calls, 1);
    ck_assert_int_eq(clipped.sent - sharded.sent, all_reduce_bytes(4, 4));
}
END_TEST

/* ---- Beside what else placements say -------------------------------------------------------------------- */

static void assert_same_bits(const job *got, const job *want, const char *what)
{
    for (int s = 0; s < STEPS; s++)
        ck_assert_msg(got->losses[s] == want->losses[s], "%s, %s: loss %d is %.17g, not %.17g", got->strategy, what, s, got->losses[s],
                      want->losses[s]);
    ck_assert_msg(got->parameters == want->parameters, "%s, %s: parameters", got->strategy, what);
}

/* Rows of a unit are on the host as flat ones are, and nothing else is sent. */
START_TEST(test_what_is_cut_may_be_on_the_host)
{
    static const char *const strategies[] = { "ddp+tp:2", "zero1+tp:2", "fsdp+tp:2" };
    for (int i = 0; i < 3; i++) {
        job j = { .model = MLP, .strategy = strategies[i], .ranks = 4, .columns = "up", .rows = "down", .clip = CLIP_2 };
        job device = run(j);
        for (j.offload = PAR_OFFLOAD_OPTIMIZER; j.offload <= (PAR_OFFLOAD_OPTIMIZER | PAR_OFFLOAD_PARAMETERS); j.offload++) {
            job host = run(j);
            assert_same_bits(&host, &device, "offloaded");
            ck_assert_int_eq(host.sent, device.sent);
            ck_assert_int_eq(host.calls, device.calls);
            ck_assert_int_ge(host.host_bytes, device.state_bytes - host.state_bytes);
            ck_assert_int_lt(host.state_bytes, j.offload == 3 ? 16 : device.state_bytes);
        }
    }
}
END_TEST

/* Rows of blocks are cast and then gathered; the unit of columns has a bias, which is read as the products read it. Where a norm's weight,
 * which is read as it is stored, is in such a unit, that is gathered as it is stored. */
START_TEST(test_what_is_cut_is_gathered_in_bf16)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    enum { UP = (IN * HIDDEN + HIDDEN) / 2, DOWN = HIDDEN * HIDDEN / 2, PARTS = 2 };
    job j = { .model = MLP, .strategy = "ddp+tp:2", .ranks = 4, .dtype = TD_BF16, .columns = "up", .rows = "down" };
    job ddp = run(j);
    j.strategy = "fsdp+tp:2";
    job narrow = run(j);
    assert_same_bits(&narrow, &ddp, "in bf16");
    j.strategy = "zero1+tp:2";
    job copied = run(j);
    assert_same_bits(&copied, &ddp, "copied in bf16");
    j.strategy = "fsdp+tp:2", j.dtype = TD_F32;
    job wide = run(j);
    ck_assert_int_ge(wide.sent - narrow.sent, 2 * ((UP + DOWN) / PARTS) * 2); /* forward and backward: two bytes of four an element */
    ck_assert_int_eq(wide.calls, narrow.calls);
    j = (job){ .model = GPT, .strategy = "ddp+tp:2", .ranks = 4, .dtype = TD_BF16 };
    j.columns = "h.*.mlp.c_fc,h.*.ln_2", j.rows = "h.*.mlp.c_proj";
    job norms = run(j);
    j.strategy = "fsdp+tp:2";
    job gathered = run(j);
    assert_same_bits(&gathered, &norms, "with norms in units that are cut");
    j.strategy = "zero2+tp:2";
    copied = run(j);
    assert_same_bits(&copied, &norms, "with copies of norms in units that are cut");
}
END_TEST

/* They are held in parts, too, under any strategy, without gradients or moments. */
START_TEST(test_frozen_layers_are_cut_alike)
{
    static const char *const strategies[] = { "ddp+tp:2", "zero1+tp:2", "fsdp+tp:2" }, *const frozen[] = { "up.*", "down.weight" };
    for (int f = 0; f < 2; f++) {
        job j = { .model = MLP, .dtype = TD_F64, .frozen = frozen[f], .ranks = 1, .strategy = "single", .clip = CLIP_2, .dropout = 0.2 };
        job one = run(j);
        j.columns = "up", j.rows = "down", j.ranks = 4;
        for (int i = 0; i < 3; i++) {
            j.strategy = strategies[i];
            job done = run(j);
            assert_same_curve(&done, &one, 1e-10);
        }
    }
    job j = { .model = MLP, .strategy = "ddp+tp:2", .ranks = 2, .columns = "up", .rows = "down", .frozen = "down.weight" };
    job cut = run(j);
    j.columns = "up", j.rows = "out";
    job whole = run(j);
    ck_assert_int_ge(whole.state_bytes - cut.state_bytes, 4 * HIDDEN * HIDDEN / 2 - 2 * 4 * (HIDDEN * CLASSES / 2 + 64));
}
END_TEST

/* ---- What cannot be ---------------------------------------------------------------------------------------- */

START_TEST(test_what_cannot_be_cut_is_refused)
{
    static const struct { const char *strategy, *columns, *rows; int ranks; const char *text; } wrong[] = {
        { "ddp+tp:2", NULL, NULL, 2, "strategy 'ddp+tp:2' says that 2 ranks share layers, but not which" },
        { "ddp+tp:3", "up", "down", 4, "strategy 'ddp+tp:3' shares layers among 3 ranks each, which 4 ranks cannot be divided into" },
        { "ddp+tp:0", "up", "down", 2, "'+tp:0' cannot be added to a strategy; +tp:T can" },
        { "ddp+tp:2x2", "up", "down", 4, "'+tp:2x2' cannot be added to a strategy; +tp:T can" },
        { "single+tp:2", "up", "down", 4, "strategy 'single' is for one rank; for 2 choose one of" },
        { "hsdp:2x2+tp:2", "up", "down", 4, "strategy 'hsdp:2x2' is for 4 ranks" },
        { "ddp+tp:3", "up", "down", 3, "ddp: 'up.weight' has 20 outputs, which 3 ranks cannot share evenly" },
        { "ddp+tp:4", "down", "up", 4, "ddp: 'up.weight' has 6 inputs, which 4 ranks cannot share evenly" },
        { "ddp+tp:2", "up,u*", "dawn", 2, "ddp: the row pattern 'dawn' matches no parameter; the first one is called 'up.weight'" },
        { "ddp+tp:2", "up", "u*", 2, "ddp: 'up.weight' is named by columns and by rows; it can be shared by one of them" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        job done = attempt((job){ .model = MLP, .dtype = TD_F32, .strategy = wrong[i].strategy, .ranks = wrong[i].ranks,
                                  .columns = wrong[i].columns, .rows = wrong[i].rows });
        ck_assert_str_has(done.error, wrong[i].text);
    }
}
END_TEST

TESTS("tensor", test_mlp_by_columns_and_rows, test_gpt_mlp_by_columns_and_rows, test_whatever_is_cut_the_curve_is_the_same,
      test_storage_has_blocks_one_after_another,
      test_a_pair_of_layers_takes_two_sums_of_activations, test_what_is_cut_is_held_in_parts,
      test_what_is_cut_may_be_on_the_host, test_what_is_cut_is_gathered_in_bf16, test_frozen_layers_are_cut_alike,
      test_what_cannot_be_cut_is_refused)
