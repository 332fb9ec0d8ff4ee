/* What modules compute in: a head in f32 under bf16, a trunk in bf16 under f32, and what belongs to which. */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>

enum { ROWS = 4, WIDTH = 16 };

static td_context *open_printing(td_dtype dtype)
{
    td_context *td = td_open(&(td_options){ .dtype = dtype, .seed = 1, .threads = 1, .print = "precision", .log = check_log_line });
    ck_assert_no_error(td);
    return td;
}

static td_tensor input(td_context *td)
{
    float *x = check_alloc(ROWS * WIDTH * sizeof *x);
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = (float)check_normal((uint64_t)i);
    return td_input(td, "x", TD_F32, TD_SHAPE(ROWS, WIDTH), x);
}

START_TEST(test_a_head_stays_f32_under_bf16)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    td_context *td = open_printing(TD_BF16);
    td_module root = td_root(td);
    nn_linear trunk = nn_linear_make_with(root, "trunk", WIDTH, WIDTH, &(nn_linear_options){ .no_bias = true });
    nn_linear head = nn_linear_make_with(root, "head", WIDTH, 3, &(nn_linear_options){ .no_bias = true });
    td_set_dtype(head.at, TD_F32);
    td_keep(nn_linear_apply(&head, td_relu(nn_linear_apply(&trunk, input(td)))));
    ck_assert(td_step(td));
    ck_assert_str_eq(log_text(), "-- precision: 10 nodes\n"
                                 "%0 = input[0]  f32 (4, 16)\n"
                                 "%1 = parameter[trunk.weight]  f32 (16, 16)  trunk\n"
                                 "%2 = cast[bf16] %0  bf16 (4, 16)  trunk\n"
                                 "%3 = cast[bf16] %1  bf16 (16, 16)  trunk\n"
                                 "%4 = matmul[a x b^T] %2 %3  bf16 (4, 16)  trunk\n"
                                 "%5 = relu %4  bf16 (4, 16)\n"
                                 "%6 = parameter[head.weight]  f32 (3, 16)  head\n"
                                 "%7 = cast[f32] %5  f32 (4, 16)  head\n"
                                 "%8 = matmul[a x b^T] %7 %6  f32 (4, 3)  head\n"
                                 "output %8\n\n");
    td_close(td);
}
END_TEST

START_TEST(test_a_trunk_is_bf16_in_an_f32_context)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    td_context *td = open_printing(TD_F32);
    td_module root = td_root(td);
    nn_linear trunk = nn_linear_make_with(root, "trunk", WIDTH, WIDTH, &(nn_linear_options){ .no_bias = true });
    nn_linear head = nn_linear_make_with(root, "head", WIDTH, 3, &(nn_linear_options){ .no_bias = true });
    td_set_dtype(trunk.at, TD_BF16);
    td_keep(nn_linear_apply(&head, td_relu(nn_linear_apply(&trunk, input(td)))));
    ck_assert(td_step(td));
    ck_assert_str_has(log_text(), "%4 = matmul[a x b^T] %2 %3  bf16 (4, 16)  trunk\n"
                                  "%5 = relu %4  bf16 (4, 16)\n"
                                  "%6 = parameter[head.weight]  f32 (3, 16)  head\n"
                                  "%7 = cast[f32] %5  f32 (4, 16)  head\n"
                                  "%8 = matmul[a x b^T] %7 %6  f32 (4, 3)  head\n");
    td_close(td);
}
END_TEST

/* a is BF16, so a.b is, a.b.c is F32; the root at first what the context is, then BF16. */
START_TEST(test_the_innermost_module_decides)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    td_context *td = open_printing(TD_F32);
    td_module root = td_root(td), a = td_child(root, "a"), b = td_child(a, "b"), c = td_child(b, "c");
    td_set_dtype(c, TD_F32); /* in any order */
    td_set_dtype(a, TD_BF16);
    td_tensor x = input(td);
    td_keep(td_matmul_with(x, x, 0, 1));
    td_enter(b);
    td_keep(td_matmul_with(x, x, 0, 1));
    td_enter(c);
    td_keep(td_matmul_with(x, x, 0, 1));
    td_leave(c);
    td_leave(b);
    td_enter(a);
    td_keep(td_matmul_with(x, x, 0, 1));
    td_leave(a);
    ck_assert(td_step(td));
    ck_assert_str_has(log_text(), "matmul[a x b^T] %0 %0  f32 (4, 4)\n");
    ck_assert_str_has(log_text(), "matmul[a x b^T] %2 %2  bf16 (4, 4)  a.b\n");
    ck_assert_str_has(log_text(), "matmul[a x b^T] %0 %0  f32 (4, 4)  a.b.c\n");
    ck_assert_str_has(log_text(), "matmul[a x b^T] %2 %2  bf16 (4, 4)  a\n");
    td_set_dtype(root, TD_BF16);
    x = input(td);
    td_keep(td_matmul_with(x, x, 0, 1));
    ck_assert(td_step(td));
    ck_assert_str_has(log_text(), "matmul[a x b^T] %1 %1  bf16 (4, 4)\n");
    td_close(td);
}
END_TEST

