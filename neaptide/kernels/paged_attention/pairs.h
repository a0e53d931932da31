/* Products of attention.c for a bf16 cache on processors that multiply pairs of bf16 numbers: an instruction
   multiplies two pairs per lane and adds both products in fp32. Queries are unchanged. Weights are rounded to bf16
   for their product with the values. Sums are fp32. */

#include "products.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define MULTIPLIES_PAIRS 1
#include <immintrin.h>

#define PAIRS_DIM 32 /* divides the dimension: a vector of bf16 numbers */
#define KEYS_AT_ONCE 16

static const uint16_t nothing[512];

INLINE __m512 add_products(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

INLINE __m512i every_lane(const void *from, int64_t pair) {
    int32_t value;
    memcpy(&value, (const char *)from + 4 * pair, 4);
    return _mm512_set1_epi32(value);
}

INLINE __m512 sum_of_halves(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}

INLINE __m512 sum_of_quarters(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

INLINE __m512 sum_of_lanes(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

/* Lane i is the sum of all lanes of sums[i]. */
INLINE __m512 totals(__m512 *sums) {
    for (int i = 0; i < 8; i++) sums[i] = sum_of_halves(sums[i], sums[i + 8]);
    for (int i = 0; i < 4; i++) sums[i] = sum_of_quarters(sums[i], sums[i + 4]);
    for (int i = 0; i < 2; i++) sums[i] = sum_of_lanes(sums[i], sums[i + 2]);
    __m512 found = sum_of_lanes(sums[0], sums[1]);
    return _mm512_shuffle_f32x4(found, found, 0xd8); /* its quarters begin with keys 0, 8, 4 and 12 */
}

/* As `score`, multiplied by scale; a row of the query holds bf16 numbers. */
static void score_pairs(int rows, int num_keys, int dim, const float *query, const void *const *keys,
                        const ahead_t *ahead, float scale, float *scores) {
    for (int t = 0; t < num_keys; t += KEYS_AT_ONCE)
        for (int r = 0; r < rows; r++) {
            if (ahead)
                for (int i = KEYS_AT_ONCE * r / rows; i < KEYS_AT_ONCE * (r + 1) / rows; i++) prefetch(ahead, t + i);
            __m512 sums[KEYS_AT_ONCE];
            for (int i = 0; i < KEYS_AT_ONCE; i++) sums[i] = _mm512_setzero_ps();
            for (int half = 0; half < KEYS_AT_ONCE; half += 8) /* as many addresses as fit into the registers */
                for (int d = 0; d < dim; d += PAIRS_DIM) {
                    __m512i part = _mm512_loadu_si512((const uint16_t *)(query + r * dim) + d);
                    for (int i = half; i < half + 8; i++)
                        sums[i] = add_products(sums[i], part, _mm512_loadu_si512((const uint16_t *)keys[t + i] + d));
                }
            _mm512_storeu_ps(scores + r * TILE + t, _mm512_mul_ps(totals(sums), _mm512_set1_ps(scale)));
        }
}

INLINE void score_block_of_pairs(int num_keys, int columns, int dim, const void *const *keys, const uint32_t *query,
                                 int padded, int at, float scale, float *scores) {
    __m512 sum[KEYS][COLUMNS_OF_SCORES];
    for (int t = 0; t < num_keys; t++)
        for (int j = 0; j < columns; j++) sum[t][j] = _mm512_setzero_ps();
    for (int d = 0; d < dim / 2; d++)
        for (int t = 0; t < num_keys; t++) {
            __m512i left = every_lane(keys[t], d);
            for (int j = 0; j < columns; j++)
                sum[t][j] = add_products(sum[t][j], left, _mm512_loadu_si512(query + d * padded + at + j * LANES));
        }
    for (int t = 0; t < num_keys; t++)
        for (int j = 0; j < columns; j++)
            _mm512_storeu_ps(scores + t * padded + at + j * LANES, _mm512_mul_ps(sum[t][j], _mm512_set1_ps(scale)));
}

INLINE void score_keys_of_pairs(int num_keys, int dim, const void *const *keys, const uint32_t *query, int padded,
                                float scale, float *scores) {
    int at = 0;
    for (; at + 3 * LANES <= padded; at += 3 * LANES)
        score_block_of_pairs(num_keys, 3, dim, keys, query, padded, at, scale, scores);
    if (at + 2 * LANES == padded) score_block_of_pairs(num_keys, 2, dim, keys, query, padded, at, scale, scores);
    if (at + LANES == padded) score_block_of_pairs(num_keys, 1, dim, keys, query, padded, at, scale, scores);
}

/* As `score_wide`, of query [dim / 2, padded] in pairs, multiplied by scale. */
static void score_wide_pairs(int num_keys, int dim, const void *const *keys, const uint32_t *query, int padded,
                             float scale, float *scores) {
    int t = 0;
    for (; t + KEYS <= num_keys; t += KEYS)
        score_keys_of_pairs(KEYS, dim, keys + t, query, padded, scale, scores + t * padded);
    for (; t < num_keys; t++) score_keys_of_pairs(1, dim, keys + t, query, padded, scale, scores + t * padded);
}

/* Rounds a row's weights, [TILE], to bf16 in place; pairs of keys are adjacent. */
static void narrow_row(float *weights) {
    for (int t = 0; t < TILE; t += 2 * LANES) {
        __m512 first = _mm512_loadu_ps(weights + t), second = _mm512_loadu_ps(weights + t + LANES);
        _mm512_storeu_si512((uint16_t *)weights + t, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
}

/* Rounds weights [num_keys, padded] to pairs of keys, [num_keys / 2, padded], in place. */
static void narrow_wide(int num_keys, int padded, float *weights) {
    uint16_t order[2 * LANES];
    for (int i = 0; i < LANES; i++) order[2 * i] = (uint16_t)i, order[2 * i + 1] = (uint16_t)(LANES + i);
    __m512i both = _mm512_loadu_si512(order);
    for (int t = 0; t < num_keys; t += 2)
        for (int r = 0; r < padded; r += LANES) {
            __m512 first = _mm512_loadu_ps(weights + t * padded + r), second = _mm512_setzero_ps();
            if (t + 1 < num_keys) second = _mm512_loadu_ps(weights + (t + 1) * padded + r);
            __m512i pairs = _mm512_permutexvar_epi16(both, (__m512i)_mm512_cvtne2ps_pbh(second, first));
            _mm512_storeu_si512((uint32_t *)weights + t / 2 * padded + r, pairs);
        }
}

/* c [rows, dim] += weights . values for `columns` vectors of values from `at`. An element of the weights, a pair of
   keys, is at row * row_step + pair * step. */
INLINE void block_of_pairs(int rows, int columns, int pairs, const uint32_t *weights, int row_step, int step,
                           const void *const *values, int dim, int at, float *c) {
    uint16_t order[4 * LANES];
    for (int i = 0; i < 2 * LANES; i++) order[2 * i] = (uint16_t)i, order[2 * i + 1] = (uint16_t)(2 * LANES + i);
    __m512i low = _mm512_loadu_si512(order), high = _mm512_loadu_si512(order + 2 * LANES);
    __m512 sum[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2 * columns; j++) sum[r][j] = _mm512_loadu_ps(c + r * dim + at + j * LANES);
    for (int k = 0; k < pairs; k++)
        for (int j = 0; j < columns; j++) {
            __m512i first = _mm512_loadu_si512((const uint16_t *)values[2 * k] + at + j * PAIRS_DIM);
            __m512i second = _mm512_loadu_si512((const uint16_t *)values[2 * k + 1] + at + j * PAIRS_DIM);
            __m512i left = _mm512_permutex2var_epi16(first, low, second);
            __m512i right = _mm512_permutex2var_epi16(first, high, second);
            for (int r = 0; r < rows; r++) {
                __m512i weight = every_lane(weights, r * row_step + k * step);
                sum[r][2 * j] = add_products(sum[r][2 * j], weight, left);
                sum[r][2 * j + 1] = add_products(sum[r][2 * j + 1], weight, right);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2 * columns; j++) _mm512_storeu_ps(c + r * dim + at + j * LANES, sum[r][j]);
}

INLINE void rows_of_pairs(int rows, int pairs, const uint32_t *weights, int row_step, int step,
                          const void *const *values, int dim, float *c) {
    int at = 0;
    for (; at + 2 * PAIRS_DIM <= dim; at += 2 * PAIRS_DIM)
        block_of_pairs(rows, 2, pairs, weights, row_step, step, values, dim, at, c);
    if (at < dim) block_of_pairs(rows, 1, pairs, weights, row_step, step, values, dim, at, c);
}

/* As `multiply_add`, of weights rounded to pairs. */
static void multiply_add_pairs(int rows, int dim, int num_keys, const float *weights, int row_step, int step,
                               const void *const *values, float *c) {
    const uint32_t *narrow = (const uint32_t *)weights;
    int pairs = (num_keys + 1) / 2, r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        rows_of_pairs(ROWS, pairs, narrow + r * row_step, row_step, step, values, dim, c + r * dim);
#define ROWS_OF_PAIRS(count) \
    case count: rows_of_pairs(count, pairs, narrow + r * row_step, row_step, step, values, dim, c + r * dim); return;
    switch (rows - r) { REST_OF_ROWS(ROWS_OF_PAIRS) }
}
#else
#define MULTIPLIES_PAIRS 0
#endif

/* The functions below multiply pairs if `pairs` is set (which implies `half`), else as products.h. */

INLINE int takes_pairs(int64_t half, int64_t dim) {
#if MULTIPLIES_PAIRS
    return half && dim % PAIRS_DIM == 0;
#else
    return (void)half, (void)dim, 0;
#endif
}

/* scores [rows, TILE] of queries [rows, dim] multiplied by scale, which fp32 queries already include. */
static void score_few(int pairs, int rows, int num_keys, int dim, const float *query, const void **keys, int half,
                      const ahead_t *ahead, float scale, float *scores) {
#if MULTIPLIES_PAIRS
    if (pairs) {
        for (int t = num_keys; t % KEYS_AT_ONCE; t++) keys[t] = keys[num_keys - 1];
        score_pairs(rows, num_keys, dim, query, keys, ahead, scale, scores);
        return;
    }
#endif
    score(rows, num_keys, dim, query, keys, half, ahead, scores);
}

/* The same for many rows: scores [num_keys, padded] of queries [dim, padded], or of [dim / 2, padded] pairs. */
static void score_many(int pairs, int num_keys, int dim, const void *const *keys, const float *query, int padded,
                       float scale, float *scores) {
#if MULTIPLIES_PAIRS
    if (pairs) {
        score_wide_pairs(num_keys, dim, keys, (const uint32_t *)query, padded, scale, scores);
        return;
    }
#endif
    score_wide(num_keys, dim, keys, query, padded, scores);
}

/* c [rows, dim] += weights . values. The weights are [rows, TILE] for few rows and [num_keys, padded] for many
   (`padded`); they are overwritten. */
static void weigh_values(int pairs, int rows, int padded, int dim, int num_keys, float *weights, const void **values,
                         int half, float *c) {
    int row_step = padded ? 1 : TILE, step = padded ? padded : 1;
#if MULTIPLIES_PAIRS
    if (pairs) {
        const void *behind = num_keys % 2 ? values[num_keys] : NULL; /* other rows may see the key */
        if (num_keys % 2) values[num_keys] = nothing;
        if (padded) narrow_wide(num_keys, padded, weights);
        else
            for (int r = 0; r < rows; r++) narrow_row(weights + r * TILE);
        multiply_add_pairs(rows, dim, num_keys, weights, row_step, step, values, c);
        if (num_keys % 2) values[num_keys] = behind;
        return;
    }
#endif
    multiply_add(rows, dim, num_keys, weights, row_step, step, values, half, c);
}
