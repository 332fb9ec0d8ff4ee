/* Dynamic loss scaling against tables of torch.amp.GradScaler's rules: when an update is skipped, what the scale becomes,
 * and that nothing else changes; with planted infinities and with products that overflow f32.
 *
 * Labels: threads
 */
#include <tandem/optim.h>
#include <tandem/parallel.h>

#include "tests/check.h"
#include "tests/memory.h"

enum { WEIGHTS = 37 };

typedef struct model {
    td_context *td;
    td_module at;
    td_state weight;
    opt_scaler *scaler;
    opt_optimizer *opt;
    double factor;
    float factor_f32;
} model;

static void open_model(model *m, td_context *td, const char *name)
{
    m->td = td;
    m->at = td_child(td_root(td), name);
    m->weight = td_parameter(m->at, "weight", TD_SHAPE(WEIGHTS), td_init_constant(1));
}

/* factor times the sum of the weights: every gradient is factor. */
static td_tensor loss_of(model *m, double factor)
{
    m->factor = factor;
    m->factor_f32 = (float)factor;
    bool wide = td_float(m->td) == TD_F64;
    td_tensor by = td_input(m->td, "factor", td_float(m->td), (td_shape){ 0 }, wide ? (const void *)&m->factor : &m->factor_f32);
    td_tensor sum = td_sum(td_use(m->weight), TD_ALL, TD_DROP);
    return td_mul(by, sum);
}

static double number_of(td_state s)
{
    double wide = NAN;
    float narrow = 0;
    int64_t begin, end;
    if (!td_state_owned(s, &begin, &end) || begin == end) return wide; /* another rank's */
    if (td_state_dtype(s) == TD_F64) return td_state_read(s, begin, 1, &wide) ? wide : (double)NAN;
    return td_state_read(s, begin, 1, &narrow) ? (double)narrow : (double)NAN;
}

static double state_of(const model *m, const char *name) { return number_of(td_state_named(m->td, name)); }

typedef struct expected {
    double gradient;                          /* of every weight, unscaled */
    double scale, good, updates, weight;      /* after the step */
} expected;

/* torch.amp.GradScaler(init_scale=4, growth_interval=2) over SGD(lr=0.5), but that the scale stays at 1 or above. */
static const expected table[] = {
    { 1, 4, 1, 1, 0.5 },
    { 1, 8, 0, 2, 0 },                        /* the second in a row: grows */
    { INFINITY, 4, 0, 2, 0 },
    { 2, 4, 1, 3, -1 },
    { NAN, 2, 0, 3, -1 },                     /* begins to count again */
    { -INFINITY, 1, 0, 3, -1 },
    { INFINITY, 1, 0, 3, -1 },                /* not below 1 */
    { -2, 1, 1, 4, 0 },
    { 0, 2, 0, 5, 0 },
    { 4, 2, 1, 6, -2 },
};
enum { ROWS = sizeof table / sizeof *table };

static bool table_step(model *m, double gradient)
{
    td_backward(opt_scaler_scale(m->scaler, loss_of(m, gradient)));
    opt_step(m->opt, 0.5);
    return td_step(m->td);
}

/* The row's number, from 1, that did not come out; 0: all did. */
static int follow_table(td_context *td)
{
    model m = { .factor = 0 };
    open_model(&m, td, "model");
    m.scaler = opt_scaler_open(td, &(opt_scaler_options){ .initial = 4, .interval = 2 });
    m.opt = opt_sgd(m.at, &(opt_sgd_options){ .scaler = m.scaler });
    for (int r = 0; r < ROWS; r++) {
        const expected *e = &table[r];
        if (!table_step(&m, e->gradient)) return r + 1;
        double norm = td_item(opt_gradient_norm(m.opt)), weight = number_of(m.weight);
        bool same = state_of(&m, "scaler.scale") == e->scale && state_of(&m, "scaler.good_steps") == e->good &&
                    state_of(&m, "optimizer.updates") == e->updates && (isnan(weight) || weight == e->weight);
        if (isfinite(e->gradient)) same = same && fabs(norm - fabs(e->gradient) * sqrt(WEIGHTS)) <= 1e-6;
        else same = same && !isfinite(norm);
        if (!same) return r + 1;
    }
    return td_last_report(td).plans == 1 ? 0 : -1; /* a skipped step is planned as any other */
}

START_TEST(test_scale_and_skips_follow_the_table)
{
    const td_dtype dtypes[] = { TD_F64, TD_F32 };
    for (int d = 0; d < 2; d++) {
        td_context *td = open_cpu(dtypes[d]);
        ck_assert_int_eq(follow_table(td), 0);
        ck_assert_no_error(td);
        td_close(td);
    }
}
END_TEST

