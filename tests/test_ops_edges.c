/* Every operation at the edges of what shapes can be, over the list of all operations and their cases: no elements, one
 * element, sizes that no vector divides, memory that is not aligned, dimensions of size 1 that stretch, and ranks that
 * have no rows. A new operation is covered by its cases; none is named here.
 *
 * A case with another size is either computed, its result shaped as the placement rule says, or refused in the
 * operation's name.
 * Labels: threads
 * Timeout: 600 s
 */
#include "tests/cases.h"

#include "core/internal.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

/* ---- Cases with other sizes --------------------------------------------------------------------------------- */

/* Dimension `dim` of input `input`, which is `size`; of all inputs those that are `size`; or all. */
typedef struct change {
    enum { ONE_DIMENSION, EQUAL_SIZES, ALL_SIZES } which;
    int input, dim;
    int64_t size;
} change;

enum { CHANGES = 2 * INPUTS * TD_MAX_DIMS + 1 };

static int changes_of(const td_case *c, change out[CHANGES])
{
    int count = 0;
    out[count++] = (change){ .which = ALL_SIZES };
    for (int i = 0; i < INPUTS && c->in[i].kind != TD_CASE_NONE; i++)
        for (int d = 0; d < c->in[i].rank; d++) {
            bool new_size = true;
            for (int k = 0; k < count; k++)
                new_size = new_size && !(out[k].which == EQUAL_SIZES && out[k].size == c->in[i].dim[d]);
            out[count++] = (change){ .which = ONE_DIMENSION, .input = i, .dim = d, .size = c->in[i].dim[d] };
            if (new_size)
                out[count++] = (change){ .which = EQUAL_SIZES, .size = c->in[i].dim[d] };
        }
    return count;
}

/* Labels stay within what they number when that becomes smaller. */
static td_case changed(const td_case *from, change what, int64_t size)
{
    td_case c = *from;
    for (int i = 0; i < INPUTS && c.in[i].kind != TD_CASE_NONE; i++) {
        for (int d = 0; d < c.in[i].rank; d++)
            if (what.which == ALL_SIZES || (what.which == EQUAL_SIZES && c.in[i].dim[d] == what.size) ||
                (what.which == ONE_DIMENSION && i == what.input && d == what.dim))
                c.in[i].dim[d] = size;
        if (c.in[i].kind == TD_CASE_LABELS && size > 0 && (what.which == ALL_SIZES || (double)what.size == c.in[i].scale))
            c.in[i].scale = fmin(c.in[i].scale, (double)size);
    }
    return c;
}

/* ---- One run ------------------------------------------------------------------------------------------------ */

/* What an operation gives, forward and backward, as doubles. */
typedef struct result {
    bool refused;
    int64_t count;        /* of all values below */
    double *values;       /* the result, then the inputs' gradients */
    int64_t forward;      /* of them the result's */
} result;

/* The data lie one element past aligned memory. */
static td_tensor record_unaligned(td_context *td, const case_data *d, int i)
{
    td_dtype dtype = is_label(d, i) ? TD_I32 : td_float(td);
    int64_t size = td_dtype_size(dtype);
    char *memory = check_alloc((size_t)((d->elements[i] + 1) * size + 64));
    char *data = memory + (64 - (uintptr_t)memory % 64) % 64 + size;
    for (int64_t e = 0; e < d->elements[i]; e++) {
        if (dtype == TD_I32)
            ((int32_t *)data)[e] = d->labels[i][e];
        else if (dtype == TD_F64)
            ((double *)data)[e] = d->values[i][e];
        else
            ((float *)data)[e] = (float)d->values[i][e];
    }
    return td_input(td, "x", dtype, d->shape[i], data);
}

static void check_refusal(td_context *td, const td_op *op)
{
    char name[64];
    snprintf(name, sizeof name, "%s: ", op->name);
    ck_assert_msg(!strncmp(td_error_text(td), name, strlen(name)), "%s is refused without its name: %s", op->name,
                  td_error_text(td));
    ck_assert_int_eq(td_error(td), TD_ERROR_USAGE);
}

