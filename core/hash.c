/* Hashes of bytes and of texts. */
#include "core/hash.h"

#include <string.h>

uint64_t td_hash_bytes(uint64_t h, const void *bytes, size_t count)
{
    const char *at = bytes;
    for (; count >= 8; at += 8, count -= 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        h = td_mix(h, word);
    }
    uint64_t rest = 0;
    if (count) memcpy(&rest, at, count);
    return td_mix(h, rest ^ (uint64_t)count << 56);
}

uint64_t td_hash_text(const char *text) { return td_hash_bytes(0x7461u, text, strlen(text)); }
