/* Gradients of one's own: straight through a step function, reversed by a factor, differentiated again, computed again, in bf16, on ranks.
 *
 * Labels: threads
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

static void straight_through_gradient(const td_gradient_call *g) { td_gradient_set(g, 0, g->dout[0]); }
static const td_gradient_rule straight_through = { "straight_through", straight_through_gradient };

/* sign(x), trained as if it were x (Bengio, Leonard, Courville, arXiv:1308.3432). */
static td_tensor binary(td_tensor x) { return td_with_gradient(td_sign(x), &x, 1, &straight_through, NULL, 0); }

typedef struct reversal { double factor; } reversal;

static void reverse_gradient(const td_gradient_call *g)
{
    const reversal *a = g->attr;
    td_tensor factor = td_fill(g->td, td_dtype_at(g->dout[0]), (td_shape){ 0 }, -a->factor);
    td_gradient_set(g, 0, td_mul(g->dout[0], factor));
}
static const td_gradient_rule reverse = { "reverse", reverse_gradient };

/* x, against which is trained (Ganin and Lempitsky, arXiv:1409.7495). */
static td_tensor reversed(td_tensor x, double factor)
{
    return td_with_gradient(x, &x, 1, &reverse, &(reversal){ factor }, sizeof(reversal));
}

static const double X[4] = { -2, -0.5, 0.25, 3 };

static td_tensor input(td_context *td) { return td_input(td, "x", TD_F64, TD_SHAPE(4), X); }

static void expect(td_tensor got, double a, double b, double c, double d)
{
    const double want[4] = { a, b, c, d };
    const double *values = check_read(got, "the result", __FILE__, __LINE__);
    ck_assert_near(values, want, 4, 1e-15);
}

START_TEST(test_straight_through)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor x = input(td), y = binary(x), dx = td_gradient(td_square(td_add(y, scalar(td, 3))), x);
    expect(y, -1, -1, 1, 1);
    expect(dx, 4, 4, 8, 8); /* 2 (sign(x) + 3) */
    td_close(td);
}
END_TEST

START_TEST(test_reversal_keeps_the_attributes_it_was_given)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor x = input(td), dx[2];
    for (int i = 0; i < 2; i++) {
        reversal a = { i ? 10 : 0.5 };
        td_tensor y = td_with_gradient(x, &x, 1, &reverse, &a, sizeof a);
        dx[i] = td_gradient(td_square(y), x);
        a.factor = 1e9; /* it was copied */
    }
    expect(reversed(x, 2), -2, -0.5, 0.25, 3);
    expect(dx[0], 2, 0.5, -0.25, -3);
    expect(dx[1], 40, 10, -5, -60);
    td_close(td);
}
END_TEST

START_TEST(test_a_layer_below_a_reversal_learns_the_opposite)
{
    double up[6], down[6], w[6];
    for (int turned = 0; turned < 2; turned++) {
        td_context *td = open_cpu(TD_F64);
        nn_linear l = nn_linear_make_with(td_root(td), "l", 2, 3, &(nn_linear_options){ .no_bias = true });
        opt_optimizer *opt = opt_sgd(td_root(td), NULL);
        ck_assert(td_state_read(l.weight, 0, 6, w));
        td_tensor h = nn_linear_apply(&l, td_input(td, "x", TD_F64, TD_SHAPE(2, 2), X));
        td_backward(td_mean(td_square(turned ? reversed(h, 1) : h), TD_ALL, TD_DROP));
        opt_step(opt, 0.1);
        ck_assert(td_step(td));
        ck_assert(td_state_read(l.weight, 0, 6, turned ? up : down));
        td_close(td);
    }
    for (int i = 0; i < 6; i++) ck_assert_double_eq_tol(up[i] - w[i], w[i] - down[i], 1e-15);
    ck_assert(fabs(down[0] - w[0]) > 1e-4);
}
END_TEST

