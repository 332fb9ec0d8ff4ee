/* The side channel: before a step runs, all ranks are shown to run the same step.
 *
 * A step runs one program or several: micro-batches, values read before their step. For each run a rank posts (run, step,
 * fingerprint) into a ring and compares with the posts of the others. With a plan it has run
 * before it compares what is already there and goes on: of two ranks the later to post a run sees the earlier one's
 * post, so a difference is always noticed, by the later one before it launches anything. With a new plan it waits
 * until every rank has posted that run.
 *
 * So that the difference can be named whoever notices it, a rank writes the text of a recording (options, and for
 * each operation a prefix hash and a line) into its log before it first posts that recording's fingerprint. The log
 * is a ring; what falls out of it is written again when it is posted again. Nothing that another rank may still have
 * to read is written over: for a new text a rank waits until the others have agreed on all runs before this one, and
 * no rank is ever further ahead than the ring of posts is long.
 */
#include <stdio.h>
#include <string.h>

#include "core/hash.h"
#include "parallel/mpi.h"

enum { PATH_SHOWN = 40 };

/* ---- Text ------------------------------------------------------------------------------------------------ */

void par_agree_options(par_world *world, int rank, const char *options)
{
    par_local *me = par_local_at(world, rank);
    if (!me) return;
    snprintf(me->options, sizeof me->options, "%s", options);
    me->options_hash = td_hash_text(options);
}

/* "mul (64, 10) f32 at model.c:41". Long paths lose their beginning. */
static void describe(const td_program *p, const td_node *n, char to[PAR_LINE_BYTES])
{
    size_t room = PAR_LINE_BYTES, used = 0;
#define ADD(...) used += used < room ? (size_t)snprintf(to + used, room - used, __VA_ARGS__) : 0
    ADD("%s", n->op->name);
    if (n->outputs > 0) {
        const td_value *v = td_value_at(p, n->output);
        for (int64_t d = 0; d < v->shape.rank; d++) ADD("%s%lld", d == 0 ? " (" : ", ", (long long)v->shape.dim[d]);
        ADD("%s %s", v->shape.rank == 0 ? " ()" : ")", td_dtype_name((td_dtype)v->dtype));
    }
    if (n->op->print) {
        char attributes[PAR_LINE_BYTES] = "";
        n->op->print(p, n, attributes, sizeof attributes);
        if (*attributes) ADD(" %.30s", attributes);
    }
    if (n->file) {
        size_t length = strlen(n->file);
        ADD(" at %s:%d", length > PATH_SHOWN ? n->file + length - PATH_SHOWN : n->file, n->line);
    }
#undef ADD
}

/* ---- The log of recordings ------------------------------------------------------------------------------- */

static int find_entry(const par_area *area, uint64_t fingerprint)
{
    for (int i = 0; i < PAR_RECORDINGS; i++)
        if (area->entry[i].fingerprint == fingerprint) return i;
    return -1;
}

/* Writes the recording over the oldest ones and returns its entry. */
static int write_recording(par_local *me, const td_program *p, uint64_t fingerprint)
{
    par_area *area = &me->world->segment->area[me->rank];
    uint32_t kept = p->node_count < PAR_LINES ? p->node_count : PAR_LINES;
    uint32_t bytes = (uint32_t)(offsetof(par_recording, line) + kept * sizeof(par_line));
    if (me->cursor + bytes > sizeof area->log) me->cursor = 0;
    uint32_t begin = me->cursor, end = begin + bytes;
    for (int i = 0; i < PAR_RECORDINGS; i++)
        if (area->entry[i].begin < end && begin < area->entry[i].end) area->entry[i].fingerprint = 0;
    par_recording *r = (par_recording *)(area->log + begin);
    memcpy(r->options, me->options, sizeof r->options);
    for (uint32_t i = 0; i < kept; i++) {
        r->line[i].hash = td_node_at(p, i)->hash;
        describe(p, td_node_at(p, i), r->line[i].text);
    }
    int entry = (int)(me->next_entry++ % PAR_RECORDINGS);
    area->entry[entry] =
        (par_entry){ .fingerprint = fingerprint, .begin = begin, .end = end, .kept = kept, .nodes = p->node_count };
    me->cursor = end;
    return entry;
}

/* What a rank posted and recorded. */
typedef struct heard {
    const par_recording *recording;
    uint32_t kept, nodes;
    uint64_t fingerprint;
    int64_t run, step;
    int rank;
} heard;

