/* Tandem's core: tensors that record a program, state that outlives it, and the step that runs it.
 *
 * A call on tensors records a node; nothing is computed until a value is asked for (td_item, td_read) or the
 * step ends (td_step). The next step records the same program, is recognised and replays without planning.
 *
 * Errors: the first failure is kept in the context (td_error, td_error_text) with the operation, both shapes,
 * the module path and the caller's file and line. An operation given a failed tensor returns a failed tensor, so
 * a program needs one check a step. The library never exits and prints only through the log callback.
 *
 * Threads: a context is used by one thread at a time; different contexts are independent.
 */
#ifndef TANDEM_CORE_H
#define TANDEM_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TD_API __attribute__((visibility("default")))
#define TD_PRINTF(text, first) __attribute__((format(printf, text, first)))

/* ---- Types ---------------------------------------------------------------------------------------------- */

typedef enum td_dtype { TD_F32, TD_F64, TD_BF16, TD_F16, TD_I32, TD_I64, TD_U8, TD_DTYPES } td_dtype;

TD_API int64_t td_dtype_size(td_dtype dtype);               /* bytes of one element */
TD_API const char *td_dtype_name(td_dtype dtype);           /* "f32" */
TD_API bool td_dtype_named(const char *name, td_dtype *out); /* false: no such name */

enum { TD_MAX_DIMS = 6 };

/* Row-major and contiguous; the last dimension is the fastest. rank 0 is a scalar. Unused dims are 0. */
typedef struct td_shape {
    int64_t rank;
    int64_t dim[TD_MAX_DIMS];
} td_shape;

#ifdef __cplusplus
#define TD_SHAPE(...) (td_shape_from({ __VA_ARGS__ }))
#else
/* TD_SHAPE(2, 3) is the shape (2, 3). */
#define TD_SHAPE(...) td_shape_of((int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (int64_t[]){ __VA_ARGS__ })
#endif
TD_API td_shape td_shape_of(int rank, const int64_t *dims);
TD_API int64_t td_shape_elements(td_shape shape);             /* INT64_MAX if there are more */
TD_API bool td_shape_equal(td_shape a, td_shape b);

typedef struct td_context td_context;

/* A value of the program being recorded. Valid until td_step; a stale handle is an error that says so. */
typedef struct td_tensor {
    td_context *td;
    uint32_t id;
    uint32_t generation;
} td_tensor;

/* A named value that outlives steps (parameter, moment, running statistic, counter): until td_close. */
typedef struct td_state {
    td_context *td;
    uint32_t id; /* TD_NONE: failed */
} td_state;

/* A place in the parameter tree: names join with dots ("h.3.attn"). */
typedef struct td_module {
    td_context *td;
    uint32_t id;
} td_module;

#define TD_NONE UINT32_MAX
/* For an operand that may be left out. */
#ifdef __cplusplus
#define TD_NO_TENSOR (td_tensor{ nullptr, TD_NONE, 0 })
#else
#define TD_NO_TENSOR ((td_tensor){ .id = TD_NONE })
#endif

/* Where the user called from; every recording call is a macro that passes it. */
typedef struct td_here {
    const char *file;
    int line;
} td_here;
#ifdef __cplusplus
#define TD_HERE (td_here{ __FILE__, __LINE__ })
#else
#define TD_HERE ((td_here){ __FILE__, __LINE__ })
#endif

/* ---- Context -------------------------------------------------------------------------------------------- */

typedef enum td_code {
    TD_OK,
    TD_ERROR_USAGE,       /* shapes, dtypes, stale handles, wrong options */
    TD_ERROR_MEMORY,      /* host or device memory */
    TD_ERROR_DATA,        /* a file or its content */
    TD_ERROR_DEVICE,      /* a device or a library under it */
    TD_ERROR_PARALLEL,    /* another rank failed, stopped or disagreed */
    TD_ERROR_NUMBER,      /* NaN or infinity where it must not be */
    TD_ERROR_UNSUPPORTED, /* a combination that cannot be had */
} td_code;

typedef enum td_level { TD_LOG_ERROR, TD_LOG_WARNING, TD_LOG_INFO, TD_LOG_PROGRAM } td_level;

/* Called with one text (several lines for a printed program), no trailing newline. */
typedef void (*td_log_function)(void *user, td_level level, const char *text);

/* The context's host memory comes from here, but for what libraries take themselves and for a GPU's page-locked copies of inputs and
 * results. Memory is at least 64-byte aligned. get returns NULL on failure. `kind` names the use: "state" and "step", where the device is
 * the CPU, "pinned" (of either, offloaded to host memory), "program", "host" ... */
typedef struct td_allocator {
    void *user;
    void *(*get)(void *user, size_t bytes, const char *kind);
    void (*put)(void *user, void *memory, size_t bytes, const char *kind);
} td_allocator;

/* The C library's, with huge pages for what is large where the kernel gives them: for an allocator that only counts. */
TD_API const td_allocator *td_allocator_default(void);

/* A GPU as far as plans depend on it. */
typedef struct td_gpu {
    char name[64];             /* "NVIDIA H200" */
    int major, minor;          /* compute capability: 9, 0 */
    int multiprocessors;
    int64_t l2_bytes;
    int64_t page_bytes;        /* that memory is taken by; 0: by the byte */
} td_gpu;

typedef struct td_options {
    td_dtype dtype;            /* TD_F32 (default), TD_F64, or TD_BF16, TD_F16: f32 parameters, products in 16 bits. What
                                  trains in TD_F16 needs a scaler of losses (optim.h); on the CPU it is for comparing, not fast */
    const char *device;        /* "cpu" (default), "cuda", or "cuda:1" for another GPU than the first */
    const td_gpu *gpu;         /* with "cuda": plan for this one, which need not be there, and run nothing; NULL: the machine's. Copied */
    uint64_t seed;             /* keys every initial value and random draw */
    int threads;               /* CPU threads of this context, fewer where OpenMP gives no more; 0: all cores */
    int64_t workspace_bytes;   /* cap on what a library call may use as scratch; 0: 256 MiB, on a GPU 1 GiB */
    int64_t memory_bytes;      /* cap on planned state + step memory; 0: none, on a GPU what of its memory is free, less a margin, in
                                  equal parts for the ranks that share it */
    bool deterministic;        /* the same bits run after run */
    bool eager;                /* run each operation as recorded and check it for NaN; also TD_EAGER=1 */
    bool poison;               /* fill dead step memory with NaN; also TD_POISON=1 */
    const char *print;         /* stages to log: "record,place,plan"; also TD_PRINT */
    const char *passes;        /* "-fuse,-simplify": rewrites to leave out; also TD_PASSES */
    td_log_function log;       /* NULL: errors and warnings to stderr */
    void *log_user;
    const td_allocator *allocator; /* NULL: td_allocator_default(); copied */
} td_options;

