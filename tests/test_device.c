/* A GPU as a device: how much of its memory is asked for, what is refused, where initial values come from, what its profile says, which
 * algorithms products have and that they are kept.
 *
 * Labels: gpu
 * Timeout: 300 s
 */
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include "core/internal.h"
#include "tests/memory.h"
#include "tests/reach.h"

#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

static td_context *open_gpu(td_options options)
{
    options.device = "cuda";
    options.threads = 1;
    options.seed = 3;
    options.log = check_log_line;
    return td_open(&options);
}

/* False, and the test counts as skipped. */
static bool gpu_for(const char *test)
{
    td_context *td = open_gpu((td_options){ 0 });
    bool has = td_error(td) == TD_OK;
    if (!has) check_skip(test, "no CUDA device");
    td_close(td);
    return has;
}

/* The driver's function of that name. */
static void find_in_driver(const char *name, void *to)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    ck_assert_msg(driver && (*(void **)to = dlsym(driver, name)), "the driver has no %s", name);
}

/* ---- A small model ---------------------------------------------------------------------------------------- */

enum { ROWS = 64, IN = 300, HIDDEN = 520, CLASSES = 10 };

typedef struct model {
    td_context *td;
    nn_linear hidden, out;
    opt_optimizer *opt;
    float x[ROWS * IN];
    int32_t y[ROWS];
} model;

static void make_model(model *m, td_context *td)
{
    td_module root = td_root(td);
    m->td = td;
    m->hidden = nn_linear_make(root, "hidden", IN, HIDDEN);
    m->out = nn_linear_make(root, "out", HIDDEN, CLASSES);
    m->opt = opt_adamw(root, &(opt_adamw_options){ .decay = 0.01 });
}

static void close_model(model *m)
{
    opt_close(m->opt);
    td_close(m->td);
}

/* Records one step, of the first `rows` rows of batch number `number`; its loss. */
static td_tensor record(model *m, int64_t rows, int number)
{
    for (int64_t i = 0; i < rows * IN; i++) m->x[i] = (float)check_normal((uint64_t)(number * ROWS * IN + i + 1));
    for (int64_t i = 0; i < rows; i++) m->y[i] = (int32_t)((i * 7 + number) % CLASSES);
    td_tensor x = td_batch(m->td, "x", TD_F32, TD_SHAPE(rows, IN), m->x), y = td_batch(m->td, "y", TD_I32, TD_SHAPE(rows), m->y);
    td_tensor h = td_gelu(nn_linear_apply(&m->hidden, x));
    td_tensor loss = td_cross_entropy(nn_linear_apply(&m->out, h), y);
    td_backward(loss);
    opt_step(m->opt, 1e-2);
    return loss;
}

static td_tensor train(model *m, int64_t rows, int number)
{
    td_tensor loss = record(m, rows, number);
    ck_assert_msg(td_step(m->td), "%s", td_error_text(m->td));
    return loss;
}

/* ---- Memory ----------------------------------------------------------------------------------------------- */

START_TEST(test_the_planned_peak_is_what_is_asked_of_the_gpu)
{
    if (!gpu_for(__func__)) return;
    static model m;
    make_model(&m, open_gpu((td_options){ 0 }));
    for (int s = 0; s < 4; s++) train(&m, 16, s);
    int64_t most, now = td_device_bytes(m.td, &most);
    ck_assert_int_eq(now, td_last_report(m.td).peak_bytes);
    ck_assert_int_eq(most, now);
    for (int s = 0; s < 4; s++) train(&m, ROWS, s); /* a larger step */
    now = td_device_bytes(m.td, &most);
    ck_assert_int_eq(now, td_last_report(m.td).peak_bytes);
    ck_assert_int_eq(most, now);
    close_model(&m);
}
END_TEST