static int table_on_ranks(par_world *world, int rank, void *user)
{
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .seed = 3, .threads = 1, .poison = true });
    par_attach(td, world, rank, &(par_options){ .strategy = user, .bucket_bytes = 4096 });
    int failed = follow_table(td);
    if (failed) fprintf(stderr, "%s, rank %d: row %d: %s\n", (const char *)user, rank, failed, td_error_text(td));
    td_close(td);
    return failed;
}

START_TEST(test_ranks_follow_the_table)
{
    static char *const strategies[] = { "ddp", "zero1", "zero2", "zero3", "fsdp" };
    for (int ranks = 2; ranks <= 3; ranks++)
        for (int s = 0; s < 5; s++)
            ck_assert_int_eq(par_run_threads(ranks, &(par_world_options){ .timeout_s = 20 }, table_on_ranks, strategies[s]), 0);
    ck_assert_int_eq(par_run_threads(4, &(par_world_options){ .timeout_s = 20 }, table_on_ranks, "hsdp:2x2"), 0);
}
END_TEST

/* A power of two changes no digit, neither of the norm nor of the weights, clipped or not. */
START_TEST(test_scaling_changes_no_bit_of_the_training)
{
    const td_dtype dtypes[] = { TD_F64, TD_F32 };
    for (int d = 0; d < 2; d++) {
        model m[2];
        for (int with = 0; with < 2; with++) {
            open_model(&m[with], open_cpu(dtypes[d]), "model");
            m[with].scaler = with ? opt_scaler_open(m[with].td, &(opt_scaler_options){ .interval = 3 }) : NULL;
            m[with].opt = opt_adamw(m[with].at, &(opt_adamw_options){ .decay = 0.1, .max_norm = 5, .scaler = m[with].scaler });
        }
        for (int n = 1; n <= 8; n++) {
            double factor = 0.3 * n;
            ck_assert(table_step(&m[0], factor) && table_step(&m[1], factor));
            ck_assert(td_item(opt_gradient_norm(m[0].opt)) == td_item(opt_gradient_norm(m[1].opt)));
            ck_assert(number_of(m[0].weight) == number_of(m[1].weight));
        }
        ck_assert(number_of(m[1].weight) < 1);
        ck_assert(state_of(&m[1], "scaler.scale") == 4 * 65536);
        td_close(m[0].td);
        td_close(m[1].td);
    }
}
END_TEST

/* The norm of the gradients is 6.1e17: times 65536 its square is no f32, times 16 it is. */
START_TEST(test_norms_that_overflow_are_backed_off)
{
    model m;
    open_model(&m, open_cpu(TD_F32), "model");
    m.scaler = opt_scaler_open(m.td, NULL);
    m.opt = opt_adam(m.at, &(opt_adam_options){ .scaler = m.scaler });
    for (double scale = 65536; scale > 16; scale /= 2) {
        ck_assert(table_step(&m, 1e17));
        ck_assert(state_of(&m, "scaler.scale") == scale / 2);
        ck_assert(number_of(m.weight) == 1);
        ck_assert(state_of(&m, "model.weight.exp_avg_sq") == 0);
        ck_assert(state_of(&m, "optimizer.updates") == 0);
    }
    ck_assert(table_step(&m, 1e17));
    ck_assert(state_of(&m, "scaler.scale") == 16);
    ck_assert(number_of(m.weight) == 0.5);    /* Adam's first step is the rate */
    ck_assert(state_of(&m, "optimizer.updates") == 1);
    td_close(m.td);
}
END_TEST

START_TEST(test_the_scale_does_not_grow_to_infinity)
{
    model m;
    open_model(&m, open_cpu(TD_F32), "model");
    m.scaler = opt_scaler_open(m.td, &(opt_scaler_options){ .initial = 0x1p126, .growth = 4, .interval = 1 });
    m.opt = opt_sgd(m.at, &(opt_sgd_options){ .scaler = m.scaler });
    ck_assert(table_step(&m, 0));
    ck_assert(state_of(&m, "scaler.scale") == 0x1p126);
    ck_assert(state_of(&m, "scaler.good_steps") == 0);
    td_close(m.td);
}
END_TEST

