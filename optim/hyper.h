/* The order of each rule's numbers in td_update_range.hyper, for its kernels on both devices. */
#ifndef TANDEM_OPTIM_HYPER_H
#define TANDEM_OPTIM_HYPER_H

enum { ADAM_DECAY, ADAM_BETA1, ADAM_BETA2, ADAM_EPS };
enum { SGD_DECAY, SGD_MOMENTUM, SGD_DAMPENING, SGD_NESTEROV };
enum { ADAGRAD_DECAY, ADAGRAD_EPS, ADAGRAD_RATE_DECAY };
enum { LION_DECAY, LION_BETA1, LION_BETA2 };

#endif
