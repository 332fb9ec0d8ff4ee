/* The program as data: for passes, strategies, transports and new operations.
 *
 * A program is a list of nodes in an order that respects their inputs. A node reads values and makes values; it is
 * pure unless its operation has TD_OP_EFFECT. A pass reads one program and builds the next (td_pass_begin,
 * td_emit, td_pass_end): nodes are never changed in place. Pointers into a program die when it grows: copy a
 * td_node or td_value before emitting.
 *
 *     record -> precision -> differentiate -> simplify -> place -> schedule -> fuse -> plan -> run
 */
#ifndef TANDEM_REWRITE_H
#define TANDEM_REWRITE_H

#include <tandem/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Mesh and placement --------------------------------------------------------------------------------- */

enum { TD_MAX_AXES = 3 };

/* The ranks as a grid with named axes; rank = row-major index of its coordinates. One rank: axes = 0. */
typedef struct td_mesh {
    int axes;
    const char *name[TD_MAX_AXES];
    int size[TD_MAX_AXES];
    int at[TD_MAX_AXES];  /* this rank's coordinates */
    bool same_rows[TD_MAX_AXES]; /* ranks along it hold the same rows of a batch; else each its part */
    int rank, world;
} td_mesh;

/* How many parts the ranks cut a batch into, and which of them this rank holds. */
TD_API void td_mesh_rows(const td_mesh *mesh, int *part, int *parts);

typedef enum td_place_kind { TD_REPLICATED, TD_SHARDED, TD_PARTIAL, TD_FREE } td_place_kind;

typedef enum td_memory { TD_DEVICE, TD_HOST } td_memory; /* of the device; of its host, pinned. On the CPU both are its own. */

/* Where a value is, one entry a mesh axis. Sharded: rank i of the axis holds chunk i of ceil(size / ranks) along dim.
 * Partial: the value is the sum over the axis. Free: computable anywhere. And in which memory. All zero is replicated, on the device. */
typedef struct td_placement {
    int8_t kind[TD_MAX_AXES];
    int8_t dim[TD_MAX_AXES];
    int8_t memory;                            /* td_memory */
} td_placement;

TD_API td_shape td_local_shape(const td_mesh *mesh, td_shape shape, td_placement place);
TD_API bool td_placement_equal(td_placement a, td_placement b);

/* ---- Programs ------------------------------------------------------------------------------------------- */

typedef uint32_t td_id;                       /* a value of a program */
typedef struct td_op td_op;

enum { TD_BACKWARD_PHASE = 1 };               /* phase: 2 x micro-batch, + 1 in its backward */

typedef struct td_value {
    td_shape shape;                           /* global */
    uint32_t node;                            /* that makes it */
    uint16_t output;                          /* which of the node's */
    uint8_t dtype;
    td_placement place;                       /* from `place` on */
} td_value;

typedef struct td_node {
    const td_op *op;
    const char *file;                         /* the caller's */
    uint64_t hash;                            /* of the program up to and with this node; of the recording only */
    int32_t line;
    uint32_t module;
    uint32_t phase;
    uint32_t input, inputs;                   /* range of program->inputs */
    uint32_t output, outputs;                 /* range of program->values */
    uint32_t attr, attr_bytes;                /* range of program->attrs, 8-byte aligned */
    uint32_t after;                           /* a value that must exist before this node runs, or TD_NONE */
    uint32_t scope;                           /* of recomputation, from 1; 0: none */
} td_node;

typedef struct td_program {
    td_context *td;
    td_node *nodes;
    td_value *values;
    td_id *inputs;
    char *attrs;
    uint32_t node_count, value_count, input_count, attr_count;
    uint32_t node_room, value_room, input_room, attr_room;
    uint32_t generation;                      /* handles into it carry this */
    uint64_t hash;
} td_program;

static inline const td_node *td_node_at(const td_program *p, uint32_t node) { return &p->nodes[node]; }
static inline const td_value *td_value_at(const td_program *p, td_id id) { return &p->values[id]; }
/* NULL where there are none. */
static inline const td_id *td_node_inputs(const td_program *p, const td_node *n) { return n->inputs ? p->inputs + n->input : NULL; }
static inline const void *td_node_attr(const td_program *p, const td_node *n) { return n->attr_bytes ? p->attrs + n->attr : NULL; }
static inline const td_node *td_producer(const td_program *p, td_id id) { return &p->nodes[p->values[id].node]; }

/* The program as text, one line a value. Owned by the caller: td_free(td, text, strlen(text) + 1, "host"). */
TD_API char *td_program_text(const td_program *p);

