/* What the files of core/ share: the context and the stages' entry points. Nothing outside core/ includes this.
 *
 * The files follow the program: context, module, state -> record -> precision, differentiate, simplify, fuse ->
 * plan -> run; plans.c ties them together and keeps what was planned, step.c runs it.
 */
#ifndef TANDEM_INTERNAL_H
#define TANDEM_INTERNAL_H

#include <tandem/rewrite.h>

#include "core/hash.h"

/* The least multiple of `to` that is n or more. */
static inline int64_t td_round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct td_onednn;
struct td_nvrtc;
struct td_cudnn;
struct td_profile;
struct td_profiled_plan;

typedef struct td_module_entry {
    char *path;                               /* "h.3.attn"; "" for the root */
    uint64_t hash;                            /* of the path */
    uint32_t parent;
    bool has_dtype;                           /* td_set_dtype */
    td_dtype dtype;
    uint32_t draws, draws_stamp;              /* random operations recorded here in this micro-batch */
} td_module_entry;

typedef struct td_state_entry {
    char *name;
    uint64_t hash;                            /* of the name: keys the initial values */
    td_state_kind kind;
    td_dtype dtype;
    td_shape shape;
    int64_t elements;
    td_init init;
    uint32_t of;                              /* a moment's parameter, else TD_NONE */
    bool frozen;
    bool sparse;                              /* asked for row-sparse gradients */
    bool of_rows;                             /* a moment with one element a row */
    uint32_t together;                        /* parameters with the same number may share a unit */
    uint32_t unit;                            /* TD_NONE: not laid out yet */
    int64_t offset;                           /* within the unit */
    uint32_t use, use_generation;             /* the value td_use gave in this recording */
    uint32_t stand_in;                        /* the state td_use reads in its place, which may be itself; TD_NONE: none */
} td_state_entry;

/* Addresses of the host. */
typedef struct td_span {
    uintptr_t begin, end;
} td_span;

/* An input or scalar of the recording, in order; plans refer to it by index. */
typedef struct td_slot {
    const void *data;                         /* the caller's; NULL: a scalar, held here */
    double f64;
    float f32;
} td_slot;

/* A rule of td_with_gradient; nodes name it by its hash. */
typedef struct td_own_gradient {
    char *name;
    uint64_t hash;
    void (*gradient)(const td_gradient_call *g);
} td_own_gradient;

typedef struct td_planned td_planned;

/* Elements [first, first + count) of a state as it begins, in f32 or bf16. */
typedef struct td_initial {
    td_init init;
    uint64_t key;                             /* of td_random_of(seed, the state's hash, whatever) */
    int64_t first, count;
    td_dtype dtype;
    void *to;
} td_initial;

/* Where state and steps have their memory, and what runs plans. Functions return false or NULL after td_fail. Reading and writing are
 * done when they return, and wait for what runs. */
typedef struct td_device {
    bool is_gpu;
    void *(*get)(td_context *td, int64_t bytes, const char *kind);
    void (*put)(td_context *td, void *memory, int64_t bytes, const char *kind);
    bool (*write)(td_context *td, void *to, const void *from, int64_t bytes);
    bool (*read)(td_context *td, void *to, const void *from, int64_t bytes);
    bool (*clear)(td_context *td, void *memory, int64_t bytes); /* to zeros; NULL on the CPU, as the next */
    bool (*initialise)(td_context *td, const td_initial *of);
    bool (*run)(td_context *td, td_planned *plan);            /* may return before it has run */
    const uint64_t *(*landed)(td_context *td, int set);       /* values of td->landed[set]; NULL after an error. NULL on the CPU */
    bool (*inputs_read)(td_context *td, td_span of);          /* waits until it has read what inputs lie there. NULL on the CPU */
    void (*drop)(td_context *td, td_planned *plan);           /* frees what `run` keeps with the plan */
    /* Of a GPU: its name, and bytes a second read and written by a copy that no cache holds. NULL on the CPU. */
    bool (*measure)(td_context *td, td_machine *out);
    int64_t (*used)(td_context *td);                          /* bytes of it in use by all programs; NULL on the CPU */
    void (*close)(td_context *td);
} td_device;
extern const td_device td_cpu;
/* How many threads a parallel region can have where `asked` are asked for. Starts none: a process may still fork. */
int td_threads_given(int asked);

