/* Initial values by fan: formulas and sources in nn.h. */
#include <tandem/nn.h>

#include <math.h>

/* Not a number for a fan that cannot be, which td_parameter refuses. */
static double checked(int64_t fan) { return fan >= 1 ? (double)fan : NAN; }

td_init nn_init_xavier_uniform(int64_t fan_in, int64_t fan_out) { return td_init_uniform(sqrt(6 / (checked(fan_in) + checked(fan_out)))); }
td_init nn_init_xavier_normal(int64_t fan_in, int64_t fan_out) { return td_init_normal(sqrt(2 / (checked(fan_in) + checked(fan_out)))); }
td_init nn_init_kaiming_uniform(int64_t fan, double gain) { return td_init_uniform(gain * sqrt(3 / checked(fan))); }
td_init nn_init_kaiming_normal(int64_t fan, double gain) { return td_init_normal(gain / sqrt(checked(fan))); }
