/* The messages by which ranks that share no memory keep copies of one another's areas.
 *
 * A message is copied, sent to each other rank without waiting, and freed when all sends are done. One receive is always
 * posted. Between two ranks messages come in the order in which they were told, so a post comes after its recording.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "parallel/mpi.h"

static const double TELL_S = 0.25; /* a wait so long is told: whoever is late can be named by what others have told */
static const double SPIN_S = 0.002; /* a wait gives way for so long, then sleeps: ranks may share a core */
static const double LOOK_S = 0.05; /* between looks whether the others of this host live */
enum { SLEEP_NS = 200000 };

typedef enum message_kind { HELLO, RECORDING, POST, COMPARED, WAITS, BUSY, BROKEN, ENDED, ORIGIN } message_kind;

typedef struct message {
    uint64_t layout;         /* first: of another one nothing more is read */
    int32_t kind, from;
    uint32_t bytes;          /* behind it */
    uint32_t index;          /* POST: of the post; COMPARED: runs; RECORDING: of the entry */
    int32_t value;           /* BUSY: 1 or -1 */
    par_post post;
    par_entry entry;
    /* WAITS */
    int64_t run, step, call, waits_word;
    uint32_t waits_target, arrived[PAR_SLOTS];
    int32_t waits_for, collective;
    par_meeting meeting[PAR_SLOTS];
} message;

enum { MESSAGE_MOST = sizeof(message) + sizeof(par_recording) };

/* ---- Calls of MPI ---------------------------------------------------------------------------------------- */

static bool check(par_world *world, int code, const char *what)
{
    if (code == MPI_OK) return true;
    char text[MPI_TEXT_BYTES] = "";
    int length = 0;
    world->mpi->lib.error_string(code, text, &length);
    par_break(world, world->first, "rank %d: MPI cannot %s: %s", world->first, what, text);
    return false;
}

bool par_mpi_send(par_world *world, int to, int tag, const void *at, int64_t bytes, mpi_request *out)
{
    par_mpi *m = world->mpi;
    pthread_mutex_lock(&m->lock);
    bool ok = check(world, m->lib.isend(at, (int)bytes, m->lib.byte, to, tag, m->data, out), "send");
    pthread_mutex_unlock(&m->lock);
    return ok;
}

bool par_mpi_receive(par_world *world, int from, int tag, void *at, int64_t bytes, mpi_request *out)
{
    par_mpi *m = world->mpi;
    pthread_mutex_lock(&m->lock);
    bool ok = check(world, m->lib.irecv(at, (int)bytes, m->lib.byte, from, tag, m->data, out), "receive");
    pthread_mutex_unlock(&m->lock);
    return ok;
}

bool par_mpi_done(par_world *world, mpi_request *request)
{
    par_mpi *m = world->mpi;
    int done = 0;
    pthread_mutex_lock(&m->lock);
    bool ok = check(world, m->lib.test(request, &done, NULL), "move data");
    pthread_mutex_unlock(&m->lock);
    return ok && done;
}

/* ---- Telling --------------------------------------------------------------------------------------------- */

static void free_sending(par_sending *s)
{
    free(s->request);
    free(s->bytes);
    free(s);
}

static par_sending *new_sending(int ranks, const message *head, const void *behind)
{
    par_sending *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->request = calloc((size_t)ranks, sizeof *s->request);
    s->bytes = malloc(sizeof *head + head->bytes);
    if (!s->request || !s->bytes) {
        free_sending(s);
        return NULL;
    }
    memcpy(s->bytes, head, sizeof *head);
    if (head->bytes) memcpy(s->bytes + sizeof *head, behind, head->bytes);
    return s;
}

static void tell(par_world *world, message head, const void *behind)
{
    par_mpi *m = world->mpi;
    head.layout = par_layout();
    head.from = m->rank;
    par_sending *s = new_sending(m->ranks, &head, behind);
    if (!s) {
        par_break(world, m->rank, "rank %d: out of memory for a message", m->rank);
        return;
    }
    pthread_mutex_lock(&m->lock);
    for (int r = 0; r < m->ranks; r++) {
        if (r == m->rank) continue;
        int size = (int)(sizeof head + head.bytes);
        if (!check(world, m->lib.isend(s->bytes, size, m->lib.byte, r, 0, m->messages, &s->request[s->count]), "send")) break;
        s->count++;
    }
    s->next = m->sendings;
    m->sendings = s;
    pthread_mutex_unlock(&m->lock);
}

static bool is_sent(par_world *world, par_sending *s)
{
    par_mpi *m = world->mpi;
    while (s->count > 0) {
        int done = 0;
        if (!check(world, m->lib.test(&s->request[s->count - 1], &done, NULL), "send") || !done) return false;
        s->count--;
    }
    return true;
}