START_TEST(test_what_grows_stays_where_it_is)
{
    if (!gpu_for(__func__)) return;
    static model m;
    make_model(&m, open_gpu((td_options){ 0 }));
    for (int s = 0; s < 4; s++) train(&m, 16, s);
    const void *arena = m.td->arena;
    int64_t had = td_device_bytes(m.td, NULL);
    td_tensor large = td_uniform(m.td, TD_SHAPE(4096, 4096));
    td_keep(td_sum(td_exp(large), TD_ALL, TD_DROP));
    ck_assert(td_step(m.td));
    ck_assert_int_ge(td_device_bytes(m.td, NULL), had + (16 << 20));
    ck_assert_ptr_eq(m.td->arena, arena);
    ck_assert_uint_eq(m.td->arena_epoch, 1);
    close_model(&m);
}
END_TEST

/* How long the piece of memory is that begins there; 0: none does. */
static size_t piece_at(const void *memory)
{
    int (*range)(uintptr_t *begin, size_t *bytes, uintptr_t of);
    uintptr_t begin = 0;
    size_t bytes = 0;
    find_in_driver("cuMemGetAddressRange_v2", &range);
    ck_assert_int_eq(range(&begin, &bytes, (uintptr_t)memory), 0);
    return begin == (uintptr_t)memory ? bytes : 0;
}

static void look_at_pieces(const td_settled *where)
{
    ck_assert_uint_ge(piece_at(where->piece[0].memory), (size_t)where->piece[0].bytes);
    for (int i = 1; i < TD_PIECES; i++)
        if (where->piece[i].memory) ck_assert_uint_eq(piece_at(where->piece[i].memory), (size_t)where->piece[i].bytes);
}

/* The third is larger than any before; graphs of those before are made again. */
START_TEST(test_steps_are_of_one_piece_where_ranks_reach_them)
{
    static const int64_t rows[] = { 16, 16, 16, ROWS, ROWS, ROWS, 16, 16, 16 };
    enum { STEPS = sizeof rows / sizeof *rows };
    if (!gpu_for(__func__)) return;
    static model m;
    double losses[2][STEPS];
    reach_now = (reach_notes){ .look = look_at_pieces };
    for (int told = 0; told < 2; told++) {
        make_model(&m, open_gpu((td_options){ 0 }));
        td_transport own = { .self = m.td, .reach = &reach_noted };
        if (told) m.td->run.transport = &own;
        for (int s = 0; s < STEPS; s++) losses[told][s] = td_item(train(&m, rows[s], s));
        size_t piece = piece_at(m.td->arena);
        td_keep(td_sum(td_exp(td_uniform(m.td, TD_SHAPE(4096, 4096))), TD_ALL, TD_DROP));
        ck_assert(td_step(m.td));
        if (told) ck_assert_uint_gt(piece_at(m.td->arena), piece);
        else ck_assert_uint_eq(piece_at(m.td->arena), piece);
        int64_t most, now = td_device_bytes(m.td, &most);
        ck_assert_int_eq(now, most);
        ck_assert_int_eq(now, td_last_report(m.td).peak_bytes);
        losses[told][STEPS - 1] = td_item(train(&m, 16, STEPS));
        close_model(&m);
    }
    for (int s = 0; s < STEPS; s++) ck_assert_double_eq_tol(losses[0][s], losses[1][s], 1e-5); /* algorithms may differ */
    ck_assert_int_ge(reach_now.settled, 3); /* plans, each of which needed more */
    ck_assert_int_ge(reach_now.left - reach_now.left_alone, 3);
    ck_assert_int_eq(reach_now.left_alone, 1);
}
END_TEST

