/* The order of an epoch: a permutation of [0, count) that is computed for any position alone.
 *
 * A Feistel network on pairs (l, r), l < left, r < right, left * right just above count: each round adds a keyed hash
 * of one half to the other, modulo its size, so a round can be undone and the whole is a permutation. Pairs at or past
 * count are sent through again until they fall below it (cycle walking: Black and Rogaway 2002), which keeps it one.
 * Integers only: the same on every machine and rank; no memory, no state.
 */
#include "data/internal.h"

data_order data_order_make(int64_t count, bool shuffle, uint64_t seed, int64_t epoch)
{
    data_order order = { .count = count, .shuffle = shuffle };
    if (!shuffle) return order;
    uint64_t n = (uint64_t)count, root = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint64_t larger = root | (uint64_t)1 << bit;
        if (larger <= n / larger) root = larger; /* at the end the largest with root * root <= n */
    }
    order.left = root * root < n ? root + 1 : root;
    order.right = (n + order.left - 1) / order.left;
    uint64_t key = data_mix(data_mix(seed + DATA_GOLDEN) ^ (uint64_t)epoch);
    for (int i = 0; i < DATA_ORDER_ROUNDS; i++) order.key[i] = data_mix(key += DATA_GOLDEN);
    return order;
}

/* A hash of x below size (size < 2^32). */
static uint64_t round_hash(uint64_t key, uint64_t x, uint64_t size)
{
    return ((data_mix(key + x * DATA_GOLDEN) >> 32) * size) >> 32;
}

int64_t data_order_at(const data_order *order, int64_t position)
{
    if (!order->shuffle) return position;
    uint64_t at = (uint64_t)position;
    do {
        uint64_t l = at / order->right, r = at % order->right;
        for (int i = 0; i < DATA_ORDER_ROUNDS; i += 2) {
            l += round_hash(order->key[i], r, order->left);
            if (l >= order->left) l -= order->left;
            r += round_hash(order->key[i + 1], l, order->right);
            if (r >= order->right) r -= order->right;
        }
        at = l * order->right + r;
    } while (at >= (uint64_t)order->count);
    return (int64_t)at;
}