static heard listen(const par_local *me, int rank, uint32_t index)
{
    const par_area *area = &me->world->segment->area[rank];
    const par_post *post = &area->post[index % PAR_POSTS];
    const par_entry *e = &area->entry[post->entry];
    return (heard){ .recording = (const par_recording *)(area->log + e->begin),
                    .kept = e->kept,
                    .nodes = e->nodes,
                    .fingerprint = post->fingerprint,
                    .run = post->run,
                    .step = post->step,
                    .rank = rank };
}

/* ---- Naming a difference --------------------------------------------------------------------------------- */

typedef struct words_pair {
    char name[64], a[96], b[96];
} words_pair;

/* Takes the next word of an options text; its value starts after '='. */
static const char *next_word(const char *text, size_t *length)
{
    text += strspn(text, " ");
    *length = strcspn(text, " ");
    return text;
}

/* "144" of "batch=144" in the whole text; "absent" if there is no such name. */
static void option_value(const char *text, const char *name, size_t name_length, char *to, size_t room)
{
    snprintf(to, room, "absent");
    size_t length;
    for (const char *w = next_word(text, &length); length > 0; w = next_word(w + length, &length)) {
        if (length < name_length || strncmp(w, name, name_length) != 0) continue;
        if (length > name_length && w[name_length] != '=') continue;
        const char *value = length > name_length ? w + name_length + 1 : "set";
        snprintf(to, room, "%.*s", length > name_length ? (int)(length - name_length - 1) : 3, value);
        return;
    }
}

/* The first option named in `text` whose values differ between a and b. */
static bool option_differs(const char *text, const char *a, const char *b, words_pair *out)
{
    size_t length;
    for (const char *w = next_word(text, &length); length > 0; w = next_word(w + length, &length)) {
        size_t name = strcspn(w, "= ");
        snprintf(out->name, sizeof out->name, "%.*s", (int)name, w);
        option_value(a, w, name, out->a, sizeof out->a);
        option_value(b, w, name, out->b, sizeof out->b);
        if (strcmp(out->a, out->b) != 0) return true;
    }
    return false;
}

/* Says how operation i differs; a rank may have recorded fewer. */
static void operation_text(const heard *a, const heard *b, uint32_t i, char *to, size_t room)
{
    const char *x = i < a->nodes ? a->recording->line[i].text : NULL,
               *y = i < b->nodes ? b->recording->line[i].text : NULL;
    if (x && y && strcmp(x, y) != 0)
        snprintf(to, room, "operation %u is %s on rank %d but %s on rank %d", i, x, a->rank, y, b->rank);
    else if (x && y)
        snprintf(to, room, "operation %u, %s, has other inputs or attributes on rank %d than on rank %d", i, x, a->rank,
                 b->rank);
    else
        snprintf(to, room, "operation %u is %s on rank %d but rank %d records only %u operations", i, x ? x : y,
                 x ? a->rank : b->rank, x ? b->rank : a->rank, i);
}

static void difference_text(const heard *a, const heard *b, char *to, size_t room)
{
    words_pair option;
    const char *p = a->recording->options, *q = b->recording->options;
    if (a->step != b->step) {
        char first[PAR_STEP_BYTES], second[PAR_STEP_BYTES];
        snprintf(to, room, "rank %d begins %s but rank %d %s", a->rank, par_step_text(a->step, first), b->rank,
                 par_step_text(b->step, second));
        return;
    }
    if (a->run != b->run) {
        snprintf(to, room, "rank %d begins run %lld but rank %d run %lld", a->rank, (long long)a->run, b->rank, (long long)b->run);
        return;
    }
    if (option_differs(p, p, q, &option) || option_differs(q, p, q, &option)) {
        snprintf(to, room, "option %s is %s on rank %d but %s on rank %d", option.name, option.a, a->rank, option.b,
                 b->rank);
        return;
    }
    uint32_t kept = a->kept < b->kept ? a->kept : b->kept, i = 0;
    while (i < kept && a->recording->line[i].hash == b->recording->line[i].hash) i++;
    if (i < kept || (a->nodes != b->nodes && i < PAR_LINES)) operation_text(a, b, i, to, room);
    else if (i == PAR_LINES)
        snprintf(to, room,
                 "the first %d operations, of which texts are kept, are the same on ranks %d and %d; a later one "
                 "differs (%u and %u recorded)",
                 PAR_LINES, a->rank, b->rank, a->nodes, b->nodes);
    else
        snprintf(to, room,
                 "ranks %d and %d recorded the same operations under other options (fingerprints %016llx and %016llx)",
                 a->rank, b->rank, (unsigned long long)a->fingerprint, (unsigned long long)b->fingerprint);
}