/* What td_emit needs of a node that already knows its outputs. */
typedef struct td_emission {
    const td_op *op;
    const td_node *like;                      /* file, line, module and phase come from it; may be NULL */
    uint32_t phase;                           /* used when like is NULL */
    const td_id *inputs;
    int input_count;
    const void *attr;
    size_t attr_bytes;
    const td_value *outputs;                  /* shape, dtype, place; node and output are filled in */
    int output_count;
    td_id after;                              /* 0 is a value too: set TD_NONE */
} td_emission;

/* Appends a node and returns its first value (TD_NONE and a context error when out of memory; for a node without
 * outputs, TD_NONE without an error). Shapes are taken as given. */
TD_API td_id td_emit(td_program *p, const td_emission *e);

/* Starts a program that passes build into: td_record and all td_ operations go to it until td_pass_end. */
TD_API td_program *td_pass_begin(td_context *td);
TD_API td_program *td_pass_end(td_program *p);   /* the same program; NULL if the context has failed (then freed) */
TD_API void td_program_free(td_program *p);
/* Copies node `n` of `from` into `to` with inputs replaced by map[old id]; writes the new ids of its outputs to map. */
TD_API bool td_copy_node(td_program *to, const td_program *from, uint32_t n, td_id *map);
/* Handles of values of the program being built, and back. */
TD_API td_tensor td_handle(const td_program *p, td_id id);
TD_API td_id td_handle_id(td_tensor t);

/* ---- Operations ----------------------------------------------------------------------------------------- */

/* A call that is being recorded: the operation's shape rule reads inputs and fills outputs. */
typedef struct td_call {
    td_context *td;
    const td_op *op;
    const void *attr;
    size_t attr_bytes;
    int inputs;
    const td_value *const *in;
    int outputs;                              /* 1 unless the rule says otherwise */
    td_value *out;                            /* room for TD_CALL_OUTPUTS */
} td_call;
enum { TD_CALL_OUTPUTS = 8 };

/* Reports "softmax: <text>, (<module path>) (<file>:<line>)" and returns false. */
TD_API bool td_call_fail(const td_call *call, const char *format, ...) TD_PRINTF(2, 3);

/* How a node's dimensions share labels: a label in an input and an output is kept, one only in inputs is contracted
 * (the output is a sum over it), 0 is blocked: never sharded; labels are below TD_RULE_LABELS. Inputs past the last row use the last
 * row. */
enum { TD_RULE_INPUTS = 4, TD_RULE_OUTPUTS = 2 };
typedef enum td_partial_rule {
    TD_PARTIAL_NONE,                          /* a sum yet to be taken must be taken before */
    TD_PARTIAL_JOINT,                         /* linear in all inputs together: all partial or none */
    TD_PARTIAL_EACH,                          /* linear in each: exactly one may be partial */
} td_partial_rule;
enum { TD_RULE_LABELS = TD_MAX_DIMS + 4 };
typedef struct td_place_rule {
    int8_t in[TD_RULE_INPUTS][TD_MAX_DIMS];
    int8_t out[TD_RULE_OUTPUTS][TD_MAX_DIMS];
    int64_t even[TD_RULE_LABELS];             /* by label: sharded only among ranks that divide it; 0: any */
    uint32_t added;                           /* bit i: input i is a term of the sum over a contracted label, which counts once if that
                                                 is sharded */
    td_partial_rule partial;
} td_place_rule;

typedef enum td_precision {
    TD_ANY_DTYPE,                             /* computes in the dtype of its inputs; mixed inputs are widened */
    TD_PRODUCT,                               /* inputs in the context's compute dtype, accumulates in f32 */
    TD_WIDE,                                  /* reads any float dtype, gives f32 */
} td_precision;

typedef struct td_cost {
    int64_t flops;
    int64_t bytes;                            /* read and written */
    int64_t sent;                             /* to other ranks */
    int64_t copied;                           /* between device and host */
} td_cost;

enum {
    TD_OP_POINTWISE = 1 << 0,                 /* every output element from the inputs' elements at its index */
    TD_OP_VIEW = 1 << 1,                      /* the output is the input's memory */
    TD_OP_SOURCE = 1 << 2,                    /* no inputs, no computation: state, input, scalar */
    TD_OP_EFFECT = 1 << 3,                    /* kept though nothing reads it */
    TD_OP_FREE = 1 << 4,                      /* made in whatever placement its reader wants */
    TD_OP_RANDOM = 1 << 5,                    /* never merged with another */
    TD_OP_COLLECTIVE = 1 << 6,                /* talks to other ranks */
    TD_OP_INPLACE = 1 << 7,                   /* output i may use input inplace[i]'s memory: written only after the same element is read */
    TD_OP_VIRTUAL = 1 << 8,                   /* replaced by a pass before `plan` */
    TD_OP_COPY = 1 << 9,                      /* between the memories of device and host */
};

/* One operand of a kernel: this rank's part of the value. */
typedef struct td_arg {
    void *data;
    td_shape shape;                           /* local */
    td_shape global;
    td_placement place;
    td_dtype dtype;
} td_arg;

