/* Rehearsals: what collectives give, count and take where one rank of many is there alone, on the CPU and on a GPU; that a step of it is planned
 * and takes memory as a rank of that world does; worlds that cannot be.
 *
 * As test_rehearsal_on_host the GPU is the host (on_host/CMakeLists.txt).
 * Labels: gpu
 */
#include "core/internal.h"
#include "parallel/world.h"
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>

enum { RANKS = 3, MOST = 5000 };

static const char *const devices[] = { "cpu", "cuda" };
enum { DEVICES = sizeof devices / sizeof *devices };

/* ---- A world */

typedef struct told {
    double seconds;             /* what each collective takes */
    par_call last;
    int calls;
} told;

static double seconds_of(const void *user, const par_call *call)
{
    told *t = (told *)user;
    t->last = *call;
    t->calls++;
    return t->seconds;
}

typedef struct one {
    td_context *td;
    par_world *world;
} one;

static td_context *open_on(const char *device)
{
    return td_open(&(td_options){ .device = device, .threads = 1, .seed = 3, .log = check_log_line });
}

/* .td NULL: there is no such device, and the test counts as skipped there. */
static one open_one(const char *device, int ranks, const char *strategy, told *t, const char *test)
{
    one o = { .td = open_on(device) };
    if (td_error(o.td) != TD_OK) {
        check_skip(test, "no CUDA device");
        td_close(o.td);
        return (one){ .td = NULL };
    }
    o.world = par_world_rehearsed(ranks, &(par_rehearsal){ .seconds = seconds_of, .user = t, .multiprocessors = 2 });
    ck_assert_ptr_nonnull(o.world);
    ck_assert_msg(par_attach(o.td, o.world, 0, &(par_options){ .strategy = strategy }), "%s", td_error_text(o.td));
    return o;
}

static void close_one(one *o)
{
    td_close(o->td);
    par_world_close(o->world);
}

/* ---- Collectives */

/* Whole numbers, of which the sum over ranks is one too that each dtype holds. */
static int value_at(int64_t i) { return (int)(i * 37 % 19) - (int)(i % 2) * 8; }

static void put(td_dtype dtype, void *to, int64_t i, int x)
{
    double wide = x;
    float narrow = (float)x;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    switch (dtype) {
    case TD_F32: ((float *)to)[i] = narrow; break;
    case TD_F64: ((double *)to)[i] = wide; break;
    case TD_BF16: ((uint16_t *)to)[i] = (uint16_t)(bits >> 16); break;
    case TD_I32: ((int32_t *)to)[i] = x; break;
    case TD_I64: ((int64_t *)to)[i] = x; break;
    default: ((uint8_t *)to)[i] = (uint8_t)x; break;
    }
}

typedef enum how { REDUCES, SCATTERS, SCATTERS_IN_PLACE, GATHERS, GATHERS_IN_PLACE, EXCHANGES, HOWS } how;

/* What element i of what comes out of `what` is, where a part has `count`. */
static int expected(how what, int64_t count, int64_t i)
{
    switch (what) {
    case REDUCES: case SCATTERS: case SCATTERS_IN_PLACE: return RANKS * value_at(i);
    case GATHERS: case GATHERS_IN_PLACE: return value_at(i % count);
    default: return value_at(i);
    }
}

static bool make_call(const td_transport *t, how what, char *in, char *out, int64_t count, td_dtype dtype)
{
    switch (what) {
    case REDUCES: return t->all_reduce(t->self, 0, in, count, dtype);
    case SCATTERS: return t->reduce_scatter(t->self, 0, in, out, count, dtype);
    case SCATTERS_IN_PLACE: return t->reduce_scatter(t->self, 0, in, in, count, dtype);
    case GATHERS: return t->all_gather(t->self, 0, in, out, count, dtype);
    case GATHERS_IN_PLACE: return t->all_gather(t->self, 0, in, in, count, dtype);
    default: return t->all_to_all(t->self, 0, in, out, count, dtype);
    }
}

