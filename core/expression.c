/* Pointwise functions from their text: "a * sigmoid(1.702 * b)" records a product, a sigmoid and a product.
 *
 *     comparison   sum [(< <= > >= == !=) sum]
 *     sum          product ((+ | -) product)...
 *     product      unary ((* | /) unary)...
 *     unary        - unary | power
 *     power        atom [^ unary]
 *     atom         number | pi | a .. z | function(comparison, ...) | (comparison)
 *
 * The text is read by recursive descent and nothing of it stays: what is recorded are the operations of pointwise_table.h,
 * with their gradients and placements. What consists of numbers alone is computed while reading, by the operations' own
 * loops, so only the numbers that meet an operand become values of the program: scalars.
 */
#include "core/ops/op.h"
#include "core/ops/pointwise_table.h"

#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_DEPTH = 64, OPERANDS = 26, ARGUMENTS = 3, NUMBER_CHARS = 63, SHOWN_CHARS = 60 };

/* A part of the text that has been read: a number, or a tensor. */
typedef struct operand {
    const char *at;                           /* where it begins */
    bool is_number;
    double number;
    td_tensor tensor;
} operand;

typedef struct parser {
    td_context *td;
    td_here here;
    const char *text, *at;
    const td_tensor *inputs;
    int count;
    int depth;                                /* of what is being read */
} parser;

typedef struct function {
    const char *name;
    const td_op *op;
} function;

#define FUNCTION(name, ...) { #name, &td_op_##name },
static const function functions[] = { TD_POINTWISE(FUNCTION) };
enum { FUNCTIONS = sizeof functions / sizeof *functions };

static operand read_comparison(parser *p);

/* ---- Errors */

static bool failed(const parser *p) { return td_error(p->td) != TD_OK; }

