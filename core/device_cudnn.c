/* cuDNN's graphs and the plans made of them: see device_cudnn.h. */
#include "core/device_cudnn.h"

#include "core/device_cache.h"
#include "core/device_cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define FUNCTIONS(X) \
    X(GetVersion) X(GetErrorString) X(GetLastErrorString) X(Create) X(Destroy) X(SetStream) X(BackendCreateDescriptor) \
    X(BackendDestroyDescriptor) X(BackendSetAttribute) X(BackendGetAttribute) X(BackendFinalize) X(BackendExecute)

enum { ALIGNED = 16, CHOICES = 8, FIRST_VIRTUAL = 1000 };

typedef struct kept_plan {
    uint64_t hash;                            /* of the key */
    char *key;
    td_cudnn_plan *plan;
    cudnnBackendDescriptor_t made[TD_CUDNN_DESCRIPTORS]; /* what the plan was made of: it goes with it */
    int made_count;
} kept_plan;

struct td_cudnn {
    void *library;                            /* NULL: there is none */
    bool ready;
    cudnnHandle_t handle;                     /* NULL: plans are for `device` */
    cudnnBackendDescriptor_t device;
    char target[64];                          /* of keys on disk: the device and the version */
    kept_plan *plans;
    uint32_t count, room;
#define MEMBER(name) __typeof__(&cudnn##name) name;
    FUNCTIONS(MEMBER)
};

/* ---- The library */

/* What failed, and cuDNN's words for it, on one line. */
static void say(const struct td_cudnn *c, cudnnStatus_t status, const char *what, char reason[TD_CUDNN_REASON])
{
    char more[160] = "";
    c->GetLastErrorString(more, sizeof more);
    more[strcspn(more, "\n")] = 0;
    snprintf(reason, TD_CUDNN_REASON, "%s: %s%s%s", what, c->GetErrorString(status), *more ? ": " : "", more);
}

static bool load_functions(struct td_cudnn *c, char reason[TD_CUDNN_REASON])
{
#define FIND(name) \
    if (!(*(void **)&c->name = dlsym(c->library, "cudnn" #name))) { \
        snprintf(reason, TD_CUDNN_REASON, "it lacks cudnn" #name ": another version than this build's"); \
        return false; \
    }
    FUNCTIONS(FIND)
    return true;
}

/* Without a device. */
static bool open_library(struct td_cudnn *c, char reason[TD_CUDNN_REASON])
{
    c->library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE); /* unloaded, it leaks what its C++ runtime holds */
    if (!c->library) snprintf(reason, TD_CUDNN_REASON, "%s", dlerror());
    return c->library && load_functions(c, reason);
}

static bool open_handle(td_context *td, struct td_cudnn *c, char reason[TD_CUDNN_REASON])
{
    snprintf(c->target, sizeof c->target, "cudnn %zu sm_%d%d", c->GetVersion(), td->gpu.major, td->gpu.minor);
    cudnnStatus_t status = c->Create(&c->handle);
    if (status == CUDNN_STATUS_SUCCESS) return true;
    c->handle = NULL;
    say(c, status, "making its handle", reason);
    return false;
}

/* What the context keeps, cuDNN or that there is none. NULL: no memory, and the context's error. */
static struct td_cudnn *new_entry(td_context *td)
{
    td->cudnn = td_alloc(td, sizeof *td->cudnn, "host");
    if (td->cudnn) memset(td->cudnn, 0, sizeof *td->cudnn);
    return td->cudnn;
}

bool td_cudnn_load(td_context *td)
{
    char reason[TD_CUDNN_REASON] = "";
    if (td->cudnn) return td->cudnn->ready;
    struct td_cudnn *c = new_entry(td);
    if (!c) return false;
    c->ready = open_library(c, reason) && open_handle(td, c, reason);
    if (!c->ready)
        td_message(td, TD_LOG_WARNING,
                   "cuDNN 9 cannot be used (%s): Tandem's own kernels compute attention, slower; install it, or name its folder in "
                   "LD_LIBRARY_PATH",
                   reason);
    return c->ready;
}

bool td_cudnn_describe_device(td_context *td, const char *json, char reason[TD_CUDNN_REASON])
{
    struct td_cudnn *c = new_entry(td);
    if (!c || !open_library(c, reason)) return false;
    cudnnStatus_t status = c->BackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &c->device);
    if (status == CUDNN_STATUS_SUCCESS)
        status = c->BackendSetAttribute(c->device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)strlen(json), json);
    if (status == CUDNN_STATUS_SUCCESS) status = c->BackendFinalize(c->device);
    c->ready = status == CUDNN_STATUS_SUCCESS;
    if (!c->ready) say(c, status, "describing a device", reason);
    return c->ready;
}

