/* Pointwise functions from their text: what they compute, what they record, their derivatives, and what is wrong in a text. */
#include "tests/check.h"

/* Of operands a = 3, b = 2, c = -1. */
static double value_of(td_context *td, const char *text)
{
    td_tensor in[3] = { scalar(td, 3), scalar(td, 2), scalar(td, -1) };
    double value = td_item(td_expression(text, 3, in));
    ck_assert_msg(td_error(td) == TD_OK, "%s: %s", text, td_error_text(td));
    return value;
}

START_TEST(test_operators_bind_as_in_mathematics)
{
    static const struct { const char *text; double value; } expected[] = {
        { "a", 3 }, { " ( a ) ", 3 }, { "1 + 2 * a", 7 }, { "(1 + 2) * a", 9 }, { "a - b - 1", 0 }, { "a - (b - 1)", 2 }, { "12 / a / b", 2 },
        { "12 / (a / b)", 8 }, { "-a + b", -1 }, { "-a * -b", 6 }, { "a - -b", 5 }, { "--a", 3 }, { "-a ^ 2", -9 }, { "(-a) ^ 2", 9 },
        { "a ^ 3", 27 }, { "b ^ a ^ b", 512 }, { "(b ^ a) ^ b", 64 }, { "a ^ -1 * 6", 2 }, { "2 ^ a", 8 }, { "a ^ b", 9 }, { "a*b-c", 7 },
        { "a < b", 0 }, { "b < a", 1 }, { "a < a", 0 }, { "a <= a", 1 }, { "a > b", 1 }, { "a > a", 0 }, { "a >= a", 1 }, { "b >= a", 0 },
        { "a == 3", 1 }, { "a == b", 0 }, { "a != b", 1 }, { "a != 3", 0 }, { "a + 1 < b * 3", 1 }, { "(a > b) + (b > c)", 2 },
        { "where(a > b, c, 7)", -1 }, { "where(a < b, c, 7)", 7 }, { "clamp(a, -1, 2.5)", 2.5 }, { "clamp(c * 4, -1, b)", -1 },
        { "clamp(b, -1, 2.5)", 2 }, { "minimum(a, b) + maximum(a, b) * 10", 32 }, { "abs(c) + square(b)", 5 }, { "pow(a, b)", 9 },
        { "0.25", 0.25 }, { ".5 * a", 1.5 }, { "1e2", 100 }, { "1.5E-1 * b", 0.3 }, { "2.", 2 }, { "pi", 3.141592653589793 },
        { "cos(pi) * a", -3 }, { "1 < 2", 1 }, { "2 ^ 3 ^ 2", 512 }, { "where(1, a, b)", 3 },
    };
    td_context *td = open_cpu(TD_F64);
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        double value = value_of(td, expected[i].text);
        ck_assert_msg(fabs(value - expected[i].value) < 1e-15 * fmax(1, fabs(value)), "%s is %.17g, not %g", expected[i].text, value,
                      expected[i].value);
    }
    td_close(td);
}
END_TEST

START_TEST(test_every_pointwise_operation_has_its_name)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor in[2] = { td_add(td_square(randn(td, 7)), scalar(td, 0.1)), td_add(td_square(randn(td, 7)), scalar(td, 0.1)) };
#define CHECK_UNARY(name) ck_assert_tensor_near(td_expression(#name "(a)", 2, in), td_##name(in[0]), 0);
#define CHECK_BINARY(name) ck_assert_tensor_near(td_expression(#name "(b, a)", 2, in), td_##name(in[1], in[0]), 0);
    TD_UNARY(CHECK_UNARY)
    TD_BINARY(CHECK_BINARY)
    td_close(td);
}
END_TEST

START_TEST(test_operands_broadcast)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor in[3] = { randn(td, 4, 1), randn(td, 3), scalar(td, 2) };
    td_tensor y = td_expression("a * b + c", 3, in);
    ck_assert(td_shape_equal(td_shape_at(y), TD_SHAPE(4, 3)));
    ck_assert_tensor_near(y, td_add(td_mul(in[0], in[1]), in[2]), 0);
    td_close(td);
}
END_TEST

/* y = x s with s = sigmoid(k x):  y' = s + k x s (1 - s),  y'' = k s (1 - s) (2 + k x (1 - 2 s)). */
START_TEST(test_first_and_second_derivative)
{
    enum { N = 6 };
    const double x[N] = { -3, -1, -0.25, 0, 0.5, 2 }, k = 1.702;
    double first[N], second[N];
    for (int i = 0; i < N; i++) {
        double s = 1 / (1 + exp(-k * x[i]));
        first[i] = s + k * x[i] * s * (1 - s);
        second[i] = k * s * (1 - s) * (2 + k * x[i] * (1 - 2 * s));
    }
    td_context *td = open_cpu(TD_F64);
    td_tensor a = td_input(td, "x", TD_F64, TD_SHAPE(N), x), y = td_expression("a * sigmoid(1.702 * a)", 1, &a);
    td_tensor dy = td_gradient(y, a), ddy = td_gradient(dy, a);
    ck_assert_tensor_near(dy, td_input(td, "y'", TD_F64, TD_SHAPE(N), first), 1e-14);
    ck_assert_tensor_near(ddy, td_input(td, "y''", TD_F64, TD_SHAPE(N), second), 1e-14);
    td_close(td);
}
END_TEST

