/* Random numbers by counter in CUDA kernels, the same as core/random.h's: random.cuh reads this, and kernels that are compiled at run time
 * carry it as text (see pointwise_f64.h).
 *
 *     td_random_on(seed, key, update)   what td_random_of(seed, key, update) is on the host
 *     td_random_block(r, block)         the four words of a block, by Philox 4x32-10: of a draw of 32 bits elements block / 16 * 64 +
 *                                       block % 16 + 16 word, of one of 16 bits the eight from 8 block on, two a word
 *     td_random_half(r, index)          one element of a draw of 16 bits: the work of eight
 *     td_random_halves(r, index, n)     the eight from `index` on, of which n are read: of one block, or of two
 *     td_mask(r, index, below, kept, x) dropout's mask from `index` on: x's elements, eight at most
 */
TD_CODE(
struct td_device_random { unsigned long long key, counter; };

TD_FUNCTION unsigned long long td_mixed(unsigned long long x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

TD_FUNCTION td_device_random td_random_on(unsigned long long seed, unsigned long long key, long long update)
{
    return { td_mixed(td_mixed(seed) ^ key), (unsigned long long)update };
}

TD_FUNCTION uint4 td_random_block(td_device_random r, unsigned long long block)
{
    unsigned c0 = (unsigned)block, c1 = (unsigned)(block >> 32), c2 = (unsigned)r.counter, c3 = (unsigned)(r.counter >> 32);
    unsigned key_0 = (unsigned)r.key, key_1 = (unsigned)(r.key >> 32);
    for (int round = 0; round < 10; round++) {
        unsigned long long product_0 = 0xD2511F53ull * c0, product_1 = 0xCD9E8D57ull * c2;
        c0 = (unsigned)(product_1 >> 32) ^ c1 ^ key_0;
        c1 = (unsigned)product_1;
        c2 = (unsigned)(product_0 >> 32) ^ c3 ^ key_1;
        c3 = (unsigned)product_0;
        key_0 += 0x9E3779B9u;
        key_1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

TD_FUNCTION unsigned td_random_half(td_device_random r, unsigned long long index)
{
    uint4 words = td_random_block(r, index / 8);
    unsigned low = index & 2 ? words.y : words.x, high = index & 2 ? words.w : words.z;
    return (index & 4 ? high : low) >> (index & 1) * 16 & 0xFFFF;
}

TD_FUNCTION uint4 td_random_halves(td_device_random r, unsigned long long index, unsigned count)
{
    uint4 w = td_random_block(r, index / 8);
    unsigned skip = (unsigned)index % 8;
    if (!skip) return w;
    uint4 next = w;
    if (skip + count > 8) next = td_random_block(r, index / 8 + 1);
    if (skip & 4) {
        w = make_uint4(w.z, w.w, next.x, next.y);
        next.x = next.z;
        next.y = next.w;
    }
    if (skip & 2) {
        w = make_uint4(w.y, w.z, w.w, next.x);
        next.x = next.y;
    }
    if (skip & 1) w = make_uint4(w.x >> 16 | w.y << 16, w.y >> 16 | w.z << 16, w.z >> 16 | w.w << 16, w.w >> 16 | next.x << 16);
    return w;
}

template <typename T, int count>
TD_FUNCTION void td_mask(td_device_random r, unsigned long long index, unsigned below, double kept, T (&x)[count])
{
    const uint4 made = td_random_halves(r, index, count);
    const unsigned words[4] = { made.x, made.y, made.z, made.w };
    for (int v = 0; v < count; v++) x[v] = (words[v / 2] >> v % 2 * 16 & 0xFFFF) < below ? (T)0 : (T)kept;
}
)
