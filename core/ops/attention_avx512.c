/* Attention's tiles in f32, in vectors of sixteen. */
#include "core/ops/attention_block.h"

#define T float
#define NAME(x) x##_f32
#define VECTOR_BYTES 64
#define BLOCK_ROWS 8
#include "core/ops/attention_tiles.h"

const td_attention_kernels td_attention_avx512 = { LANES_f32, forward_f32, backward_f32 };
