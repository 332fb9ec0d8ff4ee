/* Every strategy is a row of this table; convert.c does the rest.
 *
 * When a value placed one way is read where another placement is needed, par_convert inserts the one collective that
 * mends it. So the rows below are all there is to say about a strategy.
 */
#include "parallel/strategy.h"

#include <string.h>

enum { R = TD_REPLICATED, S = TD_SHARDED, P = TD_PARTIAL, AS_IS = PAR_AS_IS };

static const par_strategy strategies[] = {
    /* name      parameter  gradient after  gradient at    moments  accumulator  units
     *                      each backward   the optimizer                          */
    { "single",  R,         AS_IS,          R,             R,       P,           PAR_UNIT_BUCKET  },
    { "ddp",     R,         AS_IS,          R,             R,       P,           PAR_UNIT_BUCKET  },
    { "fsdp",    S,         S,              S,             S,       S,           PAR_UNIT_PATTERN },
};
enum { STRATEGIES = sizeof strategies / sizeof *strategies };

const par_strategy *par_strategy_named(const char *name)
{
    for (int i = 0; i < STRATEGIES; i++)
        if (!strcmp(strategies[i].name, name)) return &strategies[i];
    return NULL;
}

const char *par_strategy_names(void) { return "single, ddp, fsdp"; }
const char *par_strategy_names_for_ranks(void) { return "ddp, fsdp"; }