/* Where a GPU's values lie: what its libraries ask of their workspace. Ahead of the slots of a step are as many bytes for the run's numbers. */
enum { TD_GPU_ALIGN = 256 };
/* Sets of a GPU's inputs and of the host's kept scalars, which steps use in turn; how many of a step come to the host with it. */
enum { TD_INPUT_SETS = 2, TD_LANDED = 16 };
/* A run's outputs of one element, where the host has them: of the last run and the one before. */
typedef struct td_landed {
    uint32_t generation;                      /* of the recording */
    uint32_t count;
    td_id recorded[TD_LANDED];
    td_dtype dtype[TD_LANDED];
    uint64_t values[TD_LANDED];               /* on the CPU */
    uint32_t later[TD_LANDED];                /* how often td_item_later asked for it that td_item has not read it */
} td_landed;
/* One of them whose set serves another run by now. */
typedef struct td_aside {
    uint32_t generation;
    td_id recorded;
    td_dtype dtype;
    uint32_t later;
    uint64_t value;
} td_aside;

/* What a GPU was asked for since the context was opened. */
typedef struct td_device_counts {
    int64_t allocations, bytes, most_bytes;   /* of device memory: how often, and how much now and at most */
    int64_t waits;                            /* of the host for the GPU: each step once at most, however many values are read of it, and for inputs */
    int64_t stalls;                           /* of those, for all there was to do: until the host has more for it the GPU does nothing */
    int64_t waited_ns;                        /* within td_step */
    int64_t calls;                            /* operations handed over one by one */
    int64_t graphs, replays;                  /* made, and launched */
    int64_t others;                           /* nodes of the graphs made that are no kernels */
} td_device_counts;
const td_device *td_cuda_open(td_context *td);            /* the GPU that options.device names; NULL: cannot be had */
const td_device *td_described_open(td_context *td);       /* options.gpu */
/* What plans may have of the device's memory, where the options do not say, is that of one of so many ranks which share it. */
void td_limit_memory(td_context *td, int ranks);

/* TD_FOR_VALUE: for the recording's last output alone; the other outputs and stores are left out, but those of derived state. */
typedef enum td_purpose { TD_FOR_STEP, TD_FOR_VALUE } td_purpose;

struct td_context {
    td_options options;
    td_allocator allocator;
    const td_device *device, *host;           /* what has each memory */
    td_gpu gpu;                               /* its device; where options.gpu is given it points here */
    int64_t free_bytes;                       /* of its memory when it was opened; 0 on the CPU, and where the options say what plans may have */
    struct td_cuda *cuda;                     /* NULL on the CPU, and where there is only a description */
    td_device_counts device_counts;
    td_mode mode;

    td_code error;
    char error_text[1024];
    char location[512];                       /* scratch of td_location */

    td_module_entry *modules;
    uint32_t module_count, module_room;
    uint64_t dtypes_hash;                     /* of the modules that have a dtype; 0: none has */
    td_state_entry *states;
    uint32_t state_count, state_room;
    td_unit *units;
    uint32_t unit_count, unit_room;
    uint32_t together;                        /* the last number given */
    const td_update_rule **rules;
    uint32_t rule_count, rule_room;
    td_own_gradient *own_gradients;
    uint32_t own_gradient_count, own_gradient_room;

    td_program recording;
    td_program *program;                      /* what td_record appends to: the recording, or a pass's */
    uint32_t module;                          /* entered last */
    uint32_t module_stack[64];
    int module_depth;
    uint32_t phase;                           /* of what is being recorded */
    uint32_t scope, scopes;                   /* of recomputation: open now (0: none), and how many in this recording */
    uint32_t scope_depth;
    uint32_t generation;                      /* the last one given to a program */
    uint32_t draws_stamp;
    uint32_t backwards;                       /* recorded in this step */
    bool gradients_recorded, updates_recorded;
    td_span *inputs;                          /* what td_input_memory gave */
    uint32_t input_count, input_room;
    td_slot *slots;
    uint32_t slot_count, slot_room;
    struct { const td_op *op; uint64_t hash; } op_hashes[256];