/* The printed stages are in log_text. */
static td_context *open_printing(const char *stages)
{
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1, .print = stages, .log = check_log_line });
    ck_assert_no_error(td);
    return td;
}

START_TEST(test_numbers_among_themselves_are_not_recorded)
{
    const double x[2] = { 1, 2 }, y[2] = { 12.566370614359172, 25.132741228718345 };
    td_context *td = open_printing("record");
    td_tensor a = td_input(td, "x", TD_F64, TD_SHAPE(2), x);
    td_tensor t = td_expression("a * (sqrt(16) * pi)", 1, &a);
    td_keep(t);
    ck_assert(td_step(td));
    ck_assert_str_eq(log_text(), "-- record: 4 nodes\n"
                                 "%0 = input[0]  f64 (2)\n"
                                 "%1 = fill[12.5664]  f64 ()\n"
                                 "%2 = mul %0 %1  f64 (2)\n"
                                 "output %2\n\n");
    double got[2];
    ck_assert(td_read(t, got));
    ck_assert_near(got, y, 2, 1e-15);
    td_close(td);
}
END_TEST

/* One kernel reads the operands; a number is a scalar filled before it, which the kernel reads as such. */
START_TEST(test_one_kernel)
{
    td_context *td = open_printing("plan");
    td_tensor in[2] = { randn(td, 50, 20), randn(td, 50, 20) };
    td_keep(td_expression("a * sigmoid(1.702 * b) + 0.5 * tanh(a - b)^3", 2, in));
    ck_assert(td_step(td));
    const char *plan = strstr(log_text(), "-- plan: ");
    ck_assert_str_eq(plan, "-- plan: 3 calls, arena 8128 bytes (live 8128), 9000 FLOPs, sends 0 bytes\n"
                           "   0 fill -> +0\n"
                           "   1 fill -> +64\n"
                           "   2 fused +0 slot1+0 slot0+0 +64 -> +128\n\n");
    td_close(td);
}
END_TEST

START_TEST(test_f32_and_whole_numbers)
{
    float x[2] = { 1.5f, -2 };
    int32_t n[2] = { 7, -8 }, got[2];
    td_context *td = open_cpu(TD_F32);
    td_tensor a = td_input(td, "x", TD_F32, TD_SHAPE(2), x), i = td_input(td, "n", TD_I32, TD_SHAPE(2), n);
    td_tensor y = td_expression("0.1 * a", 1, &a);
    ck_assert_int_eq(td_dtype_at(y), TD_F32);
    ck_assert(td_read(y, x));
    ck_assert(x[0] == 0.1f * 1.5f && x[1] == 0.1f * -2);
    ck_assert(td_read(td_expression("a * 3 - 1", 1, &i), got));
    ck_assert(got[0] == 20 && got[1] == -25);
    ck_assert(td_failed(td_expression("a * 0.5", 1, &i)));
    ck_assert_str_has(td_error_text(td), "expression: column 5 of \"a * 0.5\": 0.5 is no whole number, and the operands are i32");
    td_close(td);
}
END_TEST

