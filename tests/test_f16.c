/* Training in f16: products read and give f16 and add in f32, losses are scaled, and a step that overflows is left out.
 *
 * Labels: threads
 */
#define SMALL_FOLDER "test_f16"
#include "tests/cases.h"
#include "tests/small_run.h"

#include <tandem/nn.h>

/* ---- Products */

enum { M = 7, K = 33, N = 12, BATCH = 3 };

enum { NUMBERS = BATCH * K * N + 9 };
static float numbers[NUMBERS];

static td_tensor half(td_context *td, const char *name, td_shape shape, int64_t from)
{
    return td_cast(td_input(td, name, TD_F32, shape, numbers + from), TD_F16);
}

/* x as the nearest f16. */
static double rounded(double x)
{
    uint16_t bits;
    td_convert(TD_F16, &bits, TD_F64, &x, 1);
    td_convert(TD_F64, &x, TD_F16, &bits, 1);
    return x;
}

START_TEST(test_products_add_in_f32)
{
    td_context *td = open_cpu(TD_F32);
    for (int i = 0; i < NUMBERS; i++) numbers[i] = (float)check_normal((uint64_t)i + 1);
    td_tensor a = half(td, "a", TD_SHAPE(BATCH, M, K), 0), b = half(td, "b", TD_SHAPE(BATCH, N, K), 5), bias = half(td, "bias", TD_SHAPE(N), 9);
    td_tensor y = td_matmul_with(a, b, 0, 1), row = td_linear(td_slice(a, 0, 0, 1), td_reshape(td_slice(b, 0, 0, 1), N, K), bias);
    ck_assert_int_eq(td_dtype_at(y), TD_F16);
    td_tensor wide_y = td_cast(y, TD_F32), wide_row = td_cast(row, TD_F32);
    td_keep(wide_y);
    td_keep(wide_row);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    const double *got = check_read(wide_y, "y", __FILE__, __LINE__), *with_bias = check_read(wide_row, "row", __FILE__, __LINE__);
    for (int64_t i = 0; i < BATCH * M * N; i++) {
        int64_t batch = i / (M * N), m = i / N % M, n = i % N;
        double sum = 0, size = 0;
        for (int64_t k = 0; k < K; k++) {
            double term = rounded(numbers[(batch * M + m) * K + k]) * rounded(numbers[5 + (batch * N + n) * K + k]);
            sum += term;
            size += fabs(term);
        }
        ck_assert_double_le(fabs(got[i] - sum), 0x1p-11 * fabs(sum) + 0x1p-20 * size); /* rounded once, after a sum in f32 */
        if (batch) continue;
        sum += rounded(numbers[9 + n]);
        ck_assert_double_le(fabs(with_bias[i] - sum), 0x1p-11 * fabs(sum) + 0x1p-20 * size);
    }
    td_close(td);
}
END_TEST

/* ---- Training */

enum { STEPS = 24, ROWS = 20, IN = 24 };

typedef struct trained {
    double loss[STEPS], scale[STEPS], updates[STEPS], plans;
} trained;

static void train_mlp(td_dtype dtype, double initial, trained *out)
{
    float x[ROWS * IN];
    int32_t y[ROWS];
    td_context *td = open_cpu(dtype);
    td_module root = td_root(td);
    nn_linear hidden = nn_linear_make(root, "hidden", IN, 40), last = nn_linear_make(root, "out", 40, 4);
    nn_norm norm = nn_layer_norm_make(root, "norm", 40);
    opt_scaler *scaler = opt_scaler_open(td, &(opt_scaler_options){ .initial = initial, .interval = 4 });
    opt_optimizer *opt = opt_adamw(root, &(opt_adamw_options){ .max_norm = 1, .scaler = scaler });
    for (int i = 0; i < ROWS * IN; i++) x[i] = (float)check_normal((uint64_t)i + 1);
    for (int i = 0; i < ROWS; i++) y[i] = i % 4;
    for (int s = 0; s < STEPS; s++) {
        td_tensor in = td_input(td, "x", TD_F32, TD_SHAPE(ROWS, IN), x), label = td_input(td, "y", TD_I32, TD_SHAPE(ROWS), y);
        td_tensor h = nn_norm_apply(&norm, td_gelu(nn_linear_apply(&hidden, in)));
        td_tensor loss = td_cross_entropy(nn_linear_apply(&last, h), label);
        td_keep(loss);
        td_backward(opt_scaler_scale(scaler, loss));
        opt_step(opt, 1e-2);
        ck_assert_msg(td_step(td), "step %d: %s", s, td_error_text(td));
        out->loss[s] = td_item(loss);
        out->scale[s] = check_state_number(td, "scaler.scale");
        out->updates[s] = check_state_number(td, "optimizer.updates");
    }
    out->plans = (double)td_last_report(td).plans;
    td_close(td);
}