/* One step's loss and the weight after it, of a layer named "l". */
static void train(td_dtype context, int module, float got[1 + WIDTH * 3])
{
    td_context *td = td_open(&(td_options){ .dtype = context, .seed = 1, .threads = 1, .log = check_log_line });
    nn_linear l = nn_linear_make_with(td_root(td), "l", WIDTH, 3, &(nn_linear_options){ .no_bias = true });
    opt_optimizer *opt = opt_sgd(td_root(td), NULL);
    if (module >= 0) td_set_dtype(l.at, (td_dtype)module);
    td_tensor loss = td_mean(td_square(td_cast(nn_linear_apply(&l, input(td)), TD_F32)), TD_ALL, TD_DROP);
    td_backward(loss);
    opt_step(opt, 0.1);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    got[0] = (float)td_item(loss);
    ck_assert(td_state_read(l.weight, 0, WIDTH * 3, got + 1));
    td_close(td);
}

/* Forward and backward: a module's dtype is as good as the context's, to the bit. */
START_TEST(test_numbers_are_those_of_the_other_context)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    static float f32[49], bf16[49], exact[49], rough[49], same[49];
    train(TD_F32, -1, f32);
    train(TD_BF16, -1, bf16);
    train(TD_BF16, TD_F32, exact);
    train(TD_F32, TD_BF16, rough);
    train(TD_F32, TD_F32, same);
    ck_assert_mem_ne(f32, bf16, sizeof f32);
    ck_assert_mem_eq(exact, f32, sizeof f32);
    ck_assert_mem_eq(rough, bf16, sizeof f32);
    ck_assert_mem_eq(same, f32, sizeof f32);
}
END_TEST

START_TEST(test_a_change_between_steps_is_another_plan)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    static const td_dtype dtypes[6] = { TD_F32, TD_BF16, TD_BF16, TD_F32, TD_BF16, TD_F32 };
    double values[6];
    td_context *td = open_cpu(TD_F32);
    nn_linear l = nn_linear_make(td_root(td), "l", WIDTH, 3);
    for (int step = 0; step < 6; step++) {
        td_set_dtype(l.at, dtypes[step]);
        td_tensor sum = td_sum(td_square(nn_linear_apply(&l, input(td))), TD_ALL, TD_DROP);
        td_keep(sum);
        ck_assert(td_step(td));
        values[step] = td_item(sum);
    }
    ck_assert_int_eq(td_last_report(td).plans, 2);
    ck_assert(values[0] != values[1]);
    for (int step = 2; step < 6; step++) ck_assert(values[step] == values[dtypes[step] == TD_BF16]);
    td_close(td);
}
END_TEST

START_TEST(test_what_cannot_be_is_refused)
{
    td_context *td = open_cpu(TD_F32);
    td_set_dtype(td_child(td_root(td), "head"), TD_I32);
    ck_assert_str_eq(td_error_text(td), "td_set_dtype: 'head' cannot compute in i32: products are in f32 or bf16");
    td_close(td);
    td = open_cpu(TD_F64);
    td_set_dtype(td_child(td_root(td), "head"), TD_F32);
    ck_assert_str_eq(td_error_text(td), "td_set_dtype: 'head' cannot compute in f32: the context is f64 and computes in f64 throughout");
    td_close(td);
}
END_TEST

TESTS("module_dtype", test_a_head_stays_f32_under_bf16, test_a_trunk_is_bf16_in_an_f32_context, test_the_innermost_module_decides,
      test_numbers_are_those_of_the_other_context, test_a_change_between_steps_is_another_plan, test_what_cannot_be_is_refused)
