/* UTF-8: where a character ends. */
#ifndef TANDEM_CORE_UTF8_H
#define TANDEM_CORE_UTF8_H

#include <stdbool.h>
#include <stdint.h>

/* The bytes of the character at s, left > 0 bytes before the end. Where none is: valid is false, and the bytes are
 * those that one U+FFFD stands for, the longest start of a character (Unicode 14, section 3.9, "maximal subpart"). */
static inline int td_utf8_step(const uint8_t *s, int64_t left, bool *valid)
{
    uint8_t lead = s[0];
    *valid = lead < 0x80;
    if (lead < 0xC2 || lead > 0xF4) return 1;
    int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    /* Of the second byte: overlong forms, surrogates and numbers past U+10FFFF are none. */
    uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    for (int i = 1; i < length; i++) {
        if (i >= left || s[i] < low || s[i] > high) return i;
        low = 0x80;
        high = 0xBF;
    }
    *valid = true;
    return length;
}

#endif