int64_t td_cudnn_version(const td_context *td) { return td->cudnn && td->cudnn->ready ? (int64_t)td->cudnn->GetVersion() : 0; }

static void destroy_all(const struct td_cudnn *c, const cudnnBackendDescriptor_t *made, int count)
{
    for (int i = count - 1; i >= 0; i--) c->BackendDestroyDescriptor(made[i]);
}

void td_cudnn_close(td_context *td)
{
    struct td_cudnn *c = td->cudnn;
    if (!c) return;
    for (uint32_t i = 0; i < c->count; i++) {
        destroy_all(c, c->plans[i].made, c->plans[i].made_count);
        td_free(td, c->plans[i].key, strlen(c->plans[i].key) + 1, "host");
        td_free(td, c->plans[i].plan, sizeof *c->plans[i].plan, "host");
    }
    td_free(td, c->plans, c->room * sizeof *c->plans, "host");
    if (c->device) c->BackendDestroyDescriptor(c->device);
    if (c->handle) c->Destroy(c->handle);
    if (c->library) dlclose(c->library);
    td_free(td, c, sizeof *c, "host");
    td->cudnn = NULL;
}

/* ---- Descriptors */

static void check(td_cudnn_graph *g, cudnnStatus_t status, const char *what)
{
    if (status == CUDNN_STATUS_SUCCESS || g->failed) return;
    g->failed = true;
    say(g->library, status, what, g->reason);
}

static void refuse(td_cudnn_graph *g, const char *reason)
{
    if (g->failed) return;
    g->failed = true;
    snprintf(g->reason, sizeof g->reason, "%s", reason);
}

static cudnnBackendDescriptor_t make(td_cudnn_graph *g, cudnnBackendDescriptorType_t type)
{
    cudnnBackendDescriptor_t made = NULL;
    if (g->made_count == TD_CUDNN_DESCRIPTORS) refuse(g, "the graph has too many parts");
    if (g->failed) return NULL;
    check(g, g->library->BackendCreateDescriptor(type, &made), "making a descriptor");
    if (!g->failed) g->made[g->made_count++] = made;
    return made;
}

static void set_many(td_cudnn_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                     int64_t count, const void *values)
{
    if (!g->failed) check(g, g->library->BackendSetAttribute(d, name, type, count, values), "describing a graph");
}

static void set(td_cudnn_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                const void *value)
{
    set_many(g, d, name, type, 1, value);
}

static void set_tensor(td_cudnn_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, const td_cudnn_tensor *t)
{
    set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, &t->descriptor);
}

static void finish(td_cudnn_graph *g, cudnnBackendDescriptor_t d, const char *what)
{
    if (!g->failed) check(g, g->library->BackendFinalize(d), what);
}

static void add_operation(td_cudnn_graph *g, cudnnBackendDescriptor_t operation)
{
    if (g->operation_count == TD_CUDNN_OPERATIONS) refuse(g, "the graph has too many operations");
    if (!g->failed) g->operation[g->operation_count++] = operation;
}

/* ---- A graph */

void td_cudnn_begin(td_context *td, td_cudnn_graph *g)
{
    *g = (td_cudnn_graph){ .td = td, .library = td->cudnn, .virtuals = FIRST_VIRTUAL };
}

typedef struct tensor_kind {
    int64_t id;
    bool is_virtual, by_value;
} tensor_kind;