/* State that is asked for before there is an optimizer lies in a piece, what comes later in another. */
START_TEST(test_state_is_of_as_many_pieces_as_times_it_was_laid_out)
{
    if (!gpu_for(__func__)) return;
    static model m;
    td_context *td = open_gpu((td_options){ 0 });
    td_transport own = { .self = td, .reach = &reach_noted };
    float bias[CLASSES] = { 1 }, got[CLASSES];
    int64_t most;
    reach_now = (reach_notes){ .look = look_at_pieces };
    td->run.transport = &own;
    td_module root = td_root(td);
    nn_linear first = nn_linear_make(root, "first", IN, CLASSES);
    ck_assert(td_state_write(first.bias, 0, CLASSES, bias));
    ck_assert_int_eq(td->state_pieces, 1);
    nn_linear wide = nn_linear_make(root, "wide", 4 * HIDDEN, HIDDEN); /* more than is left of a page */
    ck_assert_int_gt(4 * 4 * HIDDEN * HIDDEN, td->page_bytes);
    make_model(&m, td);
    for (int s = 0; s < 3; s++) train(&m, 16, s);
    ck_assert_int_ge(td->state_pieces, 2);
    ck_assert(td_state_read(wide.bias, 0, CLASSES, got));
    ck_assert_int_eq(td_device_bytes(td, &most), td_last_report(td).peak_bytes);
    ck_assert_int_eq(td_device_bytes(td, NULL), most);
    ck_assert(td_state_read(first.bias, 0, CLASSES, got));
    ck_assert_double_eq_tol(got[0], pow(1 - 1e-2 * 0.01, 3), 1e-6); /* has decayed in each update, without a gradient */
    for (int i = 1; i < CLASSES; i++) ck_assert_double_eq(got[i], 0);
    close_model(&m);
}
END_TEST

START_TEST(test_a_step_that_cannot_fit_is_refused_before_memory_is_taken)
{
    if (!gpu_for(__func__)) return;
    td_context *td = open_gpu((td_options){ 0 });
    ck_assert_int_gt(td->options.memory_bytes, 0);
    td_keep(td_exp(td_uniform(td, TD_SHAPE(1 << 20, 1 << 19))));
    ck_assert(!td_step(td));
    ck_assert_int_eq(td_error(td), TD_ERROR_MEMORY);
    ck_assert_str_has(td_error_text(td), "planning: the step needs");
    ck_assert_int_eq(td_device_bytes(td, NULL), 0);
    td_close(td);
}
END_TEST

START_TEST(test_memory_that_is_not_there_is_an_error_one_can_go_on_from)
{
    if (!gpu_for(__func__)) return;
    td_context *td = open_gpu((td_options){ .memory_bytes = INT64_MAX });
    td_keep(td_exp(td_uniform(td, TD_SHAPE(1 << 20, 1 << 19))));
    ck_assert(!td_step(td));
    ck_assert_int_eq(td_error(td), TD_ERROR_MEMORY);
    ck_assert_str_has(td_error_text(td), "out of memory on the GPU: ");
    ck_assert_str_has(td_error_text(td), "bytes for step could not be had");
    td_clear_error(td);
    td_tensor four = td_sum(td_fill(td, TD_F32, TD_SHAPE(4), 1), TD_ALL, TD_DROP);
    td_keep(four);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    ck_assert_double_eq(td_item(four), 4);
    td_close(td);
}
END_TEST

/* Every some allocations of the host's memory, from opening on, one fails. */
START_TEST(test_host_memory_that_runs_out_ends_in_a_sentence_and_leaks_nothing)
{
    if (!gpu_for(__func__)) return;
    static model m;
    memory_test memory = { .refused = -1 };
    td_allocator allocator = { .user = &memory, .get = memory_get, .put = memory_put };
    int failed = 0;
    for (int refused = 0;; refused += 1 + refused / 8) {
        memory_refuse(&memory, refused);
        td_context *td = open_gpu((td_options){ .allocator = &allocator });
        bool ran = td_error(td) == TD_OK;
        make_model(&m, td);
        for (int s = 0; s < 4 && ran; s++) {
            record(&m, 16, s);
            ran = td_step(m.td);
        }
        bool reached = memory.calls > refused;
        ck_assert_msg(ran != reached, "allocation %d failed: %s", refused, td_error_text(m.td));
        if (reached) ck_assert_int_eq(td_error(m.td), TD_ERROR_MEMORY);
        close_model(&m);
        ck_assert_int_eq(memory.held, 0);
        failed += reached;
        if (!reached) break;
    }
    printf("%d allocations failed\n", failed);
    ck_assert_int_gt(failed, 20);
}
END_TEST

/* ---- Values ----------------------------------------------------------------------------------------------- */

enum { DRAWN = 100003 };

