/* Chains that end in sums and maxima over trailing dimensions, for tests on the CPU (test_fused_rows.c) and on a GPU (test_cuda_rows.c). */
#ifndef TANDEM_TESTS_ROW_FORMS_H
#define TANDEM_TESTS_ROW_FORMS_H

#include "tests/check.h"

/* What is recorded of x (a shape), y (the same shape) and w (its last dimension), in a float dtype. */

enum { RESULTS = 3 };

typedef struct operands {
    td_context *td;
    td_tensor x, y, w, labels[2];             /* labels: i32, of x's shape */
    td_shape shape;
} operands;

typedef struct results {
    td_tensor at[RESULTS];
    int count;
} results;

static inline CHECK_UNUSED results one(td_tensor t) { return (results){ .at = { t }, .count = 1 }; }

static inline CHECK_UNUSED td_tensor tiny(const operands *o) { return td_cast(scalar(o->td, 0.5), td_dtype_at(o->x)); }

static inline CHECK_UNUSED results rms_norm(const operands *o)
{
    td_tensor square = td_square(o->x), mean = td_mean(square, TD_LAST, TD_KEEP);
    return one(td_mul(td_mul(o->x, td_cast(td_rsqrt(td_add(mean, scalar(o->td, 1e-5))), td_dtype_at(o->x))), o->w));
}

static inline CHECK_UNUSED results product_of_gradients(const operands *o) { return one(td_sum(td_mul(td_mul(o->x, o->y), o->w), TD_LAST, TD_DROP)); }

static inline CHECK_UNUSED results mean_of_squares(const operands *o) { return one(td_mean(td_square(td_sub(o->x, o->y)), TD_ALL, TD_DROP)); }

static inline CHECK_UNUSED results softmax(const operands *o)
{
    td_tensor x = td_mul(o->x, tiny(o)), most = td_max(x, TD_LAST, TD_KEEP), e = td_exp(td_sub(x, most)), sum = td_sum(e, TD_LAST, TD_KEEP);
    return one(td_div(e, td_cast(sum, td_dtype_at(e))));
}

/* Of one chain, and a value of it that is read, too. */
static inline CHECK_UNUSED results moments(const operands *o)
{
    td_tensor x = td_mul(o->x, o->w), square = td_square(x);
    return (results){ .at = { td_sum(x, TD_LAST, TD_DROP), td_sum(square, TD_LAST, TD_KEEP), td_abs(x) }, .count = 3 };
}

/* Every pair's distance: no operand has the shape of what is summed. */
static inline CHECK_UNUSED results distances(const operands *o)
{
    int64_t n = o->shape.dim[o->shape.rank - 1], rows = td_shape_elements(o->shape) / n;
    td_tensor from = td_reshape(o->x, rows, 1, n), to = td_reshape(o->y, 1, rows, n);
    return one(td_sum(td_square(td_sub(from, to)), TD_LAST, TD_DROP));
}

static inline CHECK_UNUSED results dropped(const operands *o) { return one(td_sum(td_mul(td_dropout(o->x, 0.3), o->y), TD_LAST, TD_DROP)); }

static inline CHECK_UNUSED results largest(const operands *o) { return one(td_max(td_abs(td_sub(o->x, o->y)), TD_LAST, TD_DROP)); }

static inline CHECK_UNUSED results all_but_the_first(const operands *o)
{
    td_shape to = { .rank = o->shape.rank, .dim = { o->shape.dim[0] } };
    for (int d = 1; d < to.rank; d++) to.dim[d] = 1;
    return one(td_sum_to(td_mul(o->x, o->y), to));
}

/* Computed in f64, for the labels' sake. */
static inline CHECK_UNUSED results hits(const operands *o)
{
    return one(td_mean(td_cast(td_equal(o->labels[0], o->labels[1]), TD_F32), TD_LAST, TD_DROP));
}

/* The reduced value has w's shape where x is square, and must not take its memory. */
static inline CHECK_UNUSED results beside_a_row(const operands *o)
{
    td_tensor mean = td_mean(td_mul(o->w, o->w), TD_ALL, TD_KEEP), row = td_mul(o->w, td_cast(mean, td_dtype_at(o->w)));
    return one(td_sum(td_mul(o->x, row), TD_LAST, TD_DROP));
}

