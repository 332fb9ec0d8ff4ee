/* Optimizers: rules that update the parameters of a module from their gradients, and schedules of the learning rate.
 *
 *     opt_optimizer *opt = opt_adamw(root, &(opt_adamw_options){ .decay = 0.01, .max_norm = 1 });
 *     for (int64_t step = 0; step < steps; step++) {
 *         td_backward(loss(batch(step)));              // once for each micro-batch
 *         opt_step(opt, opt_rate(&schedule, step));
 *         td_step(td);
 *     }
 *     opt_close(opt);
 *
 * The rules and their defaults are PyTorch's, but for `decay`, which is 0 unless given. In every options struct 0 means
 * the default that its comment names; a coefficient that must be 0 itself is given as a number too small to matter.
 *
 * Moments are states beside their parameters, named as in PyTorch ("hidden.weight.exp_avg"). The count of updates is
 * the state "optimizer.updates". Both are saved and restored with all other state.
 */
#ifndef TANDEM_OPTIM_H
#define TANDEM_OPTIM_H

#include <tandem/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Optimizers ----------------------------------------------------------------------------------------- */

/* The context frees it when it closes; opt_close does so before. */
typedef struct opt_optimizer opt_optimizer;
typedef struct opt_scaler opt_scaler;

/* Parameters that get a decay and a rate of their own: those whose name matches and that have enough dimensions. A
 * parameter belongs to the first group that fits it, else it has the optimizer's decay and rate. To decay matrices
 * only:  .groups = &(opt_group){ .min_rank = 2, .decay = 0.1 }, .group_count = 1  */
typedef struct opt_group {
    const char *pattern;         /* of the whole name, as td_name_matches: "*.bias"; NULL: any */
    int min_rank;                /* least number of dimensions; 0: any */
    double decay;
    double rate_scale;           /* factor on the rate of opt_step; 0: 1 */
} opt_group;

typedef struct opt_sgd_options {
    double momentum;             /* 0: none, and no moment "momentum_buffer" */
    double dampening;            /* of what enters the momentum, from the second update on */
    bool nesterov;               /* needs momentum, and no dampening */
    double decay;                /* added to the gradient: decay * parameter */
    double max_norm;             /* clip the gradient's 2-norm over all parameters; 0: no clipping */
    bool clip_inf;               /* max_norm is of the largest magnitude, the inf-norm, and so is opt_gradient_norm */
    bool track_norm;             /* make opt_gradient_norm available without clipping */
    const opt_group *groups;     /* copied */
    int group_count;
    const char *name;            /* of the module of its counter; NULL: "optimizer". A second optimizer needs another */
    opt_scaler *scaler;          /* of the losses it trains on; NULL: they are as they are */
} opt_sgd_options;

typedef struct opt_adam_options {
    double beta1;                /* 0: 0.9 */
    double beta2;                /* 0: 0.999 */
    double eps;                  /* 0: 1e-8 */
    double decay;                /* Adam: added to the gradient; AdamW: parameter *= 1 - rate * decay before the step */
    double max_norm;             /* these seven as in opt_sgd_options */
    bool clip_inf;
    bool track_norm;
    const opt_group *groups;
    int group_count;
    const char *name;
    opt_scaler *scaler;
} opt_adam_options;
typedef opt_adam_options opt_adamw_options;

typedef struct opt_adagrad_options {
    double eps;                  /* 0: 1e-10 */
    bool row_wise;               /* one sum a row ("row_sum") instead of one an element ("sum"); a row is what one index of the
                                    first dimension names. Under fsdp a unit is gathered for its update. */
    double rate_decay;           /* the rate is divided by 1 + rate_decay * updates done */
    double decay;                /* added to the gradient: decay * parameter */
    double max_norm;             /* these seven as in opt_sgd_options */
    bool clip_inf;
    bool track_norm;
    const opt_group *groups;
    int group_count;
    const char *name;
    opt_scaler *scaler;
} opt_adagrad_options;

typedef struct opt_lion_options {
    double beta1;                /* 0: 0.9 */
    double beta2;                /* 0: 0.99 */
    double decay;                /* parameter *= 1 - rate * decay */
    double max_norm;             /* these seven as in opt_sgd_options */
    bool clip_inf;
    bool track_norm;
    const opt_group *groups;
    int group_count;
    const char *name;
    opt_scaler *scaler;
} opt_lion_options;

