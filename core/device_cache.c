/* The files of device_cache.h. */
#include "core/device_cache.h"

#include "core/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What a file begins with; the key and the content follow. */
typedef struct cache_header {
    char magic[8];
    uint64_t key_bytes, bytes;
    uint64_t checksum;                        /* of the key and the content */
} cache_header;
static const char magic[8] = "tdcache1";

static cache_header header_of(const td_cache_key *key, const void *content, size_t bytes)
{
    uint64_t checksum = td_hash_bytes(td_hash_bytes(td_hash_text(key->kind), key->data, key->bytes), content, bytes);
    cache_header header = { .key_bytes = key->bytes, .bytes = bytes, .checksum = checksum };
    memcpy(header.magic, magic, sizeof magic);
    return header;
}

/* False: there is no directory to keep things in, or its name is too long. */
static bool find_directory(char to[PATH_MAX])
{
    const char *own = getenv("TANDEM_CACHE"), *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int length = -1;
    if (own && *own)
        length = strcmp(own, "off") ? snprintf(to, PATH_MAX, "%s", own) : -1;
    else if (cache && *cache == '/')
        length = snprintf(to, PATH_MAX, "%s/tandem", cache);
    else if (home && *home)
        length = snprintf(to, PATH_MAX, "%s/.cache/tandem", home);
    return length > 0 && length < PATH_MAX;
}

static bool find_file(const td_cache_key *key, char to[PATH_MAX])
{
    char directory[PATH_MAX];
    if (!find_directory(directory)) return false;
    uint64_t hash = td_hash_bytes(td_hash_text(key->kind), key->data, key->bytes);
    int length = snprintf(to, PATH_MAX, "%s/%s-%016llx", directory, key->kind, (unsigned long long)hash);
    return length > 0 && length < PATH_MAX - 16;
}

/* ---- Reading -------------------------------------------------------------------------------------------- */

static bool read_all(int fd, void *to, size_t bytes)
{
    for (char *at = to; bytes > 0;) {
        ssize_t done = read(fd, at, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        at += done;
        bytes -= (size_t)done;
    }
    return true;
}

/* Whether what comes next is the key. */
static bool read_key(int fd, const td_cache_key *key)
{
    char part[512];
    const char *want = key->data;
    for (size_t done = 0, bytes; done < key->bytes; done += bytes) {
        bytes = key->bytes - done < sizeof part ? key->bytes - done : sizeof part;
        if (!read_all(fd, part, bytes) || memcmp(part, want + done, bytes)) return false;
    }
    return true;
}

/* The file's content, `*bytes` of it; NULL: the file is not what its header says, or another key's. */
static void *read_content(td_context *td, int fd, const td_cache_key *key, size_t *bytes)
{
    cache_header header;
    struct stat status;
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || !read_all(fd, &header, sizeof header)) return NULL;
    uint64_t rest = (uint64_t)status.st_size - sizeof header;
    if (memcmp(header.magic, magic, sizeof magic) || header.key_bytes != key->bytes || header.bytes > rest ||
        rest - header.bytes != header.key_bytes || !read_key(fd, key))
        return NULL;
    *bytes = (size_t)header.bytes;
    void *content = td_alloc(td, *bytes, "host");
    if (content && read_all(fd, content, *bytes) && header_of(key, content, *bytes).checksum == header.checksum) return content;
    td_free(td, content, *bytes, "host");
    return NULL;
}

void *td_cache_get(td_context *td, const td_cache_key *key, size_t *bytes)
{
    char path[PATH_MAX];
    if (!find_file(key, path)) return NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NULL;
    void *content = read_content(td, fd, key, bytes);
    close(fd);
    return content;
}

/* ---- Writing -------------------------------------------------------------------------------------------- */

/* Makes the directory that `path` is in, and those above it. */
static bool make_directories(char *path)
{
    char *last = strrchr(path, '/');
    for (char *slash = path + 1; (slash = strchr(slash, '/')) && slash <= last; slash++) {
        *slash = 0;
        bool made = mkdir(path, 0700) == 0 || errno == EEXIST;
        *slash = '/';
        if (!made) return false;
    }
    return true;
}

bool td_cache_put(const td_cache_key *key, const void *content, size_t bytes)
{
    char path[PATH_MAX], beside[PATH_MAX + sizeof ".XXXXXX"];
    errno = 0;
    if (!find_file(key, path) || !make_directories(path)) return false;
    snprintf(beside, sizeof beside, "%s.XXXXXX", path);
    int fd = mkostemp(beside, O_CLOEXEC);
    if (fd < 0) return false;
    cache_header header = header_of(key, content, bytes);
    bool ok = td_file_put(fd, &header, sizeof header) && td_file_put(fd, key->data, (int64_t)key->bytes) &&
              td_file_put(fd, content, (int64_t)bytes);
    int error = errno;
    if (close(fd) != 0 && ok) ok = false, error = errno;
    if (ok && rename(beside, path) == 0) return true;
    if (ok) error = errno;
    unlink(beside);
    errno = error;
    return false;
}

void td_cache_keep(td_context *td, const td_cache_key *key, const void *content, size_t bytes)
{
    if (td_cache_put(key, content, bytes) || !errno || td->cache_told) return;
    td->cache_told = true;
    td_message(td, TD_LOG_WARNING, "compiled kernels and chosen algorithms cannot be kept for the next run (%s): TANDEM_CACHE=DIR names another "
               "directory, off none", strerror(errno));
}