static td_cudnn_tensor tensor_of(td_cudnn_graph *g, tensor_kind kind, cudnnDataType_t type, const int64_t *dim, const int64_t *stride)
{
    td_cudnn_tensor t = { .descriptor = make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR), .type = type };
    int64_t aligned = ALIGNED;
    memcpy(t.dim, dim, sizeof t.dim);
    set(g, t.descriptor, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, &type);
    set_many(g, t.descriptor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, TD_CUDNN_DIMS, dim);
    set_many(g, t.descriptor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, TD_CUDNN_DIMS, stride);
    set(g, t.descriptor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, &kind.id);
    set(g, t.descriptor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, &aligned);
    set(g, t.descriptor, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, &kind.is_virtual);
    set(g, t.descriptor, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, &kind.by_value);
    finish(g, t.descriptor, "a tensor");
    return t;
}

td_cudnn_tensor td_cudnn_stored(td_cudnn_graph *g, int64_t id, cudnnDataType_t type, const int64_t dim[TD_CUDNN_DIMS],
                                const int64_t stride[TD_CUDNN_DIMS])
{
    return tensor_of(g, (tensor_kind){ .id = id }, type, dim, stride);
}

td_cudnn_tensor td_cudnn_scalar(td_cudnn_graph *g, int64_t id, cudnnDataType_t type)
{
    static const int64_t ones[TD_CUDNN_DIMS] = { 1, 1, 1, 1 };
    return tensor_of(g, (tensor_kind){ .id = id, .by_value = true }, type, ones, ones);
}

static void dense(const int64_t *dim, int64_t *stride)
{
    int64_t step = 1;
    for (int i = TD_CUDNN_DIMS - 1; i >= 0; step *= dim[i], i--) stride[i] = step;
}

td_cudnn_tensor td_cudnn_virtual(td_cudnn_graph *g, cudnnDataType_t type, const int64_t dim[TD_CUDNN_DIMS])
{
    int64_t stride[TD_CUDNN_DIMS];
    dense(dim, stride);
    return tensor_of(g, (tensor_kind){ .id = g->virtuals++, .is_virtual = true }, type, dim, stride);
}

td_cudnn_tensor td_cudnn_turned(td_cudnn_graph *g, cudnnDataType_t type, const int64_t dim[TD_CUDNN_DIMS])
{
    int64_t stride[TD_CUDNN_DIMS];
    dense(dim, stride);
    stride[2] = 1;
    stride[3] = dim[2];
    return tensor_of(g, (tensor_kind){ .id = g->virtuals++, .is_virtual = true }, type, dim, stride);
}

static void pointwise(td_cudnn_graph *g, cudnnBackendDescriptor_t how, td_cudnn_tensor x, const td_cudnn_tensor *b,
                      const td_cudnn_tensor *t, td_cudnn_tensor y)
{
    finish(g, how, "a pointwise function");
    cudnnBackendDescriptor_t o = make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set(g, o, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR, &how);
    set_tensor(g, o, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, &x);
    if (b) set_tensor(g, o, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    if (t) set_tensor(g, o, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set_tensor(g, o, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &y);
    finish(g, o, "a pointwise operation");
    add_operation(g, o);
}

static cudnnBackendDescriptor_t function(td_cudnn_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t compute)
{
    cudnnBackendDescriptor_t how = make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, &mode);
    set(g, how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, &compute);
    return how;
}

void td_cudnn_pointwise(td_cudnn_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t compute, td_cudnn_tensor x, const td_cudnn_tensor *b,
                        const td_cudnn_tensor *t, td_cudnn_tensor y)
{
    pointwise(g, function(g, mode, compute), x, b, t, y);
}

void td_cudnn_index(td_cudnn_graph *g, int64_t axis, td_cudnn_tensor x, td_cudnn_tensor y)
{
    cudnnBackendDescriptor_t how = function(g, CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32);
    set(g, how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, &axis);
    pointwise(g, how, x, NULL, NULL, y);
}

void td_cudnn_matmul(td_cudnn_graph *g, td_cudnn_tensor a, td_cudnn_tensor b, td_cudnn_tensor c)
{
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t how = make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, &compute);
    finish(g, how, "a product");
    cudnnBackendDescriptor_t o = make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set(g, o, CUDNN_ATTR_OPERATION_MATMUL_DESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, &how);
    set_tensor(g, o, CUDNN_ATTR_OPERATION_MATMUL_ADESC, &a);
    set_tensor(g, o, CUDNN_ATTR_OPERATION_MATMUL_BDESC, &b);
    set_tensor(g, o, CUDNN_ATTR_OPERATION_MATMUL_CDESC, &c);
    finish(g, o, "a product's operation");
    add_operation(g, o);
}

