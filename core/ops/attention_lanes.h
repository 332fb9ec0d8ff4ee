/* Which keys a lane of attention's tensor-core kernels has: those that one block of random numbers is for.
 *
 * Of sums of 16 rows by 64 columns lane l has columns 8 n + 2 (l % 4) + i, n from 0 to 7, i 0 or 1, of rows l / 4 and l / 4 + 8 (mma.cuh).
 * Dropout has eight consecutive keys in a block. So the rows of a tile of keys lie in another order in shared memory: with n = 4 a + m the
 * column above is key 32 a + 8 (l % 4) + 2 m + i, and a lane has the eight keys of two blocks of a row.
 *
 * Where keys are rows, for dk and dv, 16 keys in their order are two blocks for a query; the eight lanes that have
 * a query's columns in common make them for one query each, td_query_of_lane, and tell the others which keys are kept, a bit a key.
 */
#ifndef TANDEM_CORE_OPS_ATTENTION_LANES_H
#define TANDEM_CORE_OPS_ATTENTION_LANES_H

#ifdef __CUDACC__
#define TD_LANE static inline __host__ __device__
#else
#define TD_LANE static inline
#endif

/* The row of shared memory that key `key` of 64 lies in. */
TD_LANE int td_row_of_key(int key) { return (key & 33) | (key & 6) << 2 | (key & 24) >> 2; }

/* The key of column 8 n + 2 (lane % 4) + i. */
TD_LANE int td_key_of_column(int n, int lane, int i) { return n / 4 * 32 + lane % 4 * 8 + n % 4 * 2 + i; }

/* Column 8 n + 2 (lane % 4) + i of 32 queries whose keys `lane` draws, and the lane that draws them for it. */
TD_LANE int td_query_of_lane(int lane) { return lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2; }
TD_LANE int td_lane_of_query(int n, int lane, int i) { return 8 * n + 4 * i + lane % 4; }

#undef TD_LANE

#endif
