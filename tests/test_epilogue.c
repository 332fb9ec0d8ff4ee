/* What norms, losses and products do beside their own: narrow results, sums of gradients, residuals, gradients of biases. On the CPU every
 * bit is as without; what is for GPUs alone is looked at as a program, and that program run on the CPU. Under valgrind, which has no
 * AVX-512, the plain kernels run.
 *
 * Labels: valgrind
 */
#include "core/ops/norm.h"
#include "core/ops/op.h"
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>

#include <string.h>

enum { BATCH = 3, POSITIONS = 20, WIDTH = 48, STEPS = 3 };

typedef struct form {
    const char *note;
    td_dtype dtype;
    bool rms, no_bias;
    double dropout;
    nn_activation activation;
} form;

static const form forms[] = {
    { "f32", TD_F32, false, false, 0, NN_GELU },
    { "f64", TD_F64, false, false, 0, NN_GELU },
    { "bf16", TD_BF16, false, false, 0, NN_GELU },
    { "bf16, no biases", TD_BF16, false, true, 0, NN_GELU },
    { "bf16, dropout between", TD_BF16, false, true, 0.2, NN_GELU },
    { "bf16, RMS norms", TD_BF16, true, true, 0, NN_GELU },
    { "bf16, tanh gelu", TD_BF16, false, false, 0, NN_GELU_TANH },
    { "f32, tanh gelu", TD_F32, false, false, 0, NN_GELU_TANH },
};

typedef struct outcome {
    double losses[STEPS];
    char program[1 << 16];                    /* as last printed */
    int64_t step_bytes;
} outcome;

static void keep_program(void *user, td_level level, const char *text)
{
    outcome *o = user;
    if (level == TD_LOG_PROGRAM) snprintf(o->program, sizeof o->program, "%s", text);
}

static float numbers[BATCH * POSITIONS * WIDTH];
static double wide_numbers[BATCH * POSITIONS * WIDTH];

typedef struct model {
    nn_block block[2];
    nn_norm norm;
    nn_linear head;
    opt_optimizer *opt;
} model;

static model model_make(td_context *td, const form *f)
{
    nn_norm_options norm = { .no_bias = f->no_bias };
    nn_linear_options product = { .no_bias = f->no_bias };
    nn_block_options block = { .rms = f->rms, .norm = norm, .dropout = f->dropout,
                               .attention = { .in = product, .out = product, .packed = true },
                               .mlp = { .in = product, .out = product, .activation = f->activation } };
    td_module root = td_root(td);
    model m = { 0 };
    m.block[0] = nn_block_make_with(root, "one", WIDTH, 2, 2 * WIDTH, &block);
    m.block[1] = nn_block_make_with(root, "two", WIDTH, 2, 2 * WIDTH, &block);
    m.norm = f->rms ? nn_rms_norm_make(root, "norm", WIDTH) : nn_layer_norm_make_with(root, "norm", WIDTH, &norm);
    m.head = nn_linear_make_with(root, "head", WIDTH, WIDTH, &product);
    m.opt = opt_adamw(root, NULL);
    for (int i = 0; i < BATCH * POSITIONS * WIDTH; i++) wide_numbers[i] = numbers[i] = (float)check_normal((uint64_t)i);
    return m;
}

static td_tensor record(td_context *td, model *m)
{
    const void *data = td_float(td) == TD_F64 ? (const void *)wide_numbers : numbers;
    td_tensor in = td_batch(td, "x", td_float(td), TD_SHAPE(BATCH, POSITIONS, WIDTH), data), x = in;
    for (int b = 0; b < 2; b++) x = nn_block_apply(&m->block[b], x);
    x = nn_linear_apply(&m->head, nn_norm_apply(&m->norm, x));
    td_tensor loss = td_mean(td_square(td_sub(x, in)), TD_ALL, TD_DROP);
    td_backward(loss);
    opt_step(m->opt, 1e-2);
    return loss;
}