/* What a step run carries to the kernels; one a context. */
typedef struct td_run {
    td_context *td;
    uint64_t seed;
    int64_t update;                           /* optimizer updates done: counter of random draws */
    int64_t micro;                            /* micro-batches run since the last update, before this step */
    int threads;
    const td_mesh *mesh;
    const struct td_transport *transport;     /* NULL on one rank */
    void *queue;                              /* of a GPU: the cudaStream_t that kernels go to; NULL on the CPU */
    const void *on_device;                    /* of a GPU: seed, update and micro as kernels read them, core/device_cuda.h */
} td_run;

typedef struct td_kernel {
    const td_op *op;
    const void *attr;
    size_t attr_bytes;
    int inputs, outputs;
    const td_arg *in;
    const td_arg *out;
    void *workspace;                          /* as many bytes as `prepare` asked for, 64-byte aligned */
    void *prepared;                           /* what `prepare` made */
    const td_run *run;
    uint32_t phase;
    bool in_place;                            /* output 0 of a TD_OP_INPLACE lies where the input it is paired with does */
    const char *way;                          /* what `prepare` chose, as profiles name it; or NULL */
} td_kernel;

/* Made once when a plan is made; data pointers are not yet valid. May make library objects (freed by `release`). */
typedef struct td_preparation {
    int64_t workspace_bytes;
    void *prepared;
    const char *way;                          /* static text: what computes the call, where there are several; NULL: the operation's kernel */
} td_preparation;

/* What runs an operation on a kind of device. On a GPU `run` puts work on the run's queue and neither waits nor allocates: it may be
 * captured in a graph, so nothing that changes from run to run may be read on the host. `prepare` and `release` NULL: none. */
typedef struct td_device_kernel {
    void (*run)(const td_kernel *k);
    bool (*prepare)(td_context *td, const td_kernel *k, td_preparation *out);
    void (*release)(void *prepared);
} td_device_kernel;

/* A descriptor names the functions of a .cu file where it is compiled with TANDEM_CUDA defined, as the library's are in a build with CUDA;
 * elsewhere it names none, and the .cu is not needed:
 *
 *     TD_CUDA_KERNEL(swish_cuda);                      in the .c; in the .cu  extern "C" void swish_cuda(const td_kernel *k)
 *     static const td_op swish_op = { ..., .cuda = TD_CUDA(swish_cuda) };
 *
 * TD_CUDA(run[, prepare[, release]]) is a td_device_kernel, TD_CUDA_ONLY(f) one function, as td_update_rule has them. */
#ifdef TANDEM_CUDA
#define TD_CUDA_ONLY(function) (function)
#else
#define TD_CUDA_ONLY(function) NULL
#endif
#define TD_CUDA(...) TD_CUDA_THREE(__VA_ARGS__, NULL, NULL, NULL)
#define TD_CUDA_THREE(run, prepare, release, ...) { TD_CUDA_ONLY(run), TD_CUDA_ONLY(prepare), TD_CUDA_ONLY(release) }
#define TD_CUDA_KERNEL(run) void run(const td_kernel *k)
#define TD_CUDA_PREPARE(prepare) bool prepare(td_context *td, const td_kernel *k, td_preparation *out)

typedef struct td_case_input {
    enum { TD_CASE_NONE, TD_CASE_NORMAL, TD_CASE_POSITIVE, TD_CASE_LABELS } kind; /* labels: i32 in [0, scale) */
    int rank;
    int64_t dim[TD_MAX_DIMS];
    double scale;                             /* 0: 1 */
} td_case_input;
#define TD_CASE_DIMS(...) (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), { __VA_ARGS__ }
#define TD_RANDN(...) { TD_CASE_NORMAL, TD_CASE_DIMS(__VA_ARGS__), 1 }
#define TD_POSITIVE(...) { TD_CASE_POSITIVE, TD_CASE_DIMS(__VA_ARGS__), 1 }
#define TD_SCALED(factor, ...) { TD_CASE_NORMAL, TD_CASE_DIMS(__VA_ARGS__), (factor) }
#define TD_LABELS(classes, ...) { TD_CASE_LABELS, TD_CASE_DIMS(__VA_ARGS__), (classes) }
#define TD_SCALAR_CASE { TD_CASE_NORMAL, 0, { 0 }, 1 }

/* One input of an operation's tests: recorded through td_record with these inputs and attributes. An array ends
 * with a case whose first input is TD_CASE_NONE. */
typedef struct td_case {
    td_case_input in[TD_RULE_INPUTS];
    const void *attr;                         /* attr_bytes of the operation */
    const char *note;
    bool no_gradient_check;                   /* not differentiable where finite differences look */
} td_case;

