/* What takes long to make and is the same in the next run, kept on disk: kernels, plans of libraries.
 *
 * One file an entry, in the directory that TANDEM_CACHE names (off: nothing is kept), else in $XDG_CACHE_HOME/tandem, else in
 * ~/.cache/tandem. A file holds its key, the content and a checksum of both; one that is damaged, or another key's, is as if it were not
 * there. Files are written beside and renamed, so any number of processes may use the directory. Nothing fails for want of a cache.
 */
#ifndef TANDEM_CORE_DEVICE_CACHE_H
#define TANDEM_CORE_DEVICE_CACHE_H

#include "core/internal.h"

/* What a content depends on: all that would make another. */
typedef struct td_cache_key {
    const char *kind;                         /* begins the file's name: "kernel" */
    const void *data;
    size_t bytes;
} td_cache_key;

/* What is kept under the key; NULL: nothing. Owned by the caller: td_free(td, content, *bytes, "host"). */
void *td_cache_get(td_context *td, const td_cache_key *key, size_t *bytes);
/* Keeps a content, in the place of an earlier one. False: it is not kept; errno says why, 0 where nothing is to be kept. */
bool td_cache_put(const td_cache_key *key, const void *content, size_t bytes);
/* The same, and where that fails a warning, once a context. */
void td_cache_keep(td_context *td, const td_cache_key *key, const void *content, size_t bytes);

#endif
