/* Processes of one machine that find each other by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
 */
#include "parallel/meet.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "core/thread.h"

static const double GRACE_S = 2;     /* longer than rank 0 waits, so that it is the one that tells */
static const double SPEAK_S = 0.5;   /* how long who speaks, or refuses, stays for those that fail a little later */
static const double HELLO_S = 1;     /* for who has come to say who it is */
enum { RETRY_MS = 20, SOCKET_TEXT = 600 };

/* What a process says that comes to rank 0. */
typedef struct hello {
    uint64_t layout;
    int32_t rank, ranks;
} hello;

typedef enum answer_kind { JOINED, REFUSED, COMPLETE } answer_kind;

typedef struct answer {
    int32_t kind;
    char text[SOCKET_TEXT];  /* COMPLETE: why */
} answer;

struct par_meet {
    par_world *world;
    int rank, ranks;
    char at[160];            /* "localhost:29500" */
    int listener;            /* rank 0; -1: none */
    int *peer;               /* connections by rank: rank 0's to each, another's to rank 0; -1: none */
    double begin, timeout_s;
    pthread_t watcher;
    int wake;                /* ends the watcher; -1: there is none */
    char *message;           /* while joining */
    size_t room;
};

static bool fail(par_meet *m, const char *format, ...) TD_PRINTF(2, 3);

static bool fail(par_meet *m, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(m->message, m->room, format, args);
    va_end(args);
    return false;
}

static void rest_ms(int ms) { nanosleep(&(struct timespec){ .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L }, NULL); }

/* ---- Sockets --------------------------------------------------------------------------------------------- */

static socklen_t name_socket(struct sockaddr_un *to, const char *kind, long number)
{
    *to = (struct sockaddr_un){ .sun_family = AF_UNIX }; /* a name that begins with 0 is in no folder */
    int length = snprintf(to->sun_path + 1, sizeof to->sun_path - 1, "tandem.%s.%ld", kind, number);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static int open_socket(void) { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0); }

static bool is_readable(int fd, double seconds)
{
    struct pollfd p = { .fd = fd, .events = POLLIN };
    return poll(&p, 1, seconds > 0 ? (int)(1000 * seconds) + 1 : 0) > 0;
}

/* Another user's process is none of the world. */
static bool is_own_user(int fd)
{
    struct ucred who;
    socklen_t size = sizeof who;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 && who.uid == geteuid();
}

/* With the memory's descriptor; -1: none. */
static void send_answer(int fd, answer_kind kind, const char *text, int memory)
{
    answer a = { .kind = kind };
    snprintf(a.text, sizeof a.text, "%s", text);
    union { struct cmsghdr head; char room[CMSG_SPACE(sizeof(int))]; } control = { .room = { 0 } };
    struct msghdr message = { .msg_iov = &(struct iovec){ &a, sizeof a }, .msg_iovlen = 1 };
    if (memory >= 0) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &memory, sizeof memory);
    }
    sendmsg(fd, &message, MSG_NOSIGNAL); /* who has gone is noticed when its connection ends */
}