struct td_op {
    const char *name;
    int inputs;                               /* -1: any number */
    uint32_t flags;
    size_t attr_bytes;
    bool (*shape)(td_call *call);
    void (*gradient)(const td_gradient_call *g);              /* NULL: not differentiable */
    td_tensor (*decompose)(const td_gradient_call *call);     /* records primitives from call->in; its one output */
    void (*place)(const td_program *p, const td_node *n, td_place_rule *rule);
    td_precision precision;
    td_cost (*cost)(const td_kernel *k);                      /* of this rank's part; NULL: 0 FLOPs, operands once */
    bool (*prepare)(td_context *td, const td_kernel *k, td_preparation *out); /* for the CPU */
    void (*release)(void *prepared);
    void (*cpu)(const td_kernel *k);
    td_device_kernel cuda;                                    /* run NULL: cannot be run there */
    void (*print)(const td_program *p, const td_node *n, char *to, size_t room); /* attributes; NULL: none */
    int8_t inplace[TD_RULE_OUTPUTS];          /* outputs past the last row pair with the inputs that follow */
    const td_case *cases;
    const char *expression;                   /* pointwise: in a, b, c */
    int pointwise;                            /* pointwise: index of its loops */
};

/* Records one call and returns its first output; td_output gives the others. attr: op->attr_bytes bytes without
 * padding garbage. n inputs of one context. */
TD_API td_tensor td_record(const td_op *op, td_here here, int n, const td_tensor *in, const void *attr);
/* The same with attributes of another size, and for operations without inputs. */
TD_API td_tensor td_record_sized(td_context *td, const td_op *op, td_here here, int n, const td_tensor *in, const void *attr, size_t attr_bytes);
TD_API td_tensor td_output(td_tensor first, int k);
TD_API td_context *td_tensor_context(td_tensor t);
TD_API bool td_is_pending(td_tensor t);                     /* a value of the step that is being recorded */

/* Calls body(user, begin, end) over [0, count) on the run's threads, in chunks of at least grain. */
typedef void (*td_range_function)(void *user, int64_t begin, int64_t end);
TD_API void td_parallel_for(const td_run *run, int64_t count, int64_t grain, td_range_function body, void *user);

/* ---- State as units ------------------------------------------------------------------------------------- */

/* Parameters are stored as views of flat units; a placement is a unit's. Members start at multiples of
 * TD_UNIT_ALIGN elements, gaps and the tail are zero. */
enum { TD_UNIT_ALIGN = 16 };
typedef struct td_unit_member {
    uint32_t state;
    int64_t offset, elements;                 /* of a unit that is cut: of a block of it, within a row */
} td_unit_member;
/* A state that is cut is `ways` blocks along its dimension `dim`, one for each rank of mesh axis `axis`, which divide it evenly. */
typedef struct td_cut {
    int32_t ways;                             /* 0: not cut */
    int8_t axis, dim;
} td_cut;
/* How s is stored, once units are laid out. */
TD_API td_cut td_state_cut(td_state s);
/* Storage has a cut state's blocks one after another. Element number `at` of that order as its number in the order of the shape,
 * and back; *run: from there so many are consecutive in both. */
TD_API int64_t td_cut_element(td_cut cut, td_shape shape, int64_t at, int64_t *run);
TD_API int64_t td_cut_position(td_cut cut, td_shape shape, int64_t element, int64_t *run);
/* A unit's value is flat (elements); that of one whose members are cut has a row of their blocks for each rank of the axis:
 * (ways, elements / ways). */
typedef struct td_unit {
    td_state_kind kind;
    td_dtype dtype;
    int64_t elements;                         /* of a unit that trains padded, a multiple of the ranks that may share it */
    td_cut cut;                               /* of each member */
    td_placement place;                       /* of the stored value; sharded along its last dimension or replicated, and by rows if cut */
    td_unit_member *members;
    int32_t member_count;
    bool trains;
    bool sparse;                              /* a table with row-sparse gradients: its only member, replicated */
    bool root;                                /* stays gathered between forward and backward */
    uint32_t of;                              /* a moment's parameter unit; what a derived one is made of; else TD_NONE */
    const char *slot;                         /* a moment's name */
    bool derived;                             /* derived state: kept until a step stores what it is made of; not saved */
    bool current;                             /* a derived one is as what it is made of */
    uint64_t layout;                          /* of a derived one: what it holds, as a number of whoever asked for it */
    uint32_t accumulator;                     /* unit of pending gradients, or TD_NONE */
    bool accumulator_full;                    /* it holds gradients not yet consumed */
    bool accumulator_taken;                   /* the program differentiated last reads it and so empties it */
    void *memory;                             /* this rank's part */
    int64_t local_bytes;
} td_unit;
TD_API uint32_t td_unit_count(const td_context *td);
TD_API const td_unit *td_unit_at(const td_context *td, uint32_t unit);
/* The unit of derived state that is made of unit `like->of`, or, TD_NONE, of parameters of any; made if there is none, and then not
 * current: a program that reads it while it is not makes its value and stores it. TD_NONE: another dtype or layout is kept already, or
 * after td_fail. Of `like`: of, slot, dtype, elements, cut, place, layout. */