/* Dimensions with one label have one size, or a multiple as heads that share keys. */
static void check_shape_of(td_tensor y, const td_op *op, int n, const td_tensor *in)
{
    const td_program *p = &y.td->recording;
    td_place_rule rule = { 0 };
    op->place(p, td_producer(p, td_handle_id(y)), &rule);
    td_shape out = td_shape_at(y);
    for (int d = 0; d < out.rank; d++)
        for (int i = 0; i < n; i++)
            for (int e = 0; e < td_shape_at(in[i]).rank && rule.out[0][d]; e++)
                if (rule.in[i][e] == rule.out[0][d]) {
                    int64_t size = td_shape_at(in[i]).dim[e];
                    ck_assert_msg(size ? out.dim[d] % size == 0 : out.dim[d] == 0,
                                  "%s: dimension %d of the result is %lld, that of input %d %lld", op->name, d,
                                  (long long)out.dim[d], i, (long long)size);
                }
}

static int64_t widened(td_tensor t, double *to)
{
    const double *values = check_read(t, "a result", __FILE__, __LINE__);
    int64_t n = td_shape_elements(td_shape_at(t));
    memcpy(to, values, (size_t)n * sizeof *to);
    return n;
}

/* `narrow`: the inputs are made bf16 first. */
static result run(td_dtype dtype, bool narrow, const char *passes, const td_op *op, const td_case *c)
{
    td_context *td = td_open(&(td_options){ .dtype = dtype, .seed = 1, .threads = 1, .passes = passes, .poison = true,
                                            .log = check_log_line });
    case_data d = data_of(c);
    td_tensor x[INPUTS], in[INPUTS], kept[INPUTS + 1];
    int64_t room = 0;
    for (int i = 0; i < d.inputs; i++) {
        for (int64_t e = 0; e < d.elements[i]; e++) { /* what bf16 has too */
            td_convert(TD_BF16, &d.narrow[i][e], TD_F64, &d.values[i][e], 1);
            td_convert(TD_F64, &d.values[i][e], TD_BF16, &d.narrow[i][e], 1);
        }
        x[i] = record_unaligned(td, &d, i);
        in[i] = narrow && !is_label(&d, i) ? td_cast(x[i], TD_BF16) : x[i];
        room += d.elements[i];
    }
    td_tensor y = td_record(op, TD_HERE, d.inputs, in, c->attr);
    if (td_failed(y)) {
        check_refusal(td, op);
        td_close(td);
        return (result){ .refused = true };
    }
    check_shape_of(y, op, d.inputs, in);
    kept[0] = td_dtype_at(y) == td_float(td) ? y : td_cast(y, td_float(td));
    td_keep(kept[0]);
    td_tensor loss = project(y, 0);
    for (int i = 0; i < d.inputs; i++)
        if (!is_label(&d, i))
            td_keep(kept[i + 1] = td_gradient(loss, x[i]));
    ck_assert_msg(td_step(td), "%s: %s", op->name, td_error_text(td));
    result r = { .forward = td_shape_elements(td_shape_at(kept[0])) };
    r.values = check_alloc((size_t)(r.forward + room) * sizeof *r.values);
    r.count = widened(kept[0], r.values);
    for (int i = 0; i < d.inputs; i++)
        if (!is_label(&d, i)) {
            ck_assert_msg(td_shape_equal(td_shape_at(kept[i + 1]), d.shape[i]), "%s: the gradient of input %d has another shape",
                          op->name, i);
            r.count += widened(kept[i + 1], r.values + r.count);
        }
    td_close(td);
    return r;
}

static const char *text_of(const td_case *c)
{
    char *text = check_alloc(512);
    for (int i = 0; i < INPUTS && c->in[i].kind != TD_CASE_NONE; i++)
        td_shape_text(td_shape_of(c->in[i].rank, c->in[i].dim), text + strlen(text));
    return text;
}

