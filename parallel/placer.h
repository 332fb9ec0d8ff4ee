/* Inside the pass that places (place.c): what its files share.
 *
 * place.c goes over a program's nodes and places them; place_demand.c has values where a reader needs them, converted or made anew;
 * place_units.c what is particular to stored units: gathered in a narrower dtype, kept in part, or copied from step to step.
 */
#ifndef TANDEM_PARALLEL_PLACER_H
#define TANDEM_PARALLEL_PLACER_H

#include "parallel/strategy.h"

typedef enum par_form { FORM_STORED, FORM_NARROW } par_form;

enum { PAR_FEW = 16 };                        /* inputs or outputs for which a rule is applied without memory of its own */

typedef struct par_memo {
    td_id value;                              /* of `in` */
    uint32_t phase;
    par_form form;
    td_placement place;
    td_id made;                               /* of `out`; TD_NONE: empty */
} par_memo;

typedef struct par_placer {
    par_attached *a;
    td_context *td;
    const td_mesh *mesh;
    const td_program *in;
    td_program *out;
    td_id *map;                               /* value of in -> of out, TD_NONE if it is made on demand */
    char *deferred;                           /* node of in */
    td_placement *natural;                    /* value of in, if made on demand: what it is without communication, free otherwise */
    par_narrow narrow;                        /* units that are gathered in a narrower dtype than they are stored in */
    td_id beside;                             /* value of out: the members of such units that are read as stored; TD_NONE: not made */
    par_memo *memos;
    uint32_t memo_count, memo_mask;
    void *memory;
    size_t bytes;
} par_placer;

/* ---- place.c */

/* The value cast, in the placement it has. */
td_id par_place_cast(par_placer *pl, td_id id, td_dtype dtype, const td_node *like);
/* Places node `index`, of state or the caller's, as it is stored. */
bool par_place_source(par_placer *pl, uint32_t index);

/* ---- place_demand.c: made TD_NONE after td_fail */

/* Whether node n, whose inputs are placed, is made where it is read. */
bool par_is_deferred(const par_placer *pl, const td_node *n);
/* The value of `out` that is v of `in` in placement `want`, for a reader. */
td_id par_need(par_placer *pl, td_id v, td_placement want, const td_node *reader);
/* Value v of a source, emitted in a placement. */
td_id par_place_result(par_placer *pl, td_id v, td_placement place);
/* Where value v, made on demand, is without communication, whole where that leaves a choice. */
td_placement par_place_naturally(const par_placer *pl, td_id v);
/* What is made for one phase is made again for another, but for units that stay gathered between forward and backward, and for
 * computed values, which are converted once. */
uint32_t par_phase_key(const par_placer *pl, td_id v, uint32_t phase);
/* What was made of v so; `made` is TD_NONE where nothing was. Valid until the next par_place_remember. */
par_memo *par_place_memo(const par_placer *pl, td_id v, par_form form, td_placement place, uint32_t phase);
/* Keeps it for later readers; false: made is TD_NONE, or there is no memory. */
bool par_place_remember(par_placer *pl, td_id v, par_form form, td_placement place, uint32_t phase, td_id made);

/* The rule of n's operation; all zeros: it has none. */
void par_rule_of(const td_program *p, const td_node *n, td_place_rule *rule);
/* The row of a rule for input or output i: the last one serves all behind it. */
static inline int par_rule_row(uint32_t i, int rows) { return (int)i < rows ? (int)i : rows - 1; }
/* The dimension of value v that row `labels` gives `label`; -1: none. */
int par_dim_of_label(const td_program *p, td_id v, const int8_t *labels, int8_t label);
/* How many parts `place` makes of dimension dim. */
int64_t par_parts_of(const par_placer *pl, td_placement place, int dim);

/* ---- place_units.c */

/* Value v where it is wanted: a stored unit in the dtype of the form. */
td_id par_fetched(par_placer *pl, td_id v, par_form form, td_placement want, const td_node *reader);
/* Value v, made on demand, if it shows a unit that is gathered narrow; TD_NONE otherwise. */
td_id par_make_of_narrow(par_placer *pl, td_id v, const td_node *reader);

#endif