/* Each takes the parameters under `under` that train now. NULL options are the defaults. Parameters that no
 * optimizer has keep their values; two optimizers must not share any.
 * Tables with row-sparse gradients (td_sparse_rows) go with adagrad and with sgd without momentum, at a decay of 0: there rows
 * without a gradient keep their values anyway, so that sparse and dense are the same.
 * NULL and an error of the context: nothing to train, an option out of its range, a group that fits nothing, a table with
 * row-sparse gradients and a rule or a decay that would move its other rows, memory.
 *
 *     sgd     d = g + decay p;  b = momentum b + (1 - dampening) d, at first d;  p -= rate b
 *             with nesterov  p -= rate (d + momentum b)
 *     adam    Kingma and Ba, arXiv:1412.6980, algorithm 1
 *     adamw   Loshchilov and Hutter, arXiv:1711.05101, algorithm 2, its decay times the rate
 *     adagrad d = g + decay p;  s += d^2;  p -= rate d / (sqrt(s) + eps)       (Duchi, Hazan, Singer, JMLR 2011)
 *             row-wise  s += mean over the row of d^2, as FBGEMM's exact row-wise Adagrad
 *     lion    p -= rate (sign(beta1 m + (1 - beta1) g) + decay p);  m = beta2 m + (1 - beta2) g
 *             (Chen et al., arXiv:2302.06675, algorithm 2) */
TD_API opt_optimizer *opt_sgd(td_module under, const opt_sgd_options *options);
TD_API opt_optimizer *opt_adam(td_module under, const opt_adam_options *options);
TD_API opt_optimizer *opt_adamw(td_module under, const opt_adamw_options *options);
TD_API opt_optimizer *opt_adagrad(td_module under, const opt_adagrad_options *options);
TD_API opt_optimizer *opt_lion(td_module under, const opt_lion_options *options);
/* Frees the optimizer now; moments and counter stay. NULL is allowed. Not after the context has closed. */
TD_API void opt_close(opt_optimizer *opt);

/* Records one update of all its parameters with the gradients gathered since the last, which it consumes. With clipping
 * gradients are first multiplied by min(1, max_norm / (norm + 1e-6)). The rate may change with every step without a
 * new plan. A NULL opt does nothing. Errors: a rate that is negative or not finite. */
#define opt_step(opt, rate) opt_step_at((opt), (rate), TD_HERE)
TD_API void opt_step_at(opt_optimizer *opt, double rate, td_here here);
/* The same with gradients of sums, not of means: they are divided by `weight`, how much those sums count in all, before anything else
 * is done with them. So micro-batches that count unequally make one mean:
 *
 *     td_tensor sum, weight;
 *     if (td_quotient(loss(part), &sum, &weight)) td_backward(sum);      // for each part; `weighed` = what the weights come to
 *     opt_step_over(opt, rate, weighed);
 *
 * A factor on the sums and on the weight together changes nothing, where 16-bit gradients would overflow. Errors: as opt_step; weight is
 * no scalar of td_float. */
#define opt_step_over(opt, rate, weight) opt_step_over_at((opt), (rate), (weight), TD_HERE)
TD_API void opt_step_over_at(opt_optimizer *opt, double rate, td_tensor weight, td_here here);
/* The gradient's 2-norm (with clip_inf its inf-norm) before clipping, of the latest opt_step: a kept scalar. Error and a failed tensor: no opt_step
 * yet, or neither max_norm, track_norm nor scaler was given. */
TD_API td_tensor opt_gradient_norm(const opt_optimizer *opt);
TD_API bool opt_has_norm(const opt_optimizer *opt);       /* clips, tracks or unscales: opt_gradient_norm can be had */

/* ---- Loss scaling --------------------------------------------------------------------------------------- */

/* Small gradients vanish in f16, so the loss is scaled up before its backward and the gradients down before their use; where the
 * scale was too large a gradient is infinite or NaN, and the update is skipped. The rules are those of PyTorch's
 * torch.amp.GradScaler, all on the device:
 *
 *     an update whose gradients' norm is not finite changes nothing: no parameter, no moment, no count of updates
 *     a step with such an update      scale = max(1, scale backoff);   good_steps = 0
 *     any other                       good_steps += 1;   from `interval` on  scale *= growth, if that is finite, and good_steps = 0
 *
 *     opt_scaler *scaler = opt_scaler_open(td, NULL);
 *     opt_optimizer *opt = opt_adamw(root, &(opt_adamw_options){ .scaler = scaler, .max_norm = 1 });
 *     td_backward(opt_scaler_scale(scaler, loss));
 *     opt_step(opt, rate);
 *
 * Clipping and opt_gradient_norm see the gradient unscaled. A skipped update consumes its gradients, and td_updates counts its step.
 * Optimizers that share a scaler are skipped each by its own gradients, and change the scale once a step (td_step) together.
 * A norm is finite if its square fits the parameters' dtype. The states NAME.scale and NAME.good_steps are saved as all others. */
typedef struct opt_scaler_options {
    double initial;              /* scale at first, at least 1; 0: 65536 */
    double growth;               /* at least 1; 0: 2 */
    double backoff;              /* below 1; 0: 0.5 */
    int64_t interval;            /* good steps before it grows; 0: 2000 */
    const char *name;            /* of the module of its states; NULL: "scaler" */
} opt_scaler_options;
/* NULL options are the defaults. The context frees it when it closes, opt_scaler_close (NULL is allowed) before, once no optimizer
 * uses it any more. NULL and an error of the context: an option out of its range, memory. */