/* Frees what has been sent. */
static void tidy(par_world *world)
{
    for (par_sending **at = &world->mpi->sendings; *at;) {
        par_sending *s = *at;
        if (!is_sent(world, s)) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        free_sending(s);
    }
}

static par_area *own_area(par_world *world) { return &world->segment->area[world->first]; }

void par_mpi_tell_recording(par_world *world, int entry)
{
    const par_area *area = own_area(world);
    const par_entry *e = &area->entry[entry];
    message head = { .kind = RECORDING, .index = (uint32_t)entry, .entry = *e, .bytes = e->end - e->begin };
    tell(world, head, area->log + e->begin);
}

void par_mpi_tell_post(par_world *world, uint32_t index)
{
    tell(world, (message){ .kind = POST, .index = index, .post = own_area(world)->post[index % PAR_POSTS] }, NULL);
}

void par_mpi_tell_compared(par_world *world)
{
    tell(world, (message){ .kind = COMPARED, .index = atomic_load(&own_area(world)->compared.value) }, NULL);
}

void par_mpi_tell_busy(par_world *world, bool busy)
{
    tell(world, (message){ .kind = BUSY, .value = busy ? 1 : -1 }, NULL);
}

void par_mpi_tell_broken(par_world *world)
{
    tell(world, (message){ .kind = BROKEN, .bytes = PAR_MESSAGE_BYTES }, own_area(world)->message);
}

void par_mpi_tell_origin(par_world *world)
{
    tell(world, (message){ .kind = ORIGIN, .bytes = sizeof(par_origin) }, &own_area(world)->origin);
}

static void tell_wait(par_world *world, bool waits)
{
    const par_area *area = own_area(world);
    message head = { .kind = WAITS, .run = atomic_load(&area->run), .step = atomic_load(&area->step), .call = atomic_load(&area->call) };
    head.collective = atomic_load(&area->collective);
    head.waits_for = waits ? atomic_load(&area->waits_for) : 0;
    head.waits_word = atomic_load(&area->waits_word);
    head.waits_target = atomic_load(&area->waits_target);
    for (int slot = 0; slot < PAR_SLOTS; slot++) {
        head.arrived[slot] = atomic_load(&area->arrived[slot].value);
        head.meeting[slot] = area->meeting[slot][(head.arrived[slot] - 1) & 1];
    }
    tell(world, head, NULL);
}

/* ---- Listening ------------------------------------------------------------------------------------------- */

static void hear_wait(par_area *area, const message *head)
{
    atomic_store(&area->step, head->step);
    atomic_store(&area->run, head->run);
    atomic_store(&area->call, head->call);
    atomic_store(&area->collective, head->collective);
    for (int slot = 0; slot < PAR_SLOTS; slot++) {
        area->meeting[slot][(head->arrived[slot] - 1) & 1] = head->meeting[slot];
        atomic_store(&area->arrived[slot].value, head->arrived[slot]);
    }
    atomic_store(&area->waits_word, head->waits_word);
    atomic_store(&area->waits_target, head->waits_target);
    atomic_store(&area->waits_for, head->waits_for);
}

static void hear_broken(par_world *world, int from, const char *text)
{
    par_segment *s = world->segment;
    memcpy(s->area[from].message, text, PAR_MESSAGE_BYTES);
    s->area[from].message[PAR_MESSAGE_BYTES - 1] = 0;
    int32_t nobody = 0;
    atomic_compare_exchange_strong(&s->broken, &nobody, from + 1);
}

static void hear_recording(par_area *area, const message *head, const char *behind)
{
    const par_entry *e = &head->entry;
    if (head->index >= PAR_RECORDINGS || e->begin > e->end || e->end > sizeof area->log || e->end - e->begin != head->bytes) return;
    memcpy(area->log + e->begin, behind, head->bytes);
    area->entry[head->index] = *e;
}

/* A post that comes after this rank has posted the same run is compared now; otherwise when this rank posts. */
static void hear_post(par_world *world, const message *head)
{
    par_area *area = &world->segment->area[head->from];
    area->post[head->index % PAR_POSTS] = head->post;
    atomic_store(&area->posted.value, head->index + 1);
    uint32_t own = atomic_load(&own_area(world)->posted.value);
    if (own > head->index && own - head->index <= PAR_POSTS) par_agree_heard(world, head->from, head->index);
}

static void hear_greeting(par_world *world, const message *head, const char *behind)
{
    par_mpi *m = world->mpi;
    memcpy(&m->who[head->from], behind, sizeof *m->who);
    m->greeted[head->from] = true;
}