/* The epilogues of a GPU in the place of a strategy: what they make is planned and run where the context is. */
static td_program *epilogues_of_a_gpu(void *self, const td_program *in)
{
    td_context *td = self;
    td_device gpu = *td->device;
    const td_device *own = td->device;
    gpu.is_gpu = true;
    td_id *map = check_alloc(in->value_count * sizeof *map);
    td_program *plain = td_pass_begin(td);
    for (uint32_t n = 0; n < in->node_count; n++) {
        const td_node *node = &in->nodes[n];
        if (node->op == &td_op_mark) map[node->output] = map[*td_node_inputs(in, node)];
        else ck_assert(td_copy_node(plain, in, n, map));
    }
    ck_assert(td_pass_end(plain) != NULL);
    td->device = &gpu;
    td_program *out = td_epilogue_pass(plain);
    td->device = own;
    td_program_free(plain);
    return out;
}

static void train_on(bool gpu, const form *f, const char *passes, outcome *o)
{
    *o = (outcome){ 0 };
    td_context *td = td_open(&(td_options){ .dtype = f->dtype, .seed = 7, .threads = 2, .poison = true, .passes = passes,
                                            .print = "simplify,fuse", .log = keep_program, .log_user = o });
    td_parallel parallel = { .self = td, .mesh = { .world = 1 }, .place = epilogues_of_a_gpu };
    if (gpu) ck_assert(td_set_parallel(td, &parallel));
    model m = model_make(td, f);
    for (int step = 0; step < STEPS; step++) {
        td_tensor loss = record(td, &m);
        ck_assert_msg(td_step(td), "%s: %s", f->note, td_error_text(td));
        o->losses[step] = td_item(loss);
    }
    o->step_bytes = td_last_report(td).step_bytes;
    td_close(td);
}

static void train(const form *f, const char *passes, outcome *o) { train_on(false, f, passes, o); }

static outcome with, without;

START_TEST(test_bits_are_those_of_the_operations_one_by_one)
{
    bool bf16 = has_bf16_products();
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (forms[i].dtype == TD_BF16 && !bf16) continue;
        train(&forms[i], NULL, &with);
        train(&forms[i], "-fuse", &without);
        ck_assert_msg(with.losses[0] != with.losses[STEPS - 1], "%s: nothing was learned", forms[i].note);
        for (int step = 0; step < STEPS; step++)
            ck_assert_msg(with.losses[step] == without.losses[step], "%s: step %d: %.17g, one by one %.17g", forms[i].note, step,
                          with.losses[step], without.losses[step]);
    }
}
END_TEST

/* Two norms a block and one behind: all are read by products. Of their gradients the last has nothing to be added to, and the first gives
 * x's, which nobody wants. */
START_TEST(test_norms_write_16_bits_and_add_gradients)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    train(&forms[2], NULL, &with);
    ck_assert_int_eq(count_of(with.program, "layer_norm[eps 1e-05 to bf16]"), 5);
    ck_assert_int_eq(count_of(with.program, "norm_gradient[eps 1e-05 + r to bf16]"), 3);
    ck_assert_int_eq(count_of(with.program, "norm_gradient[eps 1e-05 to bf16]"), 1);
    train(&forms[0], NULL, &with);
    ck_assert_int_eq(count_of(with.program, "layer_norm[eps 1e-05]"), 5);
    ck_assert_int_eq(count_of(with.program, "norm_gradient[eps 1e-05 + r]"), 3);
}
END_TEST

/* The sums over rows of a bias's gradient were taken in f32: nothing rounds them on their way to the f32 gradient. */
START_TEST(test_gradients_of_biases_are_not_rounded)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    train(&forms[2], "-fuse", &without);
    int sums = 0;
    for (const char *at = without.program; (at = strstr(at, " = sum[axes 0] ")); at++) {
        const char *line = at;
        char cast[64];
        while (line[-1] != '\n') line--;
        snprintf(cast, sizeof cast, "cast[bf16] %.*s ", (int)(at - line), line);
        ck_assert_msg(!strstr(without.program, cast), "%s in\n%s", cast, without.program);
        sums++;
    }
    ck_assert_int_eq(sums, 9); /* of four products a block, and the head */
}
END_TEST