/* Opens a context; NULL options are the defaults. Never returns NULL: a context that failed to open has an error. */
TD_API td_context *td_open(const td_options *options);
/* Frees the context, its state and everything recorded. NULL is allowed. */
TD_API void td_close(td_context *td);

TD_API td_code td_error(const td_context *td);            /* the first failure, or TD_OK */
TD_API const char *td_error_text(const td_context *td);   /* one line; "" when there is none */
/* Records a failure if none is kept yet; the text is formatted as printf does. */
TD_API void td_fail(td_context *td, td_code code, const char *format, ...) TD_PRINTF(3, 4);
/* Forgets the failure and drops what was recorded, so that the step can be tried again with other options. */
TD_API void td_clear_error(td_context *td);
/* Sends one message through the log callback. */
TD_API void td_message(td_context *td, td_level level, const char *format, ...) TD_PRINTF(3, 4);

typedef enum td_mode { TD_TRAIN, TD_EVAL } td_mode;
TD_API void td_set_mode(td_context *td, td_mode mode);    /* dropout and statistics follow it; TD_TRAIN at first */
TD_API td_mode td_get_mode(const td_context *td);
TD_API uint64_t td_seed(const td_context *td);
TD_API td_dtype td_float(const td_context *td);           /* dtype of parameters: TD_F32, or TD_F64 under TD_F64 */
TD_API int td_threads(const td_context *td);

/* Steps done that held an update; the counter of random draws. Setting it is for resuming. */
TD_API int64_t td_updates(const td_context *td);
TD_API void td_set_updates(td_context *td, int64_t updates);

/* Host memory through the context's allocator; NULL and an error on failure. kind as in td_allocator. */
TD_API void *td_alloc(td_context *td, size_t bytes, const char *kind);
TD_API void td_free(td_context *td, void *memory, size_t bytes, const char *kind);

/* ---- Modules and state ---------------------------------------------------------------------------------- */

TD_API td_module td_root(td_context *td);
TD_API td_module td_child(td_module parent, const char *name); /* the same name gives the same module */
TD_API td_context *td_module_context(td_module m);
TD_API const char *td_module_name(td_module m);           /* its dotted path, "" for the root; owned by the context */
TD_API void td_enter(td_module m);                        /* what is recorded until td_leave carries m's path */
TD_API void td_leave(td_module m);
/* What products (matmul, linear, attention) recorded in m and below it compute in: TD_F32, so that a router or a head stays exact in a
 * TD_BF16 or TD_F16 context, or TD_BF16 in a TD_F32 context; parameters stay f32. The innermost module that is set decides. Holds for the whole of
 * the step being recorded and those after it. Errors: another dtype; a TD_F64 context, which computes in f64 throughout. */
TD_API void td_set_dtype(td_module m, td_dtype dtype);
TD_API td_dtype td_get_dtype(td_module m);                /* what they compute in by now; without any set the context's dtype */

/* How a state starts. Random ones are keyed by (seed, name, element index): the same on any world size. */
typedef struct td_init {
    enum { TD_INIT_CONSTANT, TD_INIT_UNIFORM, TD_INIT_NORMAL, TD_INIT_TRUNCATED_NORMAL } kind;
    double a, b; /* constant: a; uniform: [a, b); normal: mean a, standard deviation b; truncated: within a - 2 b and a + 2 b */
} td_init;
TD_API td_init td_init_constant(double value);
TD_API td_init td_init_uniform(double bound);             /* [-bound, bound) */
TD_API td_init td_init_normal(double deviation);
/* N(0, deviation^2) where it is within +-2 deviation, and drawn again where it is not: PyTorch's trunc_normal_ with std = deviation,
 * a = -2 std, b = 2 std. The deviation of the values themselves is 0.8796 of that given. */
TD_API td_init td_init_truncated_normal(double deviation);

/* A trainable state of dtype td_float(td), named path.name. No memory is taken until the first step is planned.
 * Errors: a name used twice in the module, random initial values without a finite range. */
TD_API td_state td_parameter(td_module at, const char *name, td_shape shape, td_init init);
/* A state that is not trained: running statistics, counters, caches; any dtype but f16. Checkpointed. */
TD_API td_state td_buffer(td_module at, const char *name, td_dtype dtype, td_shape shape, td_init init);
/* The state `of`.name with `of`'s shape, stored and placed beside it (an optimizer's moment): made, as zeros, if there is none. */
TD_API td_state td_moment(td_state of, const char *name);
/* The same with one element a row: shape (V) for a parameter (V, ...), a scalar for a scalar. */
TD_API td_state td_moment_rows(td_state of, const char *name);
/* No gradient, no update. Errors: s is no parameter, has an optimizer or was in a step already. */
TD_API void td_freeze(td_state s);
/* The gradient of the table s (V, D) is kept as the rows that a step's ids name: no memory or time of a step depends on V. Nothing but
 * td_embedding may read the table where a loss depends on it, the optimizer must allow it (tandem/optim.h), the table stays whole on
 * every rank, and the step that records its backward records the update too. Errors: s is no such parameter, has an optimizer or was
 * in a step already. */
TD_API void td_sparse_rows(td_state s);

TD_API int64_t td_state_count(const td_context *td);
TD_API td_state td_state_at(td_context *td, int64_t index);      /* in order of creation */
TD_API td_state td_state_named(td_context *td, const char *name); /* id TD_NONE when there is none */
TD_API const char *td_state_name(td_state s);             /* owned by the context */
/* Whether the whole name fits a pattern as a shell's: * any part of it, dots too, ? a character, [abc] one of these, \ takes the next as
 * it is. */
TD_API bool td_name_matches(const char *pattern, const char *name);
TD_API td_shape td_state_shape(td_state s);
TD_API td_dtype td_state_dtype(td_state s);
typedef enum td_state_kind { TD_PARAMETER, TD_BUFFER, TD_MOMENT } td_state_kind;
TD_API td_state_kind td_state_kind_of(td_state s);
TD_API bool td_state_trains(td_state s);                  /* a parameter that is not frozen */
TD_API bool td_state_sparse(td_state s);                  /* td_sparse_rows was asked for, and it trains */
TD_API int64_t td_parameter_elements(const td_context *td); /* over all parameters, frozen or not */