static void check_call(const one *o, how what, int64_t count, td_dtype dtype, char *in, char *out)
{
    static char host[8 * RANKS * MOST], want[8 * RANKS * MOST];
    bool in_place = what == REDUCES || what == SCATTERS_IN_PLACE || what == GATHERS_IN_PLACE;
    bool sums = what == REDUCES || what == SCATTERS || what == SCATTERS_IN_PLACE;
    int64_t item = td_dtype_size(dtype), all = what == REDUCES ? count : RANKS * count, results = sums ? count : RANKS * count, calls;
    const par_collective kind = what == REDUCES ? PAR_ALL_REDUCE : sums ? PAR_REDUCE_SCATTER : what == EXCHANGES ? PAR_ALL_TO_ALL : PAR_ALL_GATHER;
    for (int64_t i = 0; i < all; i++) put(dtype, host, i, value_at(i));
    for (int64_t i = 0; i < results; i++) put(dtype, want, i, expected(what, count, i));
    ck_assert(o->td->device->write(o->td, in, host, all * item));
    memset(host, 0xA5, sizeof host);
    if (!in_place) ck_assert(o->td->device->write(o->td, out, host, RANKS * MOST * 8));
    int64_t before = par_sent(o->world, 0, &calls), after_calls;
    ck_assert_msg(make_call(o->td->run.transport, what, in, out, count, dtype), "%s", td_error_text(o->td));
    ck_assert_int_eq(par_sent(o->world, 0, &after_calls) - before, par_bytes_sent(kind, RANKS, count, dtype));
    ck_assert_int_eq(after_calls - calls, 1);
    ck_assert(o->td->device->read(o->td, host, in_place ? in : out, RANKS * MOST * 8));
    ck_assert_msg(!memcmp(host, want, (size_t)(results * item)), "%s %d of %lld %s", par_collective_name(kind), what, (long long)count,
                  td_dtype_name(dtype));
    int64_t beyond = 0;
    for (int64_t b = results * item; !in_place && b < (int64_t)sizeof host; b++) beyond += host[b] != (char)0xA5;
    ck_assert_int_eq(beyond, 0);
}

START_TEST(test_collectives_give_as_many_of_ones_own)
{
    static const td_dtype dtypes[] = { TD_F32, TD_F64, TD_BF16, TD_I32, TD_I64, TD_U8 };
    static const int64_t counts[] = { 1, 7, 64, 4999, MOST };
    for (int d = 0; d < DEVICES; d++) {
        told t = { .seconds = 1e-4 };
        one o = open_one(devices[d], RANKS, "ddp", &t, __func__);
        if (!o.td) continue;
        char *in = o.td->device->get(o.td, RANKS * MOST * 8, "state"), *out = o.td->device->get(o.td, RANKS * MOST * 8, "state");
        ck_assert(in && out);
        for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
                for (how what = REDUCES; what < HOWS; what++)
                    if (dtypes[i] != TD_U8 || what >= GATHERS) check_call(&o, what, counts[c], dtypes[i], in, out);
        ck_assert_int_eq(t.last.ranks, RANKS);
        ck_assert_int_eq(t.last.stride, 1);
        ck_assert_int_eq(t.last.task.sent, par_bytes_sent(PAR_ALL_TO_ALL, RANKS, MOST, TD_U8));
        o.td->device->put(o.td, out, RANKS * MOST * 8, "state");
        o.td->device->put(o.td, in, RANKS * MOST * 8, "state");
        close_one(&o);
    }
}
END_TEST

START_TEST(test_nothing_of_no_elements_is_asked_of_the_device)
{
    for (int d = 0; d < DEVICES; d++) {
        told t = { .seconds = 1e-4 };
        one o = open_one(devices[d], RANKS, "ddp", &t, __func__);
        if (!o.td) continue;
        const td_transport *by = o.td->run.transport;
        ck_assert(by->all_gather(by->self, 0, NULL, NULL, 0, TD_F32));
        ck_assert(by->all_reduce(by->self, 0, NULL, 0, TD_F32));
        ck_assert(by->broadcast(by->self, 0, 1, NULL, 100));
        ck_assert(by->barrier(by->self));
        close_one(&o);
    }
}
END_TEST

/* ---- Steps */

enum { ROWS = 24, IN = 37, HIDDEN = 48, CLASSES = 5, STEPS = 6 };

typedef struct model {
    nn_linear hidden, out;
    opt_optimizer *opt;
    float x[ROWS * IN];
    int32_t y[ROWS];
} model;

static void record(model *m, td_context *td)
{
    for (int i = 0; i < ROWS * IN; i++) m->x[i] = (float)check_normal((uint64_t)(i + 1));
    for (int i = 0; i < ROWS; i++) m->y[i] = i * 7 % CLASSES;
    td_tensor h = td_batch(td, "x", TD_F32, TD_SHAPE(ROWS, IN), m->x), y = td_batch(td, "y", TD_I32, TD_SHAPE(ROWS), m->y);
    td_backward(td_cross_entropy(nn_linear_apply(&m->out, td_gelu(nn_linear_apply(&m->hidden, h))), y));
    opt_step(m->opt, 1e-2);
}

