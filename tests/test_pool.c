/* A GPU's memory in pools, on a driver of the host's: what grows stays where it is; where ranks reach into it a step lies in one piece and
 * state in as many as times it was laid out. The host is the GPU (tests/on_host), so that steps run in this memory: what is touched after
 * it has been taken away ends the program.
 *
 * Labels: on_host
 */
#include <sys/mman.h>

#include "tests/check.h"
#include "tests/on_host/include/cudaTypedefs.h"
#include "tests/reach.h"

/* The pools beside those of tests/on_host, which are none. */
#define td_pools own_pools
#define td_pools_of own_pools_of
#define td_pools_open own_pools_open
#define td_pools_close own_pools_close
#define td_cuda_get own_get
#define td_cuda_put own_put
#include "core/device_pool.c"

#include <tandem/nn.h>
#include <tandem/optim.h>

/* ---- The driver ------------------------------------------------------------------------------------------- */

enum { PAGE = 1 << 16, MOST_PIECES = 64 };

typedef struct piece { CUdeviceptr at; size_t bytes; } piece;
static piece mapped_now[MOST_PIECES];
static int mapped_count;
static size_t limit_bytes = (size_t)1 << 30, most_bytes;
static struct own_pools *open_pools;
struct own_pools **own_pools_of(td_context *td) { (void)td; return &open_pools; }

static CUresult tell_error(CUresult status, const char **text)
{
    *text = status == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "invalid value";
    return CUDA_SUCCESS;
}

static CUresult tell_attribute(int *to, CUdevice_attribute attribute, CUdevice device)
{
    (void)attribute, (void)device;
    *to = 1;
    return CUDA_SUCCESS;
}