/* The state's value in this step, after the assigns recorded so far. */
#define td_use(s) td_use_at((s), TD_HERE)
TD_API td_tensor td_use_at(td_state s, td_here here);
/* From the next read on, s is `value` (same shape and dtype). */
#define td_assign(s, value) td_assign_at((s), (value), TD_HERE)
TD_API void td_assign_at(td_state s, td_tensor value, td_here here);
/* The same where the scalar `when` is not zero; else s keeps its value. */
#define td_assign_if(s, value, when) td_assign_if_at((s), (value), (when), TD_HERE)
TD_API void td_assign_if_at(td_state s, td_tensor value, td_tensor when, td_here here);

/* Copies elements [begin, begin+count) of the whole state to or from host memory of the state's dtype. On several ranks the elements
 * must be ones this rank holds (td_state_owned), and all ranks write before the same step. Runs nothing; false and an error on failure. */
TD_API bool td_state_read(td_state s, int64_t begin, int64_t count, void *to);
TD_API bool td_state_write(td_state s, int64_t begin, int64_t count, const void *from);
/* The range of s that this rank holds: [begin, end) of its elements in row-major order; of a state that ranks share along another
 * dimension than the first, in the order of storage (td_state_cut of rewrite.h). Lays out state not yet laid. */
TD_API bool td_state_owned(td_state s, int64_t *begin, int64_t *end);

/* What is recorded between the two is not kept for the backward but computed again there, to the bit: random draws keep their keys.
 * Memory falls, FLOPs rise by the scope's forward; td_last_report shows both. Scopes do not nest: an inner pair changes
 * nothing. What a scope reads from outside and what is read of it outside is kept. */
TD_API void td_recompute_begin(td_context *td);
TD_API void td_recompute_end(td_context *td);

/* ---- Inputs, outputs and the step ------------------------------------------------------------------------ */

/* A value given by the caller, the same on every rank. `data` holds all elements and must stay until the step has run. */
#define td_input(td, name, dtype, shape, data) td_input_at((td), (name), (dtype), (shape), (data), TD_HERE)
TD_API td_tensor td_input_at(td_context *td, const char *name, td_dtype dtype, td_shape shape, const void *data, td_here here);
/* A batch: `shape` is the global shape, `data` holds this rank's consecutive rows of it (all of them on one rank). */
#define td_batch(td, name, dtype, shape, data) td_batch_at((td), (name), (dtype), (shape), (data), TD_HERE)
TD_API td_tensor td_batch_at(td_context *td, const char *name, td_dtype dtype, td_shape shape, const void *data, td_here here);
/* Rows that each rank has of its own, which need not belong to a batch: `shape` is that of all ranks' together. */
#define td_each_rank(td, name, dtype, shape, data) td_each_rank_at((td), (name), (dtype), (shape), (data), TD_HERE)
TD_API td_tensor td_each_rank_at(td_context *td, const char *name, td_dtype dtype, td_shape shape, const void *data, td_here here);
/* Memory of the host for inputs, 64-byte aligned. On a GPU it is pinned, and the GPU itself reads what td_input, td_batch and td_each_rank are
 * given of it when it comes to their step, unless the host computes in it (offload): behind td_step td_input_wait returns when all that lies in `bytes` bytes from `memory` has been read, and they may be
 * written again; false after an error. Elsewhere, and for other memory, td_step has read it when it returns, and td_input_wait returns at once.
 * NULL and an error: out of memory. The caller frees it, before the context is closed. */
TD_API void *td_input_memory(td_context *td, int64_t bytes);
TD_API bool td_input_wait(td_context *td, const void *memory, int64_t bytes);
TD_API void td_input_memory_free(td_context *td, void *memory, int64_t bytes);
/* A scalar that may differ from step to step without a new plan, dtype td_float(td). */
#define td_scalar(td, value) td_scalar_at((td), (value), TD_HERE)
TD_API td_tensor td_scalar_at(td_context *td, double value, td_here here);

/* Records the backward of the scalar `loss`: gradients add to those of every trainable parameter it depends on,
 * until an optimizer consumes them, also across steps. The loss is kept. */
#define td_backward(loss) td_backward_at((loss), TD_HERE)
TD_API void td_backward_at(td_tensor loss, td_here here);
/* The gradient of the sum of y's elements with respect to x, itself differentiable; zeros if y does not depend on x. */
#define td_gradient(y, x) td_gradient_at((y), (x), TD_HERE)
TD_API td_tensor td_gradient_at(td_tensor y, td_tensor x, td_here here);

/* Makes t readable after the step. */
TD_API void td_keep(td_tensor t);
/* The single element of t. A kept value of the last step is read, or of the one before it, if nothing else ran since, of which sixteen of
 * one element are at hand: so a loop may have begun the next step when it looks at a loss. A pending one is computed first, by running what it needs of
 * the recording without assigning anything, and again by td_step; on several ranks all must ask for it. NaN and an
 * error on failure. */
TD_API double td_item(td_tensor t);
/* A GPU whose value is read right behind its step has nothing to do until the host has seen it. True: td_item(t) can wait, behind however
 * many steps, be it that one of them fails, and is to be called once for each such answer; it then waits for t's own step alone. False, which
 * is no error: td_item(t) is to be called before the next step, as ever: on the CPU, where there is nothing to wait for, and where t is none
 * of the sixteen kept values of one element that a step gives the host. */
TD_API bool td_item_later(td_tensor t);
/* All elements of t to host memory of t's dtype. Same rules as td_item. */
TD_API bool td_read(td_tensor t, void *to);
/* Runs what is recorded, once, and begins the next step. False and an error on failure. */
TD_API bool td_step(td_context *td);
/* Plans what is recorded, for td_last_report, and drops it: nothing runs. False and an error on failure. */
TD_API bool td_plan(td_context *td);

TD_API td_shape td_shape_at(td_tensor t);                 /* of a live handle or a kept one; rank 0 for any other */
TD_API td_dtype td_dtype_at(td_tensor t);
TD_API bool td_failed(td_tensor t);

/* The same, and what is recorded next is planned as if this step had run: micro-batch after micro-batch. For contexts that only plan. */
TD_API bool td_plan_step(td_context *td);