static void read_initial(bool gpu, td_init init, float *to)
{
    td_context *td = gpu ? open_gpu((td_options){ 0 }) : td_open(&(td_options){ .threads = 1, .seed = 3, .log = check_log_line });
    td_state before = td_parameter(td_root(td), "before", TD_SHAPE(37), td_init_constant(2)); /* so that it begins within its unit */
    td_state s = td_parameter(td_root(td), "weight", TD_SHAPE(DRAWN), init);
    float two;
    ck_assert_msg(td_state_read(s, 0, DRAWN, to), "%s", td_error_text(td));
    ck_assert(td_state_read(before, 36, 1, &two) && two == 2);
    td_close(td);
}

static void check_initial(const char *name, td_init init, int allowed, int most_different)
{
    static float host[DRAWN], device[DRAWN];
    int different = 0;
    read_initial(false, init, host);
    read_initial(true, init, device);
    for (int i = 0; i < DRAWN; i++) {
        int32_t a, b;
        memcpy(&a, &host[i], sizeof a);
        memcpy(&b, &device[i], sizeof b);
        different += a != b;
        ck_assert_msg(labs((long)a - b) <= allowed, "%s: element %d is %.9g, on the host %.9g", name, i, (double)device[i], (double)host[i]);
    }
    printf("%s: %d of %d differ by a bit\n", name, different, DRAWN);
    ck_assert_int_le(different, most_different);
}

START_TEST(test_initial_values_are_the_hosts)
{
    if (!gpu_for(__func__)) return;
    check_initial("constant", td_init_constant(0.7), 0, 0);
    check_initial("uniform", td_init_uniform(0.3), 0, 0);
    check_initial("normal", td_init_normal(0.02), 1, 3);
    check_initial("truncated normal", td_init_truncated_normal(0.02), 1, 3);
}
END_TEST

START_TEST(test_a_loss_is_read_a_step_late_or_at_the_end)
{
    if (!gpu_for(__func__)) return;
    static model m;
    double direct[8], late[8], last[8];
    td_tensor loss[8];
    for (int way = 0; way < 3; way++) {
        make_model(&m, open_gpu((td_options){ .deterministic = true }));
        for (int s = 0; s < 8; s++) {
            loss[s] = train(&m, s < 3 ? ROWS / 2 : ROWS, s); /* at the fourth step there is more to copy than there is room */
            if (way == 0) direct[s] = td_item(loss[s]);
            else if (way == 1 && s) late[s - 1] = td_item(loss[s - 1]);
            else if (way == 2) ck_assert(td_item_later(loss[s]));
        }
        if (way == 1) late[7] = td_item(loss[7]);
        for (int s = 0; way == 2 && s < 8; s++) last[s] = td_item(loss[s]);
        close_model(&m);
    }
    ck_assert_mem_eq(direct, late, sizeof direct);
    ck_assert_mem_eq(direct, last, sizeof direct);
    ck_assert(direct[7] != direct[0]);
}
END_TEST

/* The host waits for room for its inputs, and then runs what it has not run before. */
START_TEST(test_a_host_that_is_ahead_goes_on_to_another_step)
{
    if (!gpu_for(__func__)) return;
    enum { AHEAD = 16 };
    td_context *td = open_gpu((td_options){ 0 });
    td_tensor sum = { 0 };
    int64_t waits = 0;
    for (int s = 0; s < AHEAD; s++) {
        if (s == 4) waits = td->device_counts.waits;
        td_tensor x = td_uniform(td, TD_SHAPE(4096, 4096));
        td_keep(sum = td_sum(td_matmul(x, x), TD_ALL, TD_DROP));
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
    }
    ck_assert_int_gt(td->device_counts.waits, waits); /* a step takes milliseconds */
    td_tensor four = td_sum(td_fill(td, TD_F32, TD_SHAPE(4), 1), TD_ALL, TD_DROP);
    td_keep(four);
    ck_assert_msg(td_step(td), "%s", td_error_text(td));
    ck_assert_double_eq(td_item(four), 4);
    td_close(td);
}
END_TEST

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