/* Rules that say, of y = x^3, that its derivative is 2 x, and that it is y. */
static void twice_gradient(const td_gradient_call *g) { td_gradient_set(g, 0, td_mul(g->dout[0], td_add(g->in[0], g->in[0]))); }
static void itself_gradient(const td_gradient_call *g) { td_gradient_set(g, 0, td_mul(g->dout[0], g->out[0])); }

START_TEST(test_what_a_rule_records_has_a_derivative)
{
    static const td_gradient_rule twice = { "twice", twice_gradient }, itself = { "itself", itself_gradient };
    td_context *td = open_cpu(TD_F64);
    td_tensor x = input(td), y = td_mul(x, td_square(x));
    td_tensor first = td_gradient(td_with_gradient(y, &x, 1, &twice, NULL, 0), x), second = td_gradient(first, x);
    expect(first, -4, -1, 0.5, 6);
    expect(second, 2, 2, 2, 2);
    first = td_gradient(td_with_gradient(y, &x, 1, &itself, NULL, 0), x);
    second = td_gradient(td_scale(first, 3), x);
    expect(first, -8, -0.125, 0.015625, 27);
    expect(second, -24, -0.375, 0.046875, 81);
    td_close(td);
}
END_TEST

/* Of two inputs the first gets the gradient twice over and the second none. */
static void first_gradient(const td_gradient_call *g)
{
    if (g->wanted[0]) td_gradient_set(g, 0, td_add(g->dout[0], g->dout[0]));
}

START_TEST(test_nothing_passes_by_way_of_y)
{
    static const td_gradient_rule rule = { "first", first_gradient };
    td_context *td = open_cpu(TD_F64);
    td_tensor x = input(td), z = td_exp(input(td)), y = td_mul(x, z);
    td_tensor of[2] = { x, z }, other = td_square(x);
    expect(td_gradient(td_with_gradient(y, of, 2, &rule, NULL, 0), x), 2, 2, 2, 2);
    expect(td_gradient(td_with_gradient(y, of, 2, &rule, NULL, 0), z), 0, 0, 0, 0);
    expect(td_gradient(td_with_gradient(y, &z, 1, &rule, NULL, 0), x), 0, 0, 0, 0);
    expect(td_gradient(td_with_gradient(y, &other, 1, &rule, NULL, 0), x), -8, -2, 1, 12);
    td_state w = td_parameter(td_root(td), "w", TD_SHAPE(4), td_init_constant(1));
    y = td_mul(x, td_use(w));
    td_backward(td_sum(td_with_gradient(y, &x, 1, &rule, NULL, 0), TD_ALL, TD_DROP));
    ck_assert(!td_step(td));
    ck_assert_str_has(td_error_text(td), "backward: the loss depends on no parameter that trains");
    td_close(td);
}
END_TEST

static int calls;
static void counted_gradient(const td_gradient_call *g)
{
    calls++;
    td_gradient_set(g, 0, g->dout[0]);
}

START_TEST(test_a_rule_is_called_when_a_plan_is_made)
{
    static const td_gradient_rule rule = { "counted", counted_gradient };
    td_context *td = open_cpu(TD_F64);
    calls = 0;
    for (int step = 0; step < 5; step++) {
        td_tensor x = input(td);
        td_keep(td_gradient(td_with_gradient(x, &x, 1, &rule, NULL, 0), x));
        ck_assert(td_step(td));
    }
    ck_assert_int_eq(calls, 1);
    ck_assert_int_eq(td_last_report(td).plans, 1);
    for (int step = 0; step < 2; step++) { /* other attributes are another program */
        double attr = step;
        td_tensor x = input(td);
        td_keep(td_gradient(td_with_gradient(x, &x, 1, &rule, &attr, sizeof attr), x));
        ck_assert(td_step(td));
    }
    ck_assert_int_eq(calls, 3);
    td_close(td);
}
END_TEST