TD_API uint32_t td_derived_unit(td_context *td, const td_unit *like);
/* The dimension of a unit's value along which strategies shard it. */
static inline int td_unit_flat_dim(const td_unit *u) { return u->cut.ways ? 1 : 0; }

/* How a strategy wants the units of parameters: called for those that train in order of creation and, where parameters are sharded or
 * may be cut, for those that are frozen. */
typedef struct td_unit_choice {
    int32_t unit;                             /* any number: equal numbers share a unit */
    bool root;
    bool whole;                               /* stored replicated, whatever the strategy says of parameters */
    td_cut cut;                               /* the same in a unit */
} td_unit_choice;

/* ---- Optimizer updates ----------------------------------------------------------------------------------- */

/* A consecutive range of a unit that one rule updates in place, on this rank. f32 or f64 throughout. */
enum { TD_MOMENTS = 4, TD_HYPERS = 8 };
typedef struct td_update_range {
    int64_t count;                            /* elements */
    int64_t width;                            /* of a row: only for rules with moments of rows, count is a multiple of it */
    td_dtype dtype;
    void *parameter;
    const void *gradient;
    void *moment[TD_MOMENTS];
    void *copy;                               /* on a GPU, of a rule that `copies`: gets the new parameter in 16 bits; NULL: there is none */
    td_dtype copy_dtype;
    double rate;                              /* learning rate */
    double gradient_scale;                    /* multiply the gradient by it first: clipping, loss scale */
    double updates;                           /* updates done, this one included: 1 at the first */
    double hyper[TD_HYPERS];                  /* the rule's own: decay, betas, eps ... */
} td_update_range;

/* What a range's numbers are on a GPU, where they change without the host: scalars of the range's dtype in device memory. */
typedef struct td_update_scalars {
    const void *rate, *gradient_scale, *updates;
    const void *when;                         /* NULL: always */
    void *queue;                              /* the cudaStream_t */
} td_update_scalars;

typedef struct td_update_rule {
    const char *name;                         /* "adamw" */
    int moments;
    const char *moment_name[TD_MOMENTS];
    const char *hyper_name[TD_HYPERS];        /* for printing; NULL ends */
    void (*cpu)(const td_update_range *range);
    /* NULL: not on a GPU. `count` ranges of a unit at once, f32; of their own numbers it reads the hypers alone. */
    void (*cuda)(const td_update_range *ranges, int count, const td_update_scalars *scalars);
    /* NULL: no updates by rows on a GPU. `range` is a member's, its gradient count / width rows: the i-th is that of row ids[i], in device
     * memory, which rise up to the first that is -1; ids NULL: of row i. */
    void (*cuda_rows)(const td_update_range *range, const int32_t *ids, const td_update_scalars *scalars);
    int flops;                                /* an element */
    bool copies;                              /* `cuda` writes td_update_range.copy */
    bool sparse;                              /* where the gradient is zero nothing changes: rows without one may be left out */
    bool row_moment[TD_MOMENTS];              /* the moment has one element a row (td_moment_rows) */
} td_update_rule;
/* Moment m of `rule` for the parameter `of`: made if there is none. */
TD_API td_state td_update_moment(const td_update_rule *rule, td_state of, int m);
/* False, and an error that names it: one of the states has row-sparse gradients and the rule is not `sparse`. */
TD_API bool td_update_allows(const td_update_rule *rule, const td_state *states, int count);

/* Parameters that one optimizer updates: they share units with one another and with no others. Before the first step. */
TD_API void td_update_together(const td_state *states, int count);
/* The gradients of `states` (parameters that train) gathered since an update last consumed them, as one flat value in
 * the order given. Only td_gradient_norm, td_gradient_max and td_update read it. Consumes them. */
TD_API td_tensor td_gradients_at(td_context *td, const td_state *states, int count, td_here here);
/* The 2-norm over all elements of `gradients`, of the global batch: scalar, td_float. */
TD_API td_tensor td_gradient_norm_at(td_tensor gradients, td_here here);
/* The largest magnitude among them, their inf-norm; NaN if one is. */
TD_API td_tensor td_gradient_max_at(td_tensor gradients, td_here here);
/* Records the update of one parameter group. */
typedef struct td_update_call {
    const td_update_rule *rule;
    td_tensor gradients;                      /* of td_gradients_at; holds at least the group's */
    const td_state *states;                   /* the group's parameters */
    int count;
    td_tensor rate, scale, updates;           /* scalars, td_float */
    double hyper[TD_HYPERS];
    td_tensor when;                           /* scalar, td_float: where it is 0 nothing changes, to the bit; left out: always */
} td_update_call;
/* Moments named by the rule are made (td_update_moment, zeros) when first needed. Errors: those of td_update_allows. */
TD_API void td_update_at(const td_update_call *call, td_here here);
/* Moments, of any parameters, move towards the values these have by then: moment = keep moment + (1 - keep) parameter. keep: a
 * scalar, td_float. Whole units move, each rank's part in place; so may elements of a unit's moment that belong to no state. */