START_TEST(test_a_replayed_step_is_handed_over_in_20_us)
{
    enum { WARM = 10, TIMED = 300 };
    if (!gpu_for(__func__)) return;
    static model m;
    double us[TIMED];
    make_model(&m, open_gpu((td_options){ 0 }));
    for (int s = -WARM; s < TIMED; s++) {
        train(&m, ROWS, 0);
        us[s < 0 ? 0 : s] = td_last_report(m.td).host_us;
    }
    qsort(us, TIMED, sizeof *us, by_value);
    printf("the host hands a replayed step over in %.1f us, the median; a tenth took %.1f\n", us[TIMED / 2], us[TIMED / 10]);
    ck_assert_double_gt(us[TIMED / 10], 0.5);
    ck_assert_double_lt(us[TIMED / 10], 20); /* a busy machine only adds */
    close_model(&m);
}
END_TEST

/* ---- State in the host's memory ----------------------------------------------------------------------------- */

enum { OFFLOADED_STEPS = 24, SETTLED = 6, BATCHES = 8 };

/* Losses of a few steps with state offloaded so, from graphs after the first ones. Returns the report of the last step. */
static td_report train_offloaded(int offload, double losses[OFFLOADED_STEPS])
{
    static model m;
    par_world *world = par_world_threads(1, NULL);
    td_context *td = open_gpu((td_options){ .deterministic = true });
    ck_assert_msg(par_attach(td, world, 0, &(par_options){ .strategy = "single", .offload = offload }), "%s", td_error_text(td));
    make_model(&m, td);
    td_tensor loss[OFFLOADED_STEPS];
    int64_t allocations = 0;
    for (int s = 0; s < OFFLOADED_STEPS; s++) {
        loss[s] = train(&m, ROWS, s % BATCHES);
        if (s) losses[s - 1] = td_item(loss[s - 1]); /* two steps are on their way, with their rates each in its own memory */
        if (s == SETTLED) allocations = td->device_counts.allocations;
    }
    losses[OFFLOADED_STEPS - 1] = td_item(loss[OFFLOADED_STEPS - 1]);
    ck_assert_int_eq(td->device_counts.allocations, allocations);
    ck_assert_int_ge(td->device_counts.replays, OFFLOADED_STEPS - SETTLED);
    td_report report = td_last_report(td);
    close_model(&m);
    par_world_close(world);
    return report;
}

START_TEST(test_offloaded_state_learns_as_state_on_the_gpu)
{
    if (!gpu_for(__func__)) return;
    const int64_t state = (IN + 1) * HIDDEN + (HIDDEN + 1) * CLASSES;
    const int offloads[] = { PAR_OFFLOAD_OPTIMIZER, PAR_OFFLOAD_PARAMETERS, PAR_OFFLOAD_OPTIMIZER | PAR_OFFLOAD_PARAMETERS };
    double on_device[OFFLOADED_STEPS], losses[OFFLOADED_STEPS];
    td_report all = train_offloaded(0, on_device);
    ck_assert_int_eq(all.host_bytes, 0);
    double fall = on_device[0] - on_device[OFFLOADED_STEPS - 1];
    ck_assert(fall > 0);
    for (int i = 0; i < 3; i++) {
        td_report r = train_offloaded(offloads[i], losses);
        int parts = (offloads[i] & PAR_OFFLOAD_OPTIMIZER ? 2 : 0) + (offloads[i] & PAR_OFFLOAD_PARAMETERS ? 1 : 0);
        ck_assert_int_ge(r.host_bytes, parts * 4 * state);
        for (int s = 0; s < OFFLOADED_STEPS; s++)
            ck_assert_msg(fabs(losses[s] - on_device[s]) <= 2e-5 * fall, "offload %d, step %d: %.9g, not %.9g", offloads[i], s, losses[s],
                          on_device[s]);
    }
}
END_TEST

/* ---- Inputs -------------------------------------------------------------------------------------------------- */

static void check_all_are(td_tensor most, td_tensor least, double wanted)
{
    ck_assert_double_eq(td_item(most), wanted);
    ck_assert_double_eq(td_item(least), wanted);
}

