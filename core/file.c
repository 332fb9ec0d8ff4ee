/* Replacing files (file.h has the promises). */
#include "core/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { LARGEST_WRITE = 1 << 30 };

bool td_file_put(int fd, const void *data, int64_t bytes)
{
    for (const char *at = data; bytes > 0;) {
        ssize_t done = write(fd, at, bytes > LARGEST_WRITE ? LARGEST_WRITE : (size_t)bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return false;
        at += done;
        bytes -= done;
    }
    return true;
}

bool td_file_sync_directory(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return false;
    bool ok = fsync(fd) == 0 || errno == EINVAL;
    int error = errno;
    close(fd);
    errno = error;
    return ok;
}

/* The same for the directory that path is in; scratch: room for path. */
static bool sync_directory_of(const char *path, char *scratch)
{
    const char *slash = strrchr(path, '/');
    size_t length = slash == path ? 1 : slash ? (size_t)(slash - path) : 1;
    memcpy(scratch, slash ? path : ".", length);
    scratch[length] = 0;
    return td_file_sync_directory(scratch);
}

/* temporary: path.tmp. */
static bool replace(const char *path, char *temporary, td_file_content content, const void *user)
{
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) return false;
    bool ok = content(fd, user) && fsync(fd) == 0;
    int error = errno;
    if (close(fd) != 0 && ok) ok = false, error = errno;
    if (ok && rename(temporary, path) == 0) return sync_directory_of(path, temporary);
    if (ok) error = errno;
    unlink(temporary);
    errno = error;
    return false;
}

bool td_file_replace(td_context *td, const char *path, td_file_content content, const void *user)
{
    size_t room = strlen(path) + sizeof ".tmp";
    char *temporary = td_alloc(td, room, "host");
    if (!temporary) return false;
    snprintf(temporary, room, "%s.tmp", path);
    bool ok = replace(path, temporary, content, user);
    if (!ok) td_fail(td, TD_ERROR_DATA, "%s: cannot be written: %s", path, strerror(errno));
    td_free(td, temporary, room, "host");
    return ok;
}
