/* Source that is generated for GPUs, compiled by the host's C++ compiler and run there, gives what the CPU's kernel gives: to the bit but
 * where functions like exp are in it. So chains, their broadcasts and their draws are tested where there is no GPU.
 *
 * Labels: on_host
 */
#include <dlfcn.h>

#include "core/ops/attention_lanes.h"
#include "core/ops/convert.h"
#include "core/ops/device_fused.h"
#include "core/random.h"
#include "tests/check.h"
#include "tests/shell.h"

/* A chain with its operands in memory. */
typedef struct sample {
    td_context *td;
    td_mesh mesh;
    td_run run;
    td_arg in[TD_FUSED_INPUTS], out[TD_FUSED_OUTPUTS];
    _Alignas(8) char attr[TD_FUSED_BYTES + 8];
    td_kernel kernel;
    td_chain chain;
    int width;
    td_chain_rows rows;
    void *want[TD_FUSED_OUTPUTS], *got[TD_FUSED_OUTPUTS]; /* got: of rows in chunks the chunks' results */
} sample;

#define ON_HOST TANDEM_SOURCE "/tests/on_host"

enum { SAMPLES = 40, THREADS = TD_CHAIN_THREADS, BLOCKS = 3 };

/* Memory for an operand, of normal numbers where it is an input. */
static void *memory_of(const td_arg *arg, uint64_t draw)
{
    int64_t count = td_arg_elements(arg);
    char *memory = check_alloc((size_t)td_arg_bytes(arg) + 64), *at = (char *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    for (int64_t i = 0; i < count; i++) {
        double x = check_normal(draw + (uint64_t)i) * (arg->dtype == TD_I32 || arg->dtype == TD_U8 ? 20 : 1);
        td_store_f64(at + i * td_dtype_size(arg->dtype), arg->dtype, &x, 1);
    }
    return at;
}

static td_arg operand(const sample *s, td_dtype dtype, td_shape shape, td_placement place)
{
    return (td_arg){ .dtype = dtype, .shape = td_local_shape(&s->mesh, shape, place), .global = shape, .place = place };
}

static sample *sample_new(void)
{
    sample *s = check_alloc(sizeof *s);
    s->td = open_cpu(TD_F32);
    s->run = (td_run){ .td = s->td, .seed = 42, .update = 3, .micro = 2, .threads = 1, .mesh = &s->mesh };
    return s;
}

/* The operands are described: the chain is built, and run on the CPU. */
static void sample_finish(sample *s, const td_fused_builder *b, uint64_t draw)
{
    const td_op *op = b->reduced ? &td_op_fused_rows : &td_op_fused;
    size_t bytes = td_fused_finish(b, s->attr);
    td_preparation made = { 0 };
    ck_assert_uint_gt(bytes, 0);
    for (int i = 0; i < b->inputs; i++) s->in[i].data = memory_of(&s->in[i], draw + (uint64_t)i * 100000);
    for (int o = 0; o < b->outputs; o++) s->want[o] = s->out[o].data = memory_of(&s->out[o], 2);
    s->kernel = (td_kernel){ .op = op, .attr = s->attr, .attr_bytes = bytes, .inputs = b->inputs, .outputs = b->outputs, .in = s->in,
                             .out = s->out, .run = &s->run };
    s->chain = td_chain_of(&s->kernel);
    s->width = td_chain_width(&s->chain);
    s->rows = td_chain_rows_of(&s->chain, s->width);
    for (int o = 0; o < b->outputs; o++) {
        td_arg parts = s->out[o];
        if (o >= b->outputs - b->reduced) parts.shape = TD_SHAPE(s->rows.rows, s->rows.chunks);
        s->got[o] = memory_of(&parts, 1);
    }
    ck_assert(op->prepare(s->td, &s->kernel, &made));
    s->kernel.prepared = made.prepared;
    s->kernel.workspace = check_alloc((size_t)made.workspace_bytes + 1);
    op->cpu(&s->kernel);
    op->release(made.prepared);
}

/* ---- Compiling ---------------------------------------------------------------------------------------------- */

static void write_sample(FILE *to, int number, sample *s)
{
    td_text source = td_chain_source(s->td, &s->chain, s->width);
    ck_assert_no_error(s->td);
    fprintf(to, "#define td_chain_kernel kernel_%d\nnamespace chain_%d {\n", number, number);
    fputs(source.text, to);
    fprintf(to, "}\n#undef td_chain_kernel\n#undef TD_FUNCTION\n"
                "static void thread_%d(void *argument) { chain_%d::kernel_%d(*(const chain_%d::arguments *)argument); }\n"
                "extern \"C\" cudaError_t run_%d(void *argument)\n"
                "{\n"
                "    const on_host_launch launch = { \"chain %d\", %d, %d, 0, thread_%d, argument };\n"
                "    return on_host_run(&launch);\n"
                "}\n",
            number, number, number, number, number, number, BLOCKS, THREADS, number);
    td_free(s->td, source.text, source.room, "host");
}

/* The kernel's argument, and the kernel, as td_fused_cuda would have them. */
static void run_sample(void *library, int number, sample *s)
{
    uint64_t argument[TD_FUSED_INPUTS + TD_FUSED_OUTPUTS + 1 + TD_CHAIN_DRAWS + TD_CHAIN_NUMBERS];
    const td_cuda_run numbers = { s->run.seed, s->run.update, s->run.micro };
    td_chain_numbers n;
    int words = 0;
    char name[16];
    snprintf(name, sizeof name, "run_%d", number);
    cudaError_t (*run)(void *) = NULL;
    *(void **)&run = dlsym(library, name);
    ck_assert(run && td_chain_numbers_of(&s->chain, s->width, &n));
    for (int i = 0; i < s->kernel.inputs; i++) argument[words++] = (uintptr_t)s->in[i].data;
    for (int o = 0; o < s->kernel.outputs; o++) argument[words++] = (uintptr_t)s->got[o];
    if (s->chain.header.draws) argument[words++] = (uintptr_t)&numbers;
    words += td_chain_draws_of(&s->chain, argument + words);
    memcpy(argument + words, n.at, (size_t)n.count * sizeof *n.at);
    ck_assert_int_eq(run(argument), cudaSuccess);
}

/* The samples' kernels and `more` source, as a library. */
static void *compile_all(const char *name, sample **samples, int count, const char *more)
{
    char path[64];
    snprintf(path, sizeof path, "generated_%s.cu", name);
    FILE *to = fopen(path, "w");
    ck_assert_ptr_nonnull(to);
    fprintf(to, "#include <cuda_runtime.h>\n");
    for (int i = 0; i < count; i++) write_sample(to, i, samples[i]);
    fputs(more, to);
    fclose(to);
    ck_assert_sh(0, "awk -f '" ON_HOST "/cuda.awk' %s >generated_%s.cpp", path, name);
    ck_assert_sh(0, "cc -O1 -ffp-contract=off -fPIC -shared -w -D_GNU_SOURCE -I '" ON_HOST "/include' -I '" TANDEM_SOURCE "' -o generated_%s.so "
                    "generated_%s.cpp '" ON_HOST "/block.c' '" ON_HOST "/fiber.c' -lstdc++", name, name);
    snprintf(path, sizeof path, "./generated_%s.so", name);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    ck_assert_msg(library != NULL, "%s", dlerror());
    return library;
}

static void run_all(const char *name, sample **samples, int count)
{
    void *library = compile_all(name, samples, count, "");
    for (int i = 0; i < count; i++) run_sample(library, i, samples[i]);
    dlclose(library);
}

static void expect_same_bits(const sample *s, const char *note)
{
    for (int o = 0; o < td_fused_full_outputs(&s->chain.header); o++) {
        int64_t size = td_dtype_size(s->out[o].dtype);
        for (int64_t i = 0; i < td_arg_elements(&s->out[o]); i++)
            ck_assert_msg(!memcmp((char *)s->got[o] + i * size, (char *)s->want[o] + i * size, (size_t)size), "%s: output %d, element %lld",
                          note, o, (long long)i);
    }
}

static void close_all(sample **samples, int count)
{
    for (int i = 0; i < count; i++) td_close(samples[i]->td);
}

/* ---- Draws -------------------------------------------------------------------------------------------------- */

typedef struct draw_case {
    const char *note;
    td_dtype dtype;                           /* of what is dropped; the residual is f32 */
    td_shape shape, bias;
    double p[2];
    td_placement place;
    int axes, size[2], at[2];
} draw_case;

#define AXES(kind_0, dim_0, kind_1, dim_1) { .kind = { kind_0, kind_1 }, .dim = { dim_0, dim_1 } }

#define SHAPE(...) { TD_CASE_DIMS(__VA_ARGS__) }

static const draw_case draws[] = {
    { .note = "a residual", .dtype = TD_BF16, .shape = SHAPE(6, 32), .bias = SHAPE(32), .p = { 0.2, 0.5 } },
    { .note = "f32", .dtype = TD_F32, .shape = SHAPE(5, 8, 16), .bias = SHAPE(8, 1), .p = { 0.2, 0.1 } },
    { .note = "f16, more than all threads take at once", .dtype = TD_F16, .shape = SHAPE(70, 128), .bias = SHAPE(1), .p = { 0.3, 0.9 } },
    { .note = "odd sizes", .dtype = TD_BF16, .shape = SHAPE(7, 13), .bias = SHAPE(7, 1), .p = { 0.2, 0.1 } },
    { .note = "pairs", .dtype = TD_BF16, .shape = SHAPE(3, 5, 6), .bias = SHAPE(5, 1), .p = { 0.7, 0.1 } },
    { .note = "groups of four", .dtype = TD_F32, .shape = SHAPE(9, 12), .bias = SHAPE(12), .p = { 0.7, 0.1 } },
    { .note = "one element", .dtype = TD_F32, .shape = SHAPE(1), .bias = SHAPE(1), .p = { 0.5, 0.5 } },
    { .note = "integers beside it, so in f64", .dtype = TD_I32, .shape = SHAPE(4, 24), .bias = SHAPE(24), .p = { 0.3, 0.2 } },
    { .note = "nearly nothing and nearly all", .dtype = TD_F32, .shape = SHAPE(64, 64), .bias = SHAPE(64), .p = { 1e-5, 0.9999 } },
    { .note = "rows of rank 1 of 3", .dtype = TD_BF16, .shape = SHAPE(9, 24), .bias = SHAPE(24), .p = { 0.2, 0.5 },
      .place = AXES(TD_SHARDED, 0, 0, 0), .axes = 1, .size = { 3 }, .at = { 1 } },
    { .note = "columns of rank 2 of 3", .dtype = TD_BF16, .shape = SHAPE(5, 48), .bias = SHAPE(1), .p = { 0.2, 0.5 },
      .place = AXES(TD_SHARDED, 1, 0, 0), .axes = 1, .size = { 3 }, .at = { 2 } },
    { .note = "columns that are no group's", .dtype = TD_F32, .shape = SHAPE(5, 21), .bias = SHAPE(1), .p = { 0.2, 0.5 },
      .place = AXES(TD_SHARDED, 1, 0, 0), .axes = 1, .size = { 3 }, .at = { 1 } },
    { .note = "one column each", .dtype = TD_F32, .shape = SHAPE(6, 4, 3), .bias = SHAPE(1), .p = { 0.2, 0.5 },
      .place = AXES(TD_SHARDED, 2, 0, 0), .axes = 1, .size = { 3 }, .at = { 2 } },
    { .note = "rows and columns", .dtype = TD_BF16, .shape = SHAPE(4, 6, 32), .bias = SHAPE(6, 1), .p = { 0.2, 0.5 },
      .place = AXES(TD_SHARDED, 0, TD_SHARDED, 2), .axes = 2, .size = { 2, 2 }, .at = { 1, 1 } },
    { .note = "a dimension in the middle, and rows", .dtype = TD_BF16, .shape = SHAPE(4, 6, 16), .bias = SHAPE(16), .p = { 0.2, 0.5 },
      .place = AXES(TD_SHARDED, 1, TD_SHARDED, 0), .axes = 2, .size = { 3, 2 }, .at = { 2, 1 } },
};
enum { DRAWS = sizeof draws / sizeof *draws };

/* r + drop(x) bias, and the second mask; both draws are of micro-batches of their own. */
static sample *drop_of(const draw_case *c, int number)
{
    sample *s = sample_new();
    td_fused_builder b = { 0 };
    s->mesh = (td_mesh){ .axes = c->axes, .size = { c->size[0], c->size[1] }, .at = { c->at[0], c->at[1] }, .world = 1 };
    int x = td_fused_input(&b), r = td_fused_input(&b), w = td_fused_input(&b);
    int wide = td_fused_apply(&b, &td_op_cast, TD_F32, &x);
    int mask = td_fused_mask(&b, c->dtype == TD_I32 ? TD_F32 : c->dtype, (td_fused_draw){ .p = c->p[0], .key = 77, .micro = 0 });
    int dropped = td_fused_apply(&b, &td_op_mul, TD_F32, (int[]){ wide, mask });
    int scaled = td_fused_apply(&b, &td_op_mul, TD_F32, (int[]){ dropped, w });
    int other = td_fused_mask(&b, TD_F32, (td_fused_draw){ .p = c->p[1], .key = 78 + (uint64_t)number, .micro = 5 });
    ck_assert(td_fused_output(&b, td_fused_apply(&b, &td_op_add, TD_F32, (int[]){ scaled, r })));
    ck_assert(td_fused_output(&b, other));
    s->in[0] = operand(s, c->dtype, c->shape, c->place);
    s->in[1] = s->out[0] = s->out[1] = operand(s, TD_F32, c->shape, c->place);
    s->in[2] = operand(s, TD_F32, c->bias, (td_placement){ .kind = { 0 } });
    for (int d = 1; d <= c->bias.rank; d++) /* its dimensions are the local ones */
        if (c->bias.dim[c->bias.rank - d] != 1) s->in[2].shape.dim[c->bias.rank - d] = s->in[0].shape.dim[c->shape.rank - d];
    sample_finish(s, &b, (uint64_t)number * 1000003);
    return s;
}

START_TEST(test_masks_are_drawn_as_the_cpu_draws_them)
{
    sample *samples[DRAWS];
    for (int i = 0; i < DRAWS; i++) samples[i] = drop_of(&draws[i], i);
    run_all("draws", samples, DRAWS);
    for (int i = 0; i < DRAWS; i++) expect_same_bits(samples[i], draws[i].note);
    close_all(samples, DRAWS);
}
END_TEST

START_TEST(test_a_mask_is_the_ranks_part_of_the_whole)
{
    enum { ROWS = 5, COLUMNS = 48, PARTS = 3, OWN = COLUMNS / PARTS };
    draw_case c = draws[10];
    c.axes = 0;
    c.place = (td_placement){ .kind = { 0 } };
    sample *samples[1 + PARTS] = { drop_of(&c, 10) };
    for (int part = 0; part < PARTS; part++) {
        c = draws[10];
        c.at[0] = part;
        samples[1 + part] = drop_of(&c, 10);
    }
    run_all("parts", samples, 1 + PARTS);
    for (int part = 0; part < PARTS; part++)
        for (int row = 0; row < ROWS; row++)
            ck_assert_mem_eq((float *)samples[1 + part]->got[1] + row * OWN, (float *)samples[0]->got[1] + row * COLUMNS + part * OWN,
                             OWN * sizeof(float));
    close_all(samples, 1 + PARTS);
}
END_TEST

/* As attention reads them, whose rows may begin anywhere in the draw. */
START_TEST(test_eight_elements_from_any_index)
{
    sample *s = drop_of(&draws[0], 0);
    void *library = compile_all("eight", &s, 1,
                                "extern \"C\" void eight(unsigned long long index, unsigned count, unsigned *to)\n"
                                "{\n"
                                "    uint4 w = chain_0::td_random_halves(chain_0::td_random_on(1, 2, 3), index, count);\n"
                                "    memcpy(to, &w, 16);\n"
                                "}\n");
    void (*eight)(unsigned long long, unsigned, unsigned *) = NULL;
    *(void **)&eight = dlsym(library, "eight");
    ck_assert(eight);
    for (uint64_t index = 0; index < 24; index++)
        for (unsigned count = 1; count <= 8; count++) {
            unsigned got[4];
            uint16_t want[8];
            uint64_t at = ((uint64_t)1 << 36) - 12 + index;
            eight(at, count, got);
            td_random_halves(td_random_of(1, 2, 3), at, 8, want);
            ck_assert_mem_eq(got, want, count * sizeof *want);
        }
    dlclose(library);
    close_all(&s, 1);
}
END_TEST

/* Eight keys of a row are one lane's and one block's, two to a word; queries whose keys a lane draws are those of its columns. */
START_TEST(test_lanes_of_attention_have_whole_blocks)
{
    for (int lane = 0; lane < 32; lane++)
        for (int n = 0; n < 8; n++)
            for (int i = 0; i < 2; i++) {
                int column = 8 * n + 2 * (lane % 4) + i, key = td_key_of_column(n, lane, i);
                ck_assert_int_eq(td_row_of_key(key), column);
                ck_assert_int_eq(key / 8, td_key_of_column(n / 4 * 4, lane, 0) / 8);
                ck_assert_int_eq(key % 8, n % 4 * 2 + i);
                if (n < 4) ck_assert_int_eq(td_query_of_lane(td_lane_of_query(n, lane, i)), column);
            }
}
END_TEST

/* ---- Chains without draws ------------------------------------------------------------------------------------- */

/* x + w ..., each of its own shape. */
static sample *sum_of(td_dtype dtype, td_dtype to, int count, const td_shape *shapes)
{
    sample *s = sample_new();
    td_fused_builder b = { 0 };
    int y = td_fused_input(&b);
    for (int i = 0; i < count; i++) s->in[i] = operand(s, dtype, shapes[i], (td_placement){ .kind = { 0 } });
    for (int i = 1; i < count; i++) y = td_fused_apply(&b, &td_op_add, dtype, (int[]){ y, td_fused_input(&b) });
    ck_assert(td_fused_output(&b, td_fused_apply(&b, &td_op_cast, to, &y)));
    s->out[0] = operand(s, to, shapes[0], (td_placement){ .kind = { 0 } });
    sample_finish(s, &b, 5);
    return s;
}

START_TEST(test_broadcasts_and_casts_have_the_same_bits)
{
    static const td_dtype from[] = { TD_F32, TD_BF16, TD_F16, TD_I32, TD_U8 };
    const td_shape shapes[] = { TD_SHAPE(4, 6, 8), TD_SHAPE(8), TD_SHAPE(6, 1), TD_SHAPE(1, 1, 1), TD_SHAPE(4, 1, 8), TD_SHAPE(4, 1, 1),
                                TD_SHAPE(6, 8), TD_SHAPE(4, 6, 1) };
    const td_shape odd[] = { TD_SHAPE(3, 5, 7), TD_SHAPE(5, 1), TD_SHAPE(3, 1, 7) };
    sample *samples[2 * 25];
    int count = 0;
    for (int f = 0; f < 5; f++)
        for (int t = 0; t < 5; t++) {
            samples[count++] = sum_of(from[f], from[t], 8, shapes);
            samples[count++] = sum_of(from[f], from[t], 3, odd);
        }
    run_all("sums", samples, count);
    for (int i = 0; i < count; i++) expect_same_bits(samples[i], td_dtype_name(from[i / 10]));
    close_all(samples, count);
}
END_TEST

static const td_op *const every_function[] = {
#define OPERATION(name, ...) &td_op_##name,
    TD_POINTWISE(OPERATION)
};
enum { FUNCTIONS = sizeof every_function / sizeof *every_function };

/* f(|x| + 0.1, b, c) in f32, where every function is defined. */
static sample *function_of(const td_op *op)
{
    sample *s = sample_new();
    td_fused_builder b = { 0 };
    int x[3];
    for (int i = 0; i < 3; i++) {
        x[i] = td_fused_apply(&b, &td_op_abs, TD_F32, (int[]){ td_fused_input(&b) });
        s->in[i] = operand(s, TD_F32, TD_SHAPE(4, 32), (td_placement){ .kind = { 0 } });
    }
    ck_assert(td_fused_output(&b, td_fused_apply(&b, op, TD_F32, x)));
    s->out[0] = s->in[0];
    sample_finish(s, &b, 9);
    return s;
}

/* Within a few units in the last place of f32, those of the CPU's functions and the GPU's. */
START_TEST(test_every_function_is_the_cpus)
{
    sample *samples[FUNCTIONS];
    for (int f = 0; f < FUNCTIONS; f++) samples[f] = function_of(every_function[f]);
    run_all("functions", samples, FUNCTIONS);
    for (int f = 0; f < FUNCTIONS; f++)
        for (int i = 0; i < 4 * 32; i++) {
            float got = ((float *)samples[f]->got[0])[i], want = ((float *)samples[f]->want[0])[i];
            ck_assert_msg(fabsf(got - want) <= 1e-6f * (1 + fabsf(want)), "%s: %.9g, not %.9g", every_function[f]->name, got, want);
        }
    close_all(samples, FUNCTIONS);
}
END_TEST

/* ---- Rows ----------------------------------------------------------------------------------------------------- */

typedef struct row_case {
    const char *note;
    td_dtype dtype;                           /* of x; w is f32 */
    td_shape shape, w;
    int dims, lanes, chunks;
    double p;                                 /* what is dropped of x w; 0: nothing */
    int full;                                 /* of the outputs x w and its square, how many there are */
} row_case;

static const row_case row_cases[] = {
    { .note = "a thread's", .dtype = TD_BF16, .shape = SHAPE(300, 8), .w = SHAPE(8), .dims = 1, .lanes = 1, .chunks = 1, .full = 1 },
    { .note = "of two threads", .dtype = TD_F32, .shape = SHAPE(201, 8), .w = SHAPE(201, 1), .dims = 1, .lanes = 2, .chunks = 1 },
    { .note = "of four", .dtype = TD_F16, .shape = SHAPE(77, 32), .w = SHAPE(32), .dims = 1, .lanes = 4, .chunks = 1, .full = 2 },
    { .note = "of eight, not all of which have a group", .dtype = TD_F32, .shape = SHAPE(77, 20), .w = SHAPE(1), .dims = 1, .lanes = 8, .chunks = 1 },
    { .note = "odd", .dtype = TD_F32, .shape = SHAPE(50, 17), .w = SHAPE(17), .dims = 1, .lanes = 32, .chunks = 1, .full = 1 },
    { .note = "two dimensions", .dtype = TD_BF16, .shape = SHAPE(5, 3, 24), .w = SHAPE(3, 1), .dims = 2, .lanes = 16, .chunks = 1, .full = 1 },
    { .note = "a warp's", .dtype = TD_BF16, .shape = SHAPE(2100, 320), .w = SHAPE(320), .dims = 1, .lanes = 32, .chunks = 1, .full = 1 },
    { .note = "a block's, for there are few", .dtype = TD_F32, .shape = SHAPE(40, 1000), .w = SHAPE(1000), .dims = 1, .lanes = 128, .chunks = 1 },
    { .note = "a block's", .dtype = TD_F32, .shape = SHAPE(5, 1031), .w = SHAPE(5, 1), .dims = 1, .lanes = 128, .chunks = 1, .full = 2 },
    { .note = "everything", .dtype = TD_BF16, .shape = SHAPE(3, 64, 128), .w = SHAPE(64, 1), .dims = 3, .lanes = 128, .chunks = 6 },
    { .note = "chunks, the last one short", .dtype = TD_F32, .shape = SHAPE(3, 12500), .w = SHAPE(12500), .dims = 1, .lanes = 128, .chunks = 3, .full = 1 },
    { .note = "odd chunks", .dtype = TD_F32, .shape = SHAPE(1, 9999), .w = SHAPE(9999), .dims = 2, .lanes = 128, .chunks = 2 },
    { .note = "dropped", .dtype = TD_BF16, .shape = SHAPE(60, 48), .w = SHAPE(48), .dims = 1, .lanes = 8, .chunks = 1, .p = 0.3, .full = 1 },
    { .note = "dropped, in chunks", .dtype = TD_F32, .shape = SHAPE(2, 10000), .w = SHAPE(2, 1), .dims = 1, .lanes = 128, .chunks = 2, .p = 0.6 },
    { .note = "integers, so in f64", .dtype = TD_I32, .shape = SHAPE(9, 100), .w = SHAPE(100), .dims = 1, .lanes = 32, .chunks = 1, .full = 1 },
};
enum { ROW_CASES = sizeof row_cases / sizeof *row_cases };

/* The sum of (x w)^2, the largest of x w, and both of (x w)^2 in bf16. */
enum { REDUCED = 4 };

static sample *rows_of(const row_case *c, int number)
{
    sample *s = sample_new();
    td_fused_builder b = { 0 };
    int x = td_fused_input(&b), w = td_fused_input(&b);
    int y = td_fused_apply(&b, &td_op_mul, TD_F32, (int[]){ x, w });
    if (c->p > 0) y = td_fused_apply(&b, &td_op_mul, TD_F32, (int[]){ y, td_fused_mask(&b, TD_F32, (td_fused_draw){ .p = c->p, .key = 7 }) });
    int square = td_fused_apply(&b, &td_op_square, TD_F32, &y), narrow = td_fused_apply(&b, &td_op_cast, TD_BF16, &square);
    const int full[] = { y, square };
    s->in[0] = operand(s, c->dtype, c->shape, (td_placement){ .kind = { 0 } });
    s->in[1] = operand(s, TD_F32, c->w, (td_placement){ .kind = { 0 } });
    b.rows.shape = c->shape;
    b.rows.dims = c->dims;
    for (int o = 0; o < c->full; o++) {
        ck_assert(td_fused_output(&b, full[o]));
        s->out[o] = operand(s, TD_F32, c->shape, (td_placement){ .kind = { 0 } });
    }
    td_shape rows = c->shape;
    for (int d = 0; d < c->dims; d++) rows.dim[--rows.rank] = 0;
    const int values[REDUCED] = { square, y, narrow, narrow };
    for (int o = 0; o < REDUCED; o++) {
        s->out[c->full + o] = operand(s, o == 3 ? TD_BF16 : TD_F32, rows, (td_placement){ .kind = { 0 } });
        ck_assert(td_fused_reduce(&b, o % 2 ? TD_FUSED_MAX : TD_FUSED_SUM, values[o]));
    }
    sample_finish(s, &b, (uint64_t)number * 1000003);
    return s;
}

/* A chunk's results joined: row `row` of reduced output o. */
static double joined(const sample *s, int o, int64_t row)
{
    int output = td_fused_full_outputs(&s->chain.header) + o;
    td_dtype dtype = s->out[output].dtype;
    double all = o % 2 ? -INFINITY : 0, part;
    for (int64_t c = 0; c < s->rows.chunks; c++) {
        td_load_f64(&part, dtype, (char *)s->got[output] + (row * s->rows.chunks + c) * td_dtype_size(dtype), 1);
        all = o % 2 ? fmax(all, part) : all + part;
    }
    return all;
}

/* Sums of squares differ by the order of f32 additions, whose errors of half a unit in the last place add up as the root of their number;
 * maxima not at all. */
START_TEST(test_rows_are_reduced_as_the_cpu_does)
{
    sample *samples[ROW_CASES];
    for (int i = 0; i < ROW_CASES; i++) samples[i] = rows_of(&row_cases[i], i);
    run_all("rows", samples, ROW_CASES);
    for (int i = 0; i < ROW_CASES; i++) {
        const sample *s = samples[i];
        const row_case *c = &row_cases[i];
        ck_assert_msg(s->rows.lanes == c->lanes && s->rows.chunks == c->chunks, "%s: %d lanes, %d chunks", c->note, s->rows.lanes, (int)s->rows.chunks);
        double elements = (double)(s->rows.chunk * s->rows.chunks);
        expect_same_bits(s, c->note);
        for (int o = 0; o < REDUCED; o++)
            for (int64_t row = 0; row < s->rows.rows; row++) {
                const td_arg *out = &s->out[c->full + o];
                double got = joined(s, o, row), want;
                td_load_f64(&want, out->dtype, (char *)s->want[c->full + o] + row * td_dtype_size(out->dtype), 1);
                bool near = o % 2 ? got == want : fabs(got - want) <= 4 * 0x1p-24 * sqrt(elements) * want;
                ck_assert_msg(near, "%s: reduction %d, row %d is %.9g, not %.9g", c->note, o, (int)row, got, want);
            }
    }
    close_all(samples, ROW_CASES);
}
END_TEST

START_TEST(test_how_rows_are_shared_out)
{
    for (int64_t rows = 1; rows < 5000; rows = rows * 3 + 1)
        for (int64_t row = 1; row < 3000000; row = row * 5 + row % 7) {
            td_chain c = { .row = row, .elements = rows * row };
            for (int width = 8; width > 0; width /= 2) {
                if (row % width) continue;
                td_chain_rows r = td_chain_rows_of(&c, width);
                ck_assert_int_eq(r.rows, rows);
                ck_assert(r.lanes >= 1 && (r.lanes <= 32 || r.lanes == TD_CHAIN_THREADS) && !(r.lanes & (r.lanes - 1)));
                ck_assert(r.chunks >= 1 && (r.chunks - 1) * r.chunk < row && r.chunks * r.chunk >= row);
                ck_assert(r.chunks == 1 || (r.chunk >= 4096 && r.chunk % (8 * TD_CHAIN_THREADS) == 0 && rows * r.chunks <= 2048));
            }
        }
}
END_TEST

TESTS("generated", test_masks_are_drawn_as_the_cpu_draws_them, test_a_mask_is_the_ranks_part_of_the_whole,
      test_eight_elements_from_any_index, test_lanes_of_attention_have_whole_blocks,
      test_broadcasts_and_casts_have_the_same_bits, test_every_function_is_the_cpus, test_rows_are_reduced_as_the_cpu_does,
      test_how_rows_are_shared_out)