/* A GPU that is behind reads a step's input long after td_step. */
START_TEST(test_inputs_may_be_written_again_when_they_have_been_read)
{
    enum { STEPS = 12, COUNT = 1 << 20, SIDE = 4096 };
    if (!gpu_for(__func__)) return;
    td_context *td = open_gpu((td_options){ 0 });
    td_tensor most[2] = { 0 }, least[2] = { 0 };
    float *x = td_input_memory(td, COUNT * sizeof *x);
    ck_assert_no_error(td);
    for (int s = 0; s < STEPS; s++) {
        for (int i = 0; i < COUNT; i++) x[i] = (float)(s + 1);
        td_tensor busy = td_uniform(td, TD_SHAPE(SIDE, SIDE)), in = td_batch(td, "x", TD_F32, TD_SHAPE(COUNT), x);
        for (int i = 0; i < 8; i++) busy = td_scale(td_matmul(busy, busy), 1e-4);
        td_keep(td_sum(busy, TD_ALL, TD_DROP));
        td_keep(most[s % 2] = td_max(in, TD_ALL, TD_DROP));
        td_keep(least[s % 2] = td_neg(td_max(td_neg(in), TD_ALL, TD_DROP)));
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
        if (s) check_all_are(most[(s - 1) % 2], least[(s - 1) % 2], s);
        ck_assert(td_input_wait(td, x, COUNT * sizeof *x));
    }
    check_all_are(most[(STEPS - 1) % 2], least[(STEPS - 1) % 2], STEPS);
    td_input_memory_free(td, x, COUNT * sizeof *x);
    td_close(td);
}
END_TEST

/* ---- Graphs ----------------------------------------------------------------------------------------------- */

static bool five_shape(td_call *call)
{
    call->out[0].shape = (td_shape){ 0 };
    call->out[0].dtype = TD_I32;
    return true;
}

static void five_cpu(const td_kernel *k) { *(int32_t *)k->out[0].data = 5; }

/* The queue writes it itself: in a graph that is a node of which the runtime knows nothing, as those are by which copy engines wait. */
TD_CUDA_KERNEL(five_cuda);
void five_cuda(const td_kernel *k)
{
    int (*write)(void *queue, uintptr_t to, uint32_t value, unsigned flags);
    find_in_driver("cuStreamWriteValue32_v2", &write);
    ck_assert_int_eq(write(k->run->queue, (uintptr_t)k->out[0].data, 5, 0), 0);
}

static const td_op five = { .name = "five", .inputs = 1, .shape = five_shape, .cpu = five_cpu, .cuda = TD_CUDA(five_cuda) };

START_TEST(test_graphs_may_have_nodes_that_only_the_driver_knows)
{
    if (!gpu_for(__func__)) return;
    td_context *td = open_gpu((td_options){ 0 });
    for (int s = 0; s < 5; s++) {
        td_tensor x = td_uniform(td, TD_SHAPE(100)), y = td_record(&five, TD_HERE, 1, &x, NULL);
        td_keep(y);
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
        ck_assert_double_eq(td_item(y), 5);
    }
    ck_assert_int_eq(td->device_counts.graphs, TD_INPUT_SETS);
    ck_assert_int_gt(td->device_counts.others, 0);
    td_close(td);
}
END_TEST

/* Products and attention large enough for what libraries count in memory that they clear before. */
START_TEST(test_graphs_of_products_and_attention_are_of_kernels_alone)
{
    enum { STEPS = 40, WIDTH = 512, LAYERS = 4 };
    if (!gpu_for(__func__)) return;
    td_context *td = open_gpu((td_options){ .dtype = TD_BF16 });
    td_module root = td_root(td);
    nn_attention layer[LAYERS];
    char name[16];
    double us[STEPS], first = 0, last = 0;
    for (int l = 0; l < LAYERS; l++) {
        snprintf(name, sizeof name, "h.%d", l);
        layer[l] = nn_attention_make(root, name, WIDTH, 8);
    }
    opt_optimizer *opt = opt_adamw(root, NULL);
    for (int s = 0; s < STEPS; s++) {
        td_tensor x = td_uniform(td, TD_SHAPE(8, 256, WIDTH)), y = x;
        for (int l = 0; l < LAYERS; l++) y = td_add(y, nn_attention_apply(&layer[l], y));
        td_tensor loss = td_mean(td_square(y), TD_ALL, TD_DROP);
        td_backward(loss);
        opt_step(opt, 1e-3);
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
        us[s] = td_last_report(td).host_us;
        if (s == 0 || s == STEPS - 1) *(s ? &last : &first) = td_item(loss);
    }
    ck_assert_double_lt(last, first);
    ck_assert_int_eq(td->device_counts.graphs, TD_INPUT_SETS);
    ck_assert_int_eq(td->device_counts.others, 0);
    qsort(us, STEPS, sizeof *us, by_value);
    printf("the host hands a step of %d layers over in %.1f us, the median; a tenth took %.1f\n", LAYERS, us[STEPS / 2], us[STEPS / 10]);
    opt_close(opt);
    td_close(td);
}
END_TEST

