/* What the processor at hand has beyond what the build is for. */
#ifndef TANDEM_CORE_CPU_H
#define TANDEM_CORE_CPU_H

#include <stdbool.h>

/* Whether kernels of *_avx512.c run here: AVX-512 F, BW, VL, DQ and BF16, as they are compiled. */
bool td_cpu_has_avx512(void);

#endif