    bool has_parallel;
    td_parallel parallel;
    td_mesh mesh;
    struct td_owned *owned;                   /* what td_own gave, the latest first */

    td_planned **plans;
    uint64_t plans_made;
    uint32_t plan_count, plan_room;
    td_planned *last;                            /* whose outputs can be read */
    td_planned *planned;                         /* by the last td_plan; NULL: none, or it is gone */
    uint32_t last_generation;
    td_landed landed[TD_INPUT_SETS];          /* by `runs` */
    td_aside *aside;
    uint32_t aside_count, aside_room;
    void *arena, *host_arena;
    int64_t arena_bytes, host_arena_bytes;
    td_settled settled;                       /* where ranks reach into memory: state's pieces, as they are told */
    int state_pieces;                         /* all of them */
    int64_t state_skipped;                    /* bytes between them that nothing lies in */
    uint64_t arena_epoch;                     /* how often one of them came to lie elsewhere, or ranks to reach into it anew */
    int64_t page_bytes;                       /* a GPU's memory is taken by whole pages of so many bytes; 0: by the byte */
    int64_t steps;                            /* td_step calls that ran */
    int64_t runs;                             /* of plans: steps, and values computed before their step */
    td_run run;
    td_report report;
    struct td_onednn *onednn;
    struct td_nvrtc *nvrtc;                   /* of a GPU: the compiler of kernels and what it compiled; NULL: not yet */
    bool cache_told;                          /* that nothing can be kept on disk for later runs */
    struct td_cudnn *cudnn;                   /* of a GPU: cuDNN and the plans it made; NULL: not yet */
    bool profiling;
    struct td_profile *profile;               /* NULL: none was begun */

    uint32_t passes_off, print;               /* bits of td_stage */
};

typedef enum td_stage {
    TD_STAGE_RECORD, TD_STAGE_PRECISION, TD_STAGE_GRAD, TD_STAGE_SIMPLIFY, TD_STAGE_PLACE, TD_STAGE_SCHEDULE,
    TD_STAGE_FUSE, TD_STAGE_PLAN, TD_STAGES,
    TD_STAGE_DBIAS = TD_STAGES, TD_STAGE_GELU, TD_STAGE_ROWS, TD_STAGE_CONSTANTS, TD_STAGE_KEPT, TD_STAGE_ASIDE, /* what can be left out of fuse by itself */
    TD_STAGE_NAMES
} td_stage;
bool td_stage_off(const td_context *td, td_stage stage);
bool td_stage_printed(const td_context *td, td_stage stage);

/* Grows *array so that it holds at least `needed` items; keeps its content. */
bool td_grow(td_context *td, void **array, uint32_t *room, uint32_t needed, size_t item_bytes, const char *kind);
static inline bool td_room(td_context *td, void **array, uint32_t *room, uint32_t needed, size_t item_bytes, const char *kind)
{
    return needed <= *room || td_grow(td, array, room, needed, item_bytes, kind);
}
char *td_copy_text(td_context *td, const char *text, const char *kind);
/* Growing text; after a failure it stops growing. Free with td_free(td, b.text, b.room, "host"). */
typedef struct td_text {
    td_context *td;
    char *text;
    uint32_t length, room;
} td_text;
void td_text_add(td_text *b, const char *format, ...) TD_PRINTF(2, 3);

/* "(h.3.attn) (model.c:41)": where node n was recorded. Valid until the next call. */
const char *td_location(td_context *td, uint32_t module, const char *file, int line);
const char *td_module_path(const td_context *td, uint32_t module);
/* "(3, 4)" into `to`; returns it. */
enum { TD_SHAPE_TEXT = 160 };
char *td_shape_text(td_shape shape, char to[TD_SHAPE_TEXT]);

/* A float of 16 bits, which products may be in. */
static inline bool td_is_narrow(uint32_t dtype) { return dtype == TD_BF16 || dtype == TD_F16; }

