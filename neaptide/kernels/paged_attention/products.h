/* Products of attention.c: scores of a tile of keys, and values weighed with them. Keys and values are fp32 or
   (`half`) bf16 numbers; rows of queries and scores are fp32. */

#include "vectors.h"

#define TILE 32 /* keys */
#define LINE 64 /* bytes of a cache line */

/* c [rows, columns * LANES] += a . b. An element of a is at row * row_step + k * step; b is given by its rows. */
INLINE void block(int rows, int columns, int depth, const float *a, int row_step, int step, const void *const *b,
                  int half, int at, float *c, int ldc) {
    vec sum[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j++) sum[r][j] = load(c + r * ldc + at + j * LANES);
    for (int k = 0; k < depth; k++)
        for (int j = 0; j < columns; j++) {
            vec right = load_any(b[k], at + j * LANES, half);
            for (int r = 0; r < rows; r++) sum[r][j] += a[r * row_step + k * step] * right;
        }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j++) store(c + r * ldc + at + j * LANES, sum[r][j]);
}

INLINE void block_rows(int rows, int width, int depth, const float *a, int row_step, int step, const void *const *b,
                       int half, float *c) {
    int at = 0;
    for (; at + COLUMNS * LANES <= width; at += COLUMNS * LANES)
        block(rows, COLUMNS, depth, a, row_step, step, b, half, at, c, width);
    for (; at + LANES <= width; at += LANES) block(rows, 1, depth, a, row_step, step, b, half, at, c, width);
    for (; at < width; at++)
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < depth; k++) c[r * width + at] += a[r * row_step + k * step] * get(b[k], at, half);
}

/* Handles the rows left after blocks of ROWS, also at once, so that shared operands are read once. */
#if ROWS == 6
#define REST_OF_ROWS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#else
#define REST_OF_ROWS(CASE) CASE(1) CASE(2)
#endif

INLINE void multiply_add_any(int rows, int width, int depth, const float *a, int row_step, int step,
                             const void *const *b, int half, float *c) {
    int r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        block_rows(ROWS, width, depth, a + r * row_step, row_step, step, b, half, c + r * width);
#define BLOCK_ROWS(count) \
    case count: block_rows(count, width, depth, a + r * row_step, row_step, step, b, half, c + r * width); return;
    switch (rows - r) { REST_OF_ROWS(BLOCK_ROWS) }
}

/* c [rows, width] += a . b [depth, width]. */
static void multiply_add(int rows, int width, int depth, const float *a, int row_step, int step, const void *const *b,
                         int half, float *c) {
    if (half) multiply_add_any(rows, width, depth, a, row_step, step, b, 1, c);
    else multiply_add_any(rows, width, depth, a, row_step, step, b, 0, c);
}

INLINE void dots(int rows, int dim, const float *query, const void *key, int half, float *scores) {
    vec sum[ROWS];
    memset(sum, 0, sizeof sum);
    int d = 0;
    for (; d + LANES <= dim; d += LANES) {
        vec right = load_any(key, d, half);
        for (int r = 0; r < rows; r++) sum[r] += load(query + r * dim + d) * right;
    }
    for (int r = 0; r < rows; r++) {
        float score = total(sum[r]);
        for (int i = d; i < dim; i++) score += query[r * dim + i] * get(key, i, half);
        scores[r * TILE] = score;
    }
}

/* Pieces of the next tile, as many as this one has keys. */
typedef struct {
    const char *pieces[TILE];
    int64_t bytes;
} ahead_t;

INLINE void prefetch(const ahead_t *ahead, int t) {
    for (int64_t at = 0; at < ahead->bytes; at += LINE) PREFETCH(ahead->pieces[t] + at);
}

INLINE void score_rows(int rows, int num_keys, int dim, const float *query, const void *const *keys, int half,
                       const ahead_t *ahead, float *scores) {
    for (int t = 0; t < num_keys; t++) {
        if (ahead) prefetch(ahead, t);
        dots(rows, dim, query, keys[t], half, scores + t);
    }
}

INLINE void score_any(int rows, int num_keys, int dim, const float *query, const void *const *keys, int half,
                      const ahead_t *ahead, float *scores) {
    int r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        score_rows(ROWS, num_keys, dim, query + r * dim, keys, half, r ? NULL : ahead, scores + r * TILE);
#define SCORE_ROWS(count) \
    case count: \
        score_rows(count, num_keys, dim, query + r * dim, keys, half, r ? NULL : ahead, scores + r * TILE); return;
    switch (rows - r) { REST_OF_ROWS(SCORE_ROWS) }
}

/* scores [rows, TILE] = query [rows, dim] . keys^T. Meanwhile the next tile is prefetched, some lines with each key.
   All at once would fill the core's queue of outstanding loads and delay this tile. */
static void score(int rows, int num_keys, int dim, const float *query, const void *const *keys, int half,
                  const ahead_t *ahead, float *scores) {
    if (half) score_any(rows, num_keys, dim, query, keys, 1, ahead, scores);
    else score_any(rows, num_keys, dim, query, keys, 0, ahead, scores);
}

INLINE void score_block(int num_keys, int columns, int dim, const void *const *keys, const float *query, int padded,
                        int at, float *scores) {
    vec sum[KEYS][COLUMNS_OF_SCORES];
    memset(sum, 0, sizeof sum);
    for (int d = 0; d < dim; d++)
        for (int j = 0; j < columns; j++) {
            vec right = load(query + d * padded + at + j * LANES);
            for (int t = 0; t < num_keys; t++) sum[t][j] += ((const float *)keys[t])[d] * right;
        }
    for (int t = 0; t < num_keys; t++)
        for (int j = 0; j < columns; j++) store(scores + t * padded + at + j * LANES, sum[t][j]);
}

INLINE void score_keys(int num_keys, int dim, const void *const *keys, const float *query, int padded, float *scores) {
    int at = 0;
    for (; at + COLUMNS_OF_SCORES * LANES <= padded; at += COLUMNS_OF_SCORES * LANES)
        score_block(num_keys, COLUMNS_OF_SCORES, dim, keys, query, padded, at, scores);
    for (; at < padded; at += LANES) score_block(num_keys, 1, dim, keys, query, padded, at, scores);
}

/* scores [num_keys, padded] = keys . query [dim, padded]. A column is a row of the item, so that later steps need no
   sums across a vector. */
static void score_wide(int num_keys, int dim, const void *const *keys, const float *query, int padded, float *scores) {
    int t = 0;
    for (; t + KEYS <= num_keys; t += KEYS) score_keys(KEYS, dim, keys + t, query, padded, scores + t * padded);
    for (; t < num_keys; t++) score_keys(1, dim, keys + t, query, padded, scores + t * padded);
}