/* Labels that no class has give NaN by definition. */
static bool has_labels(const td_case *c)
{
    bool has = false;
    for (int i = 0; i < INPUTS && c->in[i].kind != TD_CASE_NONE; i++)
        has = has || (c->in[i].kind == TD_CASE_LABELS && td_shape_elements(td_shape_of(c->in[i].rank, c->in[i].dim)) > 0);
    return has;
}

static void check_numbers(const result *r, const td_op *op, const td_case *c)
{
    for (int64_t i = 0; i < r->count; i++)
        ck_assert_msg(!isnan(r->values[i]), "%s of %s: NaN in the %s", op->name, text_of(c),
                      i < r->forward ? "result" : "gradients");
}

/* ---- No elements -------------------------------------------------------------------------------------------- */

/* Returns how many changed cases of `op` are computed. */
static int check_size(const td_op *op, int64_t size, td_dtype dtype, bool narrow)
{
    int computed = 0;
    change changes[CHANGES];
    for (int k = 0; k < cases_of(op); k++)
        for (int i = changes_of(&op->cases[k], changes); i-- > 0;) {
            td_case c = changed(&op->cases[k], changes[i], size);
            result r = run(dtype, narrow, NULL, op, &c);
            if (r.refused)
                continue;
            computed++;
            if (size > 0 || !has_labels(&c))
                check_numbers(&r, op, &c);
        }
    return computed;
}

static void check_all_sizes(int64_t size)
{
    bool bf16 = has_bf16_products();
    for (int o = 0; o < OPERATIONS; o++) {
        const td_op *op = operations[o];
        int computed = check_size(op, size, TD_F64, false);
        bool fixed = op->attr_bytes > 0; /* attributes may name the sizes */
        ck_assert_msg(fixed || cases_of(op) == 0 || computed > 0, "%s takes no size of %lld", op->name, (long long)size);
        ck_assert_int_eq(check_size(op, size, TD_F32, false), computed);
        if (bf16)
            check_size(op, size, TD_BF16, true);
    }
}

START_TEST(test_no_elements_are_computed_or_refused_by_name)
{
    check_all_sizes(0);
}
END_TEST

/* ---- Odd sizes ---------------------------------------------------------------------------------------------- */

enum { MOST_ELEMENTS = 6000 };

static bool is_small(const td_case *c)
{
    bool small = true;
    for (int i = 0; i < INPUTS && c->in[i].kind != TD_CASE_NONE; i++)
        small = small && td_shape_elements(td_shape_of(c->in[i].rank, c->in[i].dim)) <= MOST_ELEMENTS;
    return small;
}

/* ||got - want|| beside ||want||, or beside a tenth an element: what cancels is as wrong as what it was made of. */
static double error_of(const double *got, const double *want, int64_t n)
{
    double size = 0;
    for (int64_t i = 0; i < n; i++)
        size += want[i] * want[i];
    double relative = relative_error(got, want, n), least = 0.1 * sqrt((double)n);
    return sqrt(size) < least ? relative * sqrt(size) / least : relative;
}

/* Results and gradients, each by its norm. */
static void check_near_wide(const result *got, const result *want, double tolerance, const char *what, const td_op *op,
                            const td_case *c)
{
    ck_assert_int_eq(got->count, want->count);
    double forward = error_of(got->values, want->values, want->forward);
    double backward = error_of(got->values + want->forward, want->values + want->forward, want->count - want->forward);
    ck_assert_msg(forward <= tolerance, "%s of %s: %s is off by %.3g", op->name, text_of(c), what, forward);
    ck_assert_msg(c->no_gradient_check || backward <= 4 * tolerance, "%s of %s: gradients in %s are off by %.3g", op->name, text_of(c), what, backward);
}