START_TEST(test_what_is_wrong_is_named_by_its_column)
{
    static const struct { const char *text, *message; } wrong[] = {
        { "", "column 1 of \"\": the text ends where an operand must come" },
        { "a +", "column 4 of \"a +\": the text ends where an operand must come" },
        { "a + * b", "column 5 of \"a + * b\": an operand must come here, not '*'" },
        { "a b", "column 3 of \"a b\": an operator must come here, not 'b'" },
        { "(a + b", "column 7 of \"(a + b\": the text ends where ')' must come" },
        { "(a + b, a)", "column 7 of \"(a + b, a)\": ')' must come here, not ','" },
        { "a)", "column 2 of \"a)\": an operator must come here, not ')'" },
        { "a * c", "column 5 of \"a * c\": 'c' is operand 3, and there are 2" },
        { "A", "column 1 of \"A\": 'A' is no operand, nor pi: operands are called a to b" },
        { "a + sigmoid", "column 5 of \"a + sigmoid\": 'sigmoid' is no operand, nor pi: operands are called a to b" },
        { "a + sigmod(b)", "column 5 of \"a + sigmod(b)\": there is no pointwise function 'sigmod'" },
        { "sig(b)", "column 1 of \"sig(b)\": there is no pointwise function 'sig'" },
        { "exp(a, b)", "column 1 of \"exp(a, b)\": exp takes 1 argument, not more" },
        { "1 + pow(a)", "column 5 of \"1 + pow(a)\": pow takes 2 arguments, not 1" },
        { "where(a, b)", "column 1 of \"where(a, b)\": where takes 3 arguments, not 2" },
        { "exp()", "column 5 of \"exp()\": an operand must come here, not ')'" },
        { "exp(a", "column 6 of \"exp(a\": the text ends where ')' must come" },
        { "a < b < a", "column 7 of \"a < b < a\": comparisons do not follow one another; use parentheses" },
        { "a ^", "column 4 of \"a ^\": the text ends where an operand must come" },
        { "a * 1e999", "column 5 of \"a * 1e999\": 1e999 is too large for a number" },
        { "a * .", "column 5 of \"a * .\": a number has no digits" },
        { "a * 2x", "column 6 of \"a * 2x\": an operator must come here, not 'x'" },
        { "a = b", "column 3 of \"a = b\": an operator must come here, not '='" },
        { "a * 1111111111222222222233333333334444444444555555555566666666667777", "column 5 of \"a * 1111" },
        { "1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + # + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1",
          "column 57 of \"...+ 1 + 1 + 1 + 1 + 1 + 1 + 1 + # + 1 + 1 + 1 + 1 + 1 + 1 + 1 ...\": an operand must come here, not '#'" },
    };
    td_context *td = open_cpu(TD_F64);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        td_tensor in[2] = { scalar(td, 1), scalar(td, 2) };
        int line = __LINE__ + 1;
        ck_assert(td_failed(td_expression(wrong[i].text, 2, in)));
        char where[600];
        snprintf(where, sizeof where, "(%s:%d)", __FILE__, line);
        ck_assert_str_has(td_error_text(td), wrong[i].message);
        ck_assert_str_has(td_error_text(td), where);
        ck_assert(strncmp(td_error_text(td), "expression: ", 12) == 0);
        td_clear_error(td);
    }
    td_close(td);
}
END_TEST

START_TEST(test_operands_that_do_not_go_together_are_named)
{
    td_context *td = open_cpu(TD_F64);
    td_tensor in[3] = { ones(td, 2, 3), ones(td, 4), td_fill(td, TD_F32, TD_SHAPE(3), 1) };
    ck_assert(td_failed(td_expression("1 + a * b", 3, in)));
    ck_assert_str_has(td_error_text(td), "expression: column 7 of \"1 + a * b\": mul: shapes (2, 3) and (4) cannot be broadcast");
    td_clear_error(td);
    td_tensor again[3] = { ones(td, 2, 3), ones(td, 4), td_fill(td, TD_F32, TD_SHAPE(3), 1) };
    ck_assert(td_failed(td_expression("maximum(a, c)", 3, again)));
    ck_assert_str_has(td_error_text(td), "expression: column 1 of \"maximum(a, c)\": maximum: operands have dtypes f64 and f32");
    td_clear_error(td);
    ck_assert(td_failed(td_expression("-a", 1, again)));
    ck_assert_str_has(td_error_text(td), "neg: input 0 was recorded in an earlier step");
    td_close(td);
}
END_TEST

/* `what` a hundred thousand times, and then an operand. */
static char *repeated(const char *what)
{
    enum { TIMES = 100000 };
    size_t length = strlen(what);
    char *text = check_alloc(TIMES * length + 2);
    for (int i = 0; i < TIMES; i++) memcpy(text + (size_t)i * length, what, length);
    text[TIMES * length] = 'a';
    return text;
}

START_TEST(test_nesting_is_bounded)
{
    static const char *const deep[] = { "(", "-", "a^", "exp(" };
    td_context *td = open_cpu(TD_F64);
    for (size_t i = 0; i < sizeof deep / sizeof *deep; i++) {
        td_tensor a = scalar(td, 1);
        ck_assert(td_failed(td_expression(repeated(deep[i]), 1, &a)));
        ck_assert_str_has(td_error_text(td), "is nested more than 64 deep");
        td_clear_error(td);
    }
    td_tensor a = scalar(td, 5);
    ck_assert_double_eq(td_item(td_expression("((((((((((((((((((((((((((((((a))))))))))))))))))))))))))))))", 1, &a)), 5);
    td_tensor b = scalar(td, 5);
    ck_assert(td_item(td_expression(repeated("1+"), 1, &b)) == 100005); /* long is not deep */
    td_close(td);
}
END_TEST

TESTS("expression", test_operators_bind_as_in_mathematics, test_every_pointwise_operation_has_its_name, test_operands_broadcast,
      test_first_and_second_derivative, test_numbers_among_themselves_are_not_recorded, test_one_kernel, test_f32_and_whole_numbers,
      test_what_is_wrong_is_named_by_its_column, test_operands_that_do_not_go_together_are_named, test_nesting_is_bounded)
