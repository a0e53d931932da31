/* Products of rows with a weight packed in panels of units. Four bytes of the weight are a unit: two bf16 numbers, or
   four of one byte. A weight is packed as [outputs / PANEL_OUTPUTS][units][PANEL_OUTPUTS] units; the last panel is
   padded. The including file must define the type PANEL_JOB.

   With SUM defined, `multiply_panel` is here, for instructions that multiply 512 bits of the weight with a row's unit
   and add to 16 sums. The including file must then also define the type SUM; `add_unit`, which adds the products of a
   row's unit with 16 of the weight to a SUM; and `put_sums`, which converts a row's two SUMs to results. */

#include <immintrin.h>

#define PANEL_OUTPUTS 32
#define UNITS_AT_ONCE 4
#define LINE 64
#define TILES_AHEAD 8 /* most tiles that share the prefetching of a panel, with a line or more for UNITS_AT_ONCE */

typedef struct {
    const PANEL_JOB *job; /* for `put_sums` */
    const char *x;        /* [rows, units of numbers], with x_stride bytes between rows */
    const char *packed;
    int64_t rows, units, x_stride, outputs;
} panels_t;

#if defined(SUM)
#define TILE_ROWS 14 /* x 2 sums, 2 loads and a broadcast fit into the 32 registers */

INLINE void add_units(int rows, SUM (*sum)[2], const char *x, int64_t x_stride, const char *w) {
    __m512i left = _mm512_loadu_si512(w), right = _mm512_loadu_si512(w + LINE);
    for (int r = 0; r < rows; r++) {
        int32_t unit;
        memcpy(&unit, x + r * x_stride, 4);
        __m512i everywhere = _mm512_set1_epi32(unit);
        sum[r][0] = add_unit(sum[r][0], everywhere, left);
        sum[r][1] = add_unit(sum[r][1], everywhere, right);
    }
}

/* Computes rows [first, first + rows) of the panel `w`, whose first output is `begin`, over all inputs.

   Meanwhile `step` bytes from `ahead` are prefetched for every UNITS_AT_ONCE. Reading a panel for the first time
   takes as long as multiplying it with ten rows, and the processor's own prefetching does not look beyond the
   current panel. */
INLINE void panel_tile(int rows, const panels_t *all, int64_t first, int64_t begin, const char *w, const char *ahead,
                       int64_t step) {
    const char *x = all->x + first * all->x_stride;
    int64_t i = 0, x_stride = all->x_stride;
    SUM sum[TILE_ROWS][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (SUM)_mm512_setzero_si512();
    for (; i + UNITS_AT_ONCE <= all->units; i += UNITS_AT_ONCE, ahead += step) {
        for (int64_t at = 0; at < step; at += LINE) __builtin_prefetch(ahead + at);
        for (int j = 0; j < UNITS_AT_ONCE; j++) add_units(rows, sum, x + 4 * (i + j), x_stride, w + 2 * LINE * (i + j));
    }
    for (; i < all->units; i++) add_units(rows, sum, x + 4 * i, x_stride, w + 2 * LINE * i);
    for (int r = 0; r < rows; r++)
        put_sums(all->job, first + r, begin, least(PANEL_OUTPUTS, all->outputs - begin), sum[r][0], sum[r][1]);
}

/* Computes all rows of a panel; `ahead` is the next panel. */
static void multiply_panel(const panels_t *all, int64_t begin, const char *w, const char *ahead) {
    int64_t tiles = (all->rows + TILE_ROWS - 1) / TILE_ROWS, bytes = 4 * PANEL_OUTPUTS * all->units;
    int64_t sharing = least(tiles, TILES_AHEAD);
    int64_t whole = 4 * PANEL_OUTPUTS * UNITS_AT_ONCE, step = (whole / sharing + LINE - 1) / LINE * LINE;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t first = all->rows * t / tiles, rows = all->rows * (t + 1) / tiles - first;
        const char *from = ahead + bytes * t / sharing;
        int64_t fetched = t < sharing ? step : 0;
#define PANEL_TILE(count) \
    case count: panel_tile(count, all, first, begin, w, from, fetched); break;
        switch (rows) {
            PANEL_TILE(1) PANEL_TILE(2) PANEL_TILE(3) PANEL_TILE(4) PANEL_TILE(5) PANEL_TILE(6) PANEL_TILE(7)
            PANEL_TILE(8) PANEL_TILE(9) PANEL_TILE(10) PANEL_TILE(11) PANEL_TILE(12) PANEL_TILE(13) PANEL_TILE(14)
        }
    }
}
#endif

typedef void (*multiply_t)(const panels_t *all, int64_t begin, const char *w, const char *ahead);

/* Takes parts of the panels, one after the other, until the threads together have done all; `next` starts at 0. */
INLINE void take_panels(const panels_t *all, multiply_t multiply, int64_t *next, int64_t num_threads) {
    int64_t panels = (all->outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS, bytes = 4 * PANEL_OUTPUTS * all->units;
    int64_t parts = num_threads == 1 ? 1 : least(panels, 4 * num_threads);
    for (int64_t part; (part = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < parts;) {
        int64_t end = panels * (part + 1) / parts;
        int64_t then = least(panels * (part + num_threads) / parts, panels - 1); /* likely this thread's next */
        for (int64_t p = panels * part / parts; p < end; p++) {
            const char *ahead = all->packed + bytes * (p + 1 < end ? p + 1 : then);
            multiply(all, p * PANEL_OUTPUTS, all->packed + bytes * p, ahead);
        }
    }
}