START_TEST(test_the_node_is_named_in_the_recording_and_gone_from_the_plan)
{
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1, .print = "record,simplify", .log = check_log_line });
    td_keep(td_square(reversed(input(td), 2)));
    ck_assert(td_step(td));
    ck_assert_str_eq(log_text(), "-- record: 4 nodes\n"
                                 "%0 = input[0]  f64 (4)\n"
                                 "%1 = with_gradient[reverse] %0 %0  f64 (4)\n"
                                 "%2 = square %1  f64 (4)\n"
                                 "output %2\n\n"
                                 "-- simplify: 3 nodes\n"
                                 "%0 = input[0]  f64 (4)\n"
                                 "%1 = square %0  f64 (4)\n"
                                 "output %1\n\n");
    td_close(td);
}
END_TEST

/* ---- A model of both, trained --------------------------------------------------------------------------------- */

enum { ROWS = 24, WIDTH = 8, STEPS = 5 };

typedef struct job {
    td_dtype dtype;
    const char *strategy, *passes;
    bool recompute;
    double losses[STEPS];
} job;

/* (ROWS, WIDTH) -> (ROWS, WIDTH) through WIDTH binary features; a second head is trained against by the features. */
static int train(par_world *world, int rank, void *user)
{
    job *j = user;
    int ranks = par_world_size(world), rows = ROWS / ranks;
    td_context *td = td_open(&(td_options){ .dtype = j->dtype, .seed = 1, .threads = 1, .passes = j->passes, .log = check_log_line });
    par_attach(td, world, rank, &(par_options){ .strategy = j->strategy });
    td_module root = td_root(td);
    nn_linear in = nn_linear_make(root, "in", WIDTH, WIDTH), out = nn_linear_make(root, "out", WIDTH, WIDTH);
    nn_linear against = nn_linear_make(root, "against", WIDTH, WIDTH);
    opt_optimizer *opt = opt_sgd(root, NULL);
    double *x = malloc((size_t)rows * WIDTH * sizeof *x);
    if (!x) return 1;
    for (int i = 0; i < rows * WIDTH; i++) x[i] = check_normal((uint64_t)(rank * rows * WIDTH + i));
    if (j->dtype != TD_F64)
        for (int i = 0; i < rows * WIDTH; i++) {
            float narrow = (float)x[i];
            memcpy((char *)x + i * (int)sizeof narrow, &narrow, sizeof narrow);
        }
    bool good = true;
    for (int s = 0; s < STEPS && good; s++) {
        td_tensor batch = td_batch(td, "x", td_float(td), TD_SHAPE(ROWS, WIDTH), x);
        if (j->recompute) td_recompute_begin(td);
        td_tensor h = binary(td_tanh(nn_linear_apply(&in, batch)));
        td_tensor turned = reversed(h, 0.25);
        if (j->recompute) td_recompute_end(td);
        td_tensor first = td_mse(td_cast(nn_linear_apply(&out, h), td_float(td)), batch);
        td_tensor second = td_mse(td_cast(nn_linear_apply(&against, turned), td_float(td)), batch);
        td_tensor loss = td_add(first, second);
        td_backward(loss);
        opt_step(opt, 0.5);
        good = td_step(td);
        double value = td_item(loss);
        if (rank == 0) j->losses[s] = value;
    }
    if (!good) fprintf(stderr, "%s\n", td_error_text(td));
    free(x);
    td_close(td);
    return good ? 0 : 1;
}

static job run(int ranks, job j)
{
    ck_assert_int_eq(par_run_threads(ranks, NULL, train, &j), 0);
    return j;
}

START_TEST(test_ranks_train_as_one)
{
    static const struct { int ranks; const char *strategy, *passes; } on[] = {
        { 2, "ddp", NULL }, { 2, "fsdp", NULL }, { 3, "fsdp", NULL }, { 2, "zero1", NULL }, { 3, "zero3", NULL }, { 1, "single", "-simplify" }, { 2, "ddp", "-simplify" },
    };
    job one = run(1, (job){ .dtype = TD_F64, .strategy = "single" });
    ck_assert(one.losses[STEPS - 1] < one.losses[0]);
    for (size_t i = 0; i < sizeof on / sizeof *on; i++) {
        job many = run(on[i].ranks, (job){ .dtype = TD_F64, .strategy = on[i].strategy, .passes = on[i].passes });
        ck_assert_near(many.losses, one.losses, STEPS, 1e-12);
    }
}
END_TEST

