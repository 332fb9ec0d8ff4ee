/* Freezing by name: parameters that fit a pattern train no more. */
#include <tandem/nn.h>

#include <stdio.h>
#include <string.h>

enum { NAMES_SHOWN = 4, NAME_CHARS = 80 };

/* The name of s below the module's path; NULL: it is no parameter under it. */
static const char *name_below(td_state s, const char *path)
{
    const char *name = td_state_name(s);
    size_t length = strlen(path);
    if (td_state_kind_of(s) != TD_PARAMETER) return NULL;
    if (!length) return name;
    return strncmp(name, path, length) == 0 && name[length] == '.' ? name + length + 1 : NULL;
}

/* Fails with a few of the names there are. */
static void complain(td_module under, const char *pattern, td_here here)
{
    td_context *td = td_module_context(under);
    const char *path = td_module_name(under);
    char names[NAMES_SHOWN * (NAME_CHARS + 8) + 32] = "";
    size_t used = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < td_state_count(td); i++) {
        const char *name = name_below(td_state_at(td, i), path);
        if (!name || count++ >= NAMES_SHOWN) continue;
        used += (size_t)snprintf(names + used, sizeof names - used, "%s'%.*s'", count > 1 ? ", " : "", NAME_CHARS, name);
    }
    if (count > NAMES_SHOWN) snprintf(names + used, sizeof names - used, " and %lld more", (long long)(count - NAMES_SHOWN));
    td_fail(td, TD_ERROR_USAGE, "nn_freeze: '%s' fits no parameter%s%s%s; there %s %s (%s:%d)", pattern, *path ? " of '" : "", path, *path ? "'" : "",
            count == 1 ? "is" : "are", count ? names : "none", here.file, here.line);
}

int64_t nn_freeze_at(td_module under, const char *pattern, td_here here)
{
    td_context *td = td_module_context(under);
    int64_t count = 0;
    for (int64_t i = 0; i < td_state_count(td) && td_error(td) == TD_OK; i++) {
        td_state s = td_state_at(td, i);
        const char *name = name_below(s, td_module_name(under));
        if (!name || !td_name_matches(pattern, name)) continue;
        td_freeze(s);
        count++;
    }
    if (!count && td_error(td) == TD_OK) complain(under, pattern, here);
    return td_error(td) == TD_OK ? count : 0;
}
