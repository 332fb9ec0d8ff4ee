/* schedule: the order in which a placed program runs, a function of the program alone.
 *
 *   - computation stays in the order recorded, but for calls that read whole units' gradients, as updates and norms: those come in the
 *     order in which gradients do;
 *   - a unit's gradients are packed, added to what earlier micro-batches left, and reduced as soon as the last of them exists;
 *   - what is computed from the sum waits until the next reduction has begun, where nothing wants it before, so that computation need not
 *     stand still for the sum;
 *   - a unit is gathered `prefetch` units before its first reader, not earlier, and cast and fetched from the host for that just before;
 *   - what a group keeps of a unit is taken behind the first reader of the whole;
 *   - stores come last, as recorded.
 */
#include "parallel/strategy.h"

#include <stdlib.h>
#include <string.h>

typedef struct entry {
    double key;
    uint32_t node;
} entry;

typedef struct scheduler {
    const td_program *in;
    td_program *out;
    td_id *map;
    double *key;                              /* node */
    double *first_read;                       /* node: the earliest key of a reader */
    entry *order;                             /* room for two a node */
    uint32_t *stack;                          /* nodes waiting for their inputs */
    char *done;
    char *gradient;                           /* node: NO_GRADIENT ... */
    char *fetches;                            /* node: it is on the way from a stored unit to where readers have it */
    void *memory;
    size_t bytes;
} scheduler;

/* What a node gives: no unit's gradient; one that is not reduced yet; one that is, or made of one. */
enum { NO_GRADIENT, GRADIENT, REDUCED };

/* Small steps behind a position: what follows it at once, in this order. */
static const double as_view = 1e-6, as_pack = 1e-5, as_reduction = 2e-5, before_reader = 1e-3;

static int by_key(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return x->node < y->node ? -1 : x->node > y->node;
}

static double latest_input(const scheduler *s, const td_node *n)
{
    double latest = -1;
    for (uint32_t i = 0; i < n->inputs; i++) {
        double k = s->key[s->in->values[s->in->inputs[n->input + i]].node];
        if (k > latest) latest = k;
    }
    return latest;
}

static bool is_reduction(const td_node *n) { return n->op == &par_op_all_reduce || n->op == &par_op_reduce_scatter; }

static uint32_t maker_of(const scheduler *s, const td_node *n, uint32_t input) { return s->in->values[s->in->inputs[n->input + input]].node; }

/* Whether node n gives a whole unit's gradient: packed, added to an earlier one, summed over ranks, in another dtype for that, copied to
 * where it is read. */
static char gradient_of(const scheduler *s, const td_node *n)
{
    if (n->op == &td_op_pack) return GRADIENT;
    bool carries = n->op == &td_op_add || n->op == &td_op_cast || n->op == &td_op_to_host || is_reduction(n);
    char gradient = NO_GRADIENT;
    for (uint32_t i = 0; i < n->inputs && carries; i++) {
        uint32_t maker = maker_of(s, n, i);
        char of = s->gradient[maker] && is_reduction(&s->in->nodes[maker]) ? REDUCED : s->gradient[maker];
        if (of > gradient) gradient = of;
    }
    return gradient;
}

/* Whether node n takes a stored unit, or what is on the way from it, further: it can be done as early as is wanted. */
static bool fetches(const scheduler *s, const td_node *n)
{
    if (n->op == &par_op_own_members) return true;
    bool carries = n->op == &par_op_all_gather || n->op == &par_op_all_reduce || n->op == &td_op_to_device || n->op == &td_op_cast;
    if (!carries) return false;
    uint32_t maker = s->in->values[s->in->inputs[n->input]].node;
    return s->fetches[maker] || s->in->nodes[maker].op == &td_op_unit;
}

static void key_computation(scheduler *s)
{
    for (uint32_t i = 0; i < s->in->node_count; i++) {
        const td_node *n = &s->in->nodes[i];
        double position = i;
        s->gradient[i] = gradient_of(s, n);
        s->fetches[i] = fetches(s, n);
        if (n->op->flags & TD_OP_SOURCE) position = -1;
        if ((n->op->flags & TD_OP_VIEW) && n->inputs) position = latest_input(s, n) + as_view;
        if (s->gradient[i] || is_reduction(n)) position = latest_input(s, n) + (n->op == &td_op_pack ? as_pack : as_reduction);
        s->key[i] = position;
    }
}