static bool receive_answer(int fd, answer *a, int *memory)
{
    union { struct cmsghdr head; char room[CMSG_SPACE(sizeof(int))]; } control;
    struct msghdr message = { .msg_iov = &(struct iovec){ a, sizeof *a }, .msg_iovlen = 1,
                              .msg_control = &control, .msg_controllen = sizeof control };
    *memory = -1;
    if (recvmsg(fd, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *a) return false;
    const struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (c && c->cmsg_type == SCM_RIGHTS) memcpy(memory, CMSG_DATA(c), sizeof *memory);
    a->text[sizeof a->text - 1] = 0;
    return true;
}

/* ---- The address ----------------------------------------------------------------------------------------- */

/* A socket can be bound to addresses of this machine only. */
static bool is_here(const struct addrinfo *address)
{
    int fd = socket(address->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool here = fd >= 0 && bind(fd, address->ai_addr, address->ai_addrlen) == 0;
    if (fd >= 0) close(fd);
    return here;
}

static bool check_address(par_meet *m, const char *name, const char *port)
{
    struct addrinfo *found, wanted = { .ai_socktype = SOCK_DGRAM };
    int error = getaddrinfo(name, NULL, &wanted, &found);
    if (error) return fail(m, "MASTER_ADDR=%.80s cannot be resolved (%s): set it to the name or address of this machine, or localhost",
                           name, error == EAI_SYSTEM ? strerror(errno) : gai_strerror(error));
    bool here = false;
    for (const struct addrinfo *a = found; a && !here; a = a->ai_next) here = is_here(a);
    freeaddrinfo(found);
    snprintf(m->at, sizeof m->at, "%.80s:%.8s", name, port);
    if (here) return true;
    return fail(m, "MASTER_ADDR=%.80s is no address of this machine, and ranks on several hosts are started by mpirun or srun: start them "
                "so, or set MASTER_ADDR=localhost where all are on this one", name);
}

/* ---- Rank 0 ---------------------------------------------------------------------------------------------- */

static double seconds_left(const par_meet *m) { return m->begin + m->timeout_s - par_seconds(); }

/* What is wrong with who has come; true: nothing. */
static bool check_hello(par_meet *m, const hello *h)
{
    if (h->layout != par_layout())
        return fail(m, "a process that came to %s runs another version of Tandem than rank 0: start the same program for all ranks", m->at);
    if (h->ranks != m->ranks)
        return fail(m, "rank %d was started with WORLD_SIZE=%d but rank 0 with WORLD_SIZE=%d: start all with the same, or give each world "
                    "a MASTER_PORT of its own", h->rank, h->ranks, m->ranks);
    if (h->rank >= m->ranks)
        return fail(m, "RANK=%d is none of 0 to %d, which WORLD_SIZE=%d asks for", h->rank, m->ranks - 1, m->ranks);
    if (h->rank == 0 || m->peer[h->rank] >= 0)
        return fail(m, "two processes with RANK=%d came to %s: give each process a RANK of its own, and each world a MASTER_PORT", h->rank, m->at);
    return true;
}

/* One that has come and said who it is; -1: none. */
static int accept_one(const par_meet *m, hello *h)
{
    int fd = accept4(m->listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) return -1;
    if (is_own_user(fd) && is_readable(fd, HELLO_S) && recv(fd, h, sizeof *h, 0) == (ssize_t)sizeof *h && h->rank >= 0) return fd;
    close(fd);
    return -1;
}

static bool take_in(par_meet *m)
{
    hello h;
    int fd = accept_one(m, &h);
    if (fd < 0) return true;
    if (check_hello(m, &h)) {
        m->peer[h.rank] = fd;
        return true;
    }
    send_answer(fd, REFUSED, "", -1);
    close(fd);
    return false;
}

static bool lacks_ranks(par_meet *m)
{
    char lacking[64] = "";
    int count = 0;
    size_t used = 0;
    for (int r = 1; r < m->ranks; r++) {
        if (m->peer[r] >= 0) continue;
        if (++count <= 8) used += (size_t)snprintf(lacking + used, sizeof lacking - used, "%s%d", count > 1 ? ", " : "", r);
    }
    return fail(m, "rank%s %s%s of %d did not come to %s within %g s: start as many processes as WORLD_SIZE says, each with its RANK",
                count > 1 ? "s" : "", lacking, count > 8 ? " ..." : "", m->ranks, m->at, m->timeout_s);
}

static bool gather(par_meet *m)
{
    for (int here = 1; here < m->ranks;) {
        if (!is_readable(m->listener, seconds_left(m))) return lacks_ranks(m);
        if (!take_in(m)) return false;
        here = 1;
        for (int r = 1; r < m->ranks; r++) here += m->peer[r] >= 0;
    }
    return true;
}

/* Those that are here, and for a moment those that come still, end without a word. */
static void refuse_all(par_meet *m)
{
    for (int r = 1; r < m->ranks; r++)
        if (m->peer[r] >= 0) send_answer(m->peer[r], REFUSED, "", -1);
    for (double until = par_seconds() + SPEAK_S; par_seconds() < until;) {
        hello h;
        int fd = is_readable(m->listener, until - par_seconds()) ? accept_one(m, &h) : -1;
        if (fd < 0) continue;
        send_answer(fd, REFUSED, "", -1);
        close(fd);
    }
}

static bool open_world(par_meet *m, const par_world_options *options)
{
    int memory = -1;
    if (!par_segment_open(m->world, m->ranks, options, &memory) || !par_open_local(m->world, 0, 1)) {
        if (memory >= 0) close(memory);
        return errno == EINVAL ? fail(m, "WORLD_SIZE=%d: a machine has at most %d ranks", m->ranks, PAR_MAX_RANKS)
                               : fail(m, "memory for a world of %d ranks cannot be had: %s", m->ranks, strerror(errno));
    }
    bool all = gather(m);
    for (int r = 1; r < m->ranks && all; r++) send_answer(m->peer[r], JOINED, "", memory);
    close(memory);
    return all;
}

static bool be_first(par_meet *m, const par_world_options *options)
{
    if (listen(m->listener, SOMAXCONN) != 0) return fail(m, "%s cannot be listened on: %s", m->at, strerror(errno));
    bool open = open_world(m, options);
    if (!open) refuse_all(m);
    return open;
}

/* ---- The others ------------------------------------------------------------------------------------------ */

static bool connect_to_first(par_meet *m, int fd, long port)
{
    struct sockaddr_un name;
    socklen_t size = name_socket(&name, "world", port);
    while (connect(fd, (struct sockaddr *)&name, size) != 0) {
        if (errno != ECONNREFUSED && errno != EINTR && errno != EAGAIN) return fail(m, "%s cannot be reached: %s", m->at, strerror(errno));
        if (seconds_left(m) < 0)
            return fail(m, "rank 0 of %d did not come to %s within %g s: start a process with RANK=0, and all with the same MASTER_PORT",
                        m->ranks, m->at, m->timeout_s);
        rest_ms(RETRY_MS);
    }
    if (is_own_user(fd)) return true;
    return fail(m, "MASTER_PORT of %s is taken by a world of another user: choose another", m->at);
}

static bool follow(par_meet *m, int fd, long port)
{
    hello h = { .layout = par_layout(), .rank = m->rank, .ranks = m->ranks };
    answer a;
    int memory;
    if (!connect_to_first(m, fd, port)) return false;
    bool answered = send(fd, &h, sizeof h, MSG_NOSIGNAL) == (ssize_t)sizeof h && is_readable(fd, m->timeout_s + GRACE_S) &&
                    receive_answer(fd, &a, &memory);
    if (!answered) return fail(m, "rank 0 at %s has not answered: it ended, or was stopped, before all ranks had come", m->at);
    if (a.kind == COMPLETE) return fail(m, "%s", a.text);
    if (a.kind == REFUSED) return fail(m, "%s", "");
    bool joined = memory >= 0 && par_segment_enter(m->world, memory, m->rank, m->ranks);
    if (memory >= 0) close(memory);
    return joined || fail(m, "the memory of the world at %s cannot be had: %s", m->at, strerror(errno));
}

/* ---- The world's life ------------------------------------------------------------------------------------ */

/* Who comes now is one too many, or of another world. */
static void turn_away(par_meet *m)
{
    char text[SOCKET_TEXT];
    hello h;
    int fd = accept_one(m, &h);
    if (fd < 0) return;
    snprintf(text, sizeof text, "the world of %d ranks at %s is complete and runs: give each process a RANK of its own, and each world a "
             "MASTER_PORT of its own", m->ranks, m->at);
    send_answer(fd, COMPLETE, text, -1);
    close(fd);
}

/* A rank whose connection has ended comes to nothing any more; who waits for it says where. */
static void see_off(par_meet *m, int other)
{
    close(m->peer[other]);
    m->peer[other] = -1;
    par_end(m->world, other);
}

static void *watch(void *argument)
{
    par_meet *m = argument;
    struct pollfd look[PAR_MAX_RANKS + 2];
    for (;;) {
        for (int r = 0; r < m->ranks; r++) look[r] = (struct pollfd){ .fd = m->peer[r], .events = POLLIN };
        look[m->ranks] = (struct pollfd){ .fd = m->listener, .events = POLLIN };
        look[m->ranks + 1] = (struct pollfd){ .fd = m->wake, .events = POLLIN };
        if (poll(look, (nfds_t)m->ranks + 2, -1) < 0) continue;
        if (look[m->ranks + 1].revents) return NULL;
        if (look[m->ranks].revents) turn_away(m);
        for (int r = 0; r < m->ranks; r++)
            if (look[r].revents) see_off(m, r);
    }
}

static void free_meet(par_meet *m)
{
    for (int r = 0; m->peer && r < m->ranks; r++)
        if (m->peer[r] >= 0) close(m->peer[r]);
    if (m->listener >= 0) close(m->listener);
    if (m->wake >= 0) close(m->wake);
    free(m->peer);
    free(m);
}

void par_meet_close(par_world *world)
{
    par_meet *m = world->meet;
    const uint64_t one = 1;
    par_end(world, m->rank);
    if (m->wake >= 0 && write(m->wake, &one, sizeof one) == (ssize_t)sizeof one) pthread_join(m->watcher, NULL);
    free_meet(m);
}

/* ---- Joining --------------------------------------------------------------------------------------------- */

static par_meet *new_meet(int rank, int ranks, const par_world_options *options, char *message, size_t room)
{
    par_meet *m = calloc(1, sizeof *m);
    int *peer = malloc((size_t)ranks * sizeof *peer);
    par_world *world = calloc(1, sizeof *world);
    if (!m || !peer || !world) {
        free(m);
        free(peer);
        free(world);
        return NULL;
    }
    for (int r = 0; r < ranks; r++) peer[r] = -1;
    *m = (par_meet){ .world = world, .rank = rank, .ranks = ranks, .peer = peer, .listener = -1, .wake = -1, .message = message, .room = room };
    m->begin = par_seconds();
    m->timeout_s = options && options->timeout_s > 0 ? options->timeout_s : PAR_TIMEOUT_S;
    return m;
}

/* Rank 0 owns the port's name; where another process does, this one comes to it, to be told so. */
static bool enter(par_meet *m, long port, const par_world_options *options)
{
    struct sockaddr_un name;
    socklen_t size = name_socket(&name, "world", port);
    int fd = open_socket();
    if (fd < 0) return fail(m, "no socket can be had: %s", strerror(errno));
    if (m->rank == 0 && bind(fd, (struct sockaddr *)&name, size) == 0) {
        m->listener = fd;
        return be_first(m, options);
    }
    bool in = follow(m, fd, port);
    if (in) m->peer[0] = fd;
    else close(fd);
    return in;
}

par_world *par_meet_join(int rank, int ranks, const par_world_options *options, char *message, size_t room)
{
    const char *port = getenv("MASTER_PORT");
    par_meet *m = new_meet(rank, ranks, options, message, room);
    if (!m) {
        snprintf(message, room, "out of memory for a world");
        return NULL;
    }
    par_world *world = m->world;
    if (!check_address(m, getenv("MASTER_ADDR"), port) || !enter(m, par_environment_number("MASTER_PORT"), options)) {
        free_meet(m);
        par_world_close(world);
        return NULL;
    }
    world->meet = m;
    m->wake = eventfd(0, EFD_CLOEXEC);
    int error = m->wake < 0 ? errno : td_thread_start(&m->watcher, watch, m);
    if (!error) return world;
    if (m->wake >= 0) close(m->wake);
    m->wake = -1;
    snprintf(message, room, "no thread could be started: %s", strerror(error));
    par_world_close(world);
    return NULL;
}

/* ---- Before there is a world ----------------------------------------------------------------------------- */

bool par_meet_speaks(void)
{
    struct sockaddr_un name;
    long port = par_environment_number("MASTER_PORT");
    int fd = open_socket();
    if (fd < 0) return true;
    socklen_t size = name_socket(&name, port > 0 ? "error.port" : "error.parent", port > 0 ? port : (long)getppid());
    if (bind(fd, (struct sockaddr *)&name, size) != 0) {
        bool taken = errno == EADDRINUSE;
        close(fd);
        if (taken) rest_ms((int)(2e3 * SPEAK_S)); /* a launcher may end all when the first one ends */
        return !taken;
    }
    rest_ms((int)(1e3 * SPEAK_S));
    return true; /* the name is held until the process ends */
}
