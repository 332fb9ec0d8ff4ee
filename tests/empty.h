/* Cases of operations with an empty operand: one of the sizes is 0, wherever it stands. */
#ifndef TANDEM_TESTS_EMPTY_H
#define TANDEM_TESTS_EMPTY_H

#include "core/internal.h"
#include "tests/cases.h"

/* The sizes of the case's inputs, each once; how many. */
static inline CHECK_UNUSED int sizes_of(const td_case *c, int64_t sizes[INPUTS * TD_MAX_DIMS])
{
    int count = 0;
    for (int i = 0; i < INPUTS; i++)
        for (int d = 0; d < c->in[i].rank; d++) {
            bool known = c->in[i].dim[d] == 0;
            for (int s = 0; s < count; s++) known |= sizes[s] == c->in[i].dim[d];
            if (!known) sizes[count++] = c->in[i].dim[d];
        }
    return count;
}

static inline CHECK_UNUSED td_case emptied(const td_case *c, int64_t size)
{
    td_case empty = *c;
    for (int i = 0; i < INPUTS; i++)
        for (int d = 0; d < c->in[i].rank; d++)
            if (c->in[i].dim[d] == size) empty.in[i].dim[d] = 0;
    return empty;
}

/* What a case gives: all its outputs, then the gradient of each input that has one. */
enum { EMPTY_VALUES = TD_CALL_OUTPUTS + INPUTS };
typedef struct given {
    int values;
    int64_t count[EMPTY_VALUES];
    const double *at[EMPTY_VALUES];
} given;

static inline CHECK_UNUSED int record_all(td_context *td, const td_op *op, const td_case *c, td_dtype dtype, td_tensor keep[EMPTY_VALUES])
{
    case_data d = data_of(c);
    td_tensor in[INPUTS], x[INPUTS];
    int count = 0;
    record_inputs(td, &d, in);
    for (int i = 0; i < d.inputs; i++) x[i] = dtype == td_float(td) || stays_wide(op, &d, i) ? in[i] : td_cast(in[i], dtype);
    td_tensor y = td_record(op, TD_HERE, d.inputs, x, c->attr);
    if (td_failed(y)) return 0;
    uint32_t outputs = td_producer(&td->recording, td_handle_id(y))->outputs;
    for (uint32_t k = 0; k < outputs; k++) keep[count++] = td_output(y, (int)k);
    for (int i = 0; i < d.inputs && op->gradient && !c->no_gradient_check; i++)
        if (!is_label(&d, i)) keep[count++] = td_gradient(project(y, 0), in[i]);
    for (int k = 0; k < count; k++) {
        if (td_dtype_at(keep[k]) != td_float(td)) keep[k] = td_cast(keep[k], td_float(td));
        td_keep(keep[k]);
    }
    return count;
}

/* No values: the operation is not of such operands. */
static inline CHECK_UNUSED given given_by(td_context *td, const td_op *op, const td_case *c, td_dtype dtype)
{
    td_tensor keep[EMPTY_VALUES];
    given g = { .values = record_all(td, op, c, dtype, keep) };
    if (!td_step(td)) {
        td_clear_error(td);
        return (given){ 0 };
    }
    for (int k = 0; k < g.values; k++) {
        g.count[k] = td_shape_elements(td_shape_at(keep[k]));
        g.at[k] = check_read(keep[k], op->name, __FILE__, __LINE__);
    }
    return g;
}

/* Says where they differ; true: nowhere. NaN is NaN. */
static inline CHECK_UNUSED bool given_same(const given *a, const given *b, const td_op *op, const td_case *c, td_dtype dtype)
{
    char text[TD_SHAPE_TEXT];
    for (int k = 0; k < a->values; k++)
        for (int64_t i = 0; i < a->count[k]; i++) {
            double x = a->at[k][i], y = b->at[k][i];
            if (x == y || (isnan(x) && isnan(y))) continue;
            printf("%s, %s:", op->name, td_dtype_name(dtype));
            for (int n = 0; n < INPUTS && c->in[n].kind != TD_CASE_NONE; n++)
                printf(" %s", td_shape_text(td_shape_of(c->in[n].rank, c->in[n].dim), text));
            printf(": value %d is %g in memory full of NaN, and %g in zeros\n", k, x, y);
            return false;
        }
    return true;
}

/* A context whose step memory is large enough for any of the cases, so that it can be cleared. */
static inline CHECK_UNUSED td_context *open_empty(const char *device, td_dtype wide, bool poison)
{
    td_context *td = td_open(&(td_options){ .device = device, .dtype = wide, .seed = 1, .threads = 1, .poison = poison, .log = check_log_line });
    td_keep(td_fill(td, wide, TD_SHAPE(1 << 18), 0));
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    return td;
}

static inline CHECK_UNUSED void clear_step(td_context *td)
{
    if (td->device->clear) ck_assert(td->device->clear(td, td->arena, td->arena_bytes));
    else memset(td->arena, 0, (size_t)td->arena_bytes);
}

/* The loss of rows without classes, which comes with its gradient: NaN. */
static inline CHECK_UNUSED void check_loss_of_no_classes(td_context *td)
{
    int32_t labels[3] = { 0, 1, 2 };
    float none;
    td_tensor x = td_input(td, "x", td_float(td), TD_SHAPE(3, 0), &none);
    td_tensor loss = td_cross_entropy(x, td_input(td, "labels", TD_I32, TD_SHAPE(3), labels));
    td_keep(loss);
    td_keep(td_gradient(loss, x));
    clear_step(td);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    ck_assert(isnan(td_item(loss)));
}

/* Every operation, each of its cases with each size 0: it writes all that it gives, which is in memory full of NaN what it is in memory full
 * of zeros. */
static inline CHECK_UNUSED void check_empty_operands(const char *device, td_dtype dtype)
{
    td_dtype wide = dtype == TD_F64 ? TD_F64 : TD_F32;
    td_context *poisoned = open_empty(device, wide, true), *zeroed = open_empty(device, wide, false);
    int checked = 0, wrong = 0;
    for (int o = 0; o < OPERATIONS; o++)
        for (int c = 0; c < cases_of(operations[o]); c++) {
            int64_t sizes[INPUTS * TD_MAX_DIMS];
            int count = sizes_of(&operations[o]->cases[c], sizes);
            for (int s = 0; s < count; s++) {
                td_case empty = emptied(&operations[o]->cases[c], sizes[s]);
                clear_step(zeroed);
                given want = given_by(zeroed, operations[o], &empty, dtype), got = given_by(poisoned, operations[o], &empty, dtype);
                ck_assert_int_eq(got.values, want.values);
                checked += got.values > 0;
                wrong += !given_same(&got, &want, operations[o], &empty, dtype);
            }
        }
    check_loss_of_no_classes(zeroed);
    printf("%s: %d cases checked, %d wrong\n", td_dtype_name(dtype), checked, wrong);
    ck_assert_int_eq(wrong, 0);
    ck_assert_int_gt(checked, 200);
    td_close(poisoned);
    td_close(zeroed);
}

#endif