START_TEST(test_computed_again_to_the_bit)
{
    job kept = run(1, (job){ .dtype = TD_F64, .strategy = "single" });
    job again = run(1, (job){ .dtype = TD_F64, .strategy = "single", .recompute = true });
    ck_assert_mem_eq(again.losses, kept.losses, sizeof kept.losses);
}
END_TEST

START_TEST(test_in_bf16)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    job wide = run(1, (job){ .dtype = TD_F32, .strategy = "single" }), narrow = run(1, (job){ .dtype = TD_BF16, .strategy = "single" });
    /* A bf16 has 8 bits; 192 features that are -1 or 1 seldom change with them. */
    ck_assert_near(narrow.losses, wide.losses, 1, 0.01);
    ck_assert(narrow.losses[STEPS - 1] < narrow.losses[0]);
}
END_TEST

/* Mixes what it sees, which it may if all is in one dtype. */
static void mixing_gradient(const td_gradient_call *g)
{
    td_gradient_set(g, 0, td_mul(td_mul(g->dout[0], g->in[0]), td_add(g->out[0], g->in[1])));
}

START_TEST(test_a_rule_sees_bf16_as_f32)
{
    static const td_gradient_rule rule = { "mixing", mixing_gradient };
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    float eye[4] = { 1, 0, 0, 1 }, v[4] = { 1, 2, -3, 4 }, got[4];
    td_context *td = td_open(&(td_options){ .dtype = TD_BF16, .threads = 1, .print = "precision", .log = check_log_line });
    td_tensor x = td_input(td, "x", TD_F32, TD_SHAPE(2, 2), v), product = td_matmul(x, td_input(td, "eye", TD_F32, TD_SHAPE(2, 2), eye));
    td_tensor of[2] = { product, x }; /* bf16 and f32, and y is bf16 */
    td_tensor y = td_with_gradient(product, of, 2, &rule, NULL, 0);
    td_tensor dx = td_gradient(td_square(y), x); /* 2 y product (y + x) = 4 x^3 */
    ck_assert_int_eq(td_dtype_at(dx), TD_F32);
    ck_assert(td_read(dx, got));
    ck_assert_str_has(log_text(), "%5 = with_gradient[mixing] %4 %4 %0  bf16 (2, 2)"); /* y stays what it is beside an f32 input */
    ck_assert(got[0] == 4 && got[1] == 32 && got[2] == -108 && got[3] == 256);
    td_close(td);
}
END_TEST

/* ---- What cannot be ------------------------------------------------------------------------------------------- */

static void wrong_shape_gradient(const td_gradient_call *g) { td_gradient_set(g, 0, td_sum(g->dout[0], TD_ALL, TD_KEEP)); }
static void scalar_gradient(const td_gradient_call *g) { td_gradient_set(g, 0, td_scale(g->dout[0], 2)); }
static void random_gradient(const td_gradient_call *g) { td_gradient_set(g, 0, td_mul(g->dout[0], td_cast(td_uniform(g->td, TD_SHAPE(4)), TD_F64))); }
static void nested_gradient(const td_gradient_call *g) { td_gradient_set(g, 0, td_gradient(g->in[0], g->in[0])); }
static td_tensor outside;
static void outside_gradient(const td_gradient_call *g) { td_gradient_set(g, 0, outside); }

