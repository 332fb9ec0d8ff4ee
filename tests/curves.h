/* What tests of training curves share: a job, which is a model, a strategy and how it is trained; the losses and parameters of its
 * first steps in a world of ranks; the matrix of jobs.
 *
 * The MLP has what strategies get wrong elsewhere: a scalar and a vector smaller than the ranks, sizes no rank divides, a frozen
 * parameter and one that no loss depends on. Only its second layer has outputs that ranks can share. It trains by sgd with momentum, where
 * a wrong norm or a gradient counted twice shows; the GPT by AdamW. Losses are scaled so that norms are above the limit. Dropout is
 * keyed by global index.
 */
#ifndef TANDEM_TESTS_CURVES_H
#define TANDEM_TESTS_CURVES_H

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

#include "models/gpt/gpt.h"
#include "tests/check.h"

enum { ROWS = 36, IN = 7, HIDDEN = 29, SECOND = 28, CLASSES = 5, LENGTH = 7, VOCABULARY = 67, STEPS = 20, MICRO = 3, STEEP = 8 };

typedef enum clip { UNCLIPPED, CLIP_2, CLIP_INF } clip;

typedef struct job {
    td_dtype dtype;
    const char *strategy;
    int ranks, accumulate;
    clip clip;
    bool gpt, recompute, unrolled;
    bool windows;                             /* of ranks with a GPU each: par_options.windows */
    bool gathered;                            /* units stay gathered after the forward */
    int group;                                /* or by groups of so many ranks */
    int offload;
    const char *device;                       /* of all ranks; NULL: the CPU */
    void (*joined)(td_context *td, par_world *world, int rank); /* called when a rank's context has; NULL: nothing */
    double losses[STEPS];
    double parameters;                        /* a sum over all of them at the end, each with a weight of its own */
    int64_t sent, calls;                      /* by the last step of all */
    int64_t planned_sent, planned_calls;      /* the same, as its plan has it */
    char error[512];
} job;

/* ---- Models ----------------------------------------------------------------------------------------------- */

typedef struct net {
    td_context *td;
    nn_linear first, second, out;
    nn_dropout drop;
    td_state gain, offset, base, spare;       /* of the MLP */
    gpt gpt;
} net;

static const gpt_size size = { .layers = 2, .heads = 3, .width = 21, .context = LENGTH, .vocabulary = VOCABULARY, .has_bias = true,
                               .dropout = 0.1 };

static void make_net(net *n, td_context *td, const job *j)
{
    td_module root = td_root(td);
    n->td = td;
    if (j->gpt) {
        gpt_size s = size;
        s.recompute = j->recompute;
        gpt_make(&n->gpt, root, s);
        return;
    }
    n->first = nn_linear_make(root, "first", IN, HIDDEN);
    n->second = nn_linear_make(root, "second", HIDDEN, SECOND);
    n->drop = nn_dropout_make(root, "drop", 0.2);
    n->gain = td_parameter(root, "gain", (td_shape){ 0 }, td_init_constant(1.5));
    n->offset = td_parameter(root, "offset", TD_SHAPE(1), td_init_constant(0.1));
    n->base = td_parameter(root, "base", TD_SHAPE(SECOND), td_init_normal(0.5));
    n->spare = td_parameter(root, "spare", TD_SHAPE(3), td_init_normal(1));
    n->out = nn_linear_make(root, "out", SECOND, CLASSES);
    td_freeze(n->base);
}

static td_tensor mlp_loss(const net *n, const job *j, td_tensor x, td_tensor y)
{
    if (j->recompute) td_recompute_begin(n->td);
    x = nn_dropout_apply(&n->drop, td_relu(nn_linear_apply(&n->first, x)));
    if (j->recompute) td_recompute_end(n->td);
    x = td_relu(nn_linear_apply(&n->second, x));
    x = td_add(td_mul(x, td_use(n->gain)), td_use(n->base));
    x = td_add(x, td_use(n->offset));
    return td_cross_entropy(nn_linear_apply(&n->out, x), y);
}

/* ---- Data: a rank has copies of its own rows, no larger, so that reading another's is found by the sanitizer. */

typedef struct own_rows {
    void *x;
    int32_t *y;
} own_rows;

static void *get(size_t bytes)
{
    void *memory = malloc(bytes);
    if (!memory) exit(1);
    return memory;
}

static double feature(int row, int i) { return check_normal((uint64_t)(row * IN + i)); }
static int32_t token(int row, int at) { return (int32_t)((row * 7 + at * (row % 5 + 1)) % VOCABULARY); }

