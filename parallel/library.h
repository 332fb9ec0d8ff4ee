/* Inside parallel/: libraries that are loaded at run time. */
#ifndef TANDEM_PARALLEL_LIBRARY_H
#define TANDEM_PARALLEL_LIBRARY_H

#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

/* Writes the address of what the library calls `name` to the pointer at `to`, of a function or an object: they are of one size where
 * there is dlsym. false: it has none. */
static inline bool par_library_find(void *library, const char *name, void *to)
{
    void *at = dlsym(library, name);
    memcpy(to, &at, sizeof at);
    return at != NULL;
}

#endif
