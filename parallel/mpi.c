/* The processes of an MPI world as ranks: joining, and the messages that keep their areas alike.
 *
 * Two communicators of our own, duplicates of the world's: one for data (transport_mpi.c), one for messages. A message is
 * copied, sent to each other rank without waiting, and freed when all sends are done. One receive is always posted.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "parallel/mpi.h"

static const double TELL_S = 0.25;    /* a wait so long is told: whoever is late can be named by what others have told */
static const double SPIN_S = 0.002;   /* a wait gives way for so long, then sleeps: ranks may share a core */
static const double LOOK_S = 0.05;    /* between looks whether the others of this host live */
static const double SPEAK_S = 0.3;    /* how long a rank that failed listens whether another one tells the error */
static const double LEAVE_S = 5;      /* for MPI to end once all ranks have */
enum { SLEEP_NS = 200000 };

typedef enum message_kind { HELLO, RECORDING, POST, COMPARED, WAITS, BUSY, BROKEN, ENDED } message_kind;

typedef struct message {
    int32_t kind, from;
    uint32_t bytes;          /* behind it */
    uint32_t index;          /* POST: of the post; COMPARED: steps; RECORDING: of the entry */
    int32_t value;           /* BUSY: 1 or -1; HELLO: size of the rank's world */
    par_post post;
    par_entry entry;
    /* WAITS */
    int64_t step, call, waits_word;
    uint32_t waits_target, arrived[PAR_SLOTS];
    int32_t waits_for, collective;
    par_meeting meeting[PAR_SLOTS];
} message;

enum { MESSAGE_MOST = sizeof(message) + sizeof(par_recording) };

typedef struct sending {
    struct sending *next;
    int count;
    mpi_request *request;    /* one a rank */
    char *bytes;
} sending;

typedef struct greeting {
    char host[PAR_HOST_BYTES];
    uint64_t cores;          /* a hash of those it may run on */
    uint64_t processes;      /* the namespace its process number is of */
    int64_t process;
} greeting;

struct par_mpi {
    mpi_library lib;
    mpi_comm data, messages;
    pthread_mutex_t lock;    /* recursive: MPI is called by one thread at a time */
    int rank, ranks;
    bool ours;               /* this world has initialised MPI */
    bool told_wait;
    mpi_request receiving;
    char *received;          /* MESSAGE_MOST */
    sending *sendings;
    bool *greeted;
    struct greeting *who;    /* each has told of itself */
    double looked;           /* when this rank last looked whether others live */
};

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

static void free_sending(sending *s)
{
    free(s->request);
    free(s->bytes);
    free(s);
}