/* What the last plan promises for one rank. Bytes and FLOPs of one run of the step. */
typedef struct td_report {
    int64_t state_bytes;      /* parameters, moments, accumulators, buffers, in the device's memory */
    int64_t step_bytes;       /* the arena; of a GPU with its copies of inputs, by whole pages */
    int64_t peak_bytes;       /* state + the largest step of all plans */
    int64_t live_bytes;       /* the largest sum of live bytes over the schedule: what no arena can go below */
    int64_t host_bytes;       /* beside these, in host memory: offloaded state and the largest step's part there */
    int64_t flops;
    int64_t bytes_moved;      /* read and written by kernels */
    int64_t comm_bytes;       /* sent by this rank */
    int64_t comm_calls;
    int64_t copied_bytes;     /* between device and host */
    int64_t nodes;            /* as recorded */
    int64_t calls;            /* kernels and collectives launched */
    int64_t plans;            /* made since td_open */
    double plan_ms;           /* the last planning took */
    double host_us;           /* the last step took the host, from td_step until its GPU had all of it, waits for the GPU left out; 0 on the CPU */
} td_report;
TD_API td_report td_last_report(const td_context *td);
/* Bytes that the context holds of its GPU's memory, and at most held (most may be NULL): state, steps and their inputs. 0 on the CPU, where
 * memory is the allocator's. */
TD_API int64_t td_device_bytes(const td_context *td, int64_t *most);
/* Bytes of the GPU's memory in use by whoever it be: what td_device_bytes does not explain is the driver's, its libraries' and other
 * programs'. 0 on the CPU. */
TD_API int64_t td_device_used_bytes(td_context *td);
/* The GPU that the context plans for, its own or options.gpu; NULL on the CPU. */
TD_API const td_gpu *td_gpu_of(const td_context *td);

/* ---- Profile -------------------------------------------------------------------------------------------- */

typedef enum td_profile_phase { TD_PROFILE_FORWARD, TD_PROFILE_BACKWARD, TD_PROFILE_UPDATE } td_profile_phase;

/* One call of a plan, this rank's part of it; the same each time the plan runs. Texts are the profile's and the
 * context's. */
typedef struct td_profile_task {
    const char *op;           /* "linear" */
    const char *parts;        /* of "fused" and "fused_rows" their functions, "mul+add+gelu"; of others the op */
    const char *kind;         /* matmul attention norm pointwise loss embedding update collective copy reduction random other */
    const char *module;       /* dotted path of where it was recorded; of a fused chain, of its last function; "" for the root */
    td_profile_phase phase;   /* what is computed again in the backward belongs to it */
    bool collective;
    td_dtype dtype;           /* of its first operand; of its result where that is none of floats */
    int64_t flops, bytes, sent, copied; /* as planned: td_report sums the same */
    bool on_host;             /* it computes there, on offloaded state */
    bool aside;               /* small, and beside what is computed, which does not wait for it */
    int64_t live_bytes;       /* of the step's memory, while it runs */
} td_profile_task;

/* Something that took time. Host events follow one another without gaps: each begins where the last one ended. Tasks lie within
 * the host's "run"; collectives, copies between device and host, those aside and the others each follow one another. */
typedef struct td_profile_event {
    const td_profile_task *task; /* NULL: the host's */
    const char *name;         /* host: "record" "plan" "agree" "bind" "run", or of td_profile_mark; NULL: a task */
    int64_t begin_ns, end_ns; /* of CLOCK_MONOTONIC, one clock for all processes of a machine */
    int64_t step;             /* of the profile, from 0 */
} td_profile_event;

/* From here on steps are timed, task by task, until td_profile_end; begun again, a profile goes on. Memory for `steps` more steps
 * is taken now, so that they allocate nothing; later ones take what they need. A context that does not profile pays one
 * comparison a task. False and an error on failure. */
TD_API bool td_profile_begin(td_context *td, int64_t steps);
TD_API void td_profile_end(td_context *td);
/* What the host did since its last event ended is called `name`, a text that stays. Nothing when no profile is on. */
TD_API void td_profile_mark(td_context *td, const char *name);
/* Readable until td_profile_clear or td_close, in order of their ends. */
TD_API int64_t td_profile_count(const td_context *td);
TD_API td_profile_event td_profile_at(const td_context *td, int64_t index); /* all 0 where there is none */
TD_API int64_t td_profile_steps(const td_context *td);    /* td_step calls profiled */
TD_API void td_profile_clear(td_context *td);             /* ends it and frees it */

/* What the machine, a GPU or a number of threads of the CPU, can do at best, measured: a floor under a task's time. */
typedef struct td_machine {
    char name[64];            /* of the GPU; "": the CPU's threads */
    double flops[TD_DTYPES];  /* a second, of large matrix products in f32, f64 and bf16; 0: not measured or not possible */
    double bytes;             /* a second, read and written, of a = b + s c over memory that no cache holds; on a GPU of a = b */
    int64_t buffer_bytes;     /* of what is read and written together */
} td_machine;
/* On td's device, with its threads, in the dtype its products run in and in that of its other operations; takes less than a second. Where
 * `share` ranks of a machine measure at the same time they divide the buffer among them. False and an error on failure. */
TD_API bool td_machine_measure(td_context *td, int share, td_machine *out);

/* ---- Operations ------------------------------------------------------------------------------------------
 * Pointwise operations broadcast as NumPy does: shapes are aligned at their last dimension, and a size of 1
 * stretches. Operands have one dtype. Errors name the operation and both shapes. Infinities, NaN and the sign of a zero pass as in
 * C's math.h. Integers are computed in f64, so exactly to 2^53, cut towards zero and clamped to their range; NaN gives 0.
 *
 * C leaves the order of arguments to the compiler: of two calls that record in one argument list either may come first. That
 * matters to what is printed, and to random draws, which are keyed by their order within a module. */

#define TD_LAST (-1)
#define TD_ALL INT32_MIN                                  /* every dimension */
enum { TD_DROP = 0, TD_KEEP = 1 };                        /* reduced dimensions: dropped, or kept with size 1 */

#define TD_UNARY(X) \
    X(neg) X(exp) X(log) X(sqrt) X(rsqrt) X(tanh) X(sigmoid) X(relu) X(abs) X(square) X(reciprocal) X(sin) X(cos) X(sign) X(positive) \
    X(detach) X(erf) X(log1p) X(expm1) X(softplus) X(gelu) X(gelu_tanh) X(silu)
#define TD_BINARY(X) \
    X(add) X(sub) X(mul) X(div) X(minimum) X(maximum) X(pow) X(less) X(less_equal) X(equal) X(swiglu)

#define TD_DECLARE_UNARY(name) TD_API td_tensor td_##name##_at(td_tensor x, td_here here);
#define TD_DECLARE_BINARY(name) TD_API td_tensor td_##name##_at(td_tensor a, td_tensor b, td_here here);
TD_UNARY(TD_DECLARE_UNARY)
TD_BINARY(TD_DECLARE_BINARY)

