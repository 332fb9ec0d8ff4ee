/* A disk that is slow, full, or at which the power fails: loaded before the C library (LD_PRELOAD) into programs under test.
 *
 *     DISK_PATH=TEXT     concerns calls on paths that contain it: open to write, of a folder ("enter"), write (16 KiB at a time),
 *                        fsync, rename, mkdir, unlink, rmdir
 *     DISK_RANK=N        and rank N alone; else all ranks, each by its own count
 *     DISK_LOG=FILE      gets a line for each: the call and its path
 *     DISK_DELAY_MS=N    each enter and each fsync takes so much longer
 *     DISK_FULL=N        the Nth and all later ones of write fail: no space is left
 *     DISK_KILL=N        before the Nth the process is killed, and with the launcher of ranks all of them
 *     DISK_KILL_CALL=C   the Nth call of that name is meant
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 16384 };

static atomic_long calls, calls_named;

static long number(const char *name)
{
    const char *text = getenv(name);
    return text ? strtol(text, NULL, 10) : 0;
}

/* Ranks die with their launcher. */
static void kill_world(void)
{
    if (getenv("TANDEM_RANK")) kill(getppid(), SIGKILL);
    kill(getpid(), SIGKILL);
}

static void note(const char *call, const char *path)
{
    char line[512];
    const char *log = getenv("DISK_LOG");
    if (!log) return;
    int size = snprintf(line, sizeof line, "%s %.400s\n", call, path);
    long fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0666);
    if (fd < 0) return;
    syscall(SYS_write, fd, line, (size_t)size);
    syscall(SYS_close, fd);
}

/* What happens before a call on the path: 0, or errno of its failure. */
static int meet(const char *call, const char *path)
{
    const char *concerns = getenv("DISK_PATH"), *rank = getenv("DISK_RANK"), *own = getenv("TANDEM_RANK");
    if (!concerns || !strstr(path, concerns) || (rank && strcmp(rank, own ? own : "0"))) return 0;
    long count = atomic_fetch_add(&calls, 1) + 1, delay_ms = number("DISK_DELAY_MS"), full = number("DISK_FULL");
    const char *named = getenv("DISK_KILL_CALL");
    note(call, path);
    if (!named && count == number("DISK_KILL")) kill_world();
    if (named && !strcmp(call, named) && atomic_fetch_add(&calls_named, 1) + 1 == number("DISK_KILL")) kill_world();
    if (!strcmp(call, "fsync") || !strcmp(call, "enter")) nanosleep(&(struct timespec){ .tv_sec = delay_ms / 1000, .tv_nsec = delay_ms % 1000 * 1000000 }, NULL);
    return full && count >= full && !strcmp(call, "write") ? ENOSPC : 0;
}

static int meet_fd(const char *call, int fd)
{
    char link[64], path[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return meet(call, path);
}

/* The C library's function of that name. */
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

int open(const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    if (flags & O_CREAT) meet("open", path);
    if ((flags & O_DIRECTORY) == O_DIRECTORY) meet("enter", path);
    return ((int (*)(const char *, int, ...))real("open"))(path, flags, mode);
}

ssize_t write(int fd, const void *data, size_t bytes)
{
    int error = meet_fd("write", fd);
    if (error) return errno = error, -1;
    return ((ssize_t (*)(int, const void *, size_t))real("write"))(fd, data, bytes < PIECE ? bytes : PIECE);
}

int fsync(int fd)
{
    meet_fd("fsync", fd);
    return ((int (*)(int))real("fsync"))(fd);
}

int rename(const char *from, const char *to)
{
    meet("rename", to);
    return ((int (*)(const char *, const char *))real("rename"))(from, to);
}

int mkdir(const char *path, mode_t mode)
{
    meet("mkdir", path);
    return ((int (*)(const char *, mode_t))real("mkdir"))(path, mode);
}

int unlink(const char *path)
{
    meet("unlink", path);
    return ((int (*)(const char *))real("unlink"))(path);
}

int rmdir(const char *path)
{
    meet("rmdir", path);
    return ((int (*)(const char *))real("rmdir"))(path);
}