/* The part that a group keeps of a unit: taken of what was gathered. */
static bool keeps_part(const scheduler *s, const td_node *n)
{
    return n->op == &par_op_own_part && s->in->nodes[maker_of(s, n, 0)].op == &par_op_all_gather;
}

/* Readers through views count as the view's, and through what is made of a reduced gradient; what fetches a unit on its way is none, nor
 * is what keeps a part of it. */
static void find_first_reads(scheduler *s)
{
    for (uint32_t i = 0; i < s->in->node_count; i++) s->first_read[i] = s->in->node_count;
    for (uint32_t i = s->in->node_count; i-- > 0;) {
        const td_node *n = &s->in->nodes[i];
        double at = n->op->flags & TD_OP_VIEW || s->gradient[i] == REDUCED ? s->first_read[i] : s->key[i];
        for (uint32_t k = 0; k < n->inputs && !s->fetches[i] && !keeps_part(s, n); k++) {
            uint32_t maker = maker_of(s, n, k);
            if (at < s->first_read[maker]) s->first_read[maker] = at;
        }
    }
}

/* When what is made of a reduction's sum, which is there at `sum`, is computed: before `wanted`, and when the next reduction has begun. */
static double late(const scheduler *s, uint32_t reductions, double sum, double wanted)
{
    uint32_t next = 0;
    while (next < reductions && s->order[next].key <= sum) next++;
    double begun = next < reductions ? s->order[next].key + as_view : wanted - as_view;
    double key = begun < wanted ? begun : wanted - as_view;
    return key > sum + as_reduction ? key : sum + as_reduction;
}

/* Sets the keys of what is made of gradients that were reduced. */
static void key_sums(scheduler *s)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->in->node_count; i++)
        if (is_reduction(&s->in->nodes[i]) && s->gradient[i] == GRADIENT) s->order[count++] = (entry){ s->key[i], i };
    qsort(s->order, count, sizeof *s->order, by_key);
    for (uint32_t i = 0; i < s->in->node_count; i++) {
        const td_node *n = &s->in->nodes[i];
        if (s->gradient[i] != REDUCED || n->op == &td_op_pack) continue;
        double sum = latest_input(s, n);
        bool beside = is_reduction(n) || n->op == &td_op_to_host;
        s->key[i] = beside ? sum + as_reduction : late(s, count, sum, s->first_read[i]);
    }
}

/* The key of the gradient that node n reads; below 0: it reads none, or is on a gradient's way itself. */
static double gradient_read(const scheduler *s, uint32_t node)
{
    const td_node *n = &s->in->nodes[node];
    double key = -1;
    for (uint32_t i = 0; i < n->inputs && !s->gradient[node]; i++) {
        uint32_t maker = maker_of(s, n, i);
        if (s->gradient[maker] && s->key[maker] > key) key = s->key[maker];
    }
    return key;
}

/* The calls of `op` that read gradients exchange their places: the gradient that is there first is read first. */
static void key_readers(scheduler *s, const td_op *op)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->in->node_count; i++) {
        double read = s->in->nodes[i].op == op ? gradient_read(s, i) : -1;
        if (read >= 0) s->order[count++] = (entry){ read, i };
    }
    entry *places = s->order + count;
    for (uint32_t r = 0; r < count; r++) places[r] = (entry){ s->key[s->order[r].node], s->order[r].node };
    qsort(s->order, count, sizeof *s->order, by_key);
    qsort(places, count, sizeof *places, by_key);
    for (uint32_t r = 0; r < count; r++) s->key[s->order[r].node] = places[r].key;
}

/* When what a gather reads is there. */
static double ready(scheduler *s, const td_node *gather)
{
    uint32_t maker = maker_of(s, gather, 0);
    const td_node *n = &s->in->nodes[maker];
    if (keeps_part(s, n)) {
        double read = s->first_read[maker_of(s, n, 0)];
        s->key[maker] = (read < s->in->node_count ? read : latest_input(s, n)) + as_view;
    }
    return latest_input(s, gather);
}