#define td_neg(x) td_neg_at((x), TD_HERE)
#define td_exp(x) td_exp_at((x), TD_HERE)
#define td_log(x) td_log_at((x), TD_HERE)
#define td_sqrt(x) td_sqrt_at((x), TD_HERE)
#define td_rsqrt(x) td_rsqrt_at((x), TD_HERE)             /* 1 / sqrt(x) */
#define td_tanh(x) td_tanh_at((x), TD_HERE)
#define td_sigmoid(x) td_sigmoid_at((x), TD_HERE)
#define td_relu(x) td_relu_at((x), TD_HERE)               /* gradient 0 at 0 */
#define td_abs(x) td_abs_at((x), TD_HERE)                 /* gradient sign(x) */
#define td_square(x) td_square_at((x), TD_HERE)
#define td_reciprocal(x) td_reciprocal_at((x), TD_HERE)
#define td_sin(x) td_sin_at((x), TD_HERE)
#define td_cos(x) td_cos_at((x), TD_HERE)
#define td_sign(x) td_sign_at((x), TD_HERE)               /* -1, 0 or 1; no gradient */
#define td_positive(x) td_positive_at((x), TD_HERE)       /* 1 where x > 0, else 0; no gradient */
#define td_detach(x) td_detach_at((x), TD_HERE)           /* x, through which no gradient flows */
#define td_erf(x) td_erf_at((x), TD_HERE)
#define td_log1p(x) td_log1p_at((x), TD_HERE)             /* log(1 + x), exact for small x */
#define td_expm1(x) td_expm1_at((x), TD_HERE)             /* exp(x) - 1, exact for small x */
#define td_softplus(x) td_softplus_at((x), TD_HERE)       /* log(1 + exp(x)) */
#define td_gelu(x) td_gelu_at((x), TD_HERE)               /* x (1 + erf(x / sqrt 2)) / 2 */
#define td_gelu_tanh(x) td_gelu_tanh_at((x), TD_HERE)     /* x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 */
#define td_silu(x) td_silu_at((x), TD_HERE)               /* x sigmoid(x) */
#define td_add(a, b) td_add_at((a), (b), TD_HERE)
#define td_sub(a, b) td_sub_at((a), (b), TD_HERE)
#define td_mul(a, b) td_mul_at((a), (b), TD_HERE)
#define td_div(a, b) td_div_at((a), (b), TD_HERE)
#define td_minimum(a, b) td_minimum_at((a), (b), TD_HERE) /* the gradient goes to a where a <= b */
#define td_maximum(a, b) td_maximum_at((a), (b), TD_HERE) /* the gradient goes to a where a >= b */
#define td_pow(a, b) td_pow_at((a), (b), TD_HERE)         /* a > 0 for a gradient to b */
#define td_less(a, b) td_less_at((a), (b), TD_HERE)       /* 1 or 0 in a's dtype; no gradient */
#define td_less_equal(a, b) td_less_equal_at((a), (b), TD_HERE)
#define td_equal(a, b) td_equal_at((a), (b), TD_HERE)
#define td_swiglu(a, b) td_swiglu_at((a), (b), TD_HERE)   /* silu(a) b */

/* where c is not 0: a, else b. */
#define td_where(c, a, b) td_where_at((c), (a), (b), TD_HERE)
TD_API td_tensor td_where_at(td_tensor c, td_tensor a, td_tensor b, td_here here);
/* x no less than low and no more than high, which are part of the program; the gradient passes where x is within. */
#define td_clamp(x, low, high) td_clamp_at((x), (low), (high), TD_HERE)
TD_API td_tensor td_clamp_at(td_tensor x, double low, double high, td_here here);
/* A pointwise function from its text, of operands that the text calls a, b, c ...: count of them, from 1 to 26.
 *
 *     td_tensor y = td_expression("a * sigmoid(1.702 * b)", 2, ((td_tensor[]){ x, gate }));
 *
 * From loose to tight: < <= > >= == !=, which give 1 or 0 | + - | * / | unary - | ^ from the right; parentheses; numbers; pi; every
 * pointwise operation above by its name without td_, so sqrt(a), minimum(a, b), where(c, a, b); clamp(x, low, high) of any operands.
 * What is recorded are these operations, so gradients, placement and fusion are theirs. Numbers are part of the program, in the
 * operands' dtype; those that meet only numbers are computed at once. a ^ 2 and a ^ 3 are products.
 * Errors name the column, from 1, and the caller's line: what is not understood, nested more than 64 deep, an operand not
 * given, shapes or dtypes that do not go together, a fraction where the operands are integers. */
#define td_expression(text, count, inputs) td_expression_at((text), (count), (inputs), TD_HERE)
TD_API td_tensor td_expression_at(const char *text, int count, const td_tensor *inputs, td_here here);
/* x * factor; the factor may differ from step to step without a new plan. */
#define td_scale(x, factor) td_scale_at((x), (factor), TD_HERE)
TD_API td_tensor td_scale_at(td_tensor x, double factor, td_here here);
/* A value known to the program: part of its fingerprint. */
#define td_fill(td, dtype, shape, value) td_fill_at((td), (dtype), (shape), (value), TD_HERE)
TD_API td_tensor td_fill_at(td_context *td, td_dtype dtype, td_shape shape, double value, td_here here);
#define td_cast(x, dtype) td_cast_at((x), (dtype), TD_HERE)
TD_API td_tensor td_cast_at(td_tensor x, td_dtype dtype, td_here here);

/* Reductions over one axis (TD_LAST, 0 .. rank-1, or negative from the end) or TD_ALL. Sums of f32 and bf16 are taken in f32. */
#define td_sum(x, axis, keep) td_sum_at((x), (axis), (keep), TD_HERE)
#define td_mean(x, axis, keep) td_mean_at((x), (axis), (keep), TD_HERE)
#define td_max(x, axis, keep) td_max_at((x), (axis), (keep), TD_HERE) /* the gradient is shared equally by ties */
TD_API td_tensor td_sum_at(td_tensor x, int axis, int keep, td_here here);
TD_API td_tensor td_mean_at(td_tensor x, int axis, int keep, td_here here);
TD_API td_tensor td_max_at(td_tensor x, int axis, int keep, td_here here);
/* The mean of (x - mean)^2, f32 or f64. */
#define td_variance(x, axis, keep) td_variance_at((x), (axis), (keep), TD_HERE)
TD_API td_tensor td_variance_at(td_tensor x, int axis, int keep, td_here here);
/* x summed over the dimensions in which `shape` has size 1 or is missing: the reverse of broadcasting. */
#define td_sum_to(x, shape) td_sum_to_at((x), (shape), TD_HERE)
TD_API td_tensor td_sum_to_at(td_tensor x, td_shape shape, td_here here);
/* The index of the largest element along the last dimension, first of ties, i32: (..., D) -> (...). No gradient. */
#define td_argmax(x) td_argmax_at((x), TD_HERE)
TD_API td_tensor td_argmax_at(td_tensor x, td_here here);