static CUresult take_addresses(CUdeviceptr *to, size_t bytes, size_t alignment, CUdeviceptr at, unsigned long long flags)
{
    (void)alignment, (void)at, (void)flags;
    void *got = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *to = (CUdeviceptr)(uintptr_t)got;
    return got == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult leave_addresses(CUdeviceptr at, size_t bytes)
{
    return munmap((void *)(uintptr_t)at, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult tell_page(size_t *to, const CUmemAllocationProp *of, CUmemAllocationGranularity_flags which)
{
    (void)of, (void)which;
    *to = PAGE;
    return CUDA_SUCCESS;
}

static size_t bytes_now(void)
{
    size_t bytes = 0;
    for (int i = 0; i < mapped_count; i++) bytes += mapped_now[i].bytes;
    return bytes;
}

static CUresult make_memory(CUmemGenericAllocationHandle *to, size_t bytes, const CUmemAllocationProp *of, unsigned long long flags)
{
    (void)of, (void)flags;
    *to = bytes;
    return bytes % PAGE ? CUDA_ERROR_INVALID_VALUE : bytes_now() + bytes > limit_bytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult let_go(CUmemGenericAllocationHandle memory) { return memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

static CUresult map_memory(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle memory, unsigned long long flags)
{
    (void)flags;
    ck_assert_int_lt(mapped_count, MOST_PIECES);
    mapped_now[mapped_count++] = (piece){ at, bytes };
    if (bytes_now() > most_bytes) most_bytes = bytes_now();
    bool whole = offset == 0 && memory == bytes;
    return whole && !mprotect((void *)(uintptr_t)at, bytes, PROT_READ | PROT_WRITE) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Pieces as they were mapped, one or several that follow one another; what they held is gone. */
static CUresult unmap_memory(CUdeviceptr at, size_t bytes)
{
    size_t found = 0;
    for (int i = mapped_count - 1; i >= 0; i--) {
        if (mapped_now[i].at < at || mapped_now[i].at + mapped_now[i].bytes > at + bytes) continue;
        found += mapped_now[i].bytes;
        mapped_now[i] = mapped_now[--mapped_count];
    }
    void *memory = (void *)(uintptr_t)at;
    bool whole = found == bytes && !madvise(memory, bytes, MADV_DONTNEED);
    return whole && !mprotect(memory, bytes, PROT_NONE) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult give_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *to, size_t count)
{
    return at && bytes && to && count == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **to, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found)
{
    static const struct { const char *name; void *function; } all[] = {
        { "cuGetErrorString", (void *)tell_error }, { "cuDeviceGetAttribute", (void *)tell_attribute },
        { "cuMemAddressReserve", (void *)take_addresses }, { "cuMemAddressFree", (void *)leave_addresses },
        { "cuMemGetAllocationGranularity", (void *)tell_page }, { "cuMemCreate", (void *)make_memory },
        { "cuMemRelease", (void *)let_go }, { "cuMemMap", (void *)map_memory }, { "cuMemUnmap", (void *)unmap_memory },
        { "cuMemSetAccess", (void *)give_access },
    };
    (void)version, (void)flags;
    *found = cudaDriverEntryPointSymbolNotFound;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(all[i].name, name)) *to = all[i].function, *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* How long the piece is that begins there; 0: none does. */
static size_t piece_at(const void *memory)
{
    for (int i = 0; i < mapped_count; i++)
        if (mapped_now[i].at == (CUdeviceptr)(uintptr_t)memory) return mapped_now[i].bytes;
    return 0;
}

/* ---- A model on the GPU ------------------------------------------------------------------------------------ */

enum { IN = 24, HIDDEN = 400, CLASSES = 5, ROWS = 400 };

typedef struct model {
    td_context *td;
    td_device device;
    td_transport transport;
    nn_linear in, out;
    opt_optimizer *opt;
} model;

/* Each in a piece of its own length, but for steps, which may have more than this plan needs. */
static void look_at_pieces(const td_settled *where)
{
    ck_assert_uint_ge(piece_at(where->piece[0].memory), (size_t)where->piece[0].bytes);
    for (int i = 1; i < TD_PIECES; i++)
        if (where->piece[i].memory) ck_assert_uint_eq(piece_at(where->piece[i].memory), (size_t)where->piece[i].bytes);
}

static void (*close_gpu)(td_context *td);

static void close_device(td_context *td)
{
    own_pools_close(td);
    close_gpu(td);
}

static void open_gpu(model *m)
{
    *m = (model){ 0 };
    reach_now = (reach_notes){ .look = look_at_pieces };
    most_bytes = 0;
    m->td = td_open(&(td_options){ .device = "cuda", .seed = 3, .threads = 1, .log = check_log_line });
    ck_assert_no_error(m->td);
    ck_assert(own_pools_open(m->td, 0));
    m->device = *m->td->device;
    m->device.get = own_get;
    m->device.put = own_put;
    close_gpu = m->device.close;
    m->device.close = close_device;
    m->td->device = &m->device;
    m->transport = (td_transport){ .self = m, .reach = &reach_noted };
}

static void make_layers(model *m)
{
    m->in = nn_linear_make(td_root(m->td), "in", IN, HIDDEN);
    m->out = nn_linear_make(td_root(m->td), "out", HIDDEN, CLASSES);
}

static void open_model(model *m, bool reached)
{
    open_gpu(m);
    if (reached) m->td->run.transport = &m->transport;
    make_layers(m);
}

static double train(model *m, int64_t rows, int number)
{
    float x[ROWS * IN];
    int32_t y[ROWS];
    if (!m->opt) m->opt = opt_adamw(td_root(m->td), NULL);
    for (int64_t i = 0; i < rows * IN; i++) x[i] = (float)check_normal((uint64_t)(number * ROWS * IN + i + 1));
    for (int64_t i = 0; i < rows; i++) y[i] = (int32_t)((i * 3 + number) % CLASSES);
    td_tensor h = td_gelu(nn_linear_apply(&m->in, td_batch(m->td, "x", TD_F32, TD_SHAPE(rows, IN), x)));
    td_tensor loss = td_cross_entropy(nn_linear_apply(&m->out, h), td_batch(m->td, "y", TD_I32, TD_SHAPE(rows), y));
    td_backward(loss);
    opt_step(m->opt, 1e-2);
    ck_assert_msg(td_step(m->td), "%s", td_error_text(m->td));
    return td_item(loss);
}

/* Of state and steps; inputs lie elsewhere here. */
static void assert_as_planned(const model *m)
{
    size_t planned = (size_t)(td_last_report(m->td).state_bytes + td_round_up(m->td->arena_bytes, PAGE));
    ck_assert_uint_eq(bytes_now(), planned);
    ck_assert_uint_eq(most_bytes, planned);
}

static void close_model(model *m)
{
    if (m->opt) opt_close(m->opt);
    ck_assert_no_error(m->td);
    td_close(m->td);
    ck_assert_int_eq(mapped_count, 0);
}

/* ---- Tests ------------------------------------------------------------------------------------------------- */

/* The fourth is larger than those before. */
static const int64_t rows[] = { 16, 16, 16, ROWS, ROWS, ROWS, 16, 16 };
enum { STEPS = sizeof rows / sizeof *rows };

static void train_all(model *m, double losses[STEPS])
{
    for (int s = 0; s < STEPS; s++) {
        losses[s] = train(m, rows[s], s);
        assert_as_planned(m);
    }
}

START_TEST(test_what_grows_is_of_more_pieces_at_the_same_place)
{
    model m;
    double losses[STEPS];
    open_model(&m, false);
    train_all(&m, losses);
    ck_assert_uint_gt(m.td->arena_bytes, PAGE);
    ck_assert_uint_lt(piece_at(m.td->arena), (size_t)m.td->arena_bytes);
    ck_assert_uint_eq(m.td->arena_epoch, 1);
    ck_assert_int_eq(reach_now.settled + reach_now.left, 0);
    close_model(&m);
}
END_TEST

START_TEST(test_where_ranks_reach_into_it_a_step_is_of_one_piece_and_so_is_state)
{
    model m;
    double apart[STEPS], reached[STEPS];
    open_model(&m, false);
    train_all(&m, apart);
    close_model(&m);
    open_model(&m, true);
    train_all(&m, reached);
    for (int s = 0; s < STEPS; s++) ck_assert_double_eq(apart[s], reached[s]);
    ck_assert_uint_ge(piece_at(m.td->arena), (size_t)m.td->arena_bytes);
    ck_assert_int_eq(m.td->state_pieces, 1);
    ck_assert_int_eq(mapped_count, 2);
    ck_assert_int_eq(reach_now.settled, 2); /* plans */
    ck_assert_int_eq(reach_now.left, 2);    /* and each needed more */
    close_model(&m);
    ck_assert_int_eq(reach_now.left_alone, 1);
}
END_TEST

/* Written before there is an optimizer; what that has comes in a piece of its own, none of which lies in two. */
START_TEST(test_state_has_as_many_pieces_as_times_it_was_laid_out)
{
    model m;
    float bias[CLASSES] = { 1, 2, 3, 4, 5 };
    open_model(&m, true);
    ck_assert(td_state_write(m.out.bias, 0, CLASSES, bias));
    ck_assert_int_eq(m.td->state_pieces, 1);
    train(&m, 16, 0);
    ck_assert_int_eq(m.td->state_pieces, 2);
    assert_as_planned(&m);
    for (uint32_t u = 0; u < m.td->unit_count; u++) {
        uintptr_t at = (uintptr_t)m.td->units[u].memory, end = at + (uintptr_t)m.td->units[u].local_bytes;
        int within = 0;
        for (int i = 0; i < mapped_count; i++) within += at >= mapped_now[i].at && end <= mapped_now[i].at + mapped_now[i].bytes;
        ck_assert_int_eq(within, 1);
    }
    close_model(&m);
}
END_TEST

START_TEST(test_steps_before_ranks_have_joined_leave_no_pieces)
{
    model m;
    open_gpu(&m);
    for (int64_t n = 1; n < 5; n++) {
        td_keep(td_exp(td_uniform(m.td, TD_SHAPE(n * PAGE / 4))));
        ck_assert(td_step(m.td));
    }
    ck_assert_int_gt(mapped_count, 1);
    td_parallel parallel = { .mesh = { .world = 1 }, .unit_multiple = 1, .transport = &m.transport };
    ck_assert_msg(td_set_parallel(m.td, &parallel), "%s", td_error_text(m.td));
    make_layers(&m);
    train(&m, 16, 0);
    ck_assert_uint_ge(piece_at(m.td->arena), (size_t)m.td->arena_bytes);
    close_model(&m);
}
END_TEST

START_TEST(test_a_driver_without_memory_is_an_error_in_words)
{
    model m;
    open_model(&m, true);
    train(&m, 16, 0);
    limit_bytes = bytes_now();
    td_keep(td_exp(td_uniform(m.td, TD_SHAPE(1 << 20))));
    ck_assert(!td_step(m.td));
    ck_assert_int_eq(td_error(m.td), TD_ERROR_MEMORY);
    ck_assert_str_has(td_error_text(m.td), "out of memory on the GPU: ");
    limit_bytes = (size_t)1 << 30;
    td_clear_error(m.td);
    train(&m, 16, 1);
    close_model(&m);
}
END_TEST

TESTS("pool", test_what_grows_is_of_more_pieces_at_the_same_place, test_where_ranks_reach_into_it_a_step_is_of_one_piece_and_so_is_state,
      test_state_has_as_many_pieces_as_times_it_was_laid_out, test_steps_before_ranks_have_joined_leave_no_pieces,
      test_a_driver_without_memory_is_an_error_in_words)