TD_API void td_blend_at(const td_state *moments, int count, td_tensor keep, td_here here);

/* From now on td_use(s) reads `other`, of the same shape and dtype, and s itself can be neither assigned nor updated, until it is
 * `other` of id TD_NONE or td_clear_error. A state may stand in for itself. What td_state_read and td_state_write reach is s.
 * Both work in a context that has failed, too. */
TD_API void td_stand_in(td_state s, td_state other);
TD_API bool td_has_stand_in(td_state s);

/* ---- Strategies and transports -------------------------------------------------------------------------- */

/* How units are stored. */
typedef struct td_strategy_places {
    td_placement parameter, moment, accumulator;
} td_strategy_places;

/* What parallel/ gives the core; installed before the first step. Functions return false after td_fail. */
typedef struct td_parallel {
    void *self;
    td_mesh mesh;
    td_strategy_places places;
    uint64_t options_hash;                    /* of everything that must be equal on all ranks */
    int unit_multiple;                        /* units' elements are a multiple of this many TD_UNIT_ALIGN */
    int on_gpu;                               /* ranks on this one's GPU, which have equal parts of its memory; 0: it alone */
    bool (*choose_units)(void *self, td_context *td, const td_state *states, int count, td_unit_choice *out);
    bool cuts;                                /* it may cut parameters by a dimension */
    td_program *(*place)(void *self, const td_program *in);    /* NULL: failed */
    td_program *(*schedule)(void *self, const td_program *in);
    /* Before a plan runs: posts it, and for a new plan waits until every rank posted the same. `run` counts runs: steps, and
     * values read before their step. */
    bool (*agree)(void *self, int64_t run, const td_program *recording, uint64_t fingerprint, bool is_new_plan);
    void (*failed)(void *self, const char *text);              /* this rank's first error */
    const struct td_transport *transport;
} td_parallel;
/* Copies the table. Errors: state already has memory. */
TD_API bool td_set_parallel(td_context *td, const td_parallel *parallel);
TD_API const td_mesh *td_context_mesh(const td_context *td);
/* Where the call that is being run puts its work: the cudaStream_t, of a GPU; between runs the one that waits for all others. NULL on the CPU. */
TD_API void *td_queue(const td_context *td);
/* Zeroed memory that is the context's: freed when it closes, or before by td_disown (NULL is allowed). NULL after an error. */
TD_API void *td_own(td_context *td, size_t bytes);
TD_API void td_disown(td_context *td, void *memory);
TD_API td_dtype td_compute_dtype(const td_context *td);     /* of matrix products: options.dtype */
TD_API bool td_is_eager(const td_context *td);
TD_API const char *td_passes(const td_context *td);          /* rewrites left out, as options.passes or TD_PASSES; "" */

/* Axes `first` to `last` of a mesh as one, as collectives take it; the ranks along it are in the order of their numbers. An axis alone
 * is its own number. */
static inline int td_axes(int first, int last) { return first | (last - first) << 8; }

/* What collectives sent: bytes by one rank, ring-optimal, and calls. */
typedef struct td_sent { int64_t bytes, calls; } td_sent;

/* The device's memory in which steps and state lie, in pieces: all of steps in the first, state in the others, of which there may be more than
 * are told. */
enum { TD_PIECES = 4 };
typedef struct td_settled {
    struct { void *memory; int64_t bytes; } piece[TD_PIECES];
    uint64_t layout;                          /* the same where what a plan's collectives take and give lies at the same places in them */
} td_settled;

/* For transports whose ranks reach into one another's memory. Each returns false after `fail`. The first two are called by all ranks alike, before
 * a plan's first run: */
typedef struct td_reach {
    /* Whether any rank's steps need more memory than they have, of which this rank says `own`. */
    bool (*grows)(void *self, bool own, bool *any);
    /* Where everything lies now. Sets *changed where graphs with collectives are to be made again. */
    bool (*settle)(void *self, const td_settled *where, bool *changed);
    /* Steps' memory will be given back: ends reaching into it. together: all ranks call it and have when it returns, since one of them grows;
     * none has graphs then. Else a context closes. */
    bool (*leave)(void *self, bool together);
} td_reach;