START_TEST(test_losses_follow_those_of_f32)
{
    static trained wide, narrow;
    train_mlp(TD_F32, 1024, &wide);
    train_mlp(TD_F16, 1024, &narrow);
    double error = relative_error(narrow.loss, wide.loss, STEPS);
    ck_assert_double_le(error, 2e-3);
    ck_assert_double_gt(error, 1e-7);                     /* it was not f32 */
    ck_assert_double_lt(narrow.loss[STEPS - 1], narrow.loss[0] / 2);
    ck_assert_double_eq(narrow.updates[STEPS - 1], STEPS);
}
END_TEST

/* At 2^28 the gradients of the logits are beyond 65504. */
START_TEST(test_a_step_that_overflows_is_left_out_and_halves_the_scale)
{
    static trained t;
    train_mlp(TD_F16, 0x1p28, &t);
    int skipped = 0;
    while (skipped < STEPS && t.updates[skipped] == 0) {
        ck_assert_double_eq(t.scale[skipped], ldexp(0x1p28, -skipped - 1));
        ck_assert_double_eq(t.loss[skipped], t.loss[0]);  /* nothing moved */
        skipped++;
    }
    ck_assert_int_ge(skipped, 6);
    ck_assert_int_le(skipped, 16);
    ck_assert_double_lt(t.loss[STEPS - 1], t.loss[0]);
    ck_assert_double_eq(t.plans, 1);
}
END_TEST

START_TEST(test_a_module_may_stay_in_f32_but_not_go_to_bf16)
{
    td_context *td = open_cpu(TD_F16);
    td_module head = td_child(td_root(td), "head");
    ck_assert_int_eq(td_get_dtype(head), TD_F16);
    td_set_dtype(head, TD_F32);
    ck_assert_int_eq(td_get_dtype(head), TD_F32);
    td_set_dtype(head, TD_F16);
    ck_assert_no_error(td);
    td_set_dtype(head, TD_BF16);
    ck_assert_str_eq(td_error_text(td), "td_set_dtype: 'head' cannot compute in bf16: products are in f32 or f16");
    td_close(td);
}
END_TEST

/* ---- Runs */

static int train_flags(const char *flags, bool scaled, double *losses, char *error, size_t room)
{
    run_loop *run = open_small(flags);
    small_model m = make_small(run_context(run), 17);
    opt_optimizer *opt = opt_adamw(td_root(run_context(run)), &(opt_adamw_options){ .max_norm = 1, .scaler = scaled ? run_scaler(run) : NULL });
    run_train_on(run, small_set(run_context(run)));
    for (data_batch b; run_next(run, &b);) {
        run_step(run, opt, small_loss(&m, &b));
        if (b.last && td_error(run->td) == TD_OK) losses[td_updates(run->td) - 1] = run->loss;
    }
    snprintf(error, room, "%s", td_error_text(run->td));
    return run_close(run);
}

START_TEST(test_a_run_scales_its_losses)
{
    enum { UPDATES = 12 };
    char error[512];
    double whole[UPDATES], wide[UPDATES], parts[UPDATES];
    clean("parts");
    ck_assert_int_eq(train_flags("--dtype f16 --seed 3 --accumulate 2 --steps 12", true, whole, error, sizeof error), 0);
    ck_assert_int_eq(train_flags("--seed 3 --accumulate 2 --steps 12", true, wide, error, sizeof error), 0);
    double apart = relative_error(whole, wide, UPDATES);
    ck_assert_double_le(apart, 2e-3);
    ck_assert_double_gt(apart, 1e-7);
    ck_assert_int_eq(train_flags("--dtype f16 --seed 3 --accumulate 2 --steps 5 --out parts", true, parts, error, sizeof error), 0);
    ck_assert_int_eq(train_flags("--resume --steps 12 --out parts", true, parts, error, sizeof error), 0);
    ck_assert_mem_eq(parts, whole, sizeof whole);         /* the scale and its count are saved */
}
END_TEST

START_TEST(test_a_run_without_a_scaler_is_refused)
{
    char error[512];
    double losses[2];
    ck_assert_int_eq(train_flags("--dtype f16 --seed 3 --steps 2", false, losses, error, sizeof error), 1);
    ck_assert_str_eq(error, "--dtype f16 needs a scaler of losses: give the optimizer .scaler = run_scaler(run), or train in bf16");
}
END_TEST

TESTS("f16", test_products_add_in_f32, test_losses_follow_those_of_f32, test_a_step_that_overflows_is_left_out_and_halves_the_scale,
      test_a_module_may_stay_in_f32_but_not_go_to_bf16, test_a_run_scales_its_losses, test_a_run_without_a_scaler_is_refused)
