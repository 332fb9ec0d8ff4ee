/* Memory of the host that a GPU reads and writes later than the call that asks for it: inputs, what a loader gives, kept values. The host is
 * the GPU (tests/on_host), late: it runs no more than the host has waited for, so that what is written or looked at too early shows. What
 * a step computes is then, to the bit, what it is where all is done at once.
 *
 * Labels: on_host
 */
#include <time.h>

#include "tests/check.h"
#include "tests/on_host/faults.h"

#include <tandem/data.h>
#include <tandem/nn.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

enum { STEPS = 24, ROWS = 16, IN = 24, HIDDEN = 16, CLASSES = 5 };

/* What has been computed, in bits. */
typedef struct curve {
    double loss[STEPS];                       /* 0: nobody looked */
    double parameters;                        /* a sum of all */
} curve;

typedef struct model {
    td_context *td;
    par_world *world;                         /* of this rank alone */
    nn_linear layer[2];
    opt_optimizer *opt;
} model;

/* Offloaded: the host has calls of each step, behind the GPU's. */
typedef enum execution { AT_ONCE, LATE, OFFLOADED_AT_ONCE, OFFLOADED_LATE } execution;

static model open_model(execution how)
{
    setenv("ON_HOST_LATE", how == LATE || how == OFFLOADED_LATE ? "1" : "0", 1);
    model m = { .td = td_open(&(td_options){ .device = "cuda", .seed = 3, .threads = 1, .log = check_log_line }) };
    if (how >= OFFLOADED_AT_ONCE) {
        m.world = par_world_threads(1, NULL);
        par_attach(m.td, m.world, 0, &(par_options){ .strategy = "single", .offload = PAR_OFFLOAD_OPTIMIZER | PAR_OFFLOAD_PARAMETERS });
    }
    ck_assert_no_error(m.td);
    m.layer[0] = nn_linear_make(td_root(m.td), "in", IN, HIDDEN);
    m.layer[1] = nn_linear_make(td_root(m.td), "out", HIDDEN, CLASSES);
    m.opt = opt_adamw(td_root(m.td), NULL);
    return m;
}

static void close_model(model *m)
{
    ck_assert_no_error(m->td);
    opt_close(m->opt);
    td_close(m->td);
    if (m->world) par_world_close(m->world);
}

/* A step at a rate of its own, whose loss is not looked at. */
static td_tensor step(const model *m, int s, td_tensor x, td_tensor y)
{
    td_tensor loss = td_cross_entropy(nn_linear_apply(&m->layer[1], td_relu(nn_linear_apply(&m->layer[0], x))), y);
    td_backward(loss);
    opt_step(m->opt, 1e-2 / (1 + s % 3));
    ck_assert_msg(td_step(m->td), "%s", td_error_text(m->td));
    return loss;
}

/* When all has been handed over. Losses that were asked for later are looked at. */
static curve curve_of(const model *m, const td_tensor loss[STEPS], bool looks)
{
    curve c = { 0 };
    for (int s = 0; s < STEPS && looks; s++) c.loss[s] = td_item(loss[s]);
    c.parameters = sum_of_parameters(m->td);
    return c;
}

static bool is_same(curve a, curve b) { return memcmp(&a, &b, sizeof a) == 0; }

/* ---- Inputs */

typedef struct batch {
    float x[ROWS * IN];
    int32_t y[ROWS];
} batch;

static void write_x(batch *b, int s)
{
    for (int i = 0; i < ROWS * IN; i++) b->x[i] = (float)check_normal((uint64_t)(s * ROWS * IN + i + 1));
}

static void write_y(batch *b, int s)
{
    for (int i = 0; i < ROWS; i++) b->y[i] = (i * 7 + s) % CLASSES;
}

/* ONE: of a batch either x or y, in turn. */
typedef enum memory { PLAIN, INPUTS, ONE, INPUTS_WITHOUT_WAITING } memory;
/* Of batches: `count` places in turn, each written over right behind the step that was given it, or when it may be. Whoever asks for losses
 * waits for older steps. */
typedef struct training {
    memory memory;
    int count;
    bool looks;
} training;

static void wait_and_write(const model *m, batch *b, int s, memory of)
{
    for (int i = 0; i < 2; i++) {
        bool x = i == s % 2;
        if (of == INPUTS || of == ONE) ck_assert(x ? td_input_wait(m->td, b->x, sizeof b->x) : td_input_wait(m->td, b->y, sizeof b->y));
        if (x) write_x(b, s);
        else write_y(b, s);
    }
}

