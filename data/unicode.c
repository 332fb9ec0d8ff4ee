/* UTF-8: what is valid, what is replaced. */
#include <string.h>

#include "core/utf8.h"
#include "data/tokenizer.h"

int64_t data_utf8_valid_prefix(const uint8_t *s, int64_t bytes)
{
    int64_t i = 0;
    while (i < bytes) {
        uint64_t eight;
        if (bytes - i >= (int64_t)sizeof eight) {
            memcpy(&eight, s + i, sizeof eight);
            if (!(eight & 0x8080808080808080u)) {
                i += (int64_t)sizeof eight;
                continue;
            }
        }
        bool valid;
        int step = td_utf8_step(s + i, bytes - i, &valid);
        if (!valid) return i;
        i += step;
    }
    return bytes;
}

int64_t data_utf8_replace(const uint8_t *s, int64_t bytes, uint8_t *to)
{
    uint8_t mark[4];
    int mark_bytes = data_utf8_put(REPLACEMENT, mark);
    int64_t written = 0;
    for (int64_t i = 0; i < bytes;) {
        bool valid;
        int step = td_utf8_step(s + i, bytes - i, &valid);
        int put = valid ? step : mark_bytes;
        if (to) memcpy(to + written, valid ? s + i : mark, (size_t)put);
        written += put;
        i += step;
    }
    return written;
}

int data_utf8_put(uint32_t code, uint8_t to[4])
{
    if (code < 0x80) return to[0] = (uint8_t)code, 1;
    int length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = length - 1; i > 0; i--, code >>= 6) to[i] = (uint8_t)(0x80 | (code & 0x3F));
    to[0] = (uint8_t)((0xF00u >> length & 0xF0u) | code);
    return length;
}
