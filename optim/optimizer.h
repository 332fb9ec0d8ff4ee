/* What the files of optim/ share: how a rule becomes an optimizer, and what optimizers, scalers and averages have alike. */
#ifndef TANDEM_OPTIMIZER_H
#define TANDEM_OPTIMIZER_H

#include <tandem/optim.h>
#include <tandem/rewrite.h>

typedef struct opt_making {
    const char *call;            /* "opt_adamw", for errors */
    const td_update_rule *rule;
    double hyper[TD_HYPERS];
    int decay;                   /* which of hyper a group's decay replaces */
    double max_norm;
    bool clip_inf;
    bool track_norm;
    const opt_group *groups;
    int group_count;
    const char *name;
    opt_scaler *scaler;
} opt_making;

/* Declare a rule's td_update_rule.cuda and .cuda_rows, which are in the .cu beside its .c. */
#define OPT_CUDA_RULE(update) void update(const td_update_range *ranges, int count, const td_update_scalars *scalars)
#define OPT_CUDA_ROWS(update) void update(const td_update_range *range, const int32_t *ids, const td_update_scalars *scalars)

opt_optimizer *opt_make(td_module under, const opt_making *m);
/* The parameters under the module that train, in order of creation, into `states` (NULL: nowhere); how many. */
int opt_collect(td_module under, td_state *states);
/* A scalar of td_float that is part of the program. */
td_tensor opt_constant(td_context *td, double value, td_here here);
/* Whether low <= value < high; reports the option by name otherwise. high may be INFINITY. */
bool opt_check(td_context *td, const char *call, const char *option, double value, double low, double high);

/* What one update does about the scale of its loss. */
typedef struct opt_unscaling {
    td_tensor inverse;           /* 1 / scale, scalar */
    td_tensor when;              /* 1 where the update happens, else 0 */
} opt_unscaling;
/* Records the scaler's part in an update whose gradients, as they came, have this norm. */
opt_unscaling opt_scaler_update(opt_scaler *scaler, td_tensor norm, td_here here);

#endif
