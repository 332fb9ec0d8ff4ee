/* The f32 loops for any processor the build is for. */
#define TABLE td_pointwise_f32_plain
#include "core/ops/loops_f32.h"