/* ---- Losses */

/* A classifier whose gradient is that of the mean loss, of weighted rows, or of the loss' square. */
static void classify(int kind, const char *passes, outcome *o)
{
    enum { ROWS = 6, CLASSES = 10 };
    static const int32_t labels[ROWS] = { 3, 0, 9, 9, 1, 5 };
    static const float weights[ROWS] = { 1, 0, 2, 1, 0.5f, 1 };
    *o = (outcome){ 0 };
    td_context *td = td_open(&(td_options){ .seed = 7, .threads = 2, .poison = true, .passes = passes,
                                            .print = "simplify,fuse", .log = keep_program, .log_user = o });
    nn_linear head = nn_linear_make(td_root(td), "head", WIDTH, CLASSES);
    opt_optimizer *opt = opt_adamw(td_root(td), NULL);
    for (int i = 0; i < ROWS * WIDTH; i++) numbers[i] = (float)check_normal((uint64_t)i);
    for (int step = 0; step < STEPS; step++) {
        td_tensor y = nn_linear_apply(&head, td_batch(td, "x", TD_F32, TD_SHAPE(ROWS, WIDTH), numbers));
        td_tensor l = td_batch(td, "labels", TD_I32, TD_SHAPE(ROWS), labels), w = td_batch(td, "weights", TD_F32, TD_SHAPE(ROWS), weights);
        td_tensor loss = kind == 1 ? td_cross_entropy_weighted(y, l, w) : td_cross_entropy(y, l);
        if (kind == 2) loss = td_square(loss);
        td_backward(loss);
        opt_step(opt, 1e-2);
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
        o->losses[step] = td_item(loss);
    }
    td_close(td);
}

/* What comes back of a square depends on the loss: both stay. */
START_TEST(test_a_loss_comes_with_its_gradient)
{
    for (int kind = 0; kind < 3; kind++) {
        classify(kind, NULL, &with);
        ck_assert_int_eq(count_of(with.program, "cross_entropy_gradient"), 1);
        ck_assert_int_eq(count_of(with.program, "cross_entropy_rows"), kind == 2);
        classify(kind, "-fuse", &without);
        ck_assert_int_eq(count_of(without.program, "cross_entropy_rows"), 1);
        ck_assert_mem_eq(with.losses, without.losses, sizeof with.losses);
        ck_assert(with.losses[STEPS - 1] < with.losses[0]);
    }
}
END_TEST

/* ---- For GPUs */

/* The recording as these passes of a GPU leave it. Owned by the caller, as td_program_text's. */
static char *on_a_gpu(td_context *td)
{
    td_device gpu = td_cpu;
    const td_device *own = td->device;
    td_program *p[5];
    gpu.is_gpu = true;
    p[0] = td->options.dtype == TD_BF16 ? td_precision_pass(&td->recording) : NULL;
    p[1] = td_differentiate_pass(p[0] ? p[0] : &td->recording, TD_FOR_STEP);
    p[2] = td_simplify_pass(p[1]);
    td->device = &gpu;
    p[3] = td_epilogue_pass(p[2]);
    p[4] = td_members_pass(p[3]);
    td->device = own;
    ck_assert_msg(p[4] != NULL, "%s", td_error_text(td));
    char *text = td_program_text(p[4]);
    for (int i = 0; i < 5; i++) td_program_free(p[i]);
    return text;
}

static void check_gpu_program(const form *f, const char *passes, const char *product, int times)
{
    td_context *td = td_open(&(td_options){ .dtype = f->dtype, .seed = 7, .threads = 2, .passes = passes, .log = check_log_line });
    model m = model_make(td, f);
    record(td, &m);
    char *text = on_a_gpu(td);
    ck_assert_msg(count_of(text, product) == times, "%s: %d times %s in\n%s", f->note, count_of(text, product), product, text);
    td_free(td, text, strlen(text) + 1, "host");
    td_close(td);
}

