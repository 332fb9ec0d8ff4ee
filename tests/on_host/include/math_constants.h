/* CUDA's constants, on the host. */
#ifndef TANDEM_TESTS_MATH_CONSTANTS_H
#define TANDEM_TESTS_MATH_CONSTANTS_H

#include <math.h>

#define CUDART_INF_F ((float)INFINITY)
#define CUDART_NAN_F ((float)NAN)

#endif