/* One overflow among the micro-batches of an update spoils it, and is gone with it. */
START_TEST(test_a_micro_batch_that_overflows_spoils_its_update_only)
{
    model m;
    open_model(&m, open_cpu(TD_F64), "model");
    m.scaler = opt_scaler_open(m.td, &(opt_scaler_options){ .initial = 8 });
    m.opt = opt_sgd(m.at, &(opt_sgd_options){ .scaler = m.scaler });
    td_backward(opt_scaler_scale(m.scaler, loss_of(&m, INFINITY)));
    ck_assert(td_step(m.td));
    ck_assert(state_of(&m, "scaler.scale") == 8);
    ck_assert(table_step(&m, 1));
    ck_assert(state_of(&m, "scaler.scale") == 4 && number_of(m.weight) == 1);
    td_backward(opt_scaler_scale(m.scaler, loss_of(&m, 1)));
    ck_assert(td_step(m.td));
    ck_assert(table_step(&m, 2));
    ck_assert(state_of(&m, "scaler.scale") == 4 && number_of(m.weight) == 1 - 0.5 * 3);
    td_close(m.td);
}
END_TEST

/* Each is skipped by its own gradients; the scale moves once, and both unscale by what the losses were scaled with. */
START_TEST(test_optimizers_share_a_scaler)
{
    model a, b;
    td_context *td = open_cpu(TD_F64);
    open_model(&a, td, "a");
    open_model(&b, td, "b");
    a.scaler = b.scaler = opt_scaler_open(td, &(opt_scaler_options){ .initial = 16, .interval = 2 });
    a.opt = opt_sgd(a.at, &(opt_sgd_options){ .scaler = a.scaler });
    b.opt = opt_sgd(b.at, &(opt_sgd_options){ .scaler = b.scaler, .name = "second" });
    const struct { double of_a, of_b, scale, good, a, b; } rows[] = {
        { INFINITY, 1, 8, 0, 1, 0.5 }, { 1, 1, 8, 1, 0.5, 0 }, { 1, 1, 16, 0, 0, -0.5 }, { 1, NAN, 8, 0, -0.5, -0.5 },
    };
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        td_backward(opt_scaler_scale(a.scaler, loss_of(&a, rows[r].of_a)));
        td_backward(opt_scaler_scale(b.scaler, loss_of(&b, rows[r].of_b)));
        opt_step(a.opt, 0.5);
        opt_step(b.opt, 0.5);
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
        ck_assert_double_eq(state_of(&a, "scaler.scale"), rows[r].scale);
        ck_assert_double_eq(state_of(&a, "scaler.good_steps"), rows[r].good);
        ck_assert_double_eq(number_of(a.weight), rows[r].a);
        ck_assert_double_eq(number_of(b.weight), rows[r].b);
    }
    td_close(td);
}
END_TEST

/* ---- Updates by rows ------------------------------------------------------------------------------------ */

enum { TABLE_ROWS = 6, WIDTH = 2, TABLE = TABLE_ROWS * WIDTH };

typedef struct rows_asked {
    const char *strategy;
    bool sparse, by_rows;                     /* row-sparse gradients; Adagrad with one element a row */
} rows_asked;

static const int32_t ids[] = { 4, 1, 4 };
enum { IDS = 3 };

static bool read_table(td_state s, double values[TABLE])
{
    int64_t begin, end;
    memset(values, 0, TABLE * sizeof *values);
    return td_state_owned(s, &begin, &end) && td_state_read(s, begin, end - begin, values + begin);
}