/* ---- The profile ------------------------------------------------------------------------------------------ */

START_TEST(test_tasks_are_timed_within_their_run)
{
    if (!gpu_for(__func__)) return;
    static model m;
    make_model(&m, open_gpu((td_options){ 0 }));
    for (int s = 0; s < 3; s++) train(&m, ROWS, s);
    ck_assert(td_profile_begin(m.td, 4));
    for (int s = 0; s < 4; s++) train(&m, ROWS, s);
    td_profile_end(m.td);
    int64_t tasks = 0, last_ns[2] = { 0 }, total[2] = { 0 }, calls = td_last_report(m.td).calls; /* of what is not aside, and of what is */
    for (int64_t i = 0; i < td_profile_count(m.td); i++) {
        td_profile_event e = td_profile_at(m.td, i);
        if (e.task) {
            int aside = e.task->aside;
            ck_assert_int_ge(e.begin_ns, last_ns[aside]);
            ck_assert_int_ge(e.end_ns, e.begin_ns);
            last_ns[aside] = e.end_ns;
            total[aside] += e.end_ns - e.begin_ns;
            tasks++;
        } else if (!strcmp(e.name, "run")) {
            for (int aside = 0; aside < 2; aside++) {
                ck_assert_int_ge(e.end_ns, last_ns[aside]);
                ck_assert_int_le(total[aside], e.end_ns - e.begin_ns);
                total[aside] = 0;
            }
        }
    }
    ck_assert_int_eq(tasks, 4 * calls);
    close_model(&m);
}
END_TEST

START_TEST(test_a_profile_owns_the_names_of_kernels_that_were_chosen)
{
    if (!gpu_for(__func__)) return;
    td_context *td = open_gpu((td_options){ .dtype = TD_BF16 });
    int attentions = 0;
    ck_assert(td_profile_begin(td, 2));
    for (int s = 0; s < 2; s++) {
        td_tensor q = td_uniform(td, TD_SHAPE(2, 2, 64, 64)), y = td_attention(q, q, q, &(td_attention_options){ .causal = true });
        td_keep(td_sum(y, TD_ALL, TD_DROP));
        ck_assert_msg(td_step(td), "%s", td_error_text(td));
    }
    for (int64_t i = 0; i < td_profile_count(td); i++) {
        td_profile_event e = td_profile_at(td, i);
        if (!e.task || strcmp(e.task->kind, "attention")) continue;
        ck_assert(*e.task->parts);
        attentions++;
    }
    ck_assert_int_eq(attentions, 2);
    td_profile_clear(td); /* frees what is the profile's, and nothing else */
    td_close(td);
}
END_TEST

START_TEST(test_the_floor_is_the_gpus)
{
    if (!gpu_for(__func__)) return;
    td_machine gpu;
    td_context *td = open_gpu((td_options){ .dtype = TD_BF16 });
    ck_assert_msg(td_machine_measure(td, 1, &gpu), "%s", td_error_text(td));
    printf("%s: bf16 %.1f TFLOP/s, f32 %.1f TFLOP/s, copies %.0f GB/s\n", gpu.name, 1e-12 * gpu.flops[TD_BF16], 1e-12 * gpu.flops[TD_F32],
           1e-9 * gpu.bytes);
    ck_assert(*gpu.name);
    ck_assert(gpu.flops[TD_BF16] > gpu.flops[TD_F32] && gpu.flops[TD_F32] > 1e12 && gpu.bytes > 1e11);
    td_close(td);
}
END_TEST

