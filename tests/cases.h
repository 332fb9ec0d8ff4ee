/* What tests over the list of all operations share: each operation's cases as programs, with the same numbers in every
 * context.
 */
#ifndef TANDEM_TESTS_CASES_H
#define TANDEM_TESTS_CASES_H

#include "tests/check.h"

#include "core/ops/list.h"

#define NAME_OPERATION(name) &td_op_##name,
static const td_op *const operations[] = { TD_OPERATIONS(NAME_OPERATION) };
enum { OPERATIONS = sizeof operations / sizeof *operations };

enum { INPUTS = TD_RULE_INPUTS };

static inline CHECK_UNUSED int cases_of(const td_op *op)
{
    int count = 0;
    while (op->cases && op->cases[count].in[0].kind != TD_CASE_NONE)
        count++;
    return count;
}

/* The inputs of a case, in f64; values are exact in f32, so that all contexts compute from the same numbers. */
typedef struct case_data {
    int inputs;
    const td_case_input *what[INPUTS];
    td_shape shape[INPUTS];
    int64_t elements[INPUTS];
    double *values[INPUTS];
    int32_t *labels[INPUTS];
    float *narrow[INPUTS]; /* what a f32 context reads */
} case_data;

static inline CHECK_UNUSED double draw(const td_case_input *in, uint64_t counter)
{
    double scale = in->scale == 0 ? 1 : in->scale;
    double x = check_normal(counter);
    return (float)(scale * (in->kind == TD_CASE_POSITIVE ? 0.3 + fabs(x) : x));
}

/* Numbers from draw `counter` on. */
static inline CHECK_UNUSED case_data data_from(const td_case *c, uint64_t counter)
{
    case_data d = { .inputs = 0 };
    for (int i = 0; i < INPUTS && c->in[i].kind != TD_CASE_NONE; i++) {
        const td_case_input *in = d.what[i] = &c->in[i];
        d.inputs++;
        d.shape[i] = td_shape_of(in->rank, in->dim);
        d.elements[i] = td_shape_elements(d.shape[i]);
        d.values[i] = check_alloc((size_t)d.elements[i] * sizeof(double));
        d.labels[i] = check_alloc((size_t)d.elements[i] * sizeof(int32_t));
        d.narrow[i] = check_alloc((size_t)d.elements[i] * sizeof(float));
        for (int64_t e = 0; e < d.elements[i]; e++) {
            d.values[i][e] = draw(in, counter++);
            d.labels[i][e] = (int32_t)(counter * 7 % (uint64_t)(in->scale > 0 ? in->scale : 1));
        }
    }
    return d;
}

static inline CHECK_UNUSED case_data data_of(const td_case *c) { return data_from(c, 1); }

static inline CHECK_UNUSED bool is_label(const case_data *d, int i)
{
    return d->what[i]->kind == TD_CASE_LABELS;
}

/* Whether input i is in 16 bits where the case is: labels are not, nor what norms of 16-bit rows have beside the rows. */
static inline CHECK_UNUSED bool stays_wide(const td_op *op, const case_data *d, int i)
{
    bool norm = op == &td_op_layer_norm || op == &td_op_rms_norm || op == &td_op_norm_gradient;
    return is_label(d, i) || (norm && i > 0);
}

static inline CHECK_UNUSED void record_inputs(td_context *td, case_data *d, td_tensor in[INPUTS])
{
    for (int i = 0; i < d->inputs; i++) {
        const void *data = d->values[i];
        if (td_float(td) == TD_F32) {
            for (int64_t e = 0; e < d->elements[i]; e++)
                d->narrow[i][e] = (float)d->values[i][e];
            data = d->narrow[i];
        }
        in[i] = is_label(d, i) ? td_input(td, "labels", TD_I32, d->shape[i], d->labels[i])
                               : td_input(td, "x", td_float(td), d->shape[i], data);
    }
}

/* A number for each element, the same in every program: a generic direction. */
static inline CHECK_UNUSED td_tensor direction(td_context *td, td_shape shape, uint64_t counter)
{
    check_now.draws = 1000000 + 100000 * counter;
    return check_randn(td, shape);
}

/* sum r y of a float result y. */
static inline CHECK_UNUSED td_tensor project(td_tensor y, uint64_t counter)
{
    td_context *td = y.td;
    if (td_dtype_at(y) != td_float(td))
        y = td_cast(y, td_float(td));
    return td_sum(td_mul(y, direction(td, td_shape_at(y), counter)), TD_ALL, TD_DROP);
}

/* ||got - want|| / ||want||; 0 for nothing. */
static inline CHECK_UNUSED double relative_error(const double *got, const double *want, int64_t n)
{
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    return error == 0 ? 0 : sqrt(error / size);
}

#endif