static curve train(training t, execution how)
{
    model m = open_model(how);
    int64_t bytes = t.count * (int64_t)sizeof(batch);
    batch *places = t.memory == PLAIN ? check_alloc((size_t)bytes) : td_input_memory(m.td, bytes);
    td_tensor loss[STEPS];
    for (int s = 0; s < STEPS; s++) {
        batch *b = &places[s % t.count], plain;
        wait_and_write(&m, b, s, t.memory);
        plain = *b;
        const float *x = t.memory == ONE && s % 2 ? plain.x : b->x;
        const int32_t *y = t.memory == ONE && s % 2 == 0 ? plain.y : b->y;
        loss[s] = step(&m, s, td_batch(m.td, "x", TD_F32, TD_SHAPE(ROWS, IN), x), td_batch(m.td, "y", TD_I32, TD_SHAPE(ROWS), y));
        ck_assert(!t.looks || td_item_later(loss[s]));
        memset(&plain, 0, sizeof plain);
        if (t.memory == PLAIN) memset(b, 0, sizeof *b);
    }
    curve c = curve_of(&m, loss, t.looks);
    if (t.memory != PLAIN) td_input_memory_free(m.td, places, bytes);
    close_model(&m);
    return c;
}

START_TEST(test_memory_that_is_no_inputs_is_free_behind_the_step)
{
    for (int looks = 0; looks <= 1; looks++) {
        training t = { .memory = PLAIN, .count = 1, .looks = looks };
        curve at_once = train(t, AT_ONCE);
        if (looks) ck_assert(at_once.loss[STEPS - 1] < at_once.loss[0]);
        ck_assert(is_same(train(t, LATE), at_once));
    }
}
END_TEST

/* What the GPU reads itself is not written over by what the host copies for the same step. */
START_TEST(test_one_input_may_be_read_and_another_copied)
{
    for (int count = 1; count <= 3; count++) {
        training t = { .memory = ONE, .count = count, .looks = true }, plain = t;
        plain.memory = PLAIN;
        curve want = train(plain, AT_ONCE);
        ck_assert(is_same(train(t, AT_ONCE), want));
        ck_assert(is_same(train(t, LATE), want));
    }
}
END_TEST

/* With one place the host waits for each step's copy; with two the next is under way. */
START_TEST(test_inputs_memory_is_free_when_it_was_waited_for)
{
    for (int i = 0; i < 6; i++) {
        training t = { .memory = INPUTS, .count = 1 + i / 2, .looks = i % 2 }, plain = t;
        plain.memory = PLAIN;
        ck_assert(is_same(train(t, LATE), train(plain, LATE)));
    }
}
END_TEST

/* The test above can fail. */
START_TEST(test_inputs_memory_is_read_late)
{
    for (int i = 0; i < 4; i++) {
        training t = { .memory = INPUTS_WITHOUT_WAITING, .count = 1 + i / 2, .looks = i % 2 };
        curve at_once = train(t, AT_ONCE), late = train(t, LATE);
        ck_assert(late.parameters != at_once.parameters);
        if (t.looks) ck_assert(late.loss[0] != at_once.loss[0]);
    }
}
END_TEST

/* Whose updates read the step's numbers from where the host wrote them. */
START_TEST(test_what_the_host_computes_reads_its_own_step)
{
    for (int i = 0; i < 4; i++) {
        training t = { .memory = i / 2 ? INPUTS : PLAIN, .count = 1, .looks = i % 2 };
        ck_assert(is_same(train(t, OFFLOADED_LATE), train(t, OFFLOADED_AT_ONCE)));
    }
}
END_TEST

/* ---- What a loader gives */

enum { SAMPLES = 8 * ROWS };

static data_loader_options one_ahead(void)
{
    return (data_loader_options){ .batch = ROWS, .seed = 7, .shuffle = true, .threads = 1, .prefetch = 1 };
}

static curve train_on_loader(data_loader_options options, bool looks, execution how)
{
    static float x[SAMPLES * IN];
    static int32_t y[SAMPLES];
    for (int i = 0; i < SAMPLES * IN; i++) x[i] = (float)check_normal((uint64_t)(i + 1));
    for (int i = 0; i < SAMPLES; i++) y[i] = i * 7 % CLASSES;
    model m = open_model(how);
    data_set *set = data_memory(m.td, (data_array[]){ { "x", TD_F32, TD_SHAPE(SAMPLES, IN), x, 0 }, { "y", TD_I32, TD_SHAPE(SAMPLES), y, 0 } }, 2);
    data_loader *loader = data_loader_open(m.td, set, &options);
    td_tensor loss[STEPS];
    data_batch b;
    for (int s = 0; s < STEPS && data_next(loader, &b); s++) {
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL); /* in which the loader's thread writes what it may */
        loss[s] = step(&m, s, data_get(&b, "x"), data_get(&b, "y"));
        ck_assert(!looks || td_item_later(loss[s]));
    }
    ck_assert_no_error(m.td);
    curve c = curve_of(&m, loss, looks);
    data_loader_close(loader);
    data_set_close(set);
    close_model(&m);
    return c;
}