TD_API opt_scaler *opt_scaler_open(td_context *td, const opt_scaler_options *options);
TD_API void opt_scaler_close(opt_scaler *scaler);
TD_API opt_scaler *opt_scaler_of(const opt_optimizer *opt); /* as its options gave it; NULL: none */
/* loss * scale, for td_backward: a scalar of td_float, as the loss must be. A NULL scaler gives the loss itself. */
#define opt_scaler_scale(scaler, loss) opt_scaler_scale_at((scaler), (loss), TD_HERE)
TD_API td_tensor opt_scaler_scale_at(opt_scaler *scaler, td_tensor loss, td_here here);

/* ---- Averages of parameters ------------------------------------------------------------------------------- */

/* An exponential moving average of the parameters under a module that train:
 *
 *     ema = d ema + (1 - d) p          d = decay, with warm_up min(decay, (1 + n) / (10 + n)) after n updates
 *
 * The first update makes it p. A record beside each optimizer step, and a scope in which the averages are read for p:
 *
 *     opt_ema *ema = opt_ema_open(root, NULL);
 *     td_backward(loss);  opt_step(opt, rate);  opt_ema_update(ema);  td_step(td);
 *     ...
 *     opt_ema_begin(ema);  evaluate();  opt_ema_end(ema);
 *
 * The averages are states beside their parameters ("hidden.weight.ema"), the count of updates is "ema.updates"; both are saved as
 * all other state. They move unit by unit, in place, each rank its own part; those of a table with row-sparse gradients (td_sparse_rows)
 * too, all of whose rows an update therefore reads and writes. A parameter that is frozen is not averaged, and read as it is. */
typedef struct opt_ema opt_ema;
typedef struct opt_ema_options {
    double decay;                /* d, below 1; 0: 0.999 */
    bool warm_up;
    const char *name;            /* of the averages and of the module of the count; NULL: "ema". A second one needs another */
} opt_ema_options;
/* NULL options are the defaults. The context frees it when it closes; opt_ema_close (NULL is allowed) does so before. NULL and an
 * error of the context: nothing to average, a decay out of its range, a name that is taken, memory. */
TD_API opt_ema *opt_ema_open(td_module under, const opt_ema_options *options);
TD_API void opt_ema_close(opt_ema *ema);
/* Records one update, from what the parameters are by then: behind opt_step their new values. A NULL ema does nothing, here and
 * below. Error: between begin and end. */
#define opt_ema_update(ema) opt_ema_update_at((ema), TD_HERE)
TD_API void opt_ema_update_at(opt_ema *ema, td_here here);
/* Between the two, td_use of the parameters gives their averages, which are the parameters themselves before the first update.
 * Nothing is copied or written; td_state_read still reaches the trained values. Errors: begun while averages of one of these parameters
 * are being read, ended without a beginning, and any update or assign of the parameters in between. opt_ema_end works after an error
 * too; td_clear_error ends the scope as well, and the opt_ema_end that belongs to it may follow. */
#define opt_ema_begin(ema) opt_ema_begin_at((ema), TD_HERE)
#define opt_ema_end(ema) opt_ema_end_at((ema), TD_HERE)
TD_API void opt_ema_begin_at(opt_ema *ema, td_here here);
TD_API void opt_ema_end_at(opt_ema *ema, td_here here);

/* ---- Schedules ------------------------------------------------------------------------------------------ */

/* With s counted from 0 (the first update), w = warmup and t = min(1, (s - w) / (steps - w)); while s < w every kind
 * is rate (s + 1) / (w + 1), so the first update moves and update w has the full rate:
 *
 *     constant     rate
 *     linear       rate + (final_rate - rate) t
 *     cosine       final_rate + (rate - final_rate) (1 + cos(pi t)) / 2
 *     polynomial   final_rate + (rate - final_rate) (1 - t)^power
 *     step         rate factor^floor(s / every) */
typedef enum opt_schedule_kind {
    OPT_CONSTANT, OPT_LINEAR, OPT_COSINE, OPT_POLYNOMIAL, OPT_STEP
} opt_schedule_kind;

typedef struct opt_schedule {
    opt_schedule_kind kind;
    double rate;                 /* the highest */
    double final_rate;           /* at `steps` and after */
    int64_t warmup;              /* updates of linear warm-up; 0: none */
    int64_t steps;               /* updates in all, warm-up included */
    double power;                /* polynomial */
    int64_t every;               /* step: updates between decays; 0: no decay */
    double factor;               /* step: of each decay */
} opt_schedule;

/* The rate of update `step`; pure. */
TD_API double opt_rate(const opt_schedule *schedule, int64_t step);

#ifdef __cplusplus
}
#endif

#endif