/* What is gathered, and what else is fetched, in order of first readers; each goes before the reader of the one `prefetch` gathers ahead,
 * and what is done to it on the way just before. The small all-reduce of units' members does not count as a gather. */
static void key_fetches(scheduler *s, int prefetch)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->in->node_count; i++) {
        bool is_read = s->first_read[i] < s->in->node_count, fetched = s->fetches[i] || s->in->nodes[i].op == &par_op_all_gather;
        if (is_read && fetched) s->order[count++] = (entry){ s->first_read[i], i };
    }
    qsort(s->order, count, sizeof *s->order, by_key);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t ahead = i, at = s->order[i].node;
        for (int left = prefetch; ahead && left; ahead--) left -= s->in->nodes[s->order[ahead - 1].node].op != &par_op_all_reduce;
        double key = s->order[ahead].key - before_reader, input = ready(s, &s->in->nodes[at]);
        if (!s->fetches[at]) s->key[at] = key > input ? key : input + as_view;
        for (; s->fetches[at]; key -= as_view) {
            s->key[at] = key;
            at = s->in->values[s->in->inputs[s->in->nodes[at].input]].node;
        }
    }
    for (uint32_t i = 0; i < s->in->node_count; i++) { /* views follow what they show */
        const td_node *n = &s->in->nodes[i];
        if ((n->op->flags & TD_OP_VIEW) && n->inputs) s->key[i] = latest_input(s, n) + as_view;
    }
}

/* Emits a node after what it reads, whatever the keys say. */
static bool emit(scheduler *s, uint32_t node)
{
    uint32_t depth = 0;
    s->stack[depth++] = node;
    while (depth) {
        uint32_t at = s->stack[depth - 1];
        const td_node *n = &s->in->nodes[at];
        uint32_t waiting = depth;
        for (uint32_t i = 0; !s->done[at] && i < n->inputs && depth == waiting; i++) {
            uint32_t maker = s->in->values[s->in->inputs[n->input + i]].node;
            if (!s->done[maker]) s->stack[depth++] = maker;
        }
        uint32_t after = n->after == TD_NONE ? at : s->in->values[n->after].node;
        if (!s->done[at] && depth == waiting && !s->done[after] && after != at) s->stack[depth++] = after;
        if (depth > waiting) continue;
        depth--;
        if (s->done[at]) continue;
        s->done[at] = 1;
        if (!td_copy_node(s->out, s->in, at, s->map)) return false;
    }
    return true;
}

td_program *par_schedule_pass(void *self, const td_program *in)
{
    const par_attached *a = self;
    scheduler s = { .in = in };
    uint32_t n = in->node_count;
    s.bytes = n * (2 * sizeof(double) + 2 * sizeof(entry) + sizeof(uint32_t) + 3) + in->value_count * sizeof(td_id);
    s.memory = td_alloc(in->td, s.bytes, "program");
    if (!s.memory) return NULL;
    s.key = s.memory;
    s.first_read = s.key + n;
    s.order = (entry *)(s.first_read + n);
    s.stack = (uint32_t *)(s.order + 2 * n);
    s.map = s.stack + n;
    s.done = (char *)(s.map + in->value_count);
    s.gradient = s.done + n;
    s.fetches = s.gradient + n;
    memset(s.done, 0, 3 * (size_t)n);
    key_computation(&s);
    find_first_reads(&s);
    key_sums(&s);
    key_readers(&s, &td_op_sum_squares);
    key_readers(&s, &td_op_max_abs);
    key_readers(&s, &td_op_update_unit);
    key_fetches(&s, a->options.prefetch ? a->options.prefetch : 1);
    for (uint32_t i = 0; i < n; i++) s.order[i] = (entry){ s.key[i], i };
    qsort(s.order, n, sizeof *s.order, by_key);
    td_program *out = NULL;
    if ((s.out = td_pass_begin(in->td))) {
        for (uint32_t i = 0; i < n; i++)
            if (!emit(&s, s.order[i].node)) break;
        out = td_pass_end(s.out);
    }
    td_free(in->td, s.memory, s.bytes, "program");
    return out;
}
