/* What tests of ranks share: every collective against a plain sum, recordings made by hand to agree on, and a way for a
 * rank (a thread or a process, where Check must not be called) to say which expectation failed. */
#ifndef TANDEM_TESTS_RANKS_H
#define TANDEM_TESTS_RANKS_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "parallel/world.h"

/* In a function that returns 0 on success: else the line that failed. */
#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: rank %d: %s\n", __FILE__, __LINE__, rank, #condition);                             \
            return __LINE__;                                                                                           \
        }                                                                                                              \
    } while (0)

static inline void ranks_quiet(void *user, td_level level, const char *text) { (void)user, (void)level, (void)text; }

/* 0: NCCL is not there. */
static inline int ranks_nccl_version(void)
{
    void *library = dlopen("libnccl.so.2", RTLD_NOW);
    int version = 0, (*get)(int *) = NULL;
    if (library) *(void **)&get = dlsym(library, "ncclGetVersion");
    if (get) get(&version);
    return version;
}

/* So that ranks may share a GPU, before NCCL is first called: from 2.30 on it lets them; an older one takes this process for a host of its
 * own and reaches others through sockets. */
static inline void ranks_share_by_nccl(int rank)
{
    char name[32];
    if (ranks_nccl_version() >= 23000) {
        setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
        return;
    }
    snprintf(name, sizeof name, "host-of-rank-%d", rank);
    setenv("NCCL_HOSTID", name, 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    setenv("NCCL_NET", "Socket", 0);
}

/* ---- Numbers --------------------------------------------------------------------------------------------- */

static inline uint64_t ranks_bits(int rank, int64_t i)
{
    uint64_t z = (uint64_t)rank * 0x9e3779b97f4a7c15u + (uint64_t)(i + 1) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline float ranks_widen(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* The nearer of the two neighbours, of equally near ones the even; by distance, not by bits. */
static inline uint16_t ranks_nearest_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint16_t down = (uint16_t)(bits >> 16), up = (uint16_t)(down + 1);
    double below = (double)x - (double)ranks_widen(down), above = (double)ranks_widen(up) - (double)x;
    if (below < 0) below = -below;
    if (above < 0) above = -above;
    if (below == above) return down & 1 ? up : down;
    return below < above ? down : up;
}

/* Element i of what `rank` gives: magnitudes from 2^-8 to 2^7, so that the order of a sum shows in its bits. */
static inline void ranks_put(td_dtype dtype, void *to, int64_t at, int rank, int64_t i)
{
    uint64_t bits = ranks_bits(rank, i);
    double x = ((double)(bits >> 12) * 0x1p-51 - 1) * (double)(1u << (bits & 15)) / 256;
    switch (dtype) {
    case TD_F32: ((float *)to)[at] = (float)x; break;
    case TD_F64: ((double *)to)[at] = x; break;
    case TD_BF16: ((uint16_t *)to)[at] = ranks_nearest_bf16((float)x); break;
    case TD_I32: ((int32_t *)to)[at] = (int32_t)(bits % 2000001) - 1000000; break;
    case TD_I64: ((int64_t *)to)[at] = (int64_t)(bits % 2000000000000001) - 1000000000000000; break;
    default: ((uint8_t *)to)[at] = (uint8_t)bits; break;
    }
}

#define RANKS_SUM(T)                                                                                                   \
    {                                                                                                                  \
        T sum, x;                                                                                                      \
        ranks_put(dtype, &sum, 0, 0, i);                                                                               \
        for (int r = 1; r < ranks; r++) {                                                                              \
            ranks_put(dtype, &x, 0, r, i);                                                                             \
            sum += x;                                                                                                  \
        }                                                                                                              \
        ((T *)to)[at] = sum;                                                                                           \
    }

/* The sum over all ranks of element i, in the order of ranks. */
static inline void ranks_put_sum(td_dtype dtype, void *to, int64_t at, int ranks, int64_t i)
{
    switch (dtype) {
    case TD_F32: RANKS_SUM(float) break;
    case TD_F64: RANKS_SUM(double) break;
    case TD_I32: RANKS_SUM(int32_t) break;
    case TD_I64: RANKS_SUM(int64_t) break;
    default: {
        float sum = 0;
        for (int r = 0; r < ranks; r++) {
            uint16_t x;
            ranks_put(TD_BF16, &x, 0, r, i);
            sum = r == 0 ? ranks_widen(x) : sum + ranks_widen(x);
        }
        ((uint16_t *)to)[at] = ranks_nearest_bf16(sum);
    }
    }
}

/* ---- Every collective ------------------------------------------------------------------------------------ */

/* Runs each collective once with `count` elements a part; 0, or the line of the expectation that failed. */
static inline int ranks_each_collective(const td_transport *t, int ranks, int rank, td_dtype dtype, int64_t count)
{
    int64_t size = td_dtype_size(dtype), all = count * ranks, calls_before, calls;
    int64_t before = t->sent(t->self, &calls_before);
    void *in = malloc((size_t)(all * size)), *out = malloc((size_t)(all * size)), *want = malloc((size_t)(all * size));
    EXPECT(all == 0 || (in && out && want));

    for (int64_t i = 0; i < all; i++) ranks_put(dtype, in, i, rank, i);
    for (int64_t i = 0; i < count; i++) ranks_put_sum(dtype, want, i, ranks, i);
    EXPECT(t->all_reduce(t->self, 0, in, count, dtype));
    EXPECT(all == 0 || memcmp(in, want, (size_t)(count * size)) == 0);

    for (int64_t i = 0; i < all; i++) ranks_put(dtype, in, i, rank, i);
    for (int64_t i = 0; i < count; i++) ranks_put_sum(dtype, want, i, ranks, rank * count + i);
    EXPECT(t->reduce_scatter(t->self, 0, in, out, count, dtype));
    EXPECT(all == 0 || memcmp(out, want, (size_t)(count * size)) == 0);

    for (int r = 0; r < ranks; r++)
        for (int64_t i = 0; i < count; i++) ranks_put(dtype, want, r * count + i, r, i);
    EXPECT(t->all_gather(t->self, 0, in, out, count, dtype));
    EXPECT(all == 0 || memcmp(out, want, (size_t)(all * size)) == 0);

    for (int r = 0; r < ranks; r++)
        for (int64_t i = 0; i < count; i++) ranks_put(dtype, want, r * count + i, r, rank * count + i);
    EXPECT(t->all_to_all(t->self, 0, in, out, count, dtype));
    EXPECT(all == 0 || memcmp(out, want, (size_t)(all * size)) == 0);

    int root = ranks - 1;
    for (int64_t i = 0; i < count; i++) ranks_put(dtype, want, i, root, i);
    EXPECT(t->broadcast(t->self, 0, root, in, count * size));
    EXPECT(all == 0 || memcmp(in, want, (size_t)(count * size)) == 0);
    EXPECT(t->barrier(t->self));

    int64_t part = count * size, others = ranks - 1;
    int64_t bytes = (2 * others * part + ranks - 1) / ranks + 3 * others * part + (others * part + ranks - 1) / ranks;
    EXPECT(t->sent(t->self, &calls) == before + bytes);
    EXPECT(calls == calls_before + 6);
    free(in);
    free(out);
    free(want);
    return 0;
}

/* Of the world's kind. */
static inline bool ranks_transport(par_world *world, int rank, td_context *td, const td_mesh *mesh, td_transport *t)
{
    return (world->mpi ? par_transport_mpi : par_transport_local)(world, rank, td, mesh, t);
}

/* All dtypes that are summed, at sizes from none to several times the smallest staging buffer of 4096 bytes. */
static inline int ranks_every_collective(par_world *world, int rank)
{
    static const td_dtype dtypes[] = { TD_F32, TD_F64, TD_BF16, TD_I32, TD_I64 };
    static const int64_t counts[] = { 0, 1, 7, 300, 3001 };
    td_context *td = td_open(&(td_options){ .log = ranks_quiet, .threads = 1 });
    td_transport t;
    EXPECT(ranks_transport(world, rank, td, NULL, &t));
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            int failed = ranks_each_collective(&t, par_world_size(world), rank, dtypes[d], counts[c]);
            if (failed) {
                fprintf(stderr, "rank %d of %d, %s, %lld elements: %s\n", rank, par_world_size(world),
                        td_dtype_name(dtypes[d]), (long long)counts[c], td_error_text(td));
                return failed;
            }
        }
    td_close(td);
    return 0;
}

/* ---- Recordings made by hand ----------------------------------------------------------------------------- */

enum { RANKS_OPERATIONS = 5000 };

typedef struct ranks_program {
    td_program program;
    td_node node[RANKS_OPERATIONS];
    td_value value[RANKS_OPERATIONS];
} ranks_program;

static const td_op ranks_mul = { .name = "mul", .inputs = 2 }, ranks_add = { .name = "add", .inputs = 2 };

/* `count` products (64, 10), all at model.c, each on its own line. */
static inline void ranks_record(ranks_program *p, uint32_t count)
{
    memset(p, 0, sizeof *p);
    p->program = (td_program){ .nodes = p->node, .values = p->value, .node_count = count, .value_count = count };
    for (uint32_t i = 0; i < count; i++) {
        p->node[i] =
            (td_node){ .op = &ranks_mul, .file = "model.c", .line = 29 + (int32_t)i, .output = i, .outputs = 1 };
        p->value[i] = (td_value){ .shape = { .rank = 2, .dim = { 64, 10 } }, .node = i, .dtype = TD_F32 };
    }
}

/* Makes operation i an addition, recorded two lines further down. */
static inline void ranks_differ(ranks_program *p, uint32_t i)
{
    p->node[i].op = &ranks_add;
    p->node[i].line += 2;
}

static inline void ranks_swap(ranks_program *p, uint32_t i, uint32_t j)
{
    td_node node = p->node[i];
    p->node[i] = p->node[j];
    p->node[j] = node;
}

/* Hashes operations as recording does; `salt` stands for attributes that a line of text does not show. */
static inline uint64_t ranks_fingerprint(ranks_program *p, uint64_t salt)
{
    uint64_t h = salt;
    for (uint32_t i = 0; i < p->program.node_count; i++) {
        for (const char *c = p->node[i].op->name; *c; c++) h = ranks_bits((int)*c, (int64_t)h);
        h = ranks_bits(p->node[i].line, (int64_t)(h + (uint64_t)p->value[i].shape.dim[0]));
        p->node[i].hash = h;
    }
    return h;
}

#endif