static own_rows rows_of(const net *n, const job *j, int k)
{
    int part, parts;
    td_mesh_rows(td_context_mesh(n->td), &part, &parts);
    int own = ROWS / j->accumulate / parts, first = k * (ROWS / j->accumulate) + part * own, width = j->gpt ? LENGTH : IN;
    own_rows r = { get((size_t)(own * width) * sizeof(double)), get((size_t)(own * (j->gpt ? LENGTH : 1)) * sizeof(int32_t)) };
    for (int row = 0; row < own; row++) {
        for (int i = 0; i < width; i++) {
            if (j->gpt) ((int32_t *)r.x)[row * width + i] = token(first + row, i);
            else if (j->dtype == TD_F64) ((double *)r.x)[row * width + i] = feature(first + row, i);
            else ((float *)r.x)[row * width + i] = (float)feature(first + row, i);
            if (j->gpt) r.y[row * width + i] = token(first + row, i + 1);
        }
        if (!j->gpt) r.y[row] = (int32_t)floor(fabs(feature(first + row, 0) - feature(first + row, 1) + feature(first + row, 3))) % CLASSES;
    }
    return r;
}

static td_tensor loss_of(const net *n, const job *j, own_rows own)
{
    int rows = ROWS / j->accumulate;
    if (!j->gpt) {
        td_tensor x = td_batch(n->td, "x", td_float(n->td), TD_SHAPE(rows, IN), own.x);
        return mlp_loss(n, j, x, td_batch(n->td, "y", TD_I32, TD_SHAPE(rows), own.y));
    }
    td_tensor logits = gpt_logits(&n->gpt, td_batch(n->td, "x", TD_I32, TD_SHAPE(rows, LENGTH), own.x));
    return td_cross_entropy(logits, td_batch(n->td, "y", TD_I32, TD_SHAPE(rows, LENGTH), own.y));
}

/* ---- Training --------------------------------------------------------------------------------------------- */

static opt_optimizer *make_optimizer(td_module root, const job *j)
{
    double norm = j->clip == CLIP_2 ? 1 : j->clip == CLIP_INF ? 0.2 : 0;
    bool inf = j->clip == CLIP_INF;
    const opt_group matrices = { .min_rank = 2, .decay = 0.1 }; /* segments of units */
    if (j->gpt) return opt_adamw(root, &(opt_adamw_options){ .max_norm = norm, .clip_inf = inf, .groups = &matrices, .group_count = 1 });
    return opt_sgd(root, &(opt_sgd_options){ .momentum = 0.9, .max_norm = norm, .clip_inf = inf });
}

static bool one_update(const net *n, opt_optimizer *opt, const job *j, double *mean)
{
    td_tensor loss[MICRO];
    own_rows own[MICRO];
    bool good = true;
    *mean = 0;
    for (int k = 0; k < j->accumulate; k++) own[k] = rows_of(n, j, k);
    for (int k = 0; k < j->accumulate && good; k++) {
        loss[k] = loss_of(n, j, own[k]);
        td_keep(loss[k]);
        td_backward(td_scale(loss[k], (double)STEEP / j->accumulate));
        if (j->unrolled && k + 1 < j->accumulate) continue;
        if (k + 1 == j->accumulate) opt_step(opt, j->gpt ? 3e-3 : 1e-2);
        good = td_step(n->td);
        for (int i = j->unrolled ? 0 : k; i <= k && good; i++) *mean += td_item(loss[i]) / j->accumulate;
    }
    for (int k = 0; k < j->accumulate; k++) {
        free(own[k].x);
        free(own[k].y);
    }
    return good;
}

/* What all ranks read, and where rank 0 writes. */
typedef struct run_of {
    const job *asked;
    job *done;
} run_of;

static void quiet(void *user, td_level level, const char *text) { (void)user, (void)level, (void)text; }

