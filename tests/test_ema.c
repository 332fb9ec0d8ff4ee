/* Averages of parameters: against the formula in plain C, in f64 to 1e-12, for an MLP under AdamW on 1-3 ranks, ddp and fsdp, cut
 * into micro-batches or not; read in the parameters' place without a trace; in place and in one call a unit.
 *
 * Labels: threads
 */
#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

#include "tests/check.h"
#include "tests/memory.h"

enum { ROWS = 12, IN = 7, HIDDEN = 11, OUT = 3, STEPS = 14, MOST = 256 };
enum { PARAMETERS = IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT };

typedef struct mlp {
    nn_linear hidden, out;
} mlp;

static mlp make_mlp(td_module root)
{
    mlp m;
    m.hidden = nn_linear_make(root, "hidden", IN, HIDDEN);
    m.out = nn_linear_make(root, "out", HIDDEN, OUT);
    return m;
}

static td_tensor forward(const mlp *m, td_tensor x)
{
    td_tensor h = td_tanh(nn_linear_apply(&m->hidden, x));
    return nn_linear_apply(&m->out, h);
}

static double inputs[ROWS][IN];

static void make_data(void)
{
    for (int i = 0; i < ROWS * IN; i++) inputs[i / IN][i % IN] = check_normal((uint64_t)i);
}

/* The mean of the squared outputs over `rows` of the inputs, from `first` on; ranks hold consecutive parts. */
static td_tensor loss_of(td_context *td, const mlp *m, int ranks, int rank, int first, int rows)
{
    td_tensor x = td_batch(td, "x", TD_F64, TD_SHAPE(rows, IN), inputs[first + rank * (rows / ranks)]);
    return td_mean(td_square(forward(m, x)), TD_ALL, TD_DROP);
}

typedef struct job {
    const char *strategy;
    int accumulate;
    bool warm_up;
} job;

typedef struct rank_of {
    td_context *td;
    mlp m;
    opt_optimizer *opt;
    opt_ema *ema;
    int ranks, rank;
} rank_of;

static void open_rank(rank_of *r, par_world *world, int rank, const job *j)
{
    r->td = td_open(&(td_options){ .dtype = TD_F64, .seed = 7, .threads = 1, .poison = true });
    r->ranks = par_world_size(world);
    r->rank = rank;
    par_attach(r->td, world, rank, &(par_options){ .strategy = j->strategy, .bucket_bytes = 256 });
    r->m = make_mlp(td_root(r->td));
    r->opt = opt_adamw(td_root(r->td), &(opt_adamw_options){ .decay = 0.1 });
    r->ema = opt_ema_open(td_root(r->td), &(opt_ema_options){ .decay = 0.75, .warm_up = j->warm_up });
}

static bool one_update(rank_of *r, const job *j)
{
    int rows = ROWS / j->accumulate;
    bool good = true;
    for (int k = 0; k < j->accumulate && good; k++) {
        td_tensor loss = loss_of(r->td, &r->m, r->ranks, r->rank, k * rows, rows);
        td_backward(td_scale(loss, 1.0 / j->accumulate));
        if (k + 1 == j->accumulate) {
            opt_step(r->opt, 0.05);
            opt_ema_update(r->ema);
        }
        good = td_step(r->td);
    }
    return good;
}

/* Of every parameter (which = NULL), or of its moment, the elements of which this rank holds the average, one after the other; how many. */
static int read_part(const rank_of *r, const char *which, double to[MOST])
{
    int at = 0;
    for (int64_t i = 0; i < td_state_count(r->td); i++) {
        td_state s = td_state_at(r->td, i);
        int64_t begin, end;
        if (td_state_kind_of(s) != TD_PARAMETER) continue;
        if (!td_state_owned(td_moment(s, "ema"), &begin, &end)) return -1;
        if (which) s = td_moment(s, which);
        if (!td_state_read(s, begin, end - begin, to + at)) return -1;
        at += (int)(end - begin);
    }
    return at;
}

/* The loss on all rows, by the parameters as they are read now. */
static double evaluate(const rank_of *r)
{
    td_tensor loss = loss_of(r->td, &r->m, r->ranks, r->rank, 0, ROWS);
    td_keep(loss);
    return td_step(r->td) ? td_item(loss) : (double)NAN;
}

