/* Files that a crash leaves whole: written beside, synced, renamed. Every error names the path and the reason. */
#include "run/loop.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool run_path(td_context *td, char path[RUN_PATH], const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(path, RUN_PATH, format, arguments);
    va_end(arguments);
    if (size >= 0 && size < RUN_PATH) return true;
    td_fail(td, TD_ERROR_USAGE, "the path %.60s... is longer than %d bytes", path, RUN_PATH - 1);
    return false;
}

static bool file_fail(td_context *td, const char *verb, const char *path)
{
    td_fail(td, TD_ERROR_DATA, "cannot %s %s: %s", verb, path, strerror(errno));
    return false;
}

bool run_make_directory(td_context *td, const char *path)
{
    char part[RUN_PATH];
    if (!run_path(td, part, "%s", path)) return false;
    for (char *at = part + 1; *at; at++) {
        if (*at != '/') continue;
        *at = 0;
        if (mkdir(part, 0777) && errno != EEXIST) return file_fail(td, "make directory", part);
        *at = '/';
    }
    if (mkdir(part, 0777) && errno != EEXIST) return file_fail(td, "make directory", part);
    struct stat status;
    if (stat(path, &status)) return file_fail(td, "use directory", path);
    if (S_ISDIR(status.st_mode)) return true;
    errno = ENOTDIR;
    return file_fail(td, "use directory", path);
}

bool run_sync_directory(td_context *td, const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return file_fail(td, "open directory", path);
    bool synced = fsync(fd) == 0 || errno == EINVAL; /* some file systems have no such thing */
    if (!synced) file_fail(td, "sync", path);
    close(fd);
    return synced;
}

static bool write_all(int fd, const char *text, size_t bytes)
{
    while (bytes) {
        ssize_t n = write(fd, text, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        text += n;
        bytes -= (size_t)n;
    }
    return true;
}

bool run_write_file(td_context *td, const char *path, const char *text, size_t bytes)
{
    char temporary[RUN_PATH];
    if (!run_path(td, temporary, "%s.partial", path)) return false;
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) return file_fail(td, "write", path);
    bool ok = write_all(fd, text, bytes) && fsync(fd) == 0;
    if (!ok) file_fail(td, "write", path);
    if (close(fd) && ok) ok = file_fail(td, "write", path);
    if (ok && rename(temporary, path)) ok = file_fail(td, "write", path);
    if (!ok) unlink(temporary);
    return ok;
}

static bool remove_in(td_context *td, const char *path, int depth)
{
    DIR *dir = opendir(path);
    if (!dir) return errno == ENOENT || file_fail(td, "remove", path);
    bool ok = true;
    for (struct dirent *entry; ok && (entry = readdir(dir));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        char inner[RUN_PATH];
        struct stat status;
        ok = run_path(td, inner, "%s/%s", path, entry->d_name);
        if (!ok || lstat(inner, &status)) continue;
        if (S_ISDIR(status.st_mode)) ok = depth > 0 && remove_in(td, inner, depth - 1);
        else if (unlink(inner) && errno != ENOENT) ok = file_fail(td, "remove", inner);
    }
    closedir(dir);
    return ok && (rmdir(path) == 0 || errno == ENOENT || file_fail(td, "remove", path));
}

/* What run/ writes is two folders deep: checkpoints/step-N. */
bool run_remove_tree(td_context *td, const char *path) { return remove_in(td, path, 2); }
