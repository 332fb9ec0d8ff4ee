/* The MLP's data: images or a table to classify, and a made-up function to regress on. */
#ifndef TANDEM_MODELS_MLP_H
#define TANDEM_MODELS_MLP_H

#include <tandem/run.h>

enum { MLP_FEATURES = 10 }; /* of the function to regress on */

int64_t mlp_classes(run_loop *run);

/* Each gives "train" or "test"; NULL after an error; the caller owns the set. */
data_set *mlp_images_or_table(run_loop *run, const char *split);
/* Rows x (10) of N(0, 1) and y (1) = teacher(x), an MLP 10-64-1 with tanh that is always the same: 5,000 rows to train
 * on, 1,000 others to test. */
data_set *mlp_teacher(td_context *td, const char *split);
/* A batch of made-up samples of either form; y is no function of x. */
data_set *mlp_random(run_loop *run, bool regresses);

#endif
