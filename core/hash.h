/* The 64-bit hash of all that is told apart: recordings, names, plans, what ranks compare. Not cryptographic. */
#ifndef TANDEM_HASH_H
#define TANDEM_HASH_H

#include <stddef.h>
#include <stdint.h>

static inline uint64_t td_mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * 0x9E3779B97F4A7C15u;
    return h ^ (h >> 29);
}
uint64_t td_hash_bytes(uint64_t h, const void *bytes, size_t count);
uint64_t td_hash_text(const char *text);

#endif