typedef struct form {
    const char *note;
    results (*record)(const operands *o);
    int calls;                                /* of fused_rows */
} form;

static const form forms[] = {
    { "RMS norm", rms_norm, 1 },
    { "sum(dy x w)", product_of_gradients, 1 },
    { "mean of squares", mean_of_squares, 1 },
    { "softmax", softmax, 2 },
    { "moments", moments, 1 },
    { "distances", distances, 1 },
    { "dropout", dropped, 1 },
    { "the largest", largest, 1 },
    { "all dimensions but one", all_but_the_first, 1 },
    { "hits", hits, 1 },
    { "a row of the result's shape", beside_a_row, 2 },
};
enum { FORMS = sizeof forms / sizeof *forms };

/* ---- Running them */

/* How it is run: on the CPU by one thread, with all rewrites, unless said otherwise. */
typedef struct run_options {
    const char *device, *passes;
    int threads;
    bool unpoisoned;                          /* step memory is not erased between calls: on a GPU steps are graphs */
} run_options;

typedef struct runner {
    td_context *td;
    char program[1 << 14];                    /* as last printed, behind fuse */
} runner;

static inline CHECK_UNUSED void keep_program(void *user, td_level level, const char *text)
{
    runner *r = user;
    if (level == TD_LOG_PROGRAM) snprintf(r->program, sizeof r->program, "%s", text);
    if (level == TD_LOG_ERROR) printf("%s\n", text);
}

static inline CHECK_UNUSED void runner_open(runner *r, td_dtype dtype, run_options how)
{
    r->td = td_open(&(td_options){ .dtype = dtype, .seed = 3, .threads = how.threads ? how.threads : 1, .device = how.device,
                                   .poison = !how.unpoisoned, .passes = how.passes, .print = "fuse", .log = keep_program, .log_user = r });
}

typedef struct outcome {
    double *values;                           /* all results', as they are read in f64 */
    int64_t count;
    int calls;                                /* of fused_rows */
} outcome;

static inline CHECK_UNUSED td_tensor labels_of(td_context *td, td_shape shape, uint64_t salt)
{
    int64_t count = td_shape_elements(shape);
    int32_t *labels = check_alloc((size_t)count * sizeof *labels);
    for (int64_t i = 0; i < count; i++) labels[i] = (int32_t)(((uint64_t)i * 2654435761u + salt * 97) >> 7 & 3);
    return td_input(td, "labels", TD_I32, shape, labels);
}

static inline CHECK_UNUSED outcome run_in(runner *r, const form *f, td_dtype dtype, td_shape shape)
{
    td_context *td = r->td;
    outcome o = { .count = 0 };
    check_now.draws = 0;
    td_set_updates(td, 0);
    r->program[0] = 0;
    operands in = { .td = td, .shape = shape, .x = td_cast(check_randn(td, shape), dtype), .y = td_cast(check_randn(td, shape), dtype) };
    in.w = td_cast(check_randn(td, TD_SHAPE(shape.dim[shape.rank - 1])), dtype);
    for (int i = 0; i < 2; i++) in.labels[i] = labels_of(td, shape, (uint64_t)i);
    results made = f->record(&in);
    for (int i = 0; i < made.count; i++) td_keep(made.at[i] = td_cast(made.at[i], td_float(td)));
    ck_assert_msg(td_step(td), "%s: %s", f->note, td_error_text(td));
    for (int i = 0; i < made.count; i++) o.count += td_shape_elements(td_shape_at(made.at[i]));
    double *to = o.values = check_alloc((size_t)o.count * sizeof *to);
    for (int i = 0; i < made.count; i++) {
        int64_t count = td_shape_elements(td_shape_at(made.at[i]));
        memcpy(to, check_read(made.at[i], f->note, __FILE__, __LINE__), (size_t)count * sizeof *to);
        to += count;
    }
    o.calls = count_of(r->program, "fused_rows[");
    return o;
}

static inline CHECK_UNUSED outcome run(const form *f, td_dtype dtype, td_shape shape, run_options how)
{
    runner r;
    runner_open(&r, dtype == TD_F64 ? TD_F64 : TD_F32, how);
    outcome o = run_in(&r, f, dtype, shape);
    td_close(r.td);
    return o;
}

#endif
