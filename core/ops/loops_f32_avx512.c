/* The f32 loops in vectors of sixteen. */
#define TABLE td_pointwise_f32_avx512
#include "core/ops/loops_f32.h"