/* With as few batches held and ahead as may be, and as many as there are when nobody says. */
START_TEST(test_a_loader_writes_what_has_been_read)
{
    data_loader_options options[] = { one_ahead(), one_ahead(), one_ahead() };
    options[1].hold = 1;
    options[2].prefetch = 0;
    for (int i = 0; i < 6; i++) {
        curve at_once = train_on_loader(options[i / 2], i % 2, AT_ONCE);
        if (i % 2) ck_assert(at_once.loss[STEPS - 1] < at_once.loss[0]);
        ck_assert(is_same(train_on_loader(options[i / 2], i % 2, LATE), at_once));
    }
}
END_TEST

/* ---- Kept values */

/* Of each step; squares: of the hidden layer's. */
typedef struct values {
    double loss[STEPS], squares[STEPS];
} values;

/* Read so many steps late, which may be one. */
static values read_behind(int steps, execution how)
{
    static batch b;
    values v;
    model m = open_model(how);
    td_tensor loss[STEPS], squares[STEPS];
    for (int s = 0; s < STEPS + steps; s++) {
        if (s < STEPS) {
            write_x(&b, s);
            write_y(&b, s);
            td_tensor x = td_batch(m.td, "x", TD_F32, TD_SHAPE(ROWS, IN), b.x), y = td_batch(m.td, "y", TD_I32, TD_SHAPE(ROWS), b.y);
            squares[s] = td_sum(td_square(nn_linear_apply(&m.layer[0], x)), TD_ALL, TD_DROP);
            td_keep(squares[s]);
            loss[s] = step(&m, s, x, y);
        }
        if (s < steps) continue;
        v.loss[s - steps] = td_item(loss[s - steps]);
        v.squares[s - steps] = td_item(squares[s - steps]);
    }
    close_model(&m);
    return v;
}

START_TEST(test_values_read_a_step_late_are_those_of_their_step)
{
    values at_once = read_behind(0, AT_ONCE);
    for (int s = 1; s < STEPS; s++) ck_assert(at_once.loss[s] != at_once.loss[s - 1] && at_once.squares[s] != at_once.squares[s - 1]);
    for (int steps = 0; steps <= 1; steps++) {
        values late = read_behind(steps, LATE);
        ck_assert_mem_eq(&late, &at_once, sizeof late);
    }
}
END_TEST

/* ---- The host as a late GPU */

START_TEST(test_a_late_stream_runs_what_the_host_waits_for)
{
    float out[2][FAULT_THREADS] = { 0 }, ones[FAULT_THREADS], sum = FAULT_THREADS * (FAULT_THREADS - 1) / 2;
    cudaStream_t stream, other;
    cudaEvent_t event;
    setenv("ON_HOST_LATE", "1", 1);
    for (int i = 0; i < FAULT_THREADS; i++) ones[i] = 1;
    ck_assert_int_eq(cudaStreamCreateWithFlags(&stream, 0), cudaSuccess);
    ck_assert_int_eq(cudaStreamCreateWithFlags(&other, 0), cudaSuccess);
    ck_assert_int_eq(cudaEventCreate(&event), cudaSuccess);
    for (int polls = 0; polls <= 1; polls++) {
        memset(out, 0, sizeof out);
        fault_launch(FAULT_NONE, out[0], ones, stream);
        ck_assert_int_eq(cudaEventRecord(event, stream), cudaSuccess);
        fault_launch(FAULT_NONE, out[1], ones, other);
        ck_assert_float_eq(out[0][0], 0);
        if (polls) ck_assert_int_eq(cudaEventQuery(event), cudaErrorNotReady);
        else ck_assert_int_eq(cudaEventSynchronize(event), cudaSuccess);
        ck_assert_int_eq(cudaGetLastError(), polls ? cudaErrorNotReady : cudaSuccess);
        ck_assert_int_eq(cudaEventQuery(event), cudaSuccess);
        ck_assert_float_eq(out[0][0], sum);
        ck_assert_float_eq(out[1][0], 0);
        ck_assert_int_eq(cudaStreamSynchronize(other), cudaSuccess);
        ck_assert_float_eq(out[1][0], sum);
    }
    fault_launch(FAULT_BARRIER, out[0], ones, stream); /* an error is heard of when the host waits, once */
    ck_assert_int_eq(cudaGetLastError(), cudaSuccess);
    ck_assert_int_eq(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
    ck_assert_int_eq(cudaStreamSynchronize(other), cudaSuccess);
    ck_assert_int_eq(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
    ck_assert_int_eq(cudaGetLastError(), cudaErrorLaunchFailure);
    ck_assert_int_eq(cudaStreamSynchronize(stream), cudaSuccess);
    cudaEventDestroy(event);
    cudaStreamDestroy(stream);
    cudaStreamDestroy(other);
}
END_TEST

TESTS("late_on_host", test_memory_that_is_no_inputs_is_free_behind_the_step, test_one_input_may_be_read_and_another_copied,
      test_inputs_memory_is_free_when_it_was_waited_for, test_inputs_memory_is_read_late, test_what_the_host_computes_reads_its_own_step, test_a_loader_writes_what_has_been_read,
      test_values_read_a_step_late_are_those_of_their_step, test_a_late_stream_runs_what_the_host_waits_for)