static int train(par_world *world, int rank, void *user)
{
    const run_of *r = user;
    job own = *r->asked;
    bool tensor = strstr(own.strategy, "+tp") != NULL;
    td_context *td = td_open(&(td_options){ .device = own.device, .dtype = own.dtype, .seed = 7, .threads = 1, .log = quiet,
                                            .poison = !own.device }); /* on a GPU steps are graphs without it */
    par_attach(td, world, rank, &(par_options){ .strategy = own.strategy, .bucket_bytes = 3000, .unit_elements = 500, .whole_elements = 30,
                                                .keep_gathered = own.gathered, .keep_group = own.group, .offload = own.offload, .share_gpu = true,
                                                .windows = own.windows,
                                                .tensor_columns = !tensor ? NULL : own.gpt ? "h.*.mlp.c_fc" : "second,base",
                                                .tensor_rows = !tensor ? NULL : own.gpt ? "h.*.mlp.c_proj" : "out" });
    if (own.joined && td_error(td) == TD_OK) own.joined(td, world, rank);
    net n = { 0 };
    make_net(&n, td, &own);
    opt_optimizer *opt = make_optimizer(td_root(td), &own);
    bool good = true;
    int64_t before = 0, calls_before = 0;
    for (int s = 0; s < STEPS && good; s++) {
        if (s == STEPS - 1) before = par_sent(world, rank, &calls_before);
        good = one_update(&n, opt, &own, &own.losses[s]);
    }
    own.sent = par_sent(world, rank, &own.calls) - before;
    own.calls -= calls_before;
    own.planned_sent = td_last_report(td).comm_bytes;
    own.planned_calls = td_last_report(td).comm_calls;
    own.parameters = sum_of_parameters(td);
    good = td_error(td) == TD_OK;
    snprintf(own.error, sizeof own.error, "%s", td_error_text(td));
    if (rank == 0) *r->done = own;
    opt_close(opt);
    td_close(td);
    return good ? 0 : 1;
}

static inline bool is_near(double got, double want, double tolerance) { return fabs(got - want) <= tolerance * fabs(want); }

enum { CURVE_TEXT = 320 };

/* Says in `text` where the curves or the parameters at the end part; true: nowhere. */
static inline bool same_curve(const job *got, const job *want, double tolerance, char text[CURVE_TEXT])
{
    static const char *const clips[] = { "not clipped", "clipped", "clipped by the inf-norm" };
    char who[160];
    snprintf(who, sizeof who, "%s, %s, %s, %d ranks, accumulation %d%s, %s%s", got->gpt ? "gpt" : "mlp", td_dtype_name(got->dtype),
             got->strategy, got->ranks, got->accumulate, got->unrolled ? " in one step" : "", clips[got->clip],
             got->recompute ? ", recomputed" : "");
    for (int s = 0; s < STEPS; s++) {
        if (is_near(got->losses[s], want->losses[s], tolerance)) continue;
        snprintf(text, CURVE_TEXT, "%s: loss %d is %.17g, not %.17g", who, s, got->losses[s], want->losses[s]);
        return false;
    }
    if (is_near(got->parameters, want->parameters, 10 * tolerance)) return true;
    snprintf(text, CURVE_TEXT, "%s: parameters sum to %.17g, not %.17g", who, got->parameters, want->parameters);
    return false;
}

/* ---- The matrix ------------------------------------------------------------------------------------------- */

static const struct { const char *strategy; int ranks; } worlds[] = {
    { "ddp", 2 },      { "ddp", 3 },      { "ddp", 4 },      { "zero1", 2 },    { "zero1", 3 },    { "zero1", 4 },
    { "zero2", 2 },    { "zero2", 3 },    { "zero2", 4 },    { "zero3", 2 },    { "zero3", 3 },    { "zero3", 4 },
    { "fsdp", 2 },     { "fsdp", 3 },     { "fsdp", 4 },     { "hsdp:2x2", 4 }, { "hsdp:2x1", 2 }, { "hsdp:1x2", 2 },
    { "hsdp:3x1", 3 }, { "hsdp:1x3", 3 }, { "hsdp:4x1", 4 }, { "hsdp:1x4", 4 },
    { "ddp+tp:2", 2 }, { "ddp+tp:2", 4 }, { "zero1+tp:2", 4 }, { "zero3+tp:2", 4 }, { "fsdp+tp:2", 4 }, /* all of them: test_tensor.c */
    { "fsdp", 4 },     { "hsdp:4x1", 4 },
};
enum { WORLDS = sizeof worlds / sizeof *worlds, GROUPED = WORLDS - 2, CHOICES = 2 * 3 * 2 }; /* accumulation, clip, recompute */

/* In the last of these worlds groups of 2 keep units after the forward. */
static inline int group_of(int world) { return world < GROUPED ? 0 : 2; }

static inline job job_at(td_dtype dtype, bool gpt, int w, int c)
{
    return (job){ .dtype = dtype, .gpt = gpt, .strategy = worlds[w].strategy, .ranks = worlds[w].ranks, .accumulate = c & 1 ? 3 : 1,
                  .clip = (clip)(c / 2 % 3), .recompute = c >= 6, .unrolled = (w + c / 2) & 1, .gathered = (w + c) & 1 && !group_of(w),
                  .group = group_of(w), .offload = (w + c / 4) & 3 };
}

#ifdef __SANITIZE_ADDRESS__
enum { SLOW = 1 };                /* a step takes fifteen times as long */
#else
enum { SLOW = 0 };
#endif

#endif
