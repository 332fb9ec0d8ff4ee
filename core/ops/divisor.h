/* Division by a number that is known before the launch, as a multiplication and a shift: td_quotient of pointwise_cuda.h. Granlund and
 * Montgomery, "Division by invariant integers using multiplication", PLDI 1994, for dividends and divisors below 2^31. */
#ifndef TANDEM_CORE_OPS_DIVISOR_H
#define TANDEM_CORE_OPS_DIVISOR_H

#include <stdint.h>

typedef struct td_divisor {
    uint32_t multiplier, shift, size;
} td_divisor;

static inline td_divisor td_divisor_of(uint32_t size) /* at least 1 */
{
    uint32_t shift = 0;
    while (((uint64_t)1 << shift) < size) shift++;
    td_divisor d;
    d.multiplier = (uint32_t)(((((uint64_t)1 << shift) - size) << 32) / size + 1);
    d.shift = shift;
    d.size = size;
    return d;
}

#endif