/* Key of a random operation recorded now: module path and occurrence within the micro-batch. */
uint64_t td_random_key(td_context *td);
struct td_onednn *td_onednn_of(td_context *td);           /* NULL after td_fail */
/* A bf16 as a number. */
static inline float td_widened(uint16_t bits)
{
    union { uint32_t u; float f; } wide = { (uint32_t)bits << 16 };
    return wide.f;
}
static inline td_tensor td_no_tensor(td_context *td) { return (td_tensor){ .td = td, .id = TD_NONE }; }
/* False: a size is negative, or the bytes of the value would not fit 63 bits. */
bool td_shape_possible(td_shape shape, td_dtype dtype);

/* ---- Programs (program.c) */
void td_program_reset(td_program *p, uint32_t generation);
void td_program_drop(td_program *p);                      /* frees the arrays */
/* Appends a node with room for inputs, outputs and attributes, for the caller to fill; NULL after td_fail. */
td_node *td_append(td_program *p, int inputs, int outputs, size_t attr_bytes);
bool td_program_copy(td_program *to, const td_program *from);
bool td_program_same(const td_program *a, const td_program *b);
void td_program_log(const td_program *p, td_stage stage);
/* While passes build: what recorded nodes inherit. */
typedef struct td_scope {
    uint32_t module, phase;
} td_scope;
td_scope td_scope_of(td_context *td, const td_node *n, uint32_t phase);
void td_scope_restore(td_context *td, td_scope scope);

/* ---- State (state.c, state_memory.c) */
/* That each of a unit's members is stored as, one for each row of its value. */
static inline int64_t td_unit_blocks(const td_unit *u) { return u->cut.ways ? u->cut.ways : 1; }
bool td_layout(td_context *td);                           /* gives every state a unit */
bool td_unit_allocate(td_context *td, uint32_t unit);     /* memory and initial values; nothing when it has them */
uint32_t td_accumulator_of(td_context *td, uint32_t unit); /* makes the unit of pending gradients; TD_NONE: failed */
void td_state_close(td_context *td);
void td_unit_range(const td_context *td, const td_unit *u, int64_t *begin, int64_t *end); /* elements held here */

/* Input 0, whose gradient is a rule's over the other inputs. */
extern const td_op td_op_with_gradient;

double td_read_scalar(const td_arg *arg);
/* False and an error: the state has a stand-in. */
bool td_may_change(td_state s, const char *what, td_here here);
/* A rule's number in the context, the same on all ranks that record the same. */
uint32_t td_rule_number(td_context *td, const td_update_rule *rule);
bool td_rule_has_row_moments(const td_update_rule *rule);

/* What an update node carries as recorded; `count` states (uint32_t) follow. */
typedef struct td_group_attr {
    uint64_t names_hash;
    uint32_t rule, count;
    double hyper[TD_HYPERS];
} td_group_attr;

/* ---- Passes: each returns a new program, or NULL after a failure */
td_program *td_precision_pass(const td_program *in);
td_program *td_differentiate_pass(const td_program *in, td_purpose purpose);
td_program *td_simplify_pass(const td_program *in);
td_program *td_absorb_pass(const td_program *in);         /* the first part of fuse */
td_program *td_epilogue_pass(const td_program *in);       /* the second */
td_program *td_members_pass(const td_program *in);        /* the third, on a GPU */
td_program *td_kept_pass(const td_program *in);           /* the fourth, on a GPU */
td_program *td_constants_pass(const td_program *in);      /* the last, on a GPU */
td_program *td_fuse_pass(const td_program *in);
/* Of a plan's program: values made again behind the peak, until `wanted` bytes less are alive there or *budget bytes are moved for it, less
 * what is. NULL: there is none, or an error. */
td_program *td_again_pass(const td_planned *plan, int64_t wanted, int64_t *budget);
/* Which nodes are needed: bytes of 0 or 1, one a node, from the context ("program"). */
char *td_live_nodes(const td_program *p);
/* What the program stores in the unit; TD_NONE: nothing. */
td_id td_stored_value(const td_program *p, uint32_t unit);
/* reader[v], for every value: the only live node that reads it; TD_NONE: there is none; TD_MANY: several, or another node waits for it
 * and it must stay a value of its own. */