void td_cudnn_reduce(td_cudnn_graph *g, cudnnReduceTensorOp_t mode, td_cudnn_tensor x, td_cudnn_tensor y)
{
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t how = make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, &mode);
    set(g, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, &compute);
    finish(g, how, "a reduction");
    cudnnBackendDescriptor_t o = make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set(g, o, CUDNN_ATTR_OPERATION_REDUCTION_DESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, &how);
    set_tensor(g, o, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &x);
    set_tensor(g, o, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &y);
    finish(g, o, "a reduction's operation");
    add_operation(g, o);
}

void td_cudnn_reshape(td_cudnn_graph *g, td_cudnn_tensor x, td_cudnn_tensor y)
{
    cudnnBackendDescriptor_t o = make(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_tensor(g, o, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &x);
    set_tensor(g, o, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &y);
    finish(g, o, "a reshape");
    add_operation(g, o);
}

/* ---- Plans */

const td_cudnn_plan *td_cudnn_find(td_context *td, const char *key)
{
    const struct td_cudnn *c = td->cudnn;
    uint64_t hash = td_hash_text(key);
    for (uint32_t i = 0; c && i < c->count; i++)
        if (c->plans[i].hash == hash && !strcmp(c->plans[i].key, key)) return c->plans[i].plan;
    return NULL;
}

/* The ways that cuDNN proposes for the graph, the best first; their number. */
static int64_t choices_of(td_cudnn_graph *g, cudnnBackendDescriptor_t choice[CHOICES])
{
    const struct td_cudnn *c = g->library;
    cudnnBackendDescriptor_t graph = make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    int64_t found = 0;
    set_many(g, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->operation_count, g->operation);
    if (c->handle) set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, &c->handle);
    finish(g, graph, "the graph");
    cudnnBackendDescriptor_t ways = make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    set(g, ways, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, &graph);
    set(g, ways, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, &mode);
    if (!c->handle) set(g, ways, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, &c->device);
    finish(g, ways, "asking for ways");
    for (int i = 0; i < CHOICES; i++) choice[i] = make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (g->failed) return 0;
    check(g, c->BackendGetAttribute(ways, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, CHOICES, &found, choice),
          "asking for ways");
    if (!found) refuse(g, "it proposes no way");
    return g->failed ? 0 : found < CHOICES ? found : CHOICES;
}