/* Collectives among the ranks of one mesh axis, or of several that follow one another (td_axes). Counts are elements of one rank's part;
 * buffers may be in place where noted. Each returns false after it has said why through `fail` (a rank died, a deadline passed). Sums are
 * taken in rank order, unless they are taken on the device. `bytes` of a call sent by one rank, ring-optimal, are counted in `sent`.
 *
 * On a device buffers are in its memory, and a call puts its work on td_queue and returns: it may be captured in a graph, which later runs
 * repeat without calling. What fails there is heard of later, by `is_sound`. A barrier is one of the ranks' threads, not of what they have
 * put on their queues. */
typedef struct td_transport {
    void *self;
    const char *name;
    bool on_device;
    /* A plan will call with operands of so many bytes, in and out: what a call needs besides is made in the first run of a plan, which is
     * not captured. NULL: nothing. */
    bool (*expect)(void *self, int64_t in_bytes, int64_t out_bytes);
    const td_reach *reach;                                     /* NULL: ranks do not */
    bool (*all_reduce)(void *self, int axis, void *data, int64_t count, td_dtype dtype);                    /* in place */
    bool (*reduce_scatter)(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype); /* in: ranks x count */
    bool (*all_gather)(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype);     /* out: ranks x count */
    bool (*all_to_all)(void *self, int axis, const void *in, void *out, int64_t count, td_dtype dtype);     /* ranks x count each */
    bool (*broadcast)(void *self, int axis, int root, void *data, int64_t bytes);
    bool (*barrier)(void *self);
    int64_t (*sent)(void *self, int64_t *calls);               /* bytes since opened, and collectives called */
    /* Behind each run of a plan, on td_queue: its collectives have been called, or are in a graph that has been launched. `of_plan` is the
     * plan's, zero at first: the transport keeps in it what a run sends, and counts it where nothing was called. NULL: of no interest. */
    void (*ran)(void *self, td_sent *of_plan);
    /* Behind each wait for the device: whether what it computed is to be used; false after `fail`, when collectives were given up and
     * left their results unfinished. NULL: always. */
    bool (*is_sound)(void *self);
} td_transport;

/* ---- What was planned ------------------------------------------------------------------------------------- */

/* What a GPU has a queue for: calls of one queue follow one another, those of different queues run beside one another unless one waits.
 * Copies are between device and host; what the host computes is of state that is offloaded; aside is what is small and that no computation
 * waits for. The CPU makes all calls in turn. */
typedef enum td_queue_kind {
    TD_QUEUE_COMPUTE, TD_QUEUE_COLLECTIVES, TD_QUEUE_TO_HOST, TD_QUEUE_TO_DEVICE, TD_QUEUE_HOST, TD_QUEUE_ASIDE, TD_QUEUES
} td_queue_kind;

/* One call of the plan that td_plan or td_plan_step made last, in the order of running. */
typedef struct td_planned_call {
    const td_op *op;
    const void *attr;                         /* the node's; NULL: none */
    td_profile_task task;                     /* what it costs; `parts` is the operation's name */
    td_queue_kind queue;
    int64_t waits[TD_QUEUES];                 /* the call of each other queue that must have ended, by number; -1: none, or one that a call
                                                 before it in its queue waited for */
} td_planned_call;
/* 0: nothing was planned, or the plan is gone. */
TD_API int64_t td_planned_count(const td_context *td);
/* Fills `to`, which has room for td_planned_count of them; texts and attributes are the plan's. false and an error without memory. */
TD_API bool td_planned_calls(td_context *td, td_planned_call *to);

/* What one rank holds where that plan needs most, in bytes. Of a CPU all but `host` make state_bytes + step_bytes of its td_report; a GPU's
 * report also has the sets of inputs, and state and step rounded up to whole pages. */
typedef struct td_planned_memory {
    int64_t parameters, moments, buffers;     /* parameters: with copies of them */
    int64_t accumulators;                     /* of gradients, between the steps of an update */
    int64_t gradients;                        /* of whole units, within the step */
    int64_t activations;                      /* made in a forward and read in its backward */
    int64_t transients;                       /* other values of the step */
    int64_t communication;                    /* what collectives give: units gathered, say */
    int64_t workspace;                        /* of library calls */
    int64_t unused;                           /* gaps between what lives then, and what only other moments need */
    int64_t host;                             /* beside these, in host memory: state, and values of the step */
} td_planned_memory;
TD_API bool td_planned_memory_of(td_context *td, td_planned_memory *to);

/* Values of the step that live at that moment, those alike as one: of the same operation, local shape, dtype and module, where modules
 * that differ in numbers alone are one, written h.*.attn. */