#define TD_MANY (TD_NONE - 1)
void td_only_readers(const td_program *p, const char *live, uint32_t *reader);

/* ---- Plan (plan.c, blocks.c, arena.c) and run (execute.c) */

typedef struct td_task {
    void (*run)(const td_kernel *k);
    void (*release)(void *prepared);          /* NULL: nothing to free */
    td_kernel kernel;
    uint32_t node;                            /* of the plan's program */
    bool on_host;                             /* of a GPU: the CPU's kernel, on its host */
    uint8_t queue;
    int32_t waits[TD_QUEUES];                 /* the call of each other queue that it waits for, or -1 */
    td_cost cost;
} td_task;

typedef enum td_block_kind { TD_BLOCK_ARENA, TD_BLOCK_UNIT, TD_BLOCK_SLOT, TD_BLOCK_CONSTANT } td_block_kind;
typedef struct td_block {
    td_block_kind kind;
    uint32_t index;                           /* unit, slot, or the constant's node */
    int64_t bytes;
    int64_t offset;                           /* in the arena, among a GPU's slots and constants, or in the block it is part of */
    int32_t first, last;                      /* positions of the tasks between which it is live */
    uint32_t part_of;                         /* another block, or TD_NONE */
    td_memory memory;                         /* whose arena it is in */
} td_block;

/* Where a kernel operand's pointer comes from: block's base + offset. */
typedef struct td_binding {
    void **pointer;
    uint32_t block;
    int64_t offset;
    bool on_host;                             /* of a task there: a slot is read where the host wrote it */
} td_binding;

typedef struct td_plan_output {
    td_id recorded;                           /* value of the recording */
    td_id value;                              /* of the plan's program */
    td_dtype dtype;
    td_shape shape;
    uint32_t block;                           /* where it is */
    int64_t offset;
} td_plan_output;

/* A unit as a step leaves it: its accumulator full or emptied, itself derived and current or no more. */
typedef struct td_left {
    uint32_t unit;
    bool accumulator_full, current;
} td_left;

struct td_planned {
    uint64_t number;                          /* from 1, of the context's */
    td_program recording;                     /* to confirm a fingerprint by comparison */
    uint64_t key;                             /* of the recording, the options, what accumulators hold and what is current */
    uint64_t agreement;                       /* of the layout of state and the collectives */
    td_purpose purpose;
    td_program *program;                      /* as run */
    td_task *tasks;
    uint32_t task_count, task_room;
    td_arg *args;
    uint32_t arg_count, arg_room;
    td_block *blocks;
    uint32_t block_count, block_room;
    uint32_t *given;                          /* those of them that the host gives a GPU: slots and constants */
    uint32_t given_count, given_room;
    td_binding *bindings;                     /* those of slots come last: they change every step */
    uint32_t binding_count, binding_room, fixed_count;
    td_plan_output *outputs;
    uint32_t output_count, output_room;
    td_left *left;                            /* what units are after a run */
    uint32_t left_count, left_room;
    bool beside;                              /* queues run beside one another; else all calls in turn */
    int32_t landable;                         /* the call behind which all that lands is made */
    uint32_t host_tasks;                      /* that are on_host */
    int64_t arena_bytes, live_bytes;
    int64_t host_arena_bytes;                 /* of values in host memory */
    int64_t slot_bytes;                       /* of a GPU's copies of scalars, constants and inputs, in this order */
    int64_t scalar_bytes;                     /* of those, before the first input */
    td_cost cost;
    int64_t comm_calls;
    td_sent sent;                             /* by a run: the transport's own, td_transport.ran */
    uint64_t bound;                           /* arena that fixed bindings were resolved for, by its number */
    void *on_device;                          /* what a GPU keeps with it */
    uint64_t used;                            /* step it was last used in */
    struct td_profiled_plan *profiled;        /* its tasks as the profile tells them; NULL: not yet */
};
td_planned *td_plan_make(td_context *td, td_program *final);  /* takes the program */
/* Gives tasks their queues and waits, and blocks the longer lives that follow (queues.c); before bindings are sorted. */
bool td_queues_give(td_context *td, td_planned *plan);
/* Gives arena blocks their offsets; sets arena_bytes, live_bytes and host_arena_bytes. */
bool td_arena_arrange(td_context *td, td_planned *plan);
/* The first outputs of one element, by number; how many. */
uint32_t td_plan_landing(const td_planned *plan, uint32_t to[TD_LANDED]);
/* Where an output is when the plan has run. */
const void *td_plan_output_at(const td_context *td, const td_planned *plan, const td_plan_output *o);
/* The block that `block` is part of, or itself; adds its offset there to *offset. */
const td_block *td_block_root(const td_planned *plan, uint32_t block, int64_t *offset);
void td_plan_free(td_context *td, td_planned *plan);
bool td_plan_run(td_context *td, td_planned *plan);
/* Whether what has just been read from the device is what the step gives; false and an error: a transport has given it up. */
bool td_is_sound(td_context *td);
/* Memory for the step, and for state the plan reads; binds what stays where it is. */
bool td_plan_settle(td_context *td, td_planned *plan);
/* Of this rank's part of what is laid out; of what of it has no memory yet. */
int64_t td_state_bytes(const td_context *td, td_memory memory);
int64_t td_state_missing(const td_context *td, td_memory memory);
/* Whether other ranks reach into this one's memory (td_reach). */
bool td_is_reached(const td_context *td);
/* td_plan_settle before the plan's first run, which all ranks are about to make. */
bool td_plan_settle_first(td_context *td, td_planned *plan);
void td_arenas_drop(td_context *td);
/* Calls erase(user, memory, bytes) for the arena's blocks that die with task number `task`; -1: that hold nothing yet. */
void td_plan_dying(td_context *td, const td_planned *plan, int32_t task, void (*erase)(void *user, void *memory, size_t bytes), void *user);
/* eager: an error that names the task if one of its outputs has a NaN. */
void td_plan_check_nan(td_context *td, const td_planned *plan, const td_task *task);
/* What has a memory: the context's device, or its host, which is a CPU. */
static inline const td_device *td_device_of(const td_context *td, td_memory memory) { return memory == TD_HOST ? td->host : td->device; }
/* The kernel of op on the context's device; run NULL: it has none. */
td_device_kernel td_kernel_on(const td_context *td, const td_op *op);

