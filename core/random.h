/* Random numbers by counter: a value is a function of (seed, key, counter, index) and of nothing else, so any rank or
 * thread can make any element of a draw, in any order, and all get the same.
 *
 * The generator is Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC11).
 * A block gives four elements: element `index` is word index % 64 / 16 of block index / 64 * 16 + index % 16, an order
 * in which sixteen blocks are made at once. The block's number is the low half of Philox's counter, `counter` the high.
 * Values are the same in f32 and f64: uniform ones have 24 bits.
 *
 * What is drawn against one bound, dropout, takes 16 bits and eight elements from a block: td_random_halves.
 */
#ifndef TANDEM_CORE_RANDOM_H
#define TANDEM_CORE_RANDOM_H

#include <stdint.h>

typedef struct td_random {
    uint64_t key;     /* of Philox */
    uint64_t counter; /* its high half */
} td_random;

/* The draws of one purpose: `key` names it (the hash of a parameter's name, of a module path), `counter` counts
 * its repetitions (the optimizer update). */
td_random td_random_of(uint64_t seed, uint64_t key, uint64_t counter);

/* Elements [index, index + count) of the draw. */
void td_random_bits(td_random r, uint64_t index, int64_t count, uint32_t *out);
/* Elements of 16 bits: element `index` is of block index / 8, of its word index % 8 / 2 the low half if index is even, else the high one. */
void td_random_halves(td_random r, uint64_t index, int64_t count, uint16_t *out);
void td_random_uniform(td_random r, uint64_t index, int64_t count, double *out); /* [0, 1) */
void td_random_normal(td_random r, uint64_t index, int64_t count, double *out);  /* mean 0, deviation 1 */

/* One block of Philox 4x32-10 as published. */
void td_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

#endif
