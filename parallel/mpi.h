/* Inside parallel/: worlds of processes that a launcher such as mpirun or srun started, on one host or several.
 *
 * Such ranks share no memory. Each has a segment of its own (world.h), in which its area is the truth and the others'
 * areas are copies, kept by messages: what a rank posts, where it waits, that it is busy, stopped the world or ended. So
 * agreeing and waiting are the same as between ranks of one machine. Messages are taken in while a rank waits and when it
 * posts or calls; every wait has the world's deadline.
 */
#ifndef TANDEM_PARALLEL_MPI_H
#define TANDEM_PARALLEL_MPI_H

#include <pthread.h>

#include "parallel/mpi_library.h"
#include "parallel/world.h"

enum { PAR_HOST_BYTES = 64 };

/* A message on its way. */
typedef struct par_sending {
    struct par_sending *next;
    int count;
    mpi_request *request;    /* one a rank */
    char *bytes;
} par_sending;

typedef struct par_greeting {
    char host[PAR_HOST_BYTES];
    uint64_t cores;          /* a hash of those it may run on */
    uint64_t processes;      /* what its process number is of; 0: not known */
    int64_t process;
} par_greeting;

typedef struct par_mpi {
    mpi_library lib;
    mpi_comm data, messages;
    pthread_mutex_t lock;    /* recursive: MPI is called by one thread at a time */
    int rank, ranks;
    bool ours;               /* this world has initialised MPI */
    bool told_wait;
    mpi_request receiving;
    char *received;          /* par_mpi_message_bytes() */
    par_sending *sendings;
    bool *greeted;           /* those that have told who they are */
    par_greeting *who;
    double looked;           /* when this rank last looked whether others live */
} par_mpi;

/* Joins the world that the launcher made, as `expected` of `ranks`. NULL and a message. */
par_world *par_mpi_join(int expected, int ranks, const par_world_options *options, char *message, size_t room);
bool par_mpi_same_host(const par_mpi *mpi, int a, int b); /* of ranks */

/* The variables of a launcher of the system, by which a process knows that it started it (scheduled.c). */
typedef struct par_launcher {
    const char *rank, *ranks;
    const char *here;        /* how many of them on this host; for several hosts Slurm has a list, which is no number */
    const char *within;      /* set besides; NULL: none */
    const char *needs;       /* set where Open MPI can join; NULL: always. `without`: what to say where it is not */
    const char *without;
} par_launcher;
const par_launcher *par_launcher_find(long *rank, long *ranks); /* NULL: none has started this process as one of several */

/* The ranks that the launcher started on this host, as far as can be seen (siblings.c). */
typedef struct par_siblings {
    bool any_gone;
    bool speaks;             /* this is the first that is there still, on any host */
    char text[256];          /* " (rank 1 is stopped, rank 2 is gone)"; "": neither, or not known */
} par_siblings;
par_siblings par_siblings_look(void);

/* Takes in what others have told. Errors stop the world. */
void par_mpi_listen(par_world *world);
/* Takes in what others have told, and looks whether those of this host live; by any thread, while the rank's own waits for nobody. */
void par_mpi_look(par_world *world);
/* One slice of a wait that has lasted `waited` seconds: listens, then sleeps a little. A long wait is told to others, once. */
void par_mpi_wait(par_world *world, double waited);
/* After a wait: what was told of it is over. */
void par_mpi_waited(par_world *world);

size_t par_mpi_message_bytes(void); /* the most of one message */
void par_mpi_free_sendings(par_mpi *mpi);
/* Posts the first receive, and tells all who this rank is. false: the world has been stopped. */
bool par_mpi_greet(par_world *world, const par_greeting *own);
void par_mpi_tell_ended(par_world *world);
/* Gives way to others, and sleeps a little where a wait has lasted. */
void par_mpi_rest(double waited);
void par_mpi_tell_recording(par_world *world, int entry);
void par_mpi_tell_post(par_world *world, uint32_t index);
void par_mpi_tell_compared(par_world *world);
void par_mpi_tell_busy(par_world *world, bool busy);
void par_mpi_tell_broken(par_world *world);
void par_mpi_tell_origin(par_world *world);
/* Waits until all have ended well, and leaves MPI; a stopped world is left as it is. */
void par_mpi_close(par_world *world);

/* Data between two ranks; false: the world was stopped. Requests are finished by par_mpi_done. */
bool par_mpi_send(par_world *world, int to, int tag, const void *at, int64_t bytes, mpi_request *out);
bool par_mpi_receive(par_world *world, int from, int tag, void *at, int64_t bytes, mpi_request *out);
bool par_mpi_done(par_world *world, mpi_request *request); /* whether it is; the world may have been stopped */

#endif