/* The two residuals of each block. */
START_TEST(test_products_add_residuals_on_a_gpu)
{
    check_gpu_program(&forms[0], NULL, "linear_add ", 4);
    check_gpu_program(&forms[2], NULL, "linear_add ", 4);
    check_gpu_program(&forms[3], NULL, "matmul_add[a x b^T] ", 4);
}
END_TEST

/* Whichever of the two comes first. */
START_TEST(test_a_sum_and_a_product_of_one_operand_are_one_call)
{
    for (int sum_first = 0; sum_first < 2; sum_first++) {
        td_context *td = open_cpu(TD_F32);
        td_tensor dy = td_cast(randn(td, 4, 3), TD_BF16), x = td_cast(randn(td, 4, 2), TD_BF16);
        op_matmul_attr wide = { .transpose_a = 1, .out_dtype = TD_F32 };
        if (sum_first) td_keep(td_sum(dy, 0, TD_DROP));
        td_keep(td_record(&td_op_matmul, TD_HERE, 2, (td_tensor[]){ dy, x }, &wide));
        if (!sum_first) td_keep(td_sum(dy, 0, TD_DROP));
        char *text = on_a_gpu(td);
        ck_assert_msg(count_of(text, "matmul_dbias[a^T x b]") == 1 && !count_of(text, "sum[") && !count_of(text, " = matmul["), "%s", text);
        td_free(td, text, strlen(text) + 1, "host");
        td_close(td);
    }
}
END_TEST

/* Of four products a block, and the head. In f32 the library is not asked. */
START_TEST(test_gradients_of_weights_give_those_of_biases_on_a_gpu)
{
    static const char product[] = " = matmul_dbias[a^T x b] ", sum[] = " = sum[axes 0] ";
    check_gpu_program(&forms[2], NULL, product, 9);
    check_gpu_program(&forms[2], NULL, sum, 0);
    check_gpu_program(&forms[2], "-dbias", product, 0);
    check_gpu_program(&forms[2], "-dbias", sum, 9);
    check_gpu_program(&forms[0], NULL, product, 0);
    check_gpu_program(&forms[3], NULL, product, 0);
}
END_TEST

/* Run on the CPU, where the sums are those of the operation by itself: the same bits, in memory that is no more. */
START_TEST(test_gradients_of_biases_beside_products_are_the_sums)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    train_on(true, &forms[2], NULL, &with);
    train_on(true, &forms[2], "-dbias", &without);
    ck_assert_int_eq(count_of(with.program, " = matmul_dbias[a^T x b] "), 9);
    ck_assert_int_eq(count_of(without.program, " = matmul_dbias[a^T x b] "), 0);
    ck_assert_mem_eq(with.losses, without.losses, sizeof with.losses);
    ck_assert_int_le(with.step_bytes, without.step_bytes);
}
END_TEST

/* One a block: forward what gelu was of is kept for the backward, which goes through it in the product. Gelu's erf form stays, and f32. */
START_TEST(test_products_take_gelu_along_on_a_gpu)
{
    static const char whole[] = " = linear_gelu[kept] ", back[] = " = matmul_dgelu[a x b] ";
    static const char gelu[] = " = gelu_tanh ", slope[] = " = gelu_tanh_slope ";
    check_gpu_program(&forms[6], NULL, whole, 2);
    check_gpu_program(&forms[6], NULL, back, 2);
    check_gpu_program(&forms[6], NULL, gelu, 0);
    check_gpu_program(&forms[6], NULL, slope, 0);
    check_gpu_program(&forms[6], NULL, " = matmul_dbias[a^T x b] ", 9);
    check_gpu_program(&forms[6], "-gelu", whole, 0);
    check_gpu_program(&forms[6], "-gelu", back, 0);
    check_gpu_program(&forms[6], "-gelu", gelu, 2);
    check_gpu_program(&forms[6], "-gelu", slope, 2);
    check_gpu_program(&forms[2], NULL, whole, 0);
    check_gpu_program(&forms[7], NULL, whole, 0);
    check_gpu_program(&forms[7], NULL, back, 0);
}
END_TEST

