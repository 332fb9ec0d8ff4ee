/* Paths, directories and whole files. Every error names the path and the reason. */
#include "run/loop.h"

#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"

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
    return td_file_sync_directory(path) || file_fail(td, "sync", path);
}

bool run_rename(td_context *td, const char *from, const char *to)
{
    if (!rename(from, to)) return true;
    td_fail(td, TD_ERROR_DATA, "cannot rename %s to %s: %s", from, to, strerror(errno));
    return false;
}

typedef struct text_content {
    const char *text;
    size_t bytes;
} text_content;

static bool put_text(int fd, const void *user)
{
    const text_content *content = user;
    return td_file_put(fd, content->text, (int64_t)content->bytes);
}

bool run_write_file(td_context *td, const char *path, const char *text, size_t bytes)
{
    return td_file_replace(td, path, put_text, &(text_content){ text, bytes });
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
        if (S_ISDIR(status.st_mode) && depth == 0) errno = ENOTEMPTY, ok = file_fail(td, "remove", inner);
        else if (S_ISDIR(status.st_mode)) ok = remove_in(td, inner, depth - 1);
        else if (unlink(inner) && errno != ENOENT) ok = file_fail(td, "remove", inner);
    }
    closedir(dir);
    return ok && (rmdir(path) == 0 || errno == ENOENT || file_fail(td, "remove", path));
}

/* What run/ writes is three folders deep: previous-1/checkpoints/step-N. */
bool run_remove_tree(td_context *td, const char *path) { return remove_in(td, path, 3); }