typedef struct td_planned_value {
    const char *op;                           /* what made it; of a workspace, the call it is for */
    char module[128];
    td_shape shape;                           /* of each; of a workspace (bytes) u8 */
    td_dtype dtype;
    const char *kind;                         /* as td_planned_memory has them: "activations" */
    int64_t count, bytes;                     /* of all together; shared memory counts once */
} td_planned_value;
typedef struct td_planned_moment {
    int64_t call;                             /* by number; -1: nothing was planned */
    const char *op;
    char module[128];
} td_planned_moment;
/* The `room` largest of them, the largest first; how many it gave. 0 and an error without memory. */
TD_API int64_t td_planned_largest(td_context *td, td_planned_value *to, int64_t room, td_planned_moment *when);

/* ---- Built-in operations that passes emit ----------------------------------------------------------------- */

/* Recorded: */
extern TD_API const td_op td_op_input, td_op_scalar, td_op_parameter, td_op_assign, td_op_output, td_op_backward, td_op_gradient,
    td_op_gradients, td_op_gradient_norm, td_op_update, td_op_blend;
/* Made by differentiate: */
extern TD_API const td_op td_op_unit, td_op_part, td_op_pack, td_op_store, td_op_mark, td_op_sum_squares, td_op_max_abs, td_op_update_unit,
    td_op_merge_rows, td_op_update_rows;
/* Made by place, where a value is in one memory and its reader in the other: */
extern TD_API const td_op td_op_to_host, td_op_to_device;
/* Made by fuse, of fills: */
extern TD_API const td_op td_op_constant;
/* Pointwise and shape operations that passes use: */
extern TD_API const td_op td_op_fused, td_op_fused_rows, td_op_cast, td_op_reshape, td_op_transpose, td_op_fill, td_op_broadcast, td_op_matmul, td_op_linear, td_op_add, td_op_mul;

typedef struct td_input_attr {
    uint32_t slot;
    uint32_t rows_local;                      /* 1: a batch, sharded along dimension 0; 2: rows of each rank, whatever batches are */
    int64_t dtype;
    td_shape shape;
} td_input_attr;
typedef struct td_parameter_attr { uint32_t state, pad; uint64_t name_hash; } td_parameter_attr;
typedef struct td_assign_attr { uint32_t state, conditional; uint64_t name_hash; } td_assign_attr; /* inputs: value[, when] */
typedef struct td_gradients_attr { uint64_t names_hash; uint32_t count, pad; } td_gradients_attr; /* `count` states (uint32_t) follow */
typedef struct td_constant_attr { double value; } td_constant_attr; /* of each element; on a GPU it comes with the inputs */
typedef struct td_output_attr { uint32_t recorded, pad; } td_output_attr;            /* the value of the recording that is kept */
typedef struct td_unit_attr { uint32_t unit, pad; } td_unit_attr;  /* td_op_unit: the stored value; td_op_store: input 0 becomes it */
/* td_op_part: a view of a unit's value, from this element on; of one that is cut, along `dim` of the view, from this element of a row on */
typedef struct td_part_attr { int64_t offset, dim; } td_part_attr;
typedef struct td_cast_attr { int32_t dtype, pad; } td_cast_attr;
typedef enum td_mark_kind { TD_MARK_GRADIENT, TD_MARK_OPTIMIZER, TD_MARK_ACCUMULATOR } td_mark_kind;
typedef struct td_mark_attr { uint32_t kind, unit; } td_mark_attr; /* identity; `place` reads and dissolves it */
/* td_op_pack: inputs at element offsets of a unit's value (of a row of it, if cut, along `dim` of each input), zeros elsewhere; but the last
 * `unread` elements are left as they are. */
typedef struct td_pack_attr { uint32_t unit, count; int64_t dim, unread; } td_pack_attr; /* `count` offsets (int64_t) follow */
/* td_op_update_unit: inputs parameter, gradient, moments ..., [copy,] rate, scale, updates[, when]; outputs parameter, moments[, copy]: of the
 * parameter in 16 bits, whose segments become those of the new one. */
typedef struct td_update_segment {
    int64_t begin, end;                       /* elements of the unit; between segments nothing changes */
    double hyper[TD_HYPERS];
} td_update_segment;
typedef struct td_update_attr { uint32_t rule, unit, moments, count, copied, pad; } td_update_attr; /* `count` segments follow */
/* td_op_merge_rows: inputs ids, rows of each use of a table; outputs the ids that are in it, each once and then -1 (N), and the sums of
 * their rows, then zeros (N, D). */
typedef struct td_merge_rows_attr { int64_t table_rows, width; } td_merge_rows_attr;
/* td_op_update_rows: inputs parameter, moments ..., rate, scale, updates[, when], then ids and rows as merged, or the unit's whole gradient;
 * outputs parameter, moments. The member is `rows` rows of `width` elements from element `begin` of its unit. */
typedef struct td_update_rows_attr {
    uint32_t rule, unit;
    int64_t begin, rows, width;
    int64_t moment[TD_MOMENTS];               /* where its moments begin in theirs */
    double hyper[TD_HYPERS];
} td_update_rows_attr;

#ifdef __cplusplus
}
#endif

#endif
