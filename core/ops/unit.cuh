/* Bytes that are moved in the widest unit that their number and places allow. */
#ifndef TANDEM_CORE_OPS_UNIT_CUH
#define TANDEM_CORE_OPS_UNIT_CUH

#include <stdint.h>

/* The largest power of two up to 16 that divides all that is or'ed into `bits`: sizes and addresses in bytes. */
static inline int td_unit_of(uint64_t bits)
{
    int unit = 16;
    while (bits % (uint64_t)unit) unit /= 2;
    return unit;
}

/* Calls `what` with U a type of `unit` bytes. */
#define TD_UNITS(unit, what)                                     \
    switch (unit) {                                              \
    case 16: { typedef uint4 U; what; break; }                   \
    case 8:  { typedef uint2 U; what; break; }                   \
    case 4:  { typedef uint32_t U; what; break; }                \
    case 2:  { typedef uint16_t U; what; break; }                \
    default: { typedef uint8_t U; what; break; }                 \
    }

#endif
