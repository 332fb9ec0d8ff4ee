/* Transformer blocks with the norm behind the residual: a classifier of vectors, the form of public FSDP demos, equals PyTorch
 * in f64 to 1e-9 (tests/golden/block.py), on one rank and under fsdp.
 *
 * Timeout: 300 s
 */
#include "tests/golden.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

enum { ROWS = 4, WIDTH = 512, HIDDEN = 2048, HEADS = 8, LAYERS = 4, CLASSES = 10, ARRAYS = 54, STEPS = 3 };

typedef struct classifier {
    nn_linear input, output;
    nn_block block[LAYERS];
    nn_norm norm;
} classifier;

static classifier make(td_module root)
{
    classifier c;
    c.input = nn_linear_make(root, "input", WIDTH, WIDTH);
    for (int l = 0; l < LAYERS; l++) {
        char name[24];
        snprintf(name, sizeof name, "blocks.%d", l);
        c.block[l] = nn_block_make_with(root, name, WIDTH, HEADS, HIDDEN,
                                        &(nn_block_options){ .post_norm = true, .attention = { .packed = true, .full = true } });
    }
    c.norm = nn_layer_norm_make(root, "norm", WIDTH);
    c.output = nn_linear_make(root, "output", WIDTH, CLASSES);
    return c;
}

/* x (B, 512) -> logits (B, 10) */
static td_tensor logits_of(const classifier *c, td_tensor x)
{
    td_tensor h = td_reshape(nn_linear_apply(&c->input, x), -1, 1, WIDTH); /* sequences of one position */
    for (int l = 0; l < LAYERS; l++) h = nn_block_apply(&c->block[l], h);
    h = td_mean(nn_norm_apply(&c->norm, h), 1, TD_DROP);
    return nn_linear_apply(&c->output, h);
}

/* Element i of array `number`, as block.py has it. */
static double element(uint64_t number, uint64_t i, double scale)
{
    uint64_t u = (i * 2654435761u + number * 40503) & UINT32_MAX;
    u = ((u ^ (u >> 15)) * 2246822519u) & UINT32_MAX;
    return ((double)u / 0x1p32 - 0.5) * scale;
}

/* Element i of parameter number `number`, from 1, in order of creation. */
static double initial(td_state p, uint64_t number, int64_t i)
{
    const char *name = td_state_name(p);
    bool is_scale = strstr(name, "norm") && strstr(name, "weight");
    return element(number, (uint64_t)i, 0.125) + is_scale;
}

/* Writes what this rank holds of every parameter. */
static bool write_parameters(td_context *td, double *memory)
{
    uint64_t number = 0;
    bool good = true;
    for (int64_t s = 0; s < td_state_count(td) && good; s++) {
        td_state p = td_state_at(td, s);
        int64_t begin, end;
        if (td_state_kind_of(p) != TD_PARAMETER) continue;
        number++;
        good = td_state_owned(p, &begin, &end);
        for (int64_t i = begin; i < end; i++) memory[i - begin] = initial(p, number, i);
        good = good && td_state_write(p, begin, end - begin, memory);
    }
    return good && number == ARRAYS;
}

static void fill_batch(double *x, int32_t *labels)
{
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = element(0, (uint64_t)i, 4);
    for (int r = 0; r < ROWS; r++) labels[r] = r * 3 % CLASSES;
}

START_TEST(test_parameters_by_count_and_name)
{
    td_context *td = open_cpu(TD_F32);
    make(td_root(td));
    ck_assert_no_error(td);
    ck_assert_int_eq(td_parameter_elements(td), 12878346);
    ck_assert_int_eq(td_state_count(td), ARRAYS);
    static const char *const names[] = { "input.weight", "input.bias", "blocks.0.norm_1.weight", "blocks.0.norm_1.bias",
                                         "blocks.0.attention.qkv_proj.weight", "blocks.0.attention.qkv_proj.bias",
                                         "blocks.0.attention.out_proj.weight", "blocks.0.attention.out_proj.bias", "blocks.0.norm_2.weight",
                                         "blocks.0.norm_2.bias", "blocks.0.mlp.up_proj.weight", "blocks.0.mlp.up_proj.bias",
                                         "blocks.0.mlp.down_proj.weight", "blocks.0.mlp.down_proj.bias" };
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++) ck_assert_str_eq(td_state_name(td_state_at(td, i)), names[i]);
    td_close(td);
}
END_TEST