/* Shape. One size of td_reshape may be -1. td_transpose swaps two dimensions. td_slice takes [begin, end) of a dimension. */
#define td_reshape(x, ...) td_reshape_at((x), TD_SHAPE(__VA_ARGS__), TD_HERE)
#define td_broadcast(x, shape) td_broadcast_at((x), (shape), TD_HERE)
#define td_transpose(x, a, b) td_transpose_at((x), (a), (b), TD_HERE)
#define td_slice(x, axis, begin, end) td_slice_at((x), (axis), (begin), (end), TD_HERE)
#define td_concat(parts, count, axis) td_concat_at((parts), (count), (axis), TD_HERE)
TD_API td_tensor td_reshape_at(td_tensor x, td_shape shape, td_here here);
TD_API td_tensor td_broadcast_at(td_tensor x, td_shape shape, td_here here);
TD_API td_tensor td_transpose_at(td_tensor x, int a, int b, td_here here);
TD_API td_tensor td_slice_at(td_tensor x, int axis, int64_t begin, int64_t end, td_here here);
TD_API td_tensor td_concat_at(const td_tensor *parts, int count, int axis, td_here here);
/* td_pad puts `before` and `after` elements of one value around a dimension. td_stack joins parts of one shape along a new
 * dimension. td_split cuts a dimension into `count` equal parts, out[0] to out[count - 1]; false after a failure. td_tril keeps
 * elements whose column - row is at most `diagonal`, of the last two dimensions; the others become 0. */
#define td_pad(x, axis, before, after, value) td_pad_at((x), (axis), (before), (after), (value), TD_HERE)
#define td_stack(parts, count, axis) td_stack_at((parts), (count), (axis), TD_HERE)
#define td_split(x, axis, count, out) td_split_at((x), (axis), (count), (out), TD_HERE)
#define td_tril(x, diagonal) td_tril_at((x), (diagonal), TD_HERE)
TD_API td_tensor td_pad_at(td_tensor x, int axis, int64_t before, int64_t after, double value, td_here here);
TD_API td_tensor td_stack_at(const td_tensor *parts, int count, int axis, td_here here);
TD_API bool td_split_at(td_tensor x, int axis, int count, td_tensor *out, td_here here);
TD_API td_tensor td_tril_at(td_tensor x, int64_t diagonal, td_here here);
/* Slices whose place is a value of the program, as of caches. x (B, ...) of any dtype; axis is not the first; at (B) i32. Both fail
 * where more than the size of the dimension is asked for.
 *     td_slice_write  x with [at[b], at[b] + n) of the axis in row b replaced by row b of value: x's shape but for n along the axis.
 *                     What would lie outside of x is not written; an index below 0 does not count from the end. Where nobody
 *                     reads x afterwards only the slice is moved: td_assign(cache, td_slice_write(td_use(cache), 2, at, value)).
 *     td_slice_read   the n elements of the axis from at[b] on, 0 where they lie outside of x */
#define td_slice_write(x, axis, at, value) td_slice_write_at((x), (axis), (at), (value), TD_HERE)
#define td_slice_read(x, axis, at, n) td_slice_read_at((x), (axis), (at), (n), TD_HERE)
TD_API td_tensor td_slice_write_at(td_tensor x, int axis, td_tensor at, td_tensor value, td_here here);
TD_API td_tensor td_slice_read_at(td_tensor x, int axis, td_tensor at, int64_t n, td_here here);

/* (..., m, k) x (..., k, n) -> (..., m, n); leading dimensions are equal, or b has only two. */
#define td_matmul(a, b) td_matmul_at((a), (b), 0, 0, TD_HERE)
/* The same with the last two dimensions of a, of b swapped first where the flag is 1. */
#define td_matmul_with(a, b, transpose_a, transpose_b) td_matmul_at((a), (b), (transpose_a), (transpose_b), TD_HERE)
TD_API td_tensor td_matmul_at(td_tensor a, td_tensor b, int transpose_a, int transpose_b, td_here here);
/* x (..., in), weight (out, in), bias (out) -> x weight^T + bias (..., out). */
#define td_linear(x, weight, bias) td_linear_at((x), (weight), (bias), TD_HERE)
TD_API td_tensor td_linear_at(td_tensor x, td_tensor weight, td_tensor bias, td_here here);

/* exp(x - max x) / sum exp(x - max x), along the last dimension. */
#define td_softmax(x) td_softmax_at((x), TD_HERE)
TD_API td_tensor td_softmax_at(td_tensor x, td_here here);
/* log softmax(x) (..., D) and log sum exp(x) (...), f32 or f64, along the last dimension, without overflow. Of a row of -inf: NaN and
 * -inf; of a row with +inf: NaN and +inf. */
#define td_log_softmax(x) td_log_softmax_at((x), TD_HERE)
#define td_logsumexp(x) td_logsumexp_at((x), TD_HERE)
TD_API td_tensor td_log_softmax_at(td_tensor x, td_here here);
TD_API td_tensor td_logsumexp_at(td_tensor x, td_here here);

/* The mean over rows of -log softmax(logits)[label]: logits (..., C), labels (...) i32 -> scalar f32 (f64 for f64).
 * With weights (...), td_float: sum w_i l_i / sum w_i. A label outside [0, C) gives NaN. */