/* f32 within rounding of f64, fused or not, and bf16 within its own 2^-9 a value, three in a row at most. */
static void check_odd(const td_op *op, const td_case *c, bool bf16)
{
    result wide = run(TD_F64, false, NULL, op, c);
    if (wide.refused)
        return;
    result single = run(TD_F32, false, NULL, op, c), plain = run(TD_F32, false, "-fuse", op, c);
    check_near_wide(&single, &wide, 5e-6, "f32", op, c);
    ck_assert_msg(!memcmp(single.values, plain.values, (size_t)plain.count * sizeof *plain.values),
                  "%s of %s: fused and alone differ", op->name, text_of(c));
    if (!bf16)
        return;
    result narrow = run(TD_BF16, true, NULL, op, c);
    if (!narrow.refused)
        check_near_wide(&narrow, &wide, 0x1p-7, "bf16", op, c);
}

START_TEST(test_sizes_that_no_vector_divides_agree_with_f64)
{
    static const int64_t sizes[] = { 1, 2, 17, 31, 33, 65, 127 };
    bool bf16 = has_bf16_products();
    change changes[CHANGES];
    for (int o = 0; o < OPERATIONS; o++)
        for (int k = 0; k < cases_of(operations[o]); k++)
            for (int i = changes_of(&operations[o]->cases[k], changes); i-- > 0;)
                for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
                    td_case c = changed(&operations[o]->cases[k], changes[i], sizes[s]);
                    if (changes[i].which == EQUAL_SIZES && is_small(&c))
                        check_odd(operations[o], &c, bf16);
                }
}
END_TEST

START_TEST(test_one_element_in_every_dimension)
{
    check_all_sizes(1);
}
END_TEST

/* ---- Dimensions of size 1 that stretch ------------------------------------------------------------------------ */

enum { WHOLE = 2 * 3 * 2 * 1 * 3 * 2 };
static const int64_t whole[TD_MAX_DIMS] = { 2, 3, 2, 1, 3, 2 };

/* The last `rank` dimensions of `whole`, those of `ones` 1. */
static td_shape stretched(int rank, unsigned ones)
{
    td_shape shape = { .rank = rank };
    for (int d = 0; d < rank; d++) {
        int at = TD_MAX_DIMS - rank + d;
        shape.dim[d] = ones >> at & 1 ? 1 : whole[at];
    }
    return shape;
}

/* Which element of an operand of that shape meets element `index` of the whole. */
static int64_t met_by(td_shape shape, int64_t index)
{
    int64_t at = 0, step = 1;
    for (int d = TD_MAX_DIMS; d-- > TD_MAX_DIMS - (int)shape.rank;) {
        int64_t size = shape.dim[d - (TD_MAX_DIMS - shape.rank)], i = index % whole[d];
        at += size == 1 ? 0 : i * step;
        step *= size;
        index /= whole[d];
    }
    return at;
}

/* Operand 0 is whole in the dimensions that another is not. `spread`: operands are stretched beforehand, here. */
static const double *stretch(const td_op *op, const td_shape *shape, bool spread, int64_t *count)
{
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1, .log = check_log_line });
    td_tensor in[INPUTS], parts[INPUTS + 1];
    td_shape all = stretched(TD_MAX_DIMS, 0);
    for (int i = 0; i < op->inputs; i++) {
        int64_t n = td_shape_elements(shape[i]);
        double *x = check_alloc(WHOLE * sizeof *x);
        for (int64_t e = 0; e < (spread ? WHOLE : n); e++)
            x[e] = 0.3 + fabs(check_normal((uint64_t)(1000 * i + (spread ? met_by(shape[i], e) : e))));
        in[i] = td_input(td, "x", TD_F64, spread ? all : shape[i], x);
    }
    td_tensor y = td_record(op, TD_HERE, op->inputs, in, NULL);
    ck_assert_msg(!td_failed(y), "%s", td_error_text(td));
    ck_assert(td_shape_equal(td_shape_at(y), all));
    parts[0] = td_reshape(y, -1);
    for (int i = 0; i < op->inputs; i++)
        parts[i + 1] = td_reshape(td_gradient(project(y, 0), in[i]), -1);
    td_tensor joined = td_concat(parts, op->inputs + 1, 0);
    *count = td_shape_elements(td_shape_at(joined));
    const double *values = check_read(joined, op->name, __FILE__, __LINE__);
    td_close(td);
    return values;
}

