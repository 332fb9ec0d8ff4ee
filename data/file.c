/* Files, plain or gzip alike: what is read is the content. Every way in which a file can be broken is an error of the
 * context that names the file. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "data/internal.h"

enum {
    READ_BUFFER_BYTES = 256 << 10,
    LARGEST_READ = 1 << 30, /* gzread counts in unsigned int */
    DEFLATE_RATIO = 1032,   /* no deflate stream expands further */
};

bool data_file_open(data_file *file, td_context *td, const char *path)
{
    *file = (data_file){ .td = td };
    if (snprintf(file->path, sizeof file->path, "%s", path) >= (int)sizeof file->path) {
        td_fail(td, TD_ERROR_DATA, "%.64s...: the path is longer than %d bytes", path, DATA_PATH_BYTES - 1);
        return false;
    }
    struct stat status;
    if (stat(path, &status) != 0) {
        td_fail(td, TD_ERROR_DATA, "%s: cannot be opened: %s", path, strerror(errno));
        return false;
    }
    if (S_ISDIR(status.st_mode)) {
        td_fail(td, TD_ERROR_DATA, "%s: is a directory, a file is needed", path);
        return false;
    }
    if (S_ISREG(status.st_mode) && status.st_size == 0) {
        td_fail(td, TD_ERROR_DATA, "%s: the file is empty; fetch or write it again", path);
        return false;
    }
    errno = 0;
    file->gz = gzopen(path, "rbe");
    if (!file->gz) {
        bool memory = errno == 0 || errno == ENOMEM;
        td_fail(td, memory ? TD_ERROR_MEMORY : TD_ERROR_DATA, "%s: cannot be opened: %s", path,
                memory ? "out of memory" : strerror(errno));
        return false;
    }
    gzbuffer(file->gz, READ_BUFFER_BYTES);
    file->limit = INT64_MAX;
    if (S_ISREG(status.st_mode)) {
        file->limit = (int64_t)status.st_size * (gzdirect(file->gz) ? 1 : DEFLATE_RATIO);
    }
    return true;
}

static int64_t read_failed(data_file *file)
{
    int status = Z_OK;
    gzerror(file->gz, &status);
    switch (status) {
    case Z_BUF_ERROR:
        td_fail(file->td, TD_ERROR_DATA,
                "%s: truncated gzip file: it ends before its compressed data does; fetch it again", file->path);
        break;
    case Z_MEM_ERROR: td_fail(file->td, TD_ERROR_MEMORY, "%s: out of memory while decompressing", file->path); break;
    case Z_ERRNO: td_fail(file->td, TD_ERROR_DATA, "%s: cannot be read: %s", file->path, strerror(errno)); break;
    default:
        td_fail(file->td, TD_ERROR_DATA, "%s: damaged gzip file: its data and its checksum disagree; fetch it again",
                file->path);
        break;
    }
    return -1;
}

int64_t data_file_read(data_file *file, void *to, int64_t bytes)
{
    int64_t got = 0;
    while (got < bytes) {
        int64_t ask = bytes - got < LARGEST_READ ? bytes - got : LARGEST_READ;
        int count = gzread(file->gz, (char *)to + got, (unsigned)ask);
        int status = Z_OK;
        gzerror(file->gz, &status);
        if (count < 0 || (status != Z_OK && status != Z_STREAM_END)) return read_failed(file);
        if (count == 0) break;
        got += count;
    }
    return got;
}

void data_file_close(data_file *file)
{
    if (file->gz) gzclose(file->gz);
    file->gz = NULL;
}