/* Two steps that happen around one that overflows: the skipped one changes neither table nor moment, the others do. */
static int skip_by_rows(par_world *world, int rank, void *user)
{
    const rows_asked *a = user;
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .seed = 3, .threads = 1, .poison = true });
    par_attach(td, world, rank, &(par_options){ .strategy = a->strategy, .bucket_bytes = 4096 });
    td_state table = td_parameter(td_root(td), "table", TD_SHAPE(TABLE_ROWS, WIDTH), td_init_uniform(1));
    if (a->sparse) td_sparse_rows(table);
    opt_scaler *scaler = opt_scaler_open(td, NULL);
    opt_optimizer *opt = opt_adagrad(td_root(td), &(opt_adagrad_options){ .row_wise = a->by_rows, .scaler = scaler });
    td_state sum = td_state_named(td, a->by_rows ? "table.row_sum" : "table.sum");
    const double factors[] = { 1, INFINITY, 2 };
    double before[2][TABLE], after[2][TABLE];
    int failed = 0;
    for (int n = 0; n < 3 && !failed; n++) {
        failed = !read_table(table, before[0]) || !td_state_owned(sum, &(int64_t){ 0 }, &(int64_t){ 0 });
        td_tensor y = td_embedding(td_use(table), td_input(td, "ids", TD_I32, TD_SHAPE(IDS), ids));
        td_tensor factor = td_input(td, "factor", TD_F64, (td_shape){ 0 }, &factors[n]);
        td_tensor loss = td_mul(factor, td_sum(y, TD_ALL, TD_DROP));
        td_backward(opt_scaler_scale(scaler, loss));
        opt_step(opt, 0.5);
        failed = failed || !td_step(td) || !read_table(table, after[0]);
        bool same = !memcmp(before[0], after[0], sizeof before[0]), mine = a->sparse || rank == 0 || strcmp(a->strategy, "fsdp");
        if (!failed && mine && same != (n == 1)) failed = 10 + n;
    }
    /* Row 4 was read twice: its sums are 2^2 and 4^2, without what was skipped. */
    double expected = 20, got;
    int64_t at = a->by_rows ? 4 : 4 * WIDTH, begin, end;
    if (!failed && !td_state_owned(sum, &begin, &end)) failed = 20;
    if (!failed && at >= begin && at < end && !(td_state_read(sum, at, 1, &got) && fabs(got - expected) < 1e-12)) failed = 21;
    if (failed) fprintf(stderr, "%s, sparse %d, by rows %d: %d: %s\n", a->strategy, a->sparse, a->by_rows, failed, td_error_text(td));
    td_close(td);
    return failed;
}

START_TEST(test_updates_by_rows_are_skipped_too)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int i = 0; i < 16; i++) {
            static const char *const strategies[] = { "ddp", "fsdp", "zero1", "zero2" };
            rows_asked a = { .strategy = ranks == 1 ? "single" : strategies[(i & 1) + i / 8 * 2], .sparse = i & 2, .by_rows = i & 4 };
            ck_assert_int_eq(par_run_threads(ranks, &(par_world_options){ .timeout_s = 20 }, skip_by_rows, &a), 0);
        }
}
END_TEST

START_TEST(test_no_scaler_leaves_the_loss_as_it_is)
{
    model m;
    open_model(&m, open_cpu(TD_F64), "model");
    td_tensor loss = loss_of(&m, 1);
    ck_assert(opt_scaler_scale(NULL, loss).id == loss.id);
    opt_scaler_close(NULL);
    td_close(m.td);
}
END_TEST

static void expect_refused(td_context *td, opt_scaler_options o, const char *error)
{
    ck_assert_ptr_null(opt_scaler_open(td, &o));
    ck_assert_str_eq(td_error_text(td), error);
    td_clear_error(td);
}

START_TEST(test_options_out_of_range_are_refused)
{
    td_context *td = open_cpu(TD_F32);
    expect_refused(td, (opt_scaler_options){ .initial = 0.5 }, "opt_scaler_open: initial is 0.5, must be from 1 to less than 1.70141e+38");
    expect_refused(td, (opt_scaler_options){ .growth = 0.5 }, "opt_scaler_open: growth is 0.5, must be a finite number from 1");
    expect_refused(td, (opt_scaler_options){ .backoff = 1 }, "opt_scaler_open: backoff is 1, must be from 0 to less than 1");
    expect_refused(td, (opt_scaler_options){ .interval = -1 }, "opt_scaler_open: interval is -1, must be from 1 to less than 1.67772e+07");
    td_close(td);
}
END_TEST

START_TEST(test_opening_without_memory_is_an_error)
{
    memory_test memory = { .refused = -1 };
    td_context *td = open_with(&memory);
    opt_scaler *scaler = NULL;
    int failures = 0;
    char name[2] = "a";
    for (; !scaler && failures < 20; failures++) {
        td_clear_error(td);
        name[0]++;
        memory_refuse(&memory, failures);
        scaler = opt_scaler_open(td, &(opt_scaler_options){ .name = name });
        ck_assert_int_eq(td_error(td), scaler ? TD_OK : TD_ERROR_MEMORY);
    }
    ck_assert_int_gt(failures, 3);
    td_close(td);
    ck_assert_int_eq(memory.held, 0);
}
END_TEST

TESTS("scaler", test_scale_and_skips_follow_the_table, test_ranks_follow_the_table, test_scaling_changes_no_bit_of_the_training,
      test_norms_that_overflow_are_backed_off, test_the_scale_does_not_grow_to_infinity,
      test_a_micro_batch_that_overflows_spoils_its_update_only, test_optimizers_share_a_scaler,
      test_updates_by_rows_are_skipped_too, test_no_scaler_leaves_the_loss_as_it_is, test_options_out_of_range_are_refused, test_opening_without_memory_is_an_error)