static sending *new_sending(int ranks, const message *head, const void *behind)
{
    sending *s = calloc(1, sizeof *s);
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
    head.from = m->rank;
    sending *s = new_sending(m->ranks, &head, behind);
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

static bool is_sent(par_world *world, sending *s)
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
    for (sending **at = &world->mpi->sendings; *at;) {
        sending *s = *at;
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

static void tell_wait(par_world *world, bool waits)
{
    const par_area *area = own_area(world);
    message head = { .kind = WAITS, .step = atomic_load(&area->step), .call = atomic_load(&area->call) };
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

/* A post that comes after this rank has posted the same step is compared now; otherwise when this rank posts. */
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

static void hear(par_world *world, const message *head, const char *behind)
{
    if (head->from < 0 || head->from >= world->ranks) return;
    par_area *area = &world->segment->area[head->from];
    switch ((message_kind)head->kind) {
    case HELLO: hear_greeting(world, head, behind); break;
    case RECORDING: hear_recording(area, head, behind); break;
    case POST: hear_post(world, head); break;
    case COMPARED: atomic_store(&area->compared.value, head->index); break;
    case WAITS: hear_wait(area, head); break;
    case BUSY: atomic_fetch_add(&area->busy, head->value); break;
    case BROKEN: hear_broken(world, head->from, behind); break;
    case ENDED: atomic_store(&area->ended, 1); break;
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

static bool same_host(const par_mpi *m, int a, int b) { return !strcmp(m->who[a].host, m->who[b].host); }

static bool has_died(const par_world *world, int rank)
{
    const par_mpi *m = world->mpi;
    const greeting *who = &m->who[rank];
    if (!same_host(m, rank, m->rank) || who->processes != m->who[m->rank].processes) return false;
    return !atomic_load(&world->segment->area[rank].ended) && kill((pid_t)who->process, 0) != 0 && errno == ESRCH;
}

/* Ranks of this host that are no more are noticed at once; of others the deadline tells. */
static void look_for_dead(par_world *world)
{
    par_mpi *m = world->mpi;
    double now = par_seconds();
    if (now - m->looked < LOOK_S) return;
    m->looked = now;
    for (int r = 0; r < world->ranks; r++) {
        if (!has_died(world, r)) continue;
        par_mpi_listen(world); /* what it told last */
        if (par_broken(world) || !has_died(world, r)) continue;
        char place[PAR_PLACE_BYTES];
        par_break(world, m->rank, "rank %d has died; rank %d waited for others at %s", r, m->rank, par_place(own_area(world), place));
    }
}

static void rest(double waited)
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
    rest(waited);
}

void par_mpi_waited(par_world *world)
{
    if (!world->mpi->told_wait) return;
    world->mpi->told_wait = false;
    tell_wait(world, false);
}

/* ---- Joining --------------------------------------------------------------------------------------------- */

/* What may block for ever runs in a thread that is left alone when it does. */
typedef struct blocking {
    par_mpi *mpi;
    void (*call)(par_mpi *mpi, char *message, size_t room);
    char message[PAR_MESSAGE_BYTES];
} blocking;

static void *run_blocking(void *argument)
{
    blocking *b = argument;
    b->call(b->mpi, b->message, sizeof b->message);
    return NULL;
}

/* false: it did not end in time (what it uses must stay), or no thread could be had. */
static bool run_within(blocking *b, double seconds, bool *started)
{
    pthread_t thread;
    struct timespec until;
    *started = pthread_create(&thread, NULL, run_blocking, b) == 0;
    if (!*started) return false;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)seconds + 1;
    if (pthread_timedjoin_np(thread, NULL, &until) == 0) return true;
    pthread_detach(thread);
    return false;
}

static void initialise(par_mpi *m, char *message, size_t room)
{
    const mpi_library *lib = &m->lib;
    int begun = 0, over = 0, level = 0;
    bool ok = lib->initialized(&begun) == MPI_OK && lib->finalized(&over) == MPI_OK;
    if (ok && over) {
        snprintf(message, room, "this process has been in a world and left it; it cannot join again");
        return;
    }
    m->ours = ok && !begun;
    ok = ok && (begun || lib->init_thread(NULL, NULL, MPI_SERIALIZED, &level) == MPI_OK);
    ok = ok && lib->comm_dup(lib->world, &m->data) == MPI_OK && lib->comm_dup(lib->world, &m->messages) == MPI_OK;
    ok = ok && lib->comm_set_errhandler(m->data, lib->errors_return) == MPI_OK;
    ok = ok && lib->comm_set_errhandler(m->messages, lib->errors_return) == MPI_OK;
    ok = ok && lib->comm_size(m->data, &m->ranks) == MPI_OK && lib->comm_rank(m->data, &m->rank) == MPI_OK;
    if (!ok) snprintf(message, room, "MPI could not be started");
    else if (!begun && level < MPI_SERIALIZED) snprintf(message, room, "this MPI was built without threads, which are needed");
}

static uint64_t hash_of_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 0;
    uint64_t hash = 1;
    for (int i = 0; i < CPU_SETSIZE; i++) hash = hash * 0x9e3779b97f4a7c15u + (CPU_ISSET(i, &set) ? 1 : 0);
    return hash;
}

/* Tells all who this is, and waits until all have: the first message to each rank also connects to it. */
static bool greet(par_world *world, char *message_text, size_t room)
{
    par_mpi *m = world->mpi;
    struct stat namespace;
    greeting g = { .cores = hash_of_cores(), .process = (int64_t)getpid() };
    if (stat("/proc/self/ns/pid", &namespace) == 0) g.processes = (uint64_t)namespace.st_ino;
    if (gethostname(g.host, sizeof g.host) != 0) snprintf(g.host, sizeof g.host, "unknown");
    g.host[sizeof g.host - 1] = 0;
    message own = { .kind = HELLO, .from = m->rank, .value = m->ranks, .bytes = sizeof g };
    hear(world, &own, (const char *)&g);
    if (!receive(world)) return false;
    tell(world, own, &g);
    double begin = par_seconds();
    for (int r = 0; r < m->ranks; r++) {
        while (!m->greeted[r] && !par_broken(world)) {
            double waited = par_seconds() - begin;
            par_mpi_listen(world);
            rest(waited);
            if (waited < world->segment->timeout_s) continue;
            snprintf(message_text, room, "rank %d of %d did not join within %g s", r, m->ranks, world->segment->timeout_s);
            return false;
        }
    }
    const char *broken = par_broken(world);
    if (broken) snprintf(message_text, room, "%s", broken);
    return !broken;
}

static par_mpi *new_mpi(char *message, size_t room)
{
    par_mpi *m = calloc(1, sizeof *m);
    if (!m) {
        snprintf(message, room, "out of memory for a world");
        return NULL;
    }
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&m->lock, &kind);
    pthread_mutexattr_destroy(&kind);
    if (mpi_library_load("libmpi.so.40", &m->lib, message, room)) return m;
    free(m);
    return NULL;
}

static bool make_room(par_world *world)
{
    par_mpi *m = world->mpi;
    size_t ranks = (size_t)m->ranks;
    m->received = malloc(MESSAGE_MOST);
    m->greeted = calloc(ranks, sizeof *m->greeted);
    m->who = calloc(ranks, sizeof *m->who);
    return m->received && m->greeted && m->who;
}

/* The library's part of joining; what MPI may still use is not freed on failure. */
static par_mpi *enter(const par_world_options *options, char *message, size_t room)
{
    par_mpi *m = new_mpi(message, room);
    blocking *b = m ? calloc(1, sizeof *b) : NULL;
    if (!b) return NULL;
    double seconds = options && options->timeout_s > 0 ? options->timeout_s : PAR_TIMEOUT_S;
    bool started;
    *b = (blocking){ .mpi = m, .call = initialise };
    if (!run_within(b, seconds, &started)) {
        if (started) snprintf(message, room, "not all processes came to their world within %g s", seconds);
        else snprintf(message, room, "no thread could be started");
        return NULL;
    }
    snprintf(message, room, "%s", b->message);
    free(b);
    if (!*message) return m;
    free(m);
    return NULL;
}

par_world *par_world_scheduled(const par_world_options *options, int *rank, char *message, size_t room)
{
    int expected, ranks;
    *message = 0;
    if (!par_scheduled(&expected, &ranks, message, room)) return NULL;
    par_mpi *m = enter(options, message, room);
    if (!m) return NULL;
    if (m->rank != expected || m->ranks != ranks) {
        snprintf(message, room, "this process was started as rank %d of %d, but MPI has it as rank %d of %d: start it with the mpirun or "
                 "srun of the Open MPI that is installed", expected, ranks, m->rank, m->ranks);
        return NULL;
    }
    par_world *world = calloc(1, sizeof *world);
    if (!world) return NULL;
    world->mpi = m;
    if (!par_segment_open(world, ranks, options, NULL) || !par_open_local(world, m->rank, 1) || !make_room(world)) {
        snprintf(message, room, ranks > PAR_MAX_RANKS ? "a world has at most 256 ranks" : "out of memory for a world");
        return NULL;
    }
    *rank = m->rank;
    return greet(world, message, room) ? world : NULL;
}

/* ---- Leaving --------------------------------------------------------------------------------------------- */

static void finalise(par_mpi *m, char *message, size_t room)
{
    (void)message, (void)room;
    m->lib.finalize();
}

static bool all_ended(const par_world *world)
{
    for (int r = 0; r < world->ranks; r++)
        if (r != world->first && !atomic_load(&world->segment->area[r].ended)) return false;
    return true;
}

void par_mpi_close(par_world *world)
{
    par_mpi *m = world->mpi;
    double begin = par_seconds();
    tell(world, (message){ .kind = ENDED }, NULL);
    double most = par_broken(world) ? SPEAK_S : world->segment->timeout_s;
    while ((!all_ended(world) || m->sendings) && par_seconds() - begin < most) {
        par_mpi_listen(world);
        if (par_broken(world)) most = SPEAK_S;
        rest(par_seconds() - begin);
    }
    if (!all_ended(world) || par_broken(world)) return; /* MPI ends with the process */
    blocking *b = calloc(1, sizeof *b);
    bool started;
    if (!b) return;
    *b = (blocking){ .mpi = m, .call = finalise };
    if (m->ours && !run_within(b, LEAVE_S, &started)) return;
    free(b);
    while (m->sendings) {
        sending *s = m->sendings;
        m->sendings = s->next;
        free_sending(s);
    }
    free(m->received);
    free(m->greeted);
    free(m->who);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

/* ---- What such a world knows ----------------------------------------------------------------------------- */

bool par_tells_error(par_world *world, int rank)
{
    if (!world->mpi) return true;
    double begin = par_seconds();
    while (par_seconds() - begin < SPEAK_S) {
        par_mpi_listen(world);
        rest(SPIN_S);
    }
    for (int r = 0; r < world->ranks; r++)
        if (*world->segment->area[r].message) return r == rank;
    return true;
}

int par_neighbours(const par_world *world, int rank, bool same_cores, int *index)
{
    const par_mpi *m = world->mpi;
    int count = 0;
    *index = rank;
    if (!m) return world->ranks;
    for (int r = 0; r < world->ranks; r++) {
        if (r == rank) *index = count;
        count += same_host(m, r, rank) && (!same_cores || m->who[r].cores == m->who[rank].cores);
    }
    return count;
}

void par_world_text(const par_world *world, char *text, size_t room)
{
    const par_mpi *m = world->mpi;
    int hosts = m ? 0 : 1;
    size_t used = 0;
    char names[256] = "";
    for (int r = 0; m && r < world->ranks; r++) {
        bool first = true;
        for (int before = 0; before < r && first; before++) first = !same_host(m, before, r);
        if (!first) continue;
        hosts++;
        if (used < sizeof names) used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", hosts == 1 ? " (" : ", ", m->who[r].host);
    }
    snprintf(text, room, "%d ranks on %d host%s%s%s, transport %s", world->ranks, hosts, hosts == 1 ? "" : "s", names, *names ? ")" : "",
             m ? "mpi" : "local");
}