/* Whether td_input_memory gave these bytes. */
bool td_is_input_memory(const td_context *td, const void *from, int64_t bytes);

/* ---- Profile (profile.c): called where td->profiling */
int64_t td_profile_now(void);                             /* ns */
bool td_profile_plan(td_context *td, td_planned *plan);   /* before its run */
void td_profile_task_done(td_context *td, const td_planned *plan, uint32_t task, int64_t begin_ns, int64_t end_ns);
void td_profile_step_done(td_context *td);
const char *td_profile_kind(const td_op *op);
/* Which nodes are of the update: bytes of 0 or 1, one a node. */
void td_profile_find_updates(const td_program *p, char *is_update);
/* A task but for its live bytes; `parts` is the operation's name. */
td_profile_task td_profile_describe(const td_context *td, const td_planned *plan, uint32_t task, const char *is_update);

/* ---- Landed values (landed.c) */
void td_landed_note(td_context *td, const td_planned *plan); /* of the run that was just begun */
bool td_landed_empty(td_context *td, int set);            /* before a run that will use it; false: an error */
/* When its step is done t's dtype and its value, of up to 8 bytes. False: it is none of them, or an error; one that came before takes
 * nothing from what td_item_later asked for. */
bool td_landed_read(td_tensor t, void *value, td_dtype *dtype);

/* ---- Step (step.c) */
const td_plan_output *td_kept_output(td_tensor t);        /* of the last step; NULL: t is no such handle */
void td_compute_now(td_tensor t);                         /* eager: a value of the recording, checked for NaN */
void td_step_close(td_context *td);

/* ---- Plans (plans.c) */
/* For what is recorded: made, or one that was (*is_new). NULL: an error. */
td_planned *td_plan_for(td_context *td, td_purpose purpose, bool *is_new);
/* td_last_report tells of this plan; ms: that making it took, below 0: of one that was made before. */
void td_plan_report(td_context *td, const td_planned *plan, double ms);
void td_plans_close(td_context *td);

#endif