/* Fails with what is wrong at `at`, and the text around it. */
static operand complain(parser *p, const char *at, const char *format, ...) TD_PRINTF(3, 4);
static operand complain(parser *p, const char *at, const char *format, ...)
{
    char why[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    const char *from = at - p->text > SHOWN_CHARS / 2 ? at - SHOWN_CHARS / 2 : p->text;
    bool cut = strlen(from) > SHOWN_CHARS;
    td_refuse(p->td, "expression", p->here, "column %lld of \"%s%.*s%s\": %s", (long long)(at - p->text) + 1, from > p->text ? "..." : "",
              SHOWN_CHARS, from, cut ? "..." : "", why);
    return (operand){ .at = at, .is_number = true };
}

/* ---- Recording */

/* The operand as a value of the dtype that all operands have. */
static td_tensor value_of(parser *p, operand x)
{
    if (!x.is_number) return x.tensor;
    td_dtype dtype = td_dtype_at(p->inputs[0]);
    if (!td_is_float(dtype) && x.number != floor(x.number))
        complain(p, x.at, "%g is no whole number, and the operands are %s", x.number, td_dtype_name(dtype));
    return td_fill_at(p->td, dtype, (td_shape){ 0 }, x.number, p->here);
}

static bool operands_fit(parser *p, const char *at, const char *name, td_tensor x, td_tensor y)
{
    char text[2][TD_SHAPE_TEXT];
    td_shape a = td_shape_at(x), b = td_shape_at(y), both;
    if (!td_shape_broadcast(&a, &b, &both)) {
        complain(p, at, "%s: shapes %s and %s cannot be broadcast", name, td_shape_text(a, text[0]), td_shape_text(b, text[1]));
        return false;
    }
    if (td_dtype_at(x) == td_dtype_at(y)) return true;
    complain(p, at, "%s: operands have dtypes %s and %s", name, td_dtype_name(td_dtype_at(x)), td_dtype_name(td_dtype_at(y)));
    return false;
}

/* op of as many operands as it has; `at` is where the text asks for it. */
static operand apply(parser *p, const char *at, const td_op *op, const operand *x)
{
    operand y = { .at = x[0].at, .is_number = true };
    double number[ARGUMENTS];
    td_tensor in[ARGUMENTS];
    for (int i = 0; i < op->inputs; i++) {
        y.is_number = y.is_number && x[i].is_number;
        number[i] = x[i].number;
    }
    if (y.is_number) {
        int b = op->inputs > 1, c = op->inputs > 2 ? 2 : 0;
        td_pointwise_f64[op->pointwise](&y.number, &number[0], &number[b], &number[c], 1);
        return y;
    }
    for (int i = 0; i < op->inputs; i++) in[i] = value_of(p, x[i]);
    for (int i = 1; i < op->inputs && !failed(p); i++)
        for (int j = 0; j < i && !failed(p); j++) operands_fit(p, at, op->name, in[j], in[i]);
    y.tensor = td_record(op, p->here, op->inputs, in, NULL);
    return y;
}

static operand apply2(parser *p, const char *at, const td_op *op, operand a, operand b)
{
    return apply(p, at, op, (operand[]){ a, b });
}

/* Squares and cubes are products: pow is many times as slow. */
static operand apply_power(parser *p, const char *at, operand a, operand b)
{
    if (a.is_number || !b.is_number || (b.number != 2 && b.number != 3)) return apply2(p, at, &td_op_pow, a, b);
    operand square = apply(p, at, &td_op_square, &a);
    return b.number == 2 ? square : apply2(p, at, &td_op_mul, square, a);
}

/* ---- Reading */

static void skip_spaces(parser *p)
{
    while (*p->at == ' ' || *p->at == '\t' || *p->at == '\n') p->at++;
}

/* Takes `sign` if it comes next; where it was goes to *at. */
static bool take(parser *p, const char *sign, const char **at)
{
    skip_spaces(p);
    *at = p->at;
    size_t length = strlen(sign);
    if (failed(p) || strncmp(p->at, sign, length) != 0) return false;
    p->at += length;
    return true;
}

static void expect(parser *p, const char *sign)
{
    const char *at;
    if (take(p, sign, &at) || failed(p)) return;
    if (*at)
        complain(p, at, "'%s' must come here, not '%c'", sign, *at);
    else
        complain(p, at, "the text ends where '%s' must come", sign);
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

/* Digits, a point and an exponent; the point is one whatever the locale says. */
static operand read_number(parser *p)
{
    const char *from = p->at, *end = from;
    char digits[NUMBER_CHARS + 1];
    while (is_digit(*end)) end++;
    if (*end == '.') end++;
    while (is_digit(*end)) end++;
    if (*end == 'e' || *end == 'E') {
        const char *power = end + 1 + (end[1] == '+' || end[1] == '-');
        if (is_digit(*power)) end = power;
        while (is_digit(*end)) end++;
    }
    size_t length = (size_t)(end - from);
    if (length > NUMBER_CHARS) return complain(p, from, "a number has more than %d characters", NUMBER_CHARS);
    if (length == 1 && *from == '.') return complain(p, from, "a number has no digits");
    memcpy(digits, from, length);
    digits[length] = 0;
    locale_t point = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0);
    if (!point) {
        td_fail(p->td, TD_ERROR_MEMORY, "expression: no memory to read a number");
        return (operand){ .at = from, .is_number = true };
    }
    double number = strtod_l(digits, NULL, point);
    freelocale(point);
    if (!isfinite(number)) return complain(p, from, "%s is too large for a number", digits);
    p->at = end;
    return (operand){ .at = from, .is_number = true, .number = number };
}

/* x no less than low and no more than high: the one function that is no row of the table. */
static operand apply_clamp(parser *p, const char *at, const operand *x)
{
    operand above = apply2(p, at, &td_op_maximum, x[0], x[1]);
    return apply2(p, at, &td_op_minimum, above, x[2]);
}

static operand read_call(parser *p, const char *name, int length)
{
    const function *f = functions;
    const char *at;
    operand x[ARGUMENTS];
    int count = 0;
    while (f < functions + FUNCTIONS && (strncmp(f->name, name, (size_t)length) != 0 || f->name[length])) f++;
    bool is_clamp = length == 5 && strncmp(name, "clamp", 5) == 0;
    if (f == functions + FUNCTIONS && !is_clamp) return complain(p, name, "there is no pointwise function '%.*s'", length, name);
    int wanted = is_clamp ? 3 : f->op->inputs;
    do {
        if (count == wanted) return complain(p, name, "%.*s takes %d argument%s, not more", length, name, wanted, wanted > 1 ? "s" : "");
        x[count++] = read_comparison(p);
    } while (take(p, ",", &at));
    if (failed(p)) return x[0];
    if (count < wanted) return complain(p, name, "%.*s takes %d arguments, not %d", length, name, wanted, count);
    expect(p, ")");
    return is_clamp ? apply_clamp(p, name, x) : apply(p, name, f->op, x);
}

static operand read_name(parser *p)
{
    const char *name = p->at, *at;
    while (is_letter(*p->at) || is_digit(*p->at)) p->at++;
    int length = (int)(p->at - name);
    if (take(p, "(", &at)) return read_call(p, name, length);
    if (length == 2 && strncmp(name, "pi", 2) == 0) return (operand){ .at = name, .is_number = true, .number = 3.14159265358979323846 };
    if (length != 1 || *name < 'a' || *name > 'z')
        return complain(p, name, "'%.*s' is no operand, nor pi: operands are called a to %c", length, name, 'a' + p->count - 1);
    if (*name - 'a' >= p->count)
        return complain(p, name, "'%c' is operand %d, and there %s %d", *name, *name - 'a' + 1, p->count == 1 ? "is" : "are", p->count);
    return (operand){ .at = name, .tensor = p->inputs[*name - 'a'] };
}

static operand read_atom(parser *p)
{
    const char *at;
    if (take(p, "(", &at)) {
        operand inner = read_comparison(p);
        expect(p, ")");
        return inner;
    }
    if (failed(p)) return (operand){ .at = at, .is_number = true };
    if (is_digit(*at) || *at == '.') return read_number(p);
    if (is_letter(*at)) return read_name(p);
    if (*at) return complain(p, at, "an operand must come here, not '%c'", *at);
    return complain(p, at, "the text ends where an operand must come");
}

/* Everything that nests passes here, so this bounds how deep the C stack gets. */
static operand read_unary(parser *p)
{
    const char *at;
    skip_spaces(p);
    if (p->depth == MOST_DEPTH) return complain(p, p->at, "is nested more than %d deep", MOST_DEPTH);
    p->depth++;
    operand x;
    if (take(p, "-", &at)) {
        x = read_unary(p);
        x = apply(p, at, &td_op_neg, &x);
        x.at = at;
    } else {
        x = read_atom(p);
        if (take(p, "^", &at)) x = apply_power(p, at, x, read_unary(p));
    }
    p->depth--;
    return x;
}

static operand read_product(parser *p)
{
    const char *at;
    operand x = read_unary(p);
    for (;;) {
        const td_op *op = take(p, "*", &at) ? &td_op_mul : take(p, "/", &at) ? &td_op_div : NULL;
        if (!op) return x;
        x = apply2(p, at, op, x, read_unary(p));
    }
}

static operand read_sum(parser *p)
{
    const char *at;
    operand x = read_product(p);
    for (;;) {
        const td_op *op = take(p, "+", &at) ? &td_op_add : take(p, "-", &at) ? &td_op_sub : NULL;
        if (!op) return x;
        x = apply2(p, at, op, x, read_product(p));
    }
}

/* The longer signs first: "<" begins "<=". */
static const struct comparison {
    const char *sign;
    const td_op *op;
    bool swapped, opposite;                   /* b op a; 1 - it */
} comparisons[] = {
    { "<=", &td_op_less_equal, false, false }, { ">=", &td_op_less_equal, true, false }, { "==", &td_op_equal, false, false },
    { "!=", &td_op_equal, false, true },       { "<", &td_op_less, false, false },       { ">", &td_op_less, true, false },
};
enum { COMPARISONS = sizeof comparisons / sizeof *comparisons };

static const struct comparison *take_comparison(parser *p, const char **at)
{
    for (int i = 0; i < COMPARISONS; i++)
        if (take(p, comparisons[i].sign, at)) return &comparisons[i];
    return NULL;
}

static operand read_comparison(parser *p)
{
    const char *at, *second;
    operand a = read_sum(p);
    const struct comparison *c = take_comparison(p, &at);
    if (!c) return a;
    operand b = read_sum(p);
    if (take_comparison(p, &second)) return complain(p, second, "comparisons do not follow one another; use parentheses");
    operand y = c->swapped ? apply2(p, at, c->op, b, a) : apply2(p, at, c->op, a, b);
    return c->opposite ? apply2(p, at, &td_op_sub, (operand){ .at = at, .is_number = true, .number = 1 }, y) : y;
}

td_tensor td_expression_at(const char *text, int count, const td_tensor *inputs, td_here here)
{
    td_context *td = count > 0 ? inputs[0].td : NULL;
    if (!td || td_error(td) != TD_OK) return td_no_tensor(td);
    parser p = { .td = td, .here = here, .text = text ? text : "", .at = text ? text : "", .inputs = inputs, .count = count };
    if (count > OPERANDS) return td_refuse(td, "expression", here, "has %d operands, at most %d have names", count, OPERANDS);
    operand y = read_comparison(&p);
    skip_spaces(&p);
    if (!failed(&p) && *p.at) complain(&p, p.at, "an operator must come here, not '%c'", *p.at);
    if (failed(&p)) return td_no_tensor(td);
    return value_of(&p, y);
}