static cudnnBackendDescriptor_t plan_from(td_cudnn_graph *g, cudnnBackendDescriptor_t choice)
{
    cudnnBackendDescriptor_t plan = make(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    set(g, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, &choice);
    set(g, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, &g->library->handle);
    finish(g, plan, "no plan could be built");
    return g->failed ? NULL : plan;
}

/* The first of the ways that can be built. */
static cudnnBackendDescriptor_t first_plan(td_cudnn_graph *g)
{
    cudnnBackendDescriptor_t choice[CHOICES] = { 0 }, plan = NULL;
    int64_t found = choices_of(g, choice);
    for (int64_t i = 0; i < found && !plan; i++) {
        g->failed = false; /* where another way was none */
        plan = plan_from(g, choice[i]);
    }
    return plan;
}

/* For a device that is described a way is enough: building it would load the kernel. */
static cudnnBackendDescriptor_t first_choice(td_cudnn_graph *g)
{
    cudnnBackendDescriptor_t choice[CHOICES] = { 0 };
    return choices_of(g, choice) ? choice[0] : NULL;
}

static td_cache_key disk_key(td_context *td, const char *key, td_text *text)
{
    *text = (td_text){ .td = td };
    td_text_add(text, "%s\n%s", td->cudnn->target, key);
    return (td_cache_key){ .kind = "cudnn", .data = text->text, .bytes = text->length };
}

/* What an earlier run kept; NULL: nothing, or nothing that cuDNN takes. */
static cudnnBackendDescriptor_t plan_from_disk(td_cudnn_graph *g, const td_cache_key *key)
{
    size_t bytes = 0;
    char *json = td_cache_get(g->td, key, &bytes);
    if (!json) return NULL;
    cudnnBackendDescriptor_t plan = make(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    set(g, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, &g->library->handle);
    set_many(g, plan, CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)bytes, json);
    finish(g, plan, "a kept plan");
    td_free(g->td, json, bytes, "host");
    if (!g->failed) return plan;
    g->failed = false; /* it is made again */
    return NULL;
}

static void plan_to_disk(td_cudnn_graph *g, const td_cache_key *key, cudnnBackendDescriptor_t plan)
{
    const struct td_cudnn *c = g->library;
    const cudnnBackendAttributeName_t what = CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION;
    int64_t bytes = 0;
    if (c->BackendGetAttribute(plan, what, CUDNN_TYPE_CHAR, 0, &bytes, NULL) != CUDNN_STATUS_SUCCESS || !bytes) return;
    char *json = td_alloc(g->td, (size_t)bytes, "host");
    if (json && c->BackendGetAttribute(plan, what, CUDNN_TYPE_CHAR, bytes, &bytes, json) == CUDNN_STATUS_SUCCESS)
        td_cache_keep(g->td, key, json, (size_t)bytes);
    td_free(g->td, json, (size_t)bytes, "host");
}

static cudnnBackendDescriptor_t find_or_make(td_cudnn_graph *g, const char *key)
{
    if (!g->library->handle) return first_choice(g);
    td_text text;
    td_cache_key kept = disk_key(g->td, key, &text);
    cudnnBackendDescriptor_t plan = plan_from_disk(g, &kept);
    if (!plan) {
        plan = first_plan(g);
        if (plan) plan_to_disk(g, &kept, plan);
    }
    td_free(g->td, text.text, text.room, "host");
    return plan;
}

const td_cudnn_plan *td_cudnn_build(td_cudnn_graph *g, const char *key)
{
    td_context *td = g->td;
    struct td_cudnn *c = g->library;
    kept_plan made = { .hash = td_hash_text(key) };
    if (td_room(td, (void **)&c->plans, &c->room, c->count + 1, sizeof *c->plans, "host")) {
        made.key = td_copy_text(td, key, "host");
        made.plan = td_alloc(td, sizeof *made.plan, "host");
    }
    if (td->error != TD_OK) {
        if (made.key) td_free(td, made.key, strlen(made.key) + 1, "host");
        destroy_all(c, g->made, g->made_count);
        return NULL;
    }
    *made.plan = (td_cudnn_plan){ .plan = g->failed ? NULL : find_or_make(g, key) };
    int64_t count = 0;
    if (made.plan->plan && c->handle)
        check(g,
              c->BackendGetAttribute(made.plan->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count,
                                     &made.plan->workspace_bytes),
              "asking for the workspace");
    if (g->failed) made.plan->plan = NULL;
    if (made.plan->plan) {
        memcpy(made.made, g->made, sizeof made.made);
        made.made_count = g->made_count;
    } else {
        destroy_all(c, g->made, g->made_count);
    }
    c->plans[c->count++] = made;
    return made.plan;
}

/* ---- Running */

bool td_cudnn_run(td_context *td, const td_cudnn_plan *plan, int count, const int64_t *ids, void *const *pointers, void *workspace,
                  cudaStream_t stream)
{
    td_cudnn_graph g;
    td_cudnn_begin(td, &g);
    check(&g, g.library->SetStream(g.library->handle, stream), "choosing a stream");
    cudnnBackendDescriptor_t pack = make(&g, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    set_many(&g, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids);
    set_many(&g, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers);
    set(&g, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &workspace);
    finish(&g, pack, "operands");
    if (!g.failed) check(&g, g.library->BackendExecute(g.library->handle, plan->plan, pack), "running a plan");
    destroy_all(g.library, g.made, g.made_count);
    if (g.failed) td_fail(td, TD_ERROR_DEVICE, "cuDNN: %s", g.reason);
    return !g.failed;
}