/* Run on the CPU: the parts are taken in 16 bits there, so losses differ by the rounding of a slope and a product that were one; in memory
 * that is no more. */
START_TEST(test_products_that_take_gelu_along_are_the_parts)
{
    if (!has_bf16_products()) SKIP("this processor has no bf16 matrix products");
    train_on(true, &forms[6], "-dbias", &with);
    train_on(true, &forms[6], "-dbias,-gelu", &without);
    ck_assert_int_eq(count_of(with.program, " = linear_gelu[kept] "), 2);
    ck_assert_int_eq(count_of(with.program, " = matmul_dgelu[a x b] "), 2);
    ck_assert_int_eq(count_of(without.program, "linear_gelu"), 0);
    ck_assert_near(with.losses, without.losses, STEPS, 1e-3);
    ck_assert(with.losses[STEPS - 1] < with.losses[0]);
    ck_assert_int_le(with.step_bytes, without.step_bytes);
}
END_TEST

/* Without a backward nothing is kept. What others take along stays theirs, and what is wanted as it is stays a value. */
START_TEST(test_gelu_is_taken_along_where_nothing_else_would)
{
    static const struct { const char *note, *has; } cases[] = {
        { "alone", " = linear_gelu %" }, { "kept", " = linear_gelu[kept] %" }, { "gated", " = gelu_tanh %" },
    };
    for (int c = 0; c < 3; c++) {
        td_context *td = open_cpu(TD_F32);
        td_tensor x = td_cast(randn(td, 4, 6), TD_BF16), w = td_cast(randn(td, 8, 6), TD_BF16), b = td_cast(randn(td, 8), TD_BF16);
        td_tensor y = td_linear(x, w, b), g = td_gelu_tanh(y);
        td_keep(c == 2 ? td_mul(g, td_cast(randn(td, 4, 8), TD_BF16)) : g);
        if (c == 1) td_keep(y);
        char *text = on_a_gpu(td);
        ck_assert_msg(count_of(text, cases[c].has) == 1 && count_of(text, "gelu") == 1, "%s: %s", cases[c].note, text);
        td_free(td, text, strlen(text) + 1, "host");
        td_close(td);
    }
}
END_TEST

/* What is summed must be the first operand, over what the product contracts, the result f32, and the other operand there in time. */
START_TEST(test_other_sums_stay)
{
    td_context *td = open_cpu(TD_F32);
    td_tensor dy = td_cast(randn(td, 4, 4), TD_BF16), x = td_cast(randn(td, 4, 4), TD_BF16);
    op_matmul_attr wide = { .transpose_a = 1, .out_dtype = TD_F32 }, narrow = { .transpose_a = 1, .out_dtype = -1 };
    td_keep(td_sum(dy, 1, TD_DROP));
    td_keep(td_sum(dy, 0, TD_KEEP));
    td_keep(td_record(&td_op_matmul, TD_HERE, 2, (td_tensor[]){ dy, x }, &wide));
    td_keep(td_record(&td_op_matmul, TD_HERE, 2, (td_tensor[]){ x, dy }, &narrow));
    td_keep(td_sum(x, 0, TD_DROP));
    td_keep(td_record(&td_op_matmul, TD_HERE, 2, (td_tensor[]){ x, td_exp(dy) }, &wide));
    char *text = on_a_gpu(td);
    ck_assert_msg(!strstr(text, "matmul_dbias"), "%s", text);
    td_free(td, text, strlen(text) + 1, "host");
    td_close(td);
}
END_TEST