/* Results are those of operands stretched beforehand; gradients theirs, summed over what was stretched. */
static void check_stretch(const td_op *op, const td_shape *shape)
{
    int64_t count;
    const double *got = stretch(op, shape, false, &count), *want = stretch(op, shape, true, &count);
    ck_assert_near(got, want, WHOLE, 1e-15);
    got += WHOLE;
    for (int i = 0; i < op->inputs; i++) {
        double sum[WHOLE] = { 0 };
        for (int64_t e = 0; e < WHOLE; e++)
            sum[met_by(shape[i], e)] += want[(1 + i) * WHOLE + e];
        ck_assert_near(got, sum, td_shape_elements(shape[i]), 1e-13);
        got += td_shape_elements(shape[i]);
    }
}

START_TEST(test_sizes_of_1_stretch_in_every_position)
{
    int checked = 0;
    for (int o = 0; o < OPERATIONS; o++) {
        const td_op *op = operations[o];
        if (!(op->flags & TD_OP_POINTWISE) || op->inputs < 2)
            continue;
        for (unsigned ones = 0; ones < 64; ones += op->inputs == 2 ? 1 : 9) {
            unsigned others = ~ones & 63;
            check_stretch(op, (td_shape[INPUTS]){ stretched(6, ones), stretched(6, others), stretched(6, others) });
            checked++;
        }
        for (int rank = 0; rank < TD_MAX_DIMS; rank++) { /* missing in front, on each side */
            check_stretch(op, (td_shape[INPUTS]){ stretched(6, 0), stretched(rank, 0x24), stretched(6, 0) });
            check_stretch(op, (td_shape[INPUTS]){ stretched(rank, 0x12), stretched(6, 0), stretched(rank, 0) });
        }
    }
    ck_assert_int_ge(checked, 8 * 64);
}
END_TEST

/* ---- Ranks without rows --------------------------------------------------------------------------------------- */

enum { MOST = 1 << 14 };

typedef struct job {
    const td_op *op;
    const td_case *c;
    int64_t count;
    double values[MOST];
    char error[512];
} job;

/* Inputs without rows are batches, cut among the ranks. */
static int run_rank(par_world *world, int rank, void *user)
{
    job *j = user;
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1, .poison = true });
    if (world)
        par_attach(td, world, rank, &(par_options){ .strategy = "ddp" });
    static const double x[1] = { 1 };
    td_tensor in[INPUTS], y;
    int n = 0;
    for (; n < INPUTS && j->c->in[n].kind != TD_CASE_NONE; n++) {
        td_shape shape = td_shape_of(j->c->in[n].rank, j->c->in[n].dim);
        td_dtype dtype = j->c->in[n].kind == TD_CASE_LABELS ? TD_I32 : TD_F64;
        bool rows = shape.rank == 0 || shape.dim[0] > 0;
        in[n] = rows ? td_cast(td_fill(td, TD_F64, shape, 0.5), dtype) : td_batch(td, "x", dtype, shape, x);
    }
    y = td_record(j->op, TD_HERE, n, in, j->c->attr);
    td_tensor parts[INPUTS + 1] = { td_reshape(td_cast(y, TD_F64), -1) };
    int count = 1;
    td_tensor loss = td_sum(td_square(parts[0]), TD_ALL, TD_DROP);
    for (int i = 0; i < n; i++)
        if (td_dtype_at(in[i]) == TD_F64)
            parts[count++] = td_reshape(td_gradient(loss, in[i]), -1);
    td_tensor all = td_concat(parts, count, 0);
    td_keep(all);
    bool good = td_step(td);
    if (rank == 0) {
        snprintf(j->error, sizeof j->error, "%s", td_error_text(td));
        j->count = td_shape_elements(td_shape_at(all));
        if (good && j->count <= MOST)
            good = td_read(all, j->values);
    }
    td_close(td);
    return good ? 0 : 1;
}