#define td_cross_entropy(logits, labels) td_cross_entropy_at((logits), (labels), TD_HERE)
#define td_cross_entropy_weighted(logits, labels, weights) td_cross_entropy_weighted_at((logits), (labels), (weights), TD_HERE)
TD_API td_tensor td_cross_entropy_at(td_tensor logits, td_tensor labels, td_here here);
TD_API td_tensor td_cross_entropy_weighted_at(td_tensor logits, td_tensor labels, td_tensor weights, td_here here);
/* The mean of (y - target)^2 over all elements; with weights (rows) each row's mean counts by its weight. */
#define td_mse(y, target) td_mse_at((y), (target), TD_HERE)
#define td_mse_weighted(y, target, weights) td_mse_weighted_at((y), (target), (weights), TD_HERE)
TD_API td_tensor td_mse_at(td_tensor y, td_tensor target, td_here here);
TD_API td_tensor td_mse_weighted_at(td_tensor y, td_tensor target, td_tensor weights, td_here here);
typedef struct td_cross_entropy_options {
    bool ignores;             /* rows whose label is `ignored` do not count; none left gives NaN */
    int32_t ignored;
    double smoothing;         /* the share of the loss that is the mean over all classes: [0, 1] */
    td_tensor weights;        /* of the rows, td_float; left out: 1 */
} td_cross_entropy_options;
#define td_cross_entropy_with(logits, labels, ...) td_cross_entropy_with_at((logits), (labels), (__VA_ARGS__), TD_HERE)
TD_API td_tensor td_cross_entropy_with_at(td_tensor logits, td_tensor labels, const td_cross_entropy_options *options, td_here here);
/* Means over all elements; weights as for td_mse_weighted, or TD_NO_TENSOR. Operands have one shape and dtype.
 *     td_bce      -t log sigmoid(x) - (1 - t) log(1 - sigmoid(x)) of logits x, without overflow; t in [0, 1]
 *     td_l1       |y - target|
 *     td_huber    e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2), e = y - target */
#define td_bce(logits, target, weights) td_bce_at((logits), (target), (weights), TD_HERE)
#define td_l1(y, target, weights) td_l1_at((y), (target), (weights), TD_HERE)
#define td_huber(y, target, delta, weights) td_huber_at((y), (target), (delta), (weights), TD_HERE)
TD_API td_tensor td_bce_at(td_tensor logits, td_tensor target, td_tensor weights, td_here here);
TD_API td_tensor td_l1_at(td_tensor y, td_tensor target, td_tensor weights, td_here here);
TD_API td_tensor td_huber_at(td_tensor y, td_tensor target, double delta, td_tensor weights, td_here here);
/* The scalars that a loss is the quotient of where rows count unequally (weights, ignored labels): loss = sum / weight. Of a batch in
 * parts it is these that add up, not the losses: td_backward of each part's sum, then opt_step_over (tandem/optim.h) with all that the
 * parts weigh. A part in which nothing counts adds 0 and 0. True of any td_div of scalars in this step whose divisor depends on nothing
 * that trains; false, and nothing given: of other values. */
TD_API bool td_quotient(td_tensor loss, td_tensor *sum, td_tensor *weight);

/* x * mask / (1 - p), mask drawn with P(0) = p to the nearest 2^-16, keyed by (seed, path, update, global element index). x itself in
 * TD_EVAL. */
#define td_dropout(x, p) td_dropout_at((x), (p), TD_HERE)
TD_API td_tensor td_dropout_at(td_tensor x, double p, td_here here);
/* Uniform in [0, 1), keyed in the same way. */
#define td_uniform(td, shape) td_uniform_at((td), (shape), TD_HERE)
TD_API td_tensor td_uniform_at(td_context *td, td_shape shape, td_here here);

/* Rows by number: table (V, D) float, ids (...) i32 -> (..., D). An id outside [0, V) gives a row of NaN, and no gradient. */
#define td_embedding(table, ids) td_embedding_at((table), (ids), TD_HERE)
TD_API td_tensor td_embedding_at(td_tensor table, td_tensor ids, td_here here);
/* Elements by number: x (..., D) float, ids (..., K) i32 -> (..., K). An id outside [0, D) gives NaN, and no gradient. */
#define td_gather(x, ids) td_gather_at((x), (ids), TD_HERE)
TD_API td_tensor td_gather_at(td_tensor x, td_tensor ids, td_here here);
/* The reverse: ids (..., K) i32, values (..., K) -> (..., columns), the sum of the values at each place; f32 for 16-bit floats. */
#define td_scatter_add(ids, values, columns) td_scatter_add_at((ids), (values), (columns), TD_HERE)
TD_API td_tensor td_scatter_add_at(td_tensor ids, td_tensor values, int64_t columns, td_here here);
/* ids (...) i32 -> (..., classes), 1 at the id's place and 0 elsewhere; all 0 for an id outside [0, classes), of which there are at
 * most 2^31 - 1. No gradient. */
#define td_one_hot(ids, classes, dtype) td_one_hot_at((ids), (classes), (dtype), TD_HERE)
TD_API td_tensor td_one_hot_at(td_tensor ids, int64_t classes, td_dtype dtype, td_here here);

/* Norms over the last dimension, x (..., D), weight and bias (D) f32 (f64 for f64), which is the result's dtype:
 *     layer_norm  (x - mean) / sqrt(variance + eps) weight + bias, biased variance; bias may be TD_NO_TENSOR
 *     rms_norm    x / sqrt(mean x^2 + eps) weight */
#define td_layer_norm(x, weight, bias, eps) td_layer_norm_at((x), (weight), (bias), (eps), TD_HERE)
#define td_rms_norm(x, weight, eps) td_rms_norm_at((x), (weight), (eps), TD_HERE)
TD_API td_tensor td_layer_norm_at(td_tensor x, td_tensor weight, td_tensor bias, double eps, td_here here);
TD_API td_tensor td_rms_norm_at(td_tensor x, td_tensor weight, double eps, td_here here);

/* softmax(scale q k^T) v over the keys each query sees: q (B, H, T, d), k (B, Hkv, S, d), v (B, Hkv, S, e) of one float
 * dtype -> (B, H, T, e). H is a multiple of Hkv: consecutive heads share keys and values. Query i is at position S - T + i, so
 * that the last query sees the last key. A query that sees no key gives zeros. Memory grows with T, not with T S. */
typedef struct td_attention_options {
    bool causal;              /* no key after the query's position */
    double scale;             /* 0: 1 / sqrt(d) */
    int64_t window;           /* only keys at a distance below it; 0: all */
    double dropout;           /* of the probabilities, as td_dropout, element (b, h, i, j) of the global (B, H, T, S) */
    td_tensor lengths;        /* (B) i32: keys from lengths[b] on are padding; left out: none are */
    td_tensor positions;      /* (B) i32: query i is at positions[b] + i, as beside a cache of keys; left out: S - T + i */
} td_attention_options;
/* td_attention(q, k, v, &(td_attention_options){ .causal = true, .window = 8 }); the options may be NULL. */
#define td_attention(q, k, v, ...) td_attention_at((q), (k), (v), (__VA_ARGS__), TD_HERE)
TD_API td_tensor td_attention_at(td_tensor q, td_tensor k, td_tensor v, const td_attention_options *options, td_here here);

