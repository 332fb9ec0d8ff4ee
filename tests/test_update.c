/* Updates with a predicate: where it is 0 on the device, parameters and moments keep their bits, whatever the gradients
 * are; on one rank and on several, in f64 and f32.
 *
 * Labels: threads
 */
#include "tests/check.h"

#include <tandem/parallel.h>
#include <tandem/rewrite.h>

enum { WEIGHTS = 40, BIASES = 3, ALL = WEIGHTS + BIASES, STEPS = 6 };

/* p -= rate scale g, and the sum of all g as its moment. */
static void step_cpu(const td_update_range *r)
{
    for (int64_t i = 0; i < r->count; i++) {
        double g = r->dtype == TD_F64 ? ((const double *)r->gradient)[i] : (double)((const float *)r->gradient)[i];
        double move = r->rate * r->gradient_scale * g;
        if (r->dtype == TD_F64) ((double *)r->parameter)[i] -= move, ((double *)r->moment[0])[i] += g;
        else ((float *)r->parameter)[i] -= (float)move, ((float *)r->moment[0])[i] += (float)g;
    }
}

static const td_update_rule step_rule = { .name = "step", .moments = 1, .moment_name = { "seen" }, .cpu = step_cpu };

typedef struct model {
    td_context *td;
    td_state states[2];                       /* weight, bias */
    double factor;                            /* of the loss, as an input */
    float factor_f32;
} model;

static void open_model(model *m, td_dtype dtype)
{
    m->td = td_open(&(td_options){ .dtype = dtype, .seed = 3, .threads = 1, .poison = true });
    m->states[0] = td_parameter(td_root(m->td), "weight", TD_SHAPE(WEIGHTS), td_init_uniform(1));
    m->states[1] = td_parameter(td_root(m->td), "bias", TD_SHAPE(BIASES), td_init_uniform(1));
    td_update_together(m->states, 2);
}

/* The loss is factor times the sum of all parameters, so every gradient is factor. */
static td_tensor loss_of(model *m)
{
    m->factor_f32 = (float)m->factor;
    const void *data = td_float(m->td) == TD_F64 ? (const void *)&m->factor : &m->factor_f32;
    td_tensor factor = td_input(m->td, "factor", td_float(m->td), (td_shape){ 0 }, data);
    td_tensor weights = td_sum(td_use(m->states[0]), TD_ALL, TD_DROP);
    td_tensor biases = td_sum(td_use(m->states[1]), TD_ALL, TD_DROP);
    td_tensor sum = td_add(weights, biases);
    return td_mul(factor, sum);
}

static void record_update(model *m, td_tensor when)
{
    td_tensor gradients = td_gradients_at(m->td, m->states, 2, TD_HERE);
    td_tensor rate = td_scalar(m->td, 0.5), scale = td_fill(m->td, td_float(m->td), (td_shape){ 0 }, 1);
    td_tensor updates = td_scalar(m->td, 1);
    td_update_at(&(td_update_call){ .rule = &step_rule, .gradients = gradients, .states = m->states, .count = 2, .rate = rate,
                                    .scale = scale, .updates = updates, .when = when }, TD_HERE);
}

static bool one_step(model *m, double factor, double when)
{
    m->factor = factor;
    td_backward(loss_of(m));
    record_update(m, td_scalar(m->td, when));
    return td_step(m->td);
}

/* All bytes of states and moments that this rank holds. */
static size_t read_all(const model *m, char *to)
{
    size_t at = 0;
    for (int i = 0; i < 2; i++) {
        td_state both[2] = { m->states[i], td_moment(m->states[i], "seen") };
        for (int k = 0; k < 2; k++) {
            int64_t begin, end;
            if (!td_state_owned(both[k], &begin, &end) || !td_state_read(both[k], begin, end - begin, to + at)) return 0;
            at += (size_t)(end - begin) * (size_t)td_dtype_size(td_state_dtype(both[k]));
        }
    }
    return at;
}

typedef struct asked {
    td_dtype dtype;
    const char *strategy;
} asked;

/* factor and when of each step; 0 as `when` beside what would ruin everything. */
static const struct { double factor, when; } steps[STEPS] = {
    { 1, 1 }, { INFINITY, 0 }, { 2, 1 }, { NAN, 0 }, { 3, 0 }, { 4, -1 },
};

static int skip_on_ranks(par_world *world, int rank, void *user)
{
    const asked *a = user;
    model m = { 0 };
    char before[2 * ALL * 8], after[2 * ALL * 8];
    open_model(&m, a->dtype);
    par_attach(m.td, world, rank, &(par_options){ .strategy = a->strategy, .bucket_bytes = 4096 });
    int failed = td_error(m.td) != TD_OK;
    for (int s = 0; s < STEPS && !failed; s++) {
        size_t bytes = read_all(&m, before);
        failed = !one_step(&m, steps[s].factor, steps[s].when) || read_all(&m, after) != bytes;
        bool same = !memcmp(before, after, bytes);
        if (!failed && bytes && same != (steps[s].when == 0)) failed = 10 + s;
    }
    if (failed) fprintf(stderr, "%s: %d: %s\n", a->strategy, failed, td_error_text(m.td));
    if (!failed && td_last_report(m.td).plans != 1) failed = 2; /* the predicate is no part of the plan */
    td_close(m.td);
    return failed;
}

START_TEST(test_where_when_is_0_every_bit_stays)
{
    static const asked all[] = { { TD_F64, "ddp" }, { TD_F64, "fsdp" }, { TD_F32, "ddp" }, { TD_F32, "fsdp" },
                                 { TD_F64, "zero1" }, { TD_F32, "zero2" }, { TD_F64, "zero3" } };
    for (int ranks = 1; ranks <= 3; ranks++)
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
            asked a = all[i];
            if (ranks == 1) a.strategy = "single";
            ck_assert_int_eq(par_run_threads(ranks, &(par_world_options){ .timeout_s = 20 }, skip_on_ranks, &a), 0);
        }
}
END_TEST

START_TEST(test_an_update_that_happens_is_the_one_without_a_predicate)
{
    model with = { .factor = 3 }, without = { .factor = 3 };
    char a[2 * ALL * 8], b[2 * ALL * 8];
    open_model(&with, TD_F64);
    open_model(&without, TD_F64);
    ck_assert(one_step(&with, 3, 1));
    td_backward(loss_of(&without));
    record_update(&without, TD_NO_TENSOR);
    ck_assert(td_step(without.td));
    size_t bytes = read_all(&with, a);
    ck_assert_int_eq(bytes, sizeof a);
    ck_assert_int_eq(read_all(&without, b), bytes);
    ck_assert_int_eq(memcmp(a, b, bytes), 0);
    ck_assert_int_eq(td_last_report(with.td).nodes, td_last_report(without.td).nodes + 1); /* the scalar */
    td_close(with.td);
    td_close(without.td);
}
END_TEST

START_TEST(test_a_predicate_must_be_a_scalar)
{
    model m = { .factor = 1 };
    open_model(&m, TD_F64);
    td_backward(loss_of(&m));
    record_update(&m, td_fill(m.td, TD_F64, TD_SHAPE(2), 1));
    ck_assert_str_has(td_error_text(m.td), "update: when is f64 (2), must be a scalar of f64");
    td_close(m.td);
}
END_TEST

TESTS("update", test_where_when_is_0_every_bit_stays, test_an_update_that_happens_is_the_one_without_a_predicate,
      test_a_predicate_must_be_a_scalar)