static double decay_after(int n, const job *j)
{
    double rising = (1.0 + n) / (10.0 + n);
    return n == 0 ? 0 : j->warm_up && rising < 0.75 ? rising : 0.75;
}

#define CHECK(condition)                                                                                  \
    do {                                                                                                  \
        if (condition) break;                                                                             \
        fprintf(stderr, "%s, rank %d of %d, line %d: %s: %s\n", j->strategy, rank, r.ranks, __LINE__, #condition, td_error_text(r.td)); \
        td_close(r.td);                                                                                   \
        return __LINE__;                                                                                  \
    } while (0)

static int follow_formula(par_world *world, int rank, void *user)
{
    const job *j = user;
    rank_of r;
    double p[MOST], before[MOST], mean[MOST] = { 0 }, got[MOST];
    open_rank(&r, world, rank, j);
    for (int n = 0; n < STEPS; n++) {
        CHECK(one_update(&r, j));
        int count = read_part(&r, NULL, p);
        CHECK(count >= 0 && read_part(&r, "ema", got) == count && (r.ranks > 1 || count == PARAMETERS));
        double d = decay_after(n, j);
        for (int i = 0; i < count; i++) mean[i] = d * mean[i] + (1 - d) * p[i];
        for (int i = 0; i < count; i++) CHECK(fabs(got[i] - mean[i]) <= 1e-12 * fmax(1, fabs(mean[i])));
        CHECK(n > 0 || !memcmp(got, p, (size_t)count * sizeof *p)); /* the first is the parameter, to the bit */
    }
    /* Read in the parameters' place, and gone again. */
    int count = read_part(&r, NULL, before);
    double trained = evaluate(&r), averaged, again;
    opt_ema_begin(r.ema);
    averaged = evaluate(&r);
    CHECK(read_part(&r, NULL, p) == count && !memcmp(p, before, (size_t)count * sizeof *p));
    opt_ema_end(r.ema);
    CHECK(read_part(&r, NULL, p) == count && !memcmp(p, before, (size_t)count * sizeof *p));
    again = evaluate(&r);
    CHECK(again == trained && averaged != trained);
    /* The same averages as parameters give the same loss; zero1 and zero2 hold more of the parameters than of their averages. */
    bool alike = strcmp(j->strategy, "zero1") && strcmp(j->strategy, "zero2");
    for (int64_t i = 0, at = 0; i < td_state_count(r.td) && alike; i++) {
        td_state s = td_state_at(r.td, i);
        int64_t begin, end;
        if (td_state_kind_of(s) != TD_PARAMETER) continue;
        CHECK(td_state_owned(s, &begin, &end) && td_state_write(s, begin, end - begin, got + at));
        at += end - begin;
    }
    CHECK(!alike || evaluate(&r) == averaged);
    td_close(r.td);
    return 0;
}

static const char *const strategies[] = { "ddp", "zero1", "zero2", "zero3", "fsdp" };

START_TEST(test_averages_follow_the_formula_on_ranks)
{
    make_data();
    for (int ranks = 1; ranks <= 3; ranks++)
        for (int s = 0; s < 5; s++)
            for (int accumulate = 1; accumulate <= 2; accumulate++) {
                job j = { .strategy = ranks == 1 ? "single" : strategies[s], .accumulate = accumulate, .warm_up = s & 1 };
                ck_assert_int_eq(par_run_threads(ranks, &(par_world_options){ .timeout_s = 20 }, follow_formula, &j), 0);
            }
}
END_TEST

/* A table of six rows of two, of which each step moves rows 4 and 1, by 0.5 and by 0.25: rows nobody reads are averaged as all others. */
static int average_table(par_world *world, int rank, void *user)
{
    enum { ROWS_OF = 6, WIDTH = 2, TABLE = ROWS_OF * WIDTH };
    static const int32_t ids[] = { 4, 1, 4 };
    const job *j = user;
    rank_of r = { .ranks = par_world_size(world), .rank = rank };
    r.td = td_open(&(td_options){ .dtype = TD_F64, .seed = 7, .threads = 1, .poison = true });
    par_attach(r.td, world, rank, &(par_options){ .strategy = j->strategy });
    td_state table = td_parameter(td_root(r.td), "table", TD_SHAPE(ROWS_OF, WIDTH), td_init_constant(1));
    td_sparse_rows(table);
    r.opt = opt_sgd(td_root(r.td), NULL);
    r.ema = opt_ema_open(td_root(r.td), &(opt_ema_options){ .decay = 0.75 });
    double p[ROWS_OF] = { 1, 1, 1, 1, 1, 1 }, mean[ROWS_OF] = { 0 }, got[TABLE];
    for (int n = 0; n < 5; n++) {
        td_tensor y = td_embedding(td_use(table), td_input(r.td, "ids", TD_I32, TD_SHAPE(3), ids));
        td_backward(td_sum(y, TD_ALL, TD_DROP));
        opt_step(r.opt, 0.25);
        opt_ema_update(r.ema);
        CHECK(td_step(r.td));
        p[1] -= 0.25;
        p[4] -= 0.5;
        double d = decay_after(n, j);
        for (int i = 0; i < ROWS_OF; i++) mean[i] = d * mean[i] + (1 - d) * p[i];
    }
    opt_ema_begin(r.ema);
    td_tensor whole = td_scale(td_use(table), 1);
    td_keep(whole);
    opt_ema_end(r.ema);
    CHECK(td_step(r.td) && td_read(whole, got));
    for (int i = 0; i < TABLE; i++) CHECK(fabs(got[i] - mean[i / WIDTH]) <= 1e-12);
    td_close(r.td);
    return 0;
}

START_TEST(test_averages_of_a_table_with_row_sparse_gradients)
{
    for (int ranks = 1; ranks <= 3; ranks++)
        for (int s = 0; s < 5; s++) {
            job j = { .strategy = ranks == 1 ? "single" : strategies[s] };
            ck_assert_int_eq(par_run_threads(ranks, &(par_world_options){ .timeout_s = 20 }, average_table, &j), 0);
        }
}
END_TEST

typedef struct sent {
    job j;
    bool averages;
    int64_t bytes;                            /* of rank 0 */
} sent;

static int count_sent(par_world *world, int rank, void *user)
{
    sent *s = user;
    const job *j = &s->j;
    rank_of r;
    open_rank(&r, world, rank, j);
    if (!s->averages) r.ema = NULL;
    for (int n = 0; n < 3; n++) CHECK(one_update(&r, j));
    if (rank == 0) s->bytes = par_sent(world, rank, NULL);
    td_close(r.td);
    return 0;
}

START_TEST(test_averaging_sends_nothing)
{
    make_data();
    for (int s = 0; s < 5; s++) {
        sent one = { .j = { .strategy = strategies[s], .accumulate = 1 } }, other = one;
        other.averages = true;
        ck_assert_int_eq(par_run_threads(2, &(par_world_options){ .timeout_s = 20 }, count_sent, &one), 0);
        ck_assert_int_eq(par_run_threads(2, &(par_world_options){ .timeout_s = 20 }, count_sent, &other), 0);
        ck_assert_int_gt(one.bytes, 0);
        ck_assert_int_eq(other.bytes, one.bytes);
    }
}
END_TEST

/* ---- One rank ------------------------------------------------------------------------------------------- */

typedef struct point {
    td_context *td;
    td_state w;                               /* (2), from 1 */
    opt_optimizer *opt;
    opt_ema *ema;
} point;

static point open_point(const opt_ema_options *options)
{
    point p = { .td = open_cpu(TD_F64) };
    p.w = td_parameter(td_root(p.td), "w", TD_SHAPE(2), td_init_constant(1));
    p.opt = opt_sgd(td_root(p.td), NULL);
    p.ema = opt_ema_open(td_root(p.td), options);
    return p;
}

/* The gradient is 1: w falls by the rate. */
static void record_training(point *p, double rate)
{
    td_backward(td_sum(td_use(p->w), TD_ALL, TD_DROP));
    opt_step(p->opt, rate);
    opt_ema_update(p->ema);
}

static double first_of(td_state s)
{
    double value;
    ck_assert(td_state_read(s, 0, 1, &value));
    return value;
}

/* w is 0.5, 0, -0.5; the averages 0.5, 0.5 0.5 + 0.5 0 = 0.25, 0.5 0.25 + 0.5 -0.5 = -0.125. */
START_TEST(test_literal_averages)
{
    point p = open_point(&(opt_ema_options){ .decay = 0.5 });
    const double expected[] = { 0.5, 0.25, -0.125 };
    for (int n = 0; n < 3; n++) {
        record_training(&p, 0.5);
        ck_assert(td_step(p.td));
        ck_assert_double_eq(first_of(td_state_named(p.td, "w.ema")), expected[n]);
        ck_assert_double_eq(first_of(td_state_named(p.td, "ema.updates")), n + 1);
    }
    ck_assert_int_eq(td_last_report(p.td).plans, 1);
    td_close(p.td);
}
END_TEST

static double read_w(point *p)
{
    td_tensor sum = td_sum(td_use(p->w), TD_ALL, TD_DROP);
    td_keep(sum);
    ck_assert_msg(td_step(p->td), "%s", td_error_text(p->td));
    return td_item(sum) / 2;
}

START_TEST(test_before_the_first_update_the_average_is_the_parameter)
{
    point p = open_point(NULL);
    opt_ema_begin(p.ema);
    ck_assert_double_eq(read_w(&p), 1);
    opt_ema_end(p.ema);
    record_training(&p, 0.5); /* in one recording with its reading */
    opt_ema_begin(p.ema);
    ck_assert_double_eq(read_w(&p), 0.5);
    opt_ema_end(p.ema);
    td_close(p.td);
}
END_TEST

/* td_use before, within and after the scope are three values. */
START_TEST(test_a_scope_within_a_step)
{
    point p = open_point(&(opt_ema_options){ .decay = 0.5 });
    for (int n = 0; n < 2; n++) {
        record_training(&p, 0.5);
        ck_assert(td_step(p.td));
    }
    td_tensor seen[3];
    seen[0] = td_add(td_use(p.w), td_fill(p.td, TD_F64, TD_SHAPE(2), 0));
    opt_ema_begin(p.ema);
    seen[1] = td_add(td_use(p.w), td_fill(p.td, TD_F64, TD_SHAPE(2), 0));
    opt_ema_end(p.ema);
    seen[2] = td_add(td_use(p.w), td_fill(p.td, TD_F64, TD_SHAPE(2), 0));
    for (int i = 0; i < 3; i++) td_keep(seen[i]);
    ck_assert(td_step(p.td));
    const double expected[] = { 0, 0.25, 0 };
    for (int i = 0; i < 3; i++) {
        double got[2];
        ck_assert(td_read(seen[i], got));
        ck_assert_double_eq(got[0], expected[i]);
    }
    td_close(p.td);
}
END_TEST

START_TEST(test_two_averages_of_one_model)
{
    point p = open_point(&(opt_ema_options){ .decay = 0.5 });
    opt_ema *slow = opt_ema_open(td_root(p.td), &(opt_ema_options){ .decay = 0.75, .name = "slow" });
    for (int n = 0; n < 2; n++) {
        record_training(&p, 0.5);
        opt_ema_update(slow);
        ck_assert(td_step(p.td));
    }
    ck_assert_double_eq(first_of(td_state_named(p.td, "w.ema")), 0.25);
    ck_assert_double_eq(first_of(td_state_named(p.td, "w.slow")), 0.375);
    opt_ema_begin(slow);
    ck_assert_double_eq(read_w(&p), 0.375);
    opt_ema_end(slow);
    td_close(p.td);
}
END_TEST

/* An optimizer with the averages of half its model: what lies beside in the unit is no state and stays so. */
START_TEST(test_averages_of_a_part_of_the_model)
{
    point p = { .td = open_cpu(TD_F64) };
    td_module part = td_child(td_root(p.td), "part");
    td_state other = td_parameter(td_root(p.td), "partner", TD_SHAPE(5), td_init_constant(3));
    p.w = td_parameter(part, "w", TD_SHAPE(2), td_init_constant(1));
    p.opt = opt_sgd(td_root(p.td), NULL);
    p.ema = opt_ema_open(part, &(opt_ema_options){ .decay = 0.5 });
    int64_t states = td_state_count(p.td);
    for (int n = 0; n < 2; n++) {
        td_tensor sum = td_sum(td_use(other), TD_ALL, TD_DROP);
        td_backward(td_add(sum, td_sum(td_use(p.w), TD_ALL, TD_DROP)));
        opt_step(p.opt, 0.5);
        opt_ema_update(p.ema);
        ck_assert_msg(td_step(p.td), "%s", td_error_text(p.td));
    }
    ck_assert_double_eq(first_of(td_state_named(p.td, "part.w.ema")), 0.25);
    ck_assert_double_eq(first_of(other), 2);
    ck_assert_int_eq(td_state_named(p.td, "partner.ema").id, TD_NONE);
    ck_assert_int_eq(td_state_count(p.td), states);
    opt_ema_begin(p.ema);
    ck_assert_double_eq(read_w(&p), 0.25);
    opt_ema_end(p.ema);
    td_close(p.td);
}
END_TEST

/* ---- What it costs -------------------------------------------------------------------------------------- */

/* One call for the unit and three for the count and what follows from it; beside scalars the average is all the memory it takes. */
START_TEST(test_an_average_is_one_call_a_unit_in_place)
{
    td_report report[2];
    for (int with = 0; with < 2; with++) {
        td_context *td = open_cpu(TD_F32);
        mlp m = make_mlp(td_root(td));
        opt_optimizer *opt = opt_adamw(td_root(td), NULL);
        opt_ema *ema = with ? opt_ema_open(td_root(td), NULL) : NULL;
        td_tensor y = forward(&m, randn(td, ROWS, IN));
        td_backward(td_mean(td_square(y), TD_ALL, TD_DROP));
        opt_step(opt, 0.1);
        opt_ema_update(ema);
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
        report[with] = td_last_report(td);
        td_close(td);
    }
    int64_t unit = 80 + 16 + 48 + 16, count = 1; /* f32; members begin at multiples of 16 */
    ck_assert_int_eq(report[1].calls - report[0].calls, 4);
    ck_assert_int_eq(report[1].state_bytes - report[0].state_bytes, 4 * (unit + count));
    ck_assert_int_le(report[1].step_bytes - report[0].step_bytes, 512); /* scalars */
}
END_TEST

/* ---- Errors --------------------------------------------------------------------------------------------- */

static void expect_error(point *p, const char *error)
{
    ck_assert_str_has(td_error_text(p->td), error);
    ck_assert_int_eq(td_error(p->td), TD_ERROR_USAGE);
    td_clear_error(p->td);
}

START_TEST(test_misuse_of_the_scope_is_refused)
{
    point p = open_point(NULL);
    opt_ema_end(p.ema);
    expect_error(&p, "opt_ema_end: no opt_ema_begin came before it (");
    opt_ema_begin(p.ema);
    opt_ema_begin(p.ema);
    expect_error(&p, "opt_ema_begin: averages of these parameters are being read already; opt_ema_end comes first (");
    opt_ema_begin(p.ema); /* clearing the error ended the scope */
    opt_ema_update(p.ema);
    expect_error(&p, "opt_ema_update: the averages are being read; opt_ema_end comes first (");
    opt_ema_begin(p.ema);
    opt_step(p.opt, 0.1);
    expect_error(&p, "gradients: 'w' cannot change while another state is read in its place; end that first, as opt_ema_end does (");
    opt_ema_begin(p.ema);
    td_assign(p.w, td_fill(p.td, TD_F64, TD_SHAPE(2), 0));
    expect_error(&p, "assign: 'w' cannot change while another state is read in its place");
    record_training(&p, 0.5);
    ck_assert(td_step(p.td));
    ck_assert_double_eq(first_of(p.w), 0.5);
    ck_assert_double_eq(read_w(&p), 0.5);
    td_close(p.td);
}
END_TEST

/* Two averages that have some parameters alike: what one reads the other neither takes nor ends. */
START_TEST(test_scopes_of_two_averages_do_not_mix)
{
    point p = { .td = open_cpu(TD_F64) };
    td_module root = td_root(p.td), part = td_child(root, "part");
    td_parameter(root, "first", TD_SHAPE(2), td_init_constant(1));
    p.w = td_parameter(part, "w", TD_SHAPE(2), td_init_constant(1));
    p.ema = opt_ema_open(root, NULL);
    opt_ema *of_part = opt_ema_open(part, &(opt_ema_options){ .name = "part_ema" });
    opt_ema_begin(of_part);
    opt_ema_begin(p.ema);
    expect_error(&p, "opt_ema_begin: averages of these parameters are being read already; opt_ema_end comes first (");
    opt_ema_end(of_part); /* the error was cleared and the scope with it: that is no second error */
    ck_assert_no_error(p.td);
    opt_ema_begin(of_part);
    opt_ema_end(p.ema);
    expect_error(&p, "opt_ema_end: no opt_ema_begin came before it (");
    opt_ema_begin(of_part);
    opt_ema_update(p.ema);
    expect_error(&p, "opt_ema_update: the averages are being read; opt_ema_end comes first (");
    td_close(p.td);
}
END_TEST

START_TEST(test_an_error_within_the_scope_leaves_nothing_behind)
{
    point p = open_point(NULL);
    for (int n = 0; n < 2; n++) {
        record_training(&p, 0.5);
        ck_assert(td_step(p.td));
    }
    opt_ema_begin(p.ema);
    td_fail(p.td, TD_ERROR_DATA, "the data is bad");
    opt_ema_end(p.ema); /* ends it though the context has failed */
    td_clear_error(p.td);
    ck_assert_double_eq(read_w(&p), 0);
    opt_ema_begin(p.ema);
    ck_assert(fabs(read_w(&p) - 0.4995) < 1e-15); /* 0.999 0.5 + 0.001 0 */
    td_fail(p.td, TD_ERROR_DATA, "the data is bad");
    td_clear_error(p.td);
    ck_assert_double_eq(read_w(&p), 0);
    ck_assert_double_eq(first_of(p.w), 0);
    td_close(p.td);
}
END_TEST

START_TEST(test_options_that_cannot_be_are_refused)
{
    point p = open_point(NULL);
    ck_assert_ptr_null(opt_ema_open(td_root(p.td), &(opt_ema_options){ .decay = 1 }));
    expect_error(&p, "opt_ema_open: decay is 1, must be from 0 to less than 1");
    ck_assert_ptr_null(opt_ema_open(td_root(p.td), NULL));
    expect_error(&p, "opt_ema_open: 'w.ema' exists already; give it another name");
    ck_assert_ptr_null(opt_ema_open(td_child(td_root(p.td), "nothing"), NULL));
    expect_error(&p, "opt_ema_open: no parameter under 'nothing' trains");
    opt_ema_update(NULL);
    opt_ema_begin(NULL);
    opt_ema_end(NULL);
    opt_ema_close(NULL);
    ck_assert_no_error(p.td);
    td_close(p.td);
}
END_TEST

START_TEST(test_opening_without_memory_is_an_error)
{
    memory_test memory = { .refused = -1 };
    td_context *td = open_with(&memory);
    td_parameter(td_root(td), "w", TD_SHAPE(2), td_init_constant(1));
    opt_ema *ema = NULL;
    int failures = 0;
    char name[2] = "a";
    for (; !ema && failures < 20; failures++) {
        td_clear_error(td);
        name[0]++;
        memory_refuse(&memory, failures);
        ema = opt_ema_open(td_root(td), &(opt_ema_options){ .name = name });
        ck_assert_int_eq(td_error(td), ema ? TD_OK : TD_ERROR_MEMORY);
    }
    ck_assert_int_gt(failures, 3);
    td_close(td);
    ck_assert_int_eq(memory.held, 0);
}
END_TEST

TESTS("ema", test_averages_follow_the_formula_on_ranks, test_averages_of_a_table_with_row_sparse_gradients, test_averaging_sends_nothing,
      test_literal_averages, test_before_the_first_update_the_average_is_the_parameter,
      test_a_scope_within_a_step, test_two_averages_of_one_model, test_averages_of_a_part_of_the_model,
      test_an_average_is_one_call_a_unit_in_place, test_misuse_of_the_scope_is_refused, test_scopes_of_two_averages_do_not_mix,
      test_an_error_within_the_scope_leaves_nothing_behind, test_options_that_cannot_be_are_refused, test_opening_without_memory_is_an_error)