/* Of the gradient of parameter number `number`, which an update of rate 1 has just subtracted. */
static double norm_of_step(td_state p, uint64_t number, double *memory)
{
    int64_t count = td_shape_elements(td_state_shape(p));
    double sum = 0;
    ck_assert(td_state_read(p, 0, count, memory));
    for (int64_t i = 0; i < count; i++) {
        double gradient = initial(p, number, i) - memory[i];
        sum += gradient * gradient;
    }
    return sqrt(sum);
}

START_TEST(test_the_first_step_equals_pytorch)
{
    static double x[ROWS * WIDTH];
    double norms[ARRAYS], *memory = check_alloc(WIDTH * HIDDEN * sizeof(double));
    int32_t labels[ROWS];
    golden file = golden_open("block.txt");
    fill_batch(x, labels);
    td_context *td = open_cpu(TD_F64);
    classifier c = make(td_root(td));
    opt_optimizer *opt = opt_sgd(td_root(td), NULL);
    ck_assert(write_parameters(td, memory));
    td_tensor logits = logits_of(&c, td_input(td, "x", TD_F64, TD_SHAPE(ROWS, WIDTH), x));
    td_tensor loss = td_cross_entropy(logits, td_input(td, "y", TD_I32, TD_SHAPE(ROWS), labels));
    td_backward(loss);
    opt_step(opt, 1);
    td_keep(logits);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    for (int i = 0; i < ARRAYS; i++) norms[i] = norm_of_step(td_state_at(td, i), (uint64_t)i + 1, memory);
    ck_assert_near(check_read(logits, "logits", __FILE__, __LINE__), golden_get(file, "logits").values, ROWS * CLASSES, 1e-9);
    ck_assert_near(norms, golden_get(file, "norms").values, ARRAYS, 1e-9);
    ck_assert_double_eq_tol(td_item(loss), golden_get(file, "losses").values[0], 1e-9);
    td_close(td);
}
END_TEST

typedef struct job {
    const char *strategy;
    double losses[STEPS];
} job;

static int train(par_world *world, int rank, void *user)
{
    job *j = user;
    int ranks = par_world_size(world), own = ROWS / ranks;
    double x[ROWS * WIDTH], *memory = malloc(WIDTH * HIDDEN * sizeof *memory);
    int32_t labels[ROWS];
    fill_batch(x, labels);
    td_context *td = td_open(&(td_options){ .dtype = TD_F64, .threads = 1 });
    par_attach(td, world, rank, &(par_options){ .strategy = j->strategy });
    td_module root = td_root(td);
    classifier c = make(root);
    opt_optimizer *opt = opt_adamw(root, &(opt_adamw_options){ .decay = 0.01 });
    bool good = memory && write_parameters(td, memory);
    for (int s = 0; s < STEPS && good; s++) {
        td_tensor logits = logits_of(&c, td_batch(td, "x", TD_F64, TD_SHAPE(ROWS, WIDTH), x + rank * own * WIDTH));
        td_tensor loss = td_cross_entropy(logits, td_batch(td, "y", TD_I32, TD_SHAPE(ROWS), labels + rank * own));
        td_backward(loss);
        opt_step(opt, 1e-3);
        good = td_step(td);
        double value = good ? td_item(loss) : (double)NAN;
        if (rank == 0) j->losses[s] = value;
    }
    if (!good) fprintf(stderr, "rank %d: %s\n", rank, td_error_text(td));
    td_close(td);
    free(memory);
    return !good;
}

START_TEST(test_training_equals_pytorch_on_one_rank_and_under_fsdp)
{
    golden file = golden_open("block.txt");
    for (int ranks = 1; ranks <= 2; ranks++) {
        job j = { .strategy = ranks == 1 ? "single" : "fsdp" };
        ck_assert_int_eq(par_run_threads(ranks, NULL, train, &j), 0);
        ck_assert_near(j.losses, golden_get(file, "losses").values, STEPS, 1e-9);
    }
}
END_TEST

TESTS("block", test_parameters_by_count_and_name, test_the_first_step_equals_pytorch,
      test_training_equals_pytorch_on_one_rank_and_under_fsdp)