static void hear_busy(par_world *world, const message *head)
{
    const par_greeting *who = &world->mpi->who[head->from];
    par_area *area = &world->segment->area[head->from];
    bool seen = who->processes && who->processes == world->mpi->who[world->mpi->rank].processes;
    atomic_store(&area->process, seen ? who->process : 0);
    atomic_fetch_add(&area->busy, head->value);
}

static void hear(par_world *world, const message *head, const char *behind)
{
    if (head->layout != par_layout())
        par_break(world, world->first, "rank %d and another one run different versions of Tandem: start the same program for all ranks",
                  world->first);
    if (head->layout != par_layout() || head->from < 0 || head->from >= world->ranks) return;
    par_area *area = &world->segment->area[head->from];
    switch ((message_kind)head->kind) {
    case HELLO: hear_greeting(world, head, behind); break;
    case RECORDING: hear_recording(area, head, behind); break;
    case POST: hear_post(world, head); break;
    case COMPARED: atomic_store(&area->compared.value, head->index); break;
    case WAITS: hear_wait(area, head); break;
    case BUSY: hear_busy(world, head); break;
    case BROKEN: hear_broken(world, head->from, behind); break;
    case ENDED: par_end(world, head->from); break;
    case ORIGIN:
        if (head->bytes == sizeof area->origin) memcpy(&area->origin, behind, sizeof area->origin);
        break;
    }
}

static bool receive(par_world *world)
{
    par_mpi *m = world->mpi;
    return check(world, m->lib.irecv(m->received, MESSAGE_MOST, m->lib.byte, MPI_ANY, MPI_ANY, m->messages, &m->receiving), "receive");
}

void par_mpi_listen(par_world *world)
{
    par_mpi *m = world->mpi;
    pthread_mutex_lock(&m->lock);
    for (int done = 1; done;) {
        if (!check(world, m->lib.test(&m->receiving, &done, NULL), "receive") || !done) break;
        message head;
        memcpy(&head, m->received, sizeof head);
        hear(world, &head, m->received + sizeof head);
        if (!receive(world)) break;
    }
    tidy(world);
    pthread_mutex_unlock(&m->lock);
}

static bool has_died(const par_world *world, int rank)
{
    const par_mpi *m = world->mpi;
    const par_greeting *who = &m->who[rank];
    if (!who->processes || who->processes != m->who[m->rank].processes) return false;
    return !atomic_load(&world->segment->area[rank].ended) && par_process_life(who->process, NULL) == PAR_GONE;
}

/* Ranks of this host that are no more are noticed at once; of others the deadline tells. */
static void look_for_dead(par_world *world)
{
    par_mpi *m = world->mpi;
    double now = par_seconds();
    pthread_mutex_lock(&m->lock);
    bool due = now - m->looked >= LOOK_S;
    if (due) m->looked = now;
    pthread_mutex_unlock(&m->lock);
    if (!due) return;
    for (int r = 0; r < world->ranks; r++) {
        if (!has_died(world, r)) continue;
        par_mpi_listen(world); /* what it told last */
        if (par_broken(world) || !has_died(world, r)) continue;
        char place[PAR_PLACE_BYTES];
        par_break(world, m->rank, "rank %d has died; rank %d waited for others at %s", r, m->rank, par_place(own_area(world), place));
    }
}

void par_mpi_look(par_world *world)
{
    par_mpi_listen(world);
    look_for_dead(world);
}

void par_mpi_rest(double waited)
{
    if (waited < SPIN_S) sched_yield();
    else nanosleep(&(struct timespec){ .tv_nsec = SLEEP_NS }, NULL);
}

void par_mpi_wait(par_world *world, double waited)
{
    par_mpi *m = world->mpi;
    par_mpi_listen(world);
    if (waited > SPIN_S) look_for_dead(world);
    if (waited > TELL_S && !m->told_wait) {
        m->told_wait = true;
        tell_wait(world, true);
    }
    par_mpi_rest(waited);
}

void par_mpi_waited(par_world *world)
{
    if (!world->mpi->told_wait) return;
    world->mpi->told_wait = false;
    tell_wait(world, false);
}

/* ---- Beginning and end ----------------------------------------------------------------------------------- */

size_t par_mpi_message_bytes(void) { return MESSAGE_MOST; }

bool par_mpi_greet(par_world *world, const par_greeting *own)
{
    message head = { .layout = par_layout(), .kind = HELLO, .from = world->mpi->rank, .bytes = sizeof *own };
    hear(world, &head, (const char *)own);
    if (!receive(world)) return false;
    tell(world, head, own);
    return !par_broken(world);
}

void par_mpi_tell_ended(par_world *world) { tell(world, (message){ .kind = ENDED }, NULL); }

void par_mpi_free_sendings(par_mpi *mpi)
{
    while (mpi->sendings) {
        par_sending *s = mpi->sendings;
        mpi->sendings = s->next;
        free_sending(s);
    }
}
