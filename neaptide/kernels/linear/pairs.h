/* Products of linear.c for bf16 rows on processors that multiply pairs of bf16 numbers: an instruction makes two products
   of each lane and adds both in fp32. A weight is packed in panels as there, but pairs of inputs lie side by side:
   [n / PAIR_PANEL][k / 2][PAIR_PANEL][2]. */

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define MULTIPLIES_PAIRS 1
#include <immintrin.h>

#define PAIR_ROWS 14  /* x 2 sums, 2 loads and a broadcast fit into the 32 registers */
#define PAIR_PANEL 32 /* outputs */
#define PAIRS_AT_ONCE 4
#define LINE 64
#define TILES_AHEAD 8 /* at most so many tiles share a panel that is fetched ahead, a line or more for PAIRS_AT_ONCE */

typedef struct {
    const uint16_t *x; /* [rows, k] */
    uint16_t *y;       /* [rows, n], of which the panel is written */
    const float *bias; /* [width] or NULL */
    int64_t rows, k, x_stride, y_stride, width;
    int64_t adds; /* to what y holds */
} pair_panel_t;

INLINE __m512 wide_half(__m512i numbers, int upper) {
    __m256i half = upper ? _mm512_extracti64x4_epi64(numbers, 1) : _mm512_castsi512_si256(numbers);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE void put_row(const pair_panel_t *panel, uint16_t *y, __m512 left, __m512 right) {
    __mmask32 mask = panel->width == PAIR_PANEL ? 0xffffffff : ((__mmask32)1 << panel->width) - 1;
    if (panel->bias) {
        left = _mm512_add_ps(left, _mm512_maskz_loadu_ps((__mmask16)mask, panel->bias));
        right = _mm512_add_ps(right, _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), panel->bias + 16));
    }
    if (panel->adds) {
        __m512i held = _mm512_maskz_loadu_epi16(mask, y);
        left = _mm512_add_ps(left, wide_half(held, 0));
        right = _mm512_add_ps(right, wide_half(held, 1));
    }
    _mm512_mask_storeu_epi16(y, mask, (__m512i)_mm512_cvtne2ps_pbh(right, left));
}

INLINE void add_pair(int rows, __m512 (*sum)[2], const uint16_t *x, int64_t x_stride, const uint16_t *w) {
    __m512bh left = (__m512bh)_mm512_loadu_si512(w), right = (__m512bh)_mm512_loadu_si512(w + PAIR_PANEL);
    for (int r = 0; r < rows; r++) {
        int32_t pair;
        memcpy(&pair, x + r * x_stride, 4);
        __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, left);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, right);
    }
}

/* Rows [first, first + rows) of a panel, over all inputs.

   Meanwhile `step` bytes from `ahead` on are fetched for every PAIRS_AT_ONCE: reading a panel for the first time takes as
   long as multiplying it with ten rows, and the processor does not look beyond the one that it is in. */
INLINE void pair_tile(int rows, const pair_panel_t *panel, int64_t first, const uint16_t *w, const char *ahead,
                      int64_t step) {
    const uint16_t *x = panel->x + first * panel->x_stride;
    uint16_t *y = panel->y + first * panel->y_stride;
    int64_t pairs = panel->k / 2, p = 0;
    __m512 sum[PAIR_ROWS][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (; p + PAIRS_AT_ONCE <= pairs; p += PAIRS_AT_ONCE, ahead += step) {
        for (int64_t at = 0; at < step; at += LINE) __builtin_prefetch(ahead + at);
        for (int i = 0; i < PAIRS_AT_ONCE; i++)
            add_pair(rows, sum, x + 2 * (p + i), panel->x_stride, w + 2 * PAIR_PANEL * (p + i));
    }
    for (; p < pairs; p++) add_pair(rows, sum, x + 2 * p, panel->x_stride, w + 2 * PAIR_PANEL * p);
    for (int r = 0; r < rows; r++) put_row(panel, y + r * panel->y_stride, sum[r][0], sum[r][1]);
}

/* All rows of a panel; `ahead` is the one that comes next. */
static void multiply_panel(const pair_panel_t *panel, const uint16_t *w, const uint16_t *ahead) {
    int64_t tiles = (panel->rows + PAIR_ROWS - 1) / PAIR_ROWS, bytes = 2 * PAIR_PANEL * panel->k;
    int64_t sharing = tiles < TILES_AHEAD ? tiles : TILES_AHEAD;
    int64_t whole = 4 * PAIR_PANEL * PAIRS_AT_ONCE, step = (whole / sharing + LINE - 1) / LINE * LINE;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t first = panel->rows * t / tiles, rows = panel->rows * (t + 1) / tiles - first;
        const char *from = (const char *)ahead + bytes * t / sharing;
        int64_t fetched = t < sharing ? step : 0;
#define PAIR_TILE(count) \
    case count: pair_tile(count, panel, first, w, from, fetched); break;
        switch (rows) {
            PAIR_TILE(1) PAIR_TILE(2) PAIR_TILE(3) PAIR_TILE(4) PAIR_TILE(5) PAIR_TILE(6) PAIR_TILE(7)
            PAIR_TILE(8) PAIR_TILE(9) PAIR_TILE(10) PAIR_TILE(11) PAIR_TILE(12) PAIR_TILE(13) PAIR_TILE(14)
        }
    }
}
#endif
