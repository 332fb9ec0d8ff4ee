/* The choice of the next token from its logits.
 *
 * A token is drawn from softmax(logits / temperature): of the top_k largest, and of these from the fewest, the likeliest first, whose
 * probabilities among the top_k sum to top_p at least: the one that reaches it is among them (Holtzman et al., arXiv:1904.09751). Of equal
 * logits the lower id counts as likelier.
 */
#ifndef TANDEM_MODELS_GPT_DRAW_H
#define TANDEM_MODELS_GPT_DRAW_H

#include <stdint.h>

typedef struct gpt_draw_options {
    double temperature;          /* 0: the likeliest token */
    int64_t top_k;               /* 0: all */
    double top_p;                /* in (0, 1]; 1: all */
} gpt_draw_options;

typedef struct gpt_choice {
    double weight;               /* its probability times a number that all share */
    int32_t id;
} gpt_choice;

/* The id of one of `count` >= 1 logits; `uniform`, in [0, 1), is the draw. `room` holds count choices. -1: there are no probabilities, as a logit
 * is NaN, the largest infinite, or all are -infinity. */
int32_t gpt_draw(const double *logits, int64_t count, const gpt_draw_options *options, double uniform, gpt_choice *room);

#endif