/* Rotary positions: x (B, H, T, d), d even, each pair of elements j and j + d/2 of row i turned by p theta^(-2j/d). */
typedef struct td_rotary_options {
    double theta;             /* 0: 10000 */
    td_tensor positions;      /* (B) i32: row i is at p = positions[b] + i; left out: p = i */
    double factor, low, high; /* Llama 3.1's stretched wavelengths: 8, 1, 4 with the context of training; factor 0: none */
    int64_t context;
} td_rotary_options;
/* td_rotary(x, &(td_rotary_options){ .theta = 1e5, .positions = at }); the options may be NULL. */
#define td_rotary(x, ...) td_rotary_at((x), (__VA_ARGS__), TD_HERE)
TD_API td_tensor td_rotary_at(td_tensor x, const td_rotary_options *options, td_here here);

/* Running sums along the last dimension: y_j = x_0 + ... + x_j. */
#define td_cumsum(x) td_cumsum_at((x), TD_HERE)
TD_API td_tensor td_cumsum_at(td_tensor x, td_here here);
/* The k largest elements along the last dimension in falling order, (..., D) -> (..., k); of equal ones the first comes first, a NaN
 * is the largest. td_sort gives all of them. */
typedef struct td_top_k_options {
    bool smallest;            /* the smallest, in rising order */
    td_tensor *indices;       /* where they are, (..., k) i32; NULL: not asked for */
} td_top_k_options;
/* The options may be NULL. */
#define td_top_k(x, k, ...) td_top_k_at((x), (k), (__VA_ARGS__), TD_HERE)
#define td_sort(x, ...) td_sort_at((x), (__VA_ARGS__), TD_HERE)
TD_API td_tensor td_top_k_at(td_tensor x, int64_t k, const td_top_k_options *options, td_here here);
TD_API td_tensor td_sort_at(td_tensor x, const td_top_k_options *options, td_here here);

/* ---- Gradients of one's own ------------------------------------------------------------------------------- */

/* What a gradient rule sees: handles of the forward's inputs and outputs and of the gradients that arrived. It records
 * operations and gives each input its gradient with td_gradient_set; an input left out has none. */
typedef struct td_gradient_call {
    td_context *td;
    td_here here;
    const void *attr;
    int inputs, outputs;
    const td_tensor *in, *out;
    const td_tensor *dout;                    /* id TD_NONE: no gradient arrived for that output */
    const bool *wanted;                       /* whether anything reads this input's gradient */
    td_tensor *din;
} td_gradient_call;
#define td_gradient_set(g, i, t) ((g)->din[i] = (t))

/* A gradient in place of the one that y's own operations have. */
typedef struct td_gradient_rule {
    const char *name;                         /* what it is known by, the same on every rank */
    void (*gradient)(const td_gradient_call *g);
} td_gradient_rule;
enum { TD_GRADIENT_INPUTS = 15, TD_GRADIENT_ATTR_BYTES = 256 };

/* The value of y, whose gradient is what the rule gives the n inputs: nothing reaches them through y itself. So y = sign(x) trained
 * as if it were x is td_with_gradient(td_sign(x), &x, 1, &straight_through, NULL, 0), with
 *
 *     static void straight_through_gradient(const td_gradient_call *g) { td_gradient_set(g, 0, g->dout[0]); }
 *     static const td_gradient_rule straight_through = { "straight_through", straight_through_gradient };
 *
 * The rule sees the inputs as g->in, y as g->out[0], the gradient that arrived as g->dout[0], and attr, attr_bytes of which are copied
 * into the program and are part of its fingerprint, without padding garbage; NULL: none. What it gives input i has that input's shape.
 * Values of 16 bits reach it as f32 and what it gives is rounded to them. It is called when a plan is made, once for each gradient that
 * passes, not in every step. It records operations on what it sees and on td_fill; being recorded they have derivatives too. States,
 * inputs, scalars (so td_scale), random draws and further gradients belong to the step: make them inputs.
 * Errors: two rules of one name; y no float; more than TD_GRADIENT_INPUTS or TD_GRADIENT_ATTR_BYTES; when planning: a gradient of
 * another shape, something recorded that belongs to the step. */
#define td_with_gradient(y, inputs, n, rule, attr, attr_bytes) td_with_gradient_at((y), (inputs), (n), (rule), (attr), (attr_bytes), TD_HERE)
TD_API td_tensor td_with_gradient_at(td_tensor y, const td_tensor *inputs, int n, const td_gradient_rule *rule, const void *attr,
                                     size_t attr_bytes, td_here here);

/* ---- safetensors ------------------------------------------------------------------------------------------ */

/* A file opened for reading; its content is mapped. The whole header is checked before anything is believed. */
typedef struct td_safetensors td_safetensors;
typedef struct td_safetensors_entry {
    const char *name;        /* owned by the file */
    td_dtype dtype;
    td_shape shape;
    const void *data;        /* mapped, little-endian; any alignment */
    int64_t bytes;
} td_safetensors_entry;

/* NULL and an error that names the file and what is wrong with it. */
TD_API td_safetensors *td_safetensors_open(td_context *td, const char *path);
TD_API void td_safetensors_close(td_safetensors *file);
TD_API int64_t td_safetensors_count(const td_safetensors *file);
TD_API td_safetensors_entry td_safetensors_at(const td_safetensors *file, int64_t index);       /* in order of offset */
TD_API bool td_safetensors_find(const td_safetensors *file, const char *name, td_safetensors_entry *out);
TD_API const char *td_safetensors_metadata(const td_safetensors *file, const char *key);        /* NULL: not there */
/* Writes to a temporary name beside path, syncs, renames. metadata: pairs of key and value, ending with NULL; may be NULL. */
TD_API bool td_safetensors_write(td_context *td, const char *path, const td_safetensors_entry *entries, int64_t count,
                                 const char *const *metadata);
/* The same of tensors that are made one at a time: get gives the data of entries[index], in order; they are read before the next
 * call. NULL after td_fail ends the writing. What `data` of the entries says is not looked at. */
typedef const void *(*td_safetensors_get)(void *user, int64_t index);
TD_API bool td_safetensors_write_from(td_context *td, const char *path, const td_safetensors_entry *entries, int64_t count,
                                      const char *const *metadata, td_safetensors_get get, void *user);
/* `count` elements of any alignment in another dtype. Bits stay where the dtypes are equal; to 16 bits values round to nearest, ties
 * to even. */
TD_API void td_convert(td_dtype to_dtype, void *to, td_dtype from_dtype, const void *from, int64_t count);

#ifdef __cplusplus
}
#include <initializer_list>
static inline td_shape td_shape_from(std::initializer_list<int64_t> dims)
{
    return td_shape_of((int)dims.size(), dims.begin());
}
#endif

#endif
