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
    int ranks, accumulate, group;             /* group: of ranks that keep what they gathered */
    clip clip;
    td_dtype dtype;
    double dropout;
    double losses[STEPS];
    double parameters;                        /* a sum over all of them at the end, each with a weight of its own */
    int64_t sent, calls, state_bytes, reduced; /* of the last update; reduced: calls along the tensor axis alone */
    char error[512];
} job;

typedef struct net {
    td_context *td;
    nn_linear first, up, down, out;
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
        if (j->model == MLP) r.y[row] = (int32_t)floor(fabs(feature(first + row, 0) - feature(first + row, 1) + feature(first + row, 3))) % CLASSES;
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

static double sum_of_parameters(td_context *td)
{
    td_tensor total = td_fill(td, td_float(td), (td_shape){ 0 }, 0);
    for (int64_t s = 0; s < td_state_count(td); s++) {
        td_state state = td_state_at(td, s);
        if (td_state_kind_of(state) != TD_PARAMETER) continue;
        td_tensor sum = td_sum(td_use(state), TD_ALL, TD_DROP);
        total = td_add(total, td_scale(sum, 1 + (double)(s % 7) / 4));
    }
    td_keep(total);
    return td_step(td) ? td_item(total) : (double)NAN;
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
                                                .whole_elements = -1 });
    net n = { 0 };
    make_net(&n, td, &own);
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

TESTS("tensor", test_mlp_by_columns_and_rows, test_gpt_mlp_by_columns_and_rows)
