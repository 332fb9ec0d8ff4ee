/* Every strategy is a row of this table; convert.c does the rest.
 *
 * When a value placed one way is read where another placement is needed, par_convert inserts the collectives that mend
 * it. So the rows below are all there is to say about a strategy. hsdp is fsdp within a group and ddp across groups. With +tp:T
 * there is one more axis, along which parameters that patterns name are cut (units.c). Under bf16 parameters that are R where their moments
 * are S are stored S, too, and R is a copy of them (copies.c).
 */
#include "parallel/strategy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { R = TD_REPLICATED, S = TD_SHARDED, P = TD_PARTIAL, AS_IS = PAR_AS_IS };

static const par_strategy strategies[] = {
    /* name        units                 axis         parameter  gradient after  gradient at    moments  accumulator
     *                                                           each backward   the optimizer                       */
    { "single", PAR_UNITS_BUCKET,  { { "data",      R,         AS_IS,          R,             R,       P } } },
    { "ddp",    PAR_UNITS_BUCKET,  { { "data",      R,         AS_IS,          R,             R,       P } } },
    { "zero1",  PAR_UNITS_BUCKET,  { { "data",      R,         AS_IS,          S,             S,       P } } },
    { "zero2",  PAR_UNITS_BUCKET,  { { "data",      R,         S,              S,             S,       S } } },
    { "zero3",  PAR_UNITS_SIZE,    { { "data",      S,         S,              S,             S,       S } } },
    { "fsdp",   PAR_UNITS_PATTERN, { { "data",      S,         S,              S,             S,       S } } },
    { "hsdp",   PAR_UNITS_PATTERN, { { "replicate", R,         AS_IS,          R,             R,       P },
                                     { "shard",     S,         S,              S,             S,       S } } },
};
enum { STRATEGIES = sizeof strategies / sizeof *strategies };

/* What is not cut along it is whole on each of its ranks. */
const par_axis par_tensor_axis = { "tensor", R, R, R, R, R };

static const char all[] = "single, ddp, zero1, zero2, zero3, fsdp, hsdp:SxR, and with +tp:T",
                  several[] = "ddp, zero1, zero2, zero3, fsdp, hsdp:SxR";

const char *par_strategy_names_for_ranks(void) { return several; }

/* ---- A strategy's text: a name, and for a row of several axes their sizes, the last one's first */

static bool is_named(const par_strategy *s, const char *text, size_t length)
{
    return strlen(s->name) == length && !memcmp(s->name, text, length);
}

static const par_strategy *find(const char *text, size_t length, const par_strategy *own)
{
    if (own && own->name && is_named(own, text, length)) return own;
    for (int i = 0; i < STRATEGIES; i++)
        if (is_named(&strategies[i], text, length)) return &strategies[i];
    return NULL;
}

static int axes_of(const par_strategy *s)
{
    int axes = 0;
    while (axes < PAR_STRATEGY_AXES && s->axis[axes].name) axes++;
    return axes;
}

/* Reads "4x2" into sizes, the last axis first; false: something else. */
static bool read_sizes(const char *text, int axes, int *size)
{
    for (int a = axes - 1; a >= 0; a--) {
        char *end;
        long value = *text >= '1' && *text <= '9' ? strtol(text, &end, 10) : 0;
        if (value < 1 || value > PAR_MOST_RANKS || *end != (a ? 'x' : 0)) return false;
        size[a] = (int)value;
        text = end + 1;
    }
    return true;
}

static bool is_sound(const par_strategy *s)
{
    int axes = axes_of(s);
    for (int a = 0; a < axes; a++) {
        const par_axis *x = &s->axis[a];
        bool stored = (x->parameter == R || x->parameter == S) && (x->moment == R || x->moment == S);
        bool reduced = x->optimizer_gradient == R || x->optimizer_gradient == S;
        bool kept = x->accumulator == R || x->accumulator == S || x->accumulator == P;
        if (!stored || !reduced || !kept || x->gradient < AS_IS || x->gradient > P) return false;
    }
    return axes > 0;
}