/* ---- Algorithms of products ------------------------------------------------------------------------------- */

static void damage(const char *path)
{
    int fd = open(path, O_WRONLY);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(pwrite(fd, "damaged", 7, 40), 7);
    close(fd);
}

/* Files of the cache that keep a product's algorithm; each is damaged if asked for. */
static int kept_products(const char *directory, bool damages)
{
    int count = 0;
    DIR *d = opendir(directory);
    for (struct dirent *e; d && (e = readdir(d));) {
        char path[512];
        if (strncmp(e->d_name, "product-", 8)) continue;
        snprintf(path, sizeof path, "%s/%s", directory, e->d_name);
        if (damages) damage(path);
        count++;
    }
    if (d) closedir(d);
    return count;
}

static void clear_directory(const char *directory)
{
    DIR *d = opendir(directory);
    for (struct dirent *e; d && (e = readdir(d));) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", directory, e->d_name);
        if (*e->d_name != '.') unlink(path);
    }
    if (d) closedir(d);
}

static double loss_after(int steps, bool deterministic)
{
    static model m;
    td_tensor loss = { 0 };
    make_model(&m, open_gpu((td_options){ .deterministic = deterministic }));
    for (int s = 0; s < steps; s++) loss = train(&m, ROWS, s);
    double value = td_item(loss);
    close_model(&m);
    return value;
}

START_TEST(test_algorithms_are_kept_and_damaged_ones_chosen_again)
{
    if (!gpu_for(__func__)) return;
    const char *directory = "test_device_cache";
    clear_directory(directory);
    setenv("TANDEM_CACHE", directory, 1);
    loss_after(3, true);
    ck_assert_int_eq(kept_products(directory, false), 0); /* nothing is timed */
    double first = loss_after(3, false);
    int kept = kept_products(directory, false);
    ck_assert_int_ge(kept, 5); /* two products forward, three backward */
    double second = loss_after(3, false);
    ck_assert_mem_eq(&first, &second, sizeof first);
    ck_assert_int_eq(kept_products(directory, true), kept);
    double third = loss_after(3, false);
    ck_assert(fabs(third - first) < 1e-4);
    double fourth = loss_after(3, false);
    ck_assert_mem_eq(&third, &fourth, sizeof third);
    ck_assert_int_eq(kept_products(directory, false), kept);
    unsetenv("TANDEM_CACHE");
}
END_TEST

START_TEST(test_a_deterministic_context_gives_the_same_bits_without_a_cache)
{
    if (!gpu_for(__func__)) return;
    setenv("TANDEM_CACHE", "off", 1);
    double first = loss_after(6, true), second = loss_after(6, true);
    ck_assert_mem_eq(&first, &second, sizeof first);
    unsetenv("TANDEM_CACHE");
}
END_TEST

TESTS("device", test_the_planned_peak_is_what_is_asked_of_the_gpu, test_what_grows_stays_where_it_is,
      test_steps_are_of_one_piece_where_ranks_reach_them, test_state_is_of_as_many_pieces_as_times_it_was_laid_out,
      test_a_step_that_cannot_fit_is_refused_before_memory_is_taken, test_memory_that_is_not_there_is_an_error_one_can_go_on_from,
      test_host_memory_that_runs_out_ends_in_a_sentence_and_leaks_nothing,
      test_initial_values_are_the_hosts, test_a_loss_is_read_a_step_late_or_at_the_end,
      test_a_host_that_is_ahead_goes_on_to_another_step,
      test_a_replayed_step_is_handed_over_in_20_us, test_offloaded_state_learns_as_state_on_the_gpu,
      test_inputs_may_be_written_again_when_they_have_been_read, test_graphs_may_have_nodes_that_only_the_driver_knows,
      test_graphs_of_products_and_attention_are_of_kernels_alone, test_tasks_are_timed_within_their_run,
      test_a_profile_owns_the_names_of_kernels_that_were_chosen, test_the_floor_is_the_gpus,
      test_algorithms_are_kept_and_damaged_ones_chosen_again, test_a_deterministic_context_gives_the_same_bits_without_a_cache)