/* Of the parameters all products' weights are parts of one copy; biases and norms' weights are read as they are. */
START_TEST(test_weights_are_parts_of_one_copy_on_a_gpu)
{
    td_context *td = td_open(&(td_options){ .dtype = TD_BF16, .seed = 7, .threads = 2, .log = check_log_line });
    model m = model_make(td, &forms[3]);
    record(td, &m);
    char *text = on_a_gpu(td);
    const char *copy = strstr(text, "= cast[bf16] %1 ");
    ck_assert_msg(strstr(text, "%1 = unit[0") && copy && count_of(text, "= cast[bf16] %1 ") == 1, "%s", text);
    ck_assert_int_eq(count_of(text, "bf16 (48, 48)"), 2 + 1);     /* two of attention, and the head */
    ck_assert_int_eq(count_of(text, "bf16 (96, 48)"), 2);
    for (const char *line = text, *end; (end = strchr(line, '\n')); line = end + 1)
        if (strstr(line, "bf16 (96, 48)") && strstr(line, "bf16 (96, 48)") < end)
            ck_assert_msg(!memcmp(strchr(line, '=') + 2, "part[at", 7), "%s", text);
    td_free(td, text, strlen(text) + 1, "host");
    td_close(td);
}
END_TEST

/* A product that somebody else reads, too, must be made as it is; so must one that is added to what comes after it. */
START_TEST(test_what_others_read_stays)
{
    td_context *td = open_cpu(TD_F32);
    td_tensor a = randn(td, 4, 4), b = randn(td, 4, 4), c = td_matmul(a, b), d = td_matmul(b, a), later = td_exp(a);
    td_keep(td_add(td_add(a, c), c));
    td_keep(td_add(d, later));
    char *text = on_a_gpu(td);
    ck_assert_msg(!strstr(text, "matmul_add"), "%s", text);
    td_free(td, text, strlen(text) + 1, "host");
    td_close(td);
}
END_TEST

/* ---- Gradients of norms by themselves: lengths with and without whole vectors */

static void check_norm_gradient(int64_t columns, int32_t bias)
{
    enum { ROWS = 37 };
    td_context *td = open_cpu(TD_F32);
    td_tensor x = randn(td, ROWS, columns), weight = randn(td, columns), dy = randn(td, ROWS, columns), r = randn(td, ROWS, columns);
    const td_norm_attr plain = { .eps = 1e-5, .centered = 1, .bias = bias };
    td_norm_attr all = plain;
    all.adds = 1;
    all.narrow = TD_BF16;
    td_tensor want = td_record(&td_op_norm_gradient, TD_HERE, 3, (td_tensor[]){ x, weight, dy }, &plain);
    td_tensor got = td_record(&td_op_norm_gradient, TD_HERE, 4, (td_tensor[]){ x, weight, dy, r }, &all);
    td_tensor sum = td_add(r, want), narrow = td_cast(td_output(got, 2 + bias), TD_F32);
    ck_assert_int_eq(td_dtype_at(td_output(got, 2 + bias)), TD_BF16);
    ck_assert_tensor_near(narrow, td_cast(td_cast(sum, TD_BF16), TD_F32), 0);
    ck_assert_tensor_near(got, sum, 0);
    for (int k = 1; k <= 1 + bias; k++) ck_assert_tensor_near(td_output(got, k), td_output(want, k), 0);
    td_close(td);
}

START_TEST(test_a_gradient_of_a_norm_is_added_and_narrowed)
{
    static const int64_t columns[] = { 5, 64, 520, 1031 };
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
        check_norm_gradient(columns[i], 0);
        check_norm_gradient(columns[i], 1);
    }
}
END_TEST

TESTS("epilogue", test_bits_are_those_of_the_operations_one_by_one, test_norms_write_16_bits_and_add_gradients,
      test_gradients_of_biases_are_not_rounded, test_a_loss_comes_with_its_gradient, test_products_add_residuals_on_a_gpu,
      test_a_sum_and_a_product_of_one_operand_are_one_call,
      test_gradients_of_weights_give_those_of_biases_on_a_gpu, test_gradients_of_biases_beside_products_are_the_sums, test_other_sums_stay,
      test_products_take_gelu_along_on_a_gpu, test_products_that_take_gelu_along_are_the_parts,
      test_gelu_is_taken_along_where_nothing_else_would,
      test_weights_are_parts_of_one_copy_on_a_gpu, test_what_others_read_stays, test_a_gradient_of_a_norm_is_added_and_narrowed)
