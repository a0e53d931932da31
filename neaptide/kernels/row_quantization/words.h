/* Products of product.h for processors with AVX2 alone. Their instruction for bytes adds pairs of products in 16 bits,
   which overflow. The one for 16-bit numbers adds pairs in 32 bits, which is exact. Rows are quantized to 16-bit numbers.
   The weight stays in bytes, and is widened whenever it is read. */

#define PANEL_JOB product_t
#include "../panels.h"

#define WORD_ROWS 6    /* x 2 sums, 2 weights, a row and a product fit into the 16 registers */
#define MOST_VECTORS 8 /* of 4 outputs each: those of a panel */
#define AHEAD 1024     /* bytes of the weight that are prefetched ahead of their use, for one row */

/* In assembly, because gcc 12 would keep sums in memory. */
INLINE __m256i add_pairs(__m256i sum, __m256i row, __m256i weight) {
    __m256i products;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(row), "x"(weight));
    return sum;
}

/* Puts the results of a row and 8 outputs. Two adjacent lanes are an output's sum. */
__attribute__((noinline)) static void put_sums(const product_t *job, int64_t row, int64_t begin, int64_t width,
                                               __m256i left, __m256i right) {
    int32_t sums[8];
    __m256i mixed = _mm256_hadd_epi32(left, right); /* outputs 0, 1, 4, 5, 2, 3, 6, 7 */
    _mm256_storeu_si256((__m256i *)sums, _mm256_permute4x64_epi64(mixed, 0xd8));
    if (width < 8) put_results(job, row, begin, width, sums, (int)job->rows.is_bfloat16);
    else if (job->rows.is_bfloat16) put_results(job, row, begin, 8, sums, 1);
    else put_results(job, row, begin, 8, sums, 0);
}

/* Adds the products of four inputs. */
INLINE void add_words(int rows, int vectors, __m256i (*sum)[MOST_VECTORS], const char *x, int64_t x_stride, const char *w) {
    __m256i weight[MOST_VECTORS];
    for (int v = 0; v < vectors; v++) weight[v] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w + v));
    for (int r = 0; r < rows; r++) {
        int64_t unit;
        memcpy(&unit, x + r * x_stride, 8);
        __m256i everywhere = _mm256_set1_epi64x(unit);
        for (int v = 0; v < vectors; v++) sum[r][v] = add_pairs(sum[r][v], everywhere, weight[v]);
    }
}

/* Computes `rows` rows from `first` and 4 * `vectors` outputs from `begin`, over all inputs; `w` is their first unit.
   For every UNITS_AT_ONCE, `step` bytes from `ahead` are prefetched. */
INLINE void word_tile(int rows, int vectors, const panels_t *all, int64_t first, int64_t begin, const char *w,
                      const char *ahead, int64_t step) {
    const char *x = all->x + first * all->x_stride;
    int64_t i = 0, x_stride = all->x_stride, unit = 4 * PANEL_OUTPUTS;
    __m256i sum[WORD_ROWS][MOST_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = _mm256_setzero_si256();
    for (; i + UNITS_AT_ONCE <= all->units; i += UNITS_AT_ONCE, ahead += step) {
        for (int64_t at = 0; at < step; at += LINE) __builtin_prefetch(ahead + at);
        for (int j = 0; j < UNITS_AT_ONCE; j++) add_words(rows, vectors, sum, x + 8 * (i + j), x_stride, w + unit * (i + j));
    }
    for (; i < all->units; i++) add_words(rows, vectors, sum, x + 8 * i, x_stride, w + unit * i);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v += 2)
            put_sums(all->job, first + r, begin + 4 * v, least(8, all->outputs - begin - 4 * v), sum[r][v], sum[r][v + 1]);
}

/* Computes all rows of a panel, part by part; `ahead` is the next panel. One row reads the panel in order, as fast as
   memory delivers it. */
static void multiply_panel(const panels_t *all, int64_t begin, const char *w, const char *ahead) {
    int64_t tiles = (all->rows + WORD_ROWS - 1) / WORD_ROWS, bytes = 4 * PANEL_OUTPUTS * all->units;
    int64_t vectors = all->rows == 1 ? 8 : all->rows == 2 ? 4 : 2, parts = MOST_VECTORS / vectors;
    int64_t sharing = least(tiles * parts, TILES_AHEAD);
    int64_t whole = 4 * PANEL_OUTPUTS * UNITS_AT_ONCE, step = (whole / sharing + LINE - 1) / LINE * LINE;
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t p = 0; p < parts; p++) {
            int64_t first = all->rows * t / tiles, rows = all->rows * (t + 1) / tiles - first, done = t * parts + p;
            int64_t output = begin + 4 * vectors * p;
            const char *from = all->rows == 1 ? w + AHEAD : ahead + bytes * done / sharing, *part = w + 16 * vectors * p;
            int64_t fetched = done < sharing ? step : 0;
#define WORD_TILE(count, vectors) \
    case count: word_tile(count, vectors, all, first, output, part, from, fetched); break;
            switch (rows) {
                WORD_TILE(1, 8) WORD_TILE(2, 4) WORD_TILE(3, 2) WORD_TILE(4, 2) WORD_TILE(5, 2) WORD_TILE(6, 2)
            }
        }
}