static void make_model(model *m, td_context *td)
{
    td_module root = td_root(td);
    m->hidden = nn_linear_make(root, "hidden", IN, HIDDEN);
    m->out = nn_linear_make(root, "out", HIDDEN, CLASSES);
    m->opt = opt_adamw(root, NULL);
}

/* Until the device has done what it was given. */
static void wait_for(const model *m)
{
    int64_t begin, end;
    float first;
    ck_assert(td_state_owned(m->hidden.weight, &begin, &end) && end > begin);
    ck_assert(td_state_read(m->hidden.weight, begin, 1, &first));
}

/* Bytes sent in a step of a world that is planned only. */
static int64_t planned_bytes(const char *strategy, int ranks, int64_t *peak)
{
    static model m;
    td_context *td = open_on("cpu");
    par_world *world = par_world_none(ranks, 0);
    int64_t count, bytes = 0;
    ck_assert(par_attach(td, world, 0, &(par_options){ .strategy = strategy }));
    make_model(&m, td);
    record(&m, td);
    ck_assert_msg(td_plan(td), "%s", td_error_text(td));
    par_call *calls = par_calls(td, &count);
    for (int64_t i = 0; i < count; i++) bytes += calls[i].task.sent;
    *peak = td_last_report(td).peak_bytes;
    td_disown(td, calls);
    opt_close(m.opt);
    td_close(td);
    par_world_close(world);
    return bytes;
}

/* A graph repeats its collectives without calling them: they are counted all the same, and take their time. */
START_TEST(test_steps_send_and_hold_what_is_planned)
{
    static const struct { const char *strategy; int ranks; } cells[] = { { "ddp", 3 }, { "zero2", 4 }, { "fsdp", 4 }, { "hsdp:2x2", 4 } };
    static model m;
    for (int d = 0; d < DEVICES; d++)
        for (size_t c = 0; c < sizeof cells / sizeof *cells; c++) {
            told t = { .seconds = 2e-3 };
            int64_t peak, sent = planned_bytes(cells[c].strategy, cells[c].ranks, &peak), calls_before, calls;
            one o = open_one(devices[d], cells[c].ranks, cells[c].strategy, &t, __func__);
            if (!o.td) continue;
            make_model(&m, o.td);
            for (int s = 0; s < STEPS; s++) {
                int64_t before = par_sent(o.world, 0, &calls_before);
                double begin = par_seconds();
                record(&m, o.td);
                ck_assert_msg(td_step(o.td), "%s", td_error_text(o.td));
                int64_t bytes = par_sent(o.world, 0, &calls) - before;
                ck_assert_msg(bytes == sent, "%s, step %d: %lld sent, %lld planned", cells[c].strategy, s, (long long)bytes, (long long)sent);
                wait_for(&m);
                ck_assert_double_ge(par_seconds() - begin, 0.9 * t.seconds * (double)(calls - calls_before));
            }
            if (!d) ck_assert_int_eq(td_last_report(o.td).peak_bytes, peak);
            opt_close(m.opt);
            close_one(&o);
        }
}
END_TEST

/* ---- Worlds */

START_TEST(test_worlds_that_cannot_be_are_refused)
{
    told t = { 0 };
    const par_rehearsal how = { .seconds = seconds_of, .user = &t };
    ck_assert_ptr_null(par_world_rehearsed(0, &how));
    ck_assert_ptr_null(par_world_rehearsed(PAR_MAX_RANKS + 1, &how));
    par_world *most = par_world_rehearsed(PAR_MAX_RANKS, &how);
    ck_assert_int_eq(par_world_size(most), PAR_MAX_RANKS);
    td_context *td = open_cpu(TD_F32);
    ck_assert(!par_attach(td, most, 1, NULL));
    ck_assert_str_has(td_error_text(td), "rank 1");
    td_close(td);
    par_world_close(most);
}
END_TEST

TESTS("rehearsal", test_collectives_give_as_many_of_ones_own, test_nothing_of_no_elements_is_asked_of_the_device,
      test_steps_send_and_hold_what_is_planned, test_worlds_that_cannot_be_are_refused)