static bool wrong_sizes(td_context *td, const par_strategy *s, const char *text, int ranks, const int *size)
{
    int64_t product = (int64_t)size[0] * size[1];
    if (!product)
        td_fail(td, TD_ERROR_USAGE, "strategy '%.80s' does not say how its ranks are grouped: write %s:SxR, S ranks that share one copy "
                "of the state times R such groups, S x R = %d", text, s->name, ranks);
    else
        td_fail(td, TD_ERROR_USAGE, "strategy '%.80s' is for %lld ranks (%d that share one copy of the state x %d such groups), but there "
                "%s %d", text, (long long)product, size[1], size[0], ranks == 1 ? "is" : "are", ranks);
    return false;
}

/* "+tp:T" behind a strategy: T; 1: there is none; 0: after td_fail. */
static int read_tensor(td_context *td, const char *text, int ranks)
{
    const char *added = strchr(text, '+');
    int size = 1;
    if (!added) return 1;
    if (strncmp(added, "+tp:", 4) || !read_sizes(added + 4, 1, &size))
        td_fail(td, TD_ERROR_USAGE, "strategy '%.80s': '%.40s' cannot be added to a strategy; +tp:T can, T ranks that share linear "
                "layers", text, added);
    else if (ranks % size)
        td_fail(td, TD_ERROR_USAGE, "strategy '%.80s' shares layers among %d ranks each, which %d rank%s cannot be divided into", text,
                size, ranks, ranks == 1 ? "" : "s");
    else return size;
    return 0;
}

int par_batch_parts(const char *strategy, int ranks)
{
    const char *added = strstr(strategy, "+tp:");
    int size = 1;
    return added && read_sizes(added + 4, 1, &size) && ranks % size == 0 ? ranks / size : ranks;
}

static bool read_axes(td_context *td, const char *text, const par_strategy *own, int ranks, par_chosen *out)
{
    size_t length = strcspn(text, ":");
    const par_strategy *s = out->strategy = find(text, length, own);
    bool sized = text[length] == ':';
    if (!s) {
        td_fail(td, TD_ERROR_USAGE, "strategy '%.80s' is not known; it can be one of %s", text, all);
    } else if (s == own && !is_sound(own)) {
        td_fail(td, TD_ERROR_USAGE, "strategy '%s': on each axis parameters, moments and the optimizer's gradient are replicated or "
                "sharded, and accumulators and gradients may also be partial", own->name);
    } else if (axes_of(s) == 1 && sized) {
        td_fail(td, TD_ERROR_USAGE, "strategy '%.80s': '%s' has no groups; leave '%s' out", text, s->name, text + length);
    } else if (axes_of(s) == 1) {
        out->size[0] = ranks;
        if (ranks > 1 && !strcmp(s->name, "single"))
            td_fail(td, TD_ERROR_USAGE, "strategy 'single' is for one rank; for %d choose one of %s", ranks, several);
    } else if (!sized || !read_sizes(text + length + 1, axes_of(s), out->size)) {
        return wrong_sizes(td, s, text, ranks, (int[PAR_STRATEGY_AXES]){ 0 });
    } else if ((int64_t)out->size[0] * out->size[1] != ranks) {
        return wrong_sizes(td, s, text, ranks, out->size);
    }
    return td_error(td) == TD_OK;
}

bool par_strategy_read(td_context *td, const char *text, const par_strategy *own, int ranks, par_chosen *out)
{
    char alone[128];
    *out = (par_chosen){ .tensor = read_tensor(td, text, ranks) };
    snprintf(alone, sizeof alone, "%.*s", (int)strcspn(text, "+"), text);
    return out->tensor && read_axes(td, alone, own, ranks / out->tensor, out);
}