static bool first_is_empty(const td_case *c)
{
    return c->in[0].kind != TD_CASE_NONE && c->in[0].rank > 0 && c->in[0].dim[0] == 0;
}

START_TEST(test_ranks_without_rows_give_what_one_gives)
{
    int checked = 0;
    job *one = check_alloc(sizeof *one), *many = check_alloc(sizeof *many);
    change changes[CHANGES];
    for (int o = 0; o < OPERATIONS; o++)
        for (int k = 0; k < cases_of(operations[o]); k++)
            for (int i = changes_of(&operations[o]->cases[k], changes); i-- > 0;) {
                td_case c = changed(&operations[o]->cases[k], changes[i], 0);
                if (changes[i].which != EQUAL_SIZES || !first_is_empty(&c))
                    continue;
                *one = *many = (job){ .op = operations[o], .c = &c };
                if (par_run_threads(1, &(par_world_options){ .timeout_s = 20 }, run_rank, one))
                    continue; /* refused, as above */
                int failed = par_run_threads(3, &(par_world_options){ .timeout_s = 20 }, run_rank, many);
                ck_assert_msg(!failed, "%s of %s on 3 ranks: %s", c.note ? c.note : one->op->name, text_of(&c), many->error);
                ck_assert_int_eq(one->count, many->count);
                for (int64_t e = 0; e < one->count && e < MOST; e++)
                    ck_assert_msg(!memcmp(&one->values[e], &many->values[e], sizeof(double)) ||
                                      fabs(one->values[e] - many->values[e]) <= 1e-12,
                                  "%s of %s on 3 ranks", one->op->name, text_of(&c));
                checked++;
            }
    ck_assert_int_gt(checked, 60);
}
END_TEST

/* Two parameters of one element and one of two on three ranks: two steps of AdamW, then the loss. */
typedef struct small_job {
    const char *strategy;
    double loss;
} small_job;

static int run_small(par_world *world, int rank, void *user)
{
    small_job *j = user;
    static const double x[2] = { 1, -3 };
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1, .seed = 3, .poison = true });
    if (world)
        par_attach(td, world, rank, &(par_options){ .strategy = j->strategy });
    nn_linear one = nn_linear_make(td_root(td), "one", 2, 1);
    td_state scale = td_parameter(td_root(td), "scale", TD_SHAPE(1), td_init_constant(2));
    opt_optimizer *adamw = opt_adamw(td_root(td), NULL);
    for (int step = 0; step < 3; step++) {
        td_tensor y = nn_linear_apply(&one, td_input(td, "x", TD_F64, TD_SHAPE(1, 2), x));
        td_tensor loss = td_mean(td_square(td_mul(y, td_use(scale))), TD_ALL, TD_DROP);
        td_backward(loss);
        opt_step(adamw, 0.1);
        bool good = td_step(td);
        if (rank == 0)
            j->loss = good ? td_item(loss) : NAN;
    }
    td_close(td);
    return 0;
}

START_TEST(test_parameters_smaller_than_the_ranks)
{
    const char *const strategies[] = { "single", "ddp", "fsdp" };
    small_job job[3];
    for (int s = 0; s < 3; s++) {
        job[s] = (small_job){ .strategy = strategies[s] };
        ck_assert_int_eq(par_run_threads(s ? 3 : 1, &(par_world_options){ .timeout_s = 20 }, run_small, &job[s]), 0);
        ck_assert_msg(fabs(job[s].loss - job[0].loss) <= 1e-12, "%s: %.17g, not %.17g", strategies[s], job[s].loss, job[0].loss);
    }
    ck_assert(job[0].loss > 0);
}
END_TEST

TESTS("ops_edges", test_no_elements_are_computed_or_refused_by_name, test_one_element_in_every_dimension,
      test_sizes_that_no_vector_divides_agree_with_f64, test_sizes_of_1_stretch_in_every_position,
      test_ranks_without_rows_give_what_one_gives,
      test_parameters_smaller_than_the_ranks)