static void disagree(par_local *me, int other, uint32_t index)
{
    heard mine = listen(me, me->rank, index), theirs = listen(me, other, index);
    const heard *a = me->rank < other ? &mine : &theirs, *b = me->rank < other ? &theirs : &mine;
    char text[PAR_MESSAGE_BYTES], step[PAR_STEP_BYTES];
    difference_text(a, b, text, sizeof text);
    par_break(me->world, me->rank, "ranks disagree at %s: %s", par_step_text(a->step, step), text);
}

/* ---- Posting and comparing ------------------------------------------------------------------------------- */

static bool same_post(const par_local *me, int other, uint32_t index)
{
    const par_area *mine = &me->world->segment->area[me->rank], *theirs = &me->world->segment->area[other];
    const par_post *x = &mine->post[index % PAR_POSTS], *y = &theirs->post[index % PAR_POSTS];
    return x->run == y->run && x->step == y->step && x->fingerprint == y->fingerprint;
}

/* Compares this post where the other has made it too; if not, the other will compare when it does. */
static bool compare(par_local *me, int other, uint32_t index)
{
    if (!par_reached(&me->world->segment->area[other].posted, index + 1) || same_post(me, other, index)) return true;
    disagree(me, other, index);
    return par_stopped(me);
}

/* Waits until all others have agreed on the first `runs` runs. */
static bool await_others(par_local *me, uint32_t runs)
{
    for (int r = 0; r < me->world->ranks; r++)
        if (r != me->rank && !par_wait(me, r, &me->world->segment->area[r].compared, runs)) return false;
    return true;
}

static bool post(par_local *me, uint32_t index, par_post said, const td_program *recording)
{
    par_area *area = &me->world->segment->area[me->rank];
    int entry = find_entry(area, said.fingerprint);
    bool is_first_lap = index < PAR_POSTS;
    if (entry < 0 ? !await_others(me, index) : !is_first_lap && !await_others(me, index - PAR_POSTS + 2)) return false;
    if (entry < 0) {
        entry = write_recording(me, recording, said.fingerprint);
        if (me->world->mpi) par_mpi_tell_recording(me->world, entry);
    }
    said.entry = entry;
    area->post[index % PAR_POSTS] = said;
    par_advance(&area->posted);
    if (me->world->mpi) par_mpi_tell_post(me->world, index);
    return true;
}

void par_begin_run(par_local *me, par_moment at)
{
    par_area *area = &me->world->segment->area[me->rank];
    atomic_store(&area->step, par_step_of(at));
    atomic_store(&area->run, at.run + 1);
    atomic_store(&area->call, 0);
}

bool par_agree(par_world *world, int rank, td_context *td, par_moment at, const td_program *recording,
               uint64_t fingerprint, bool is_new_plan)
{
    par_local *me = par_local_at(world, rank);
    if (!me) {
        td_fail(td, TD_ERROR_PARALLEL, "rank %d is not a rank of this process in a world of %d", rank, world->ranks);
        return false;
    }
    if (!world->segment) return true;
    par_area *area = &world->segment->area[rank];
    me->td = td;
    if (!me->behind) par_begin_run(me, at);
    if (world->mpi) par_mpi_listen(world);
    if (par_broken(world)) return par_stopped(me);
    if (world->ranks == 1) return true;
    uint64_t name = td_mix(fingerprint, me->options_hash);
    uint32_t index = atomic_load(&area->posted.value);
    double begin = par_seconds();
    par_post said = { .run = at.run, .step = par_step_of(at), .fingerprint = name ? name : 1, .computed_s = par_pace_take(me) };
    if (!post(me, index, said, recording)) return false;
    for (int r = 0; r < world->ranks; r++) {
        if (r == rank) continue;
        if (is_new_plan && !par_wait(me, r, &world->segment->area[r].posted, index + 1)) return false;
        if (!compare(me, r, index)) return false;
    }
    if (index > 0) par_pace_compare(me, index - 1);
    par_advance(&area->compared);
    if (world->mpi) par_mpi_tell_compared(world);
    par_add_waited(me, begin);
    par_pace_begin(me);
    return true;
}

void par_agree_heard(par_world *world, int other, uint32_t index)
{
    par_local *me = par_local_at(world, world->first);
    if (!same_post(me, other, index)) disagree(me, other, index);
}
