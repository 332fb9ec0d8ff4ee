/* States that ranks share by a dimension: the order in which their elements are stored.
 *
 * With dimensions before the cut one as `outer` runs of n elements, each run is `ways` parts of n / ways. Storage has part 0 of every
 * run, then part 1 of every run: along the first dimension that is the order of the shape itself.
 */
#include "core/internal.h"

typedef struct runs {
    int64_t outer, whole, part;
} runs;

static runs runs_of(td_cut cut, td_shape shape)
{
    runs r = { .outer = 1, .whole = 1 };
    for (int d = 0; d < shape.rank; d++) *(cut.ways && d < cut.dim ? &r.outer : &r.whole) *= shape.dim[d];
    r.part = cut.ways ? r.whole / cut.ways : r.whole;
    return r;
}

int64_t td_cut_element(td_cut cut, td_shape shape, int64_t at, int64_t *run)
{
    runs r = runs_of(cut, shape);
    *run = r.part;
    if (!r.part) return at;
    int64_t block = r.outer * r.part, within = at % block, column = within % r.part;
    *run = r.part - column;
    return within / r.part * r.whole + at / block * r.part + column;
}

int64_t td_cut_position(td_cut cut, td_shape shape, int64_t element, int64_t *run)
{
    runs r = runs_of(cut, shape);
    *run = r.part;
    if (!r.part) return element;
    int64_t column = element % r.whole;
    *run = r.part - column % r.part;
    return column / r.part * r.outer * r.part + element / r.whole * r.part + column % r.part;
}

td_cut td_state_cut(td_state s)
{
    if (s.id == TD_NONE || s.td->states[s.id].unit == TD_NONE) return (td_cut){ 0 };
    return s.td->units[s.td->states[s.id].unit].cut;
}