START_TEST(test_what_a_rule_may_not_record)
{
    static const struct { td_gradient_rule rule; const char *message; } wrong[] = {
        { { "sums", wrong_shape_gradient }, "with_gradient: rule 'sums' gives input 0, f64 (4), a gradient f64 (1) (" },
        { { "scales", scalar_gradient }, "with_gradient: rule 'scales' records 'scalar', which belongs to the step: it is called when a plan is made; make it an input (" },
        { { "draws", random_gradient }, "with_gradient: rule 'draws' records 'uniform', which belongs to the step" },
        { { "nests", nested_gradient }, "with_gradient: rule 'nests' records 'gradient', which belongs to the step" },
        { { "keeps", outside_gradient }, "with_gradient: rule 'keeps' gives input 0 a gradient that it neither recorded nor saw (" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        td_context *td = open_cpu(TD_F64);
        td_tensor x = outside = input(td);
        int line = __LINE__ + 1;
        td_keep(td_gradient(td_with_gradient(x, &x, 1, &wrong[i].rule, NULL, 0), x));
        ck_assert(!td_step(td));
        char where[600];
        snprintf(where, sizeof where, "(%s:%d)", __FILE__, line);
        ck_assert_str_has(td_error_text(td), wrong[i].message);
        ck_assert_str_has(td_error_text(td), where);
        td_close(td);
    }
}
END_TEST

START_TEST(test_calls_that_cannot_be_are_refused)
{
    static const td_gradient_rule other = { "straight_through", reverse_gradient }, again = { "straight_through", straight_through_gradient };
    static const td_gradient_rule nameless = { "", reverse_gradient }, nothing = { "nothing", NULL };
    char large[257] = { 0 };
    td_context *td = open_cpu(TD_F64);
    td_tensor x = input(td), whole = td_fill(td, TD_I32, TD_SHAPE(4), 1), many[16];
    for (int i = 0; i < 16; i++) many[i] = x;
#define REFUSED(call, message)                                        \
    do {                                                              \
        ck_assert(td_failed(call));                                   \
        ck_assert_str_has(td_error_text(td), message);                \
        ck_assert_str_has(td_error_text(td), "test_with_gradient.c:"); \
        td_clear_error(td);                                           \
        x = input(td), whole = td_fill(td, TD_I32, TD_SHAPE(4), 1);   \
    } while (0)
    td_with_gradient(x, &x, 1, &straight_through, NULL, 0);
    td_with_gradient(x, &x, 1, &again, NULL, 0); /* a copy of the same rule */
    ck_assert_no_error(td);
    REFUSED(td_with_gradient(x, &x, 1, &other, NULL, 0), "with_gradient: two rules are called 'straight_through'; each needs its own name (");
    REFUSED(td_with_gradient(x, &x, 1, &nameless, NULL, 0), "with_gradient: a rule needs a name and a function (");
    REFUSED(td_with_gradient(x, &x, 1, &nothing, NULL, 0), "with_gradient: a rule needs a name and a function (");
    REFUSED(td_with_gradient(x, &x, 0, &reverse, NULL, 0), "with_gradient: 'reverse' has 0 inputs, must be from 1 to 15 (");
    REFUSED(td_with_gradient(x, many, 16, &reverse, NULL, 0), "with_gradient: 'reverse' has 16 inputs, must be from 1 to 15 (");
    REFUSED(td_with_gradient(x, &x, 1, &reverse, large, 257), "with_gradient: 'reverse' has 257 bytes of attributes, at most 256 are kept (");
    REFUSED(td_with_gradient(whole, &x, 1, &reverse, large, 8), "with_gradient: y is i32, which has no gradient (");
    td_close(td);
}
END_TEST

TESTS("with_gradient", test_straight_through, test_reversal_keeps_the_attributes_it_was_given,
      test_a_layer_below_a_reversal_learns_the_opposite, test_what_a_rule_records_has_a_derivative, test_nothing_passes_by_way_of_y,
      test_a_rule_is_called_when_a_plan_is_made, test_the_node_is_named_in_the_recording_and_gone_from_the_plan, test_ranks_train_as_one,
      test_computed_again_to_the_bit, test_in_bf16, test_a_rule_sees_bf16_as_f32, test_what_a_rule_may_not_record,
      test_calls_that_cannot_be_are_refused)
