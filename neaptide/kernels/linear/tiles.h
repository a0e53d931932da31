/* Products of pairs.h on processors that multiply tiles (AMX_BF16). An instruction multiplies 16 rows of 32 inputs
   with the weights of 16 outputs, and adds to 256 sums in fp32. Panels are packed as there. For half of a panel's
   outputs, 16 of its units are a tile of weights whose rows are two LINEs apart. Inputs must fill whole tiles
   (`fits_tiles`); rows and outputs need not. */

#if MULTIPLIES_PAIRS && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define MULTIPLIES_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

#define SIDE 16                  /* rows of a tile, and its units */
#define BLOCK_ROWS (2 * SIDE)    /* x PANEL_OUTPUTS sums are four tiles, besides two of rows and two of weights */
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18              /* XFEATURE_XTILEDATA */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes_t;

/* Linux lets a process use tiles after it has asked. */
static int may_use_tiles(void) {
    static int answer; /* 0: not asked yet */
    if (!answer) answer = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? -1 : 1;
    return answer > 0;
}

static int fits_tiles(int64_t inputs) { return inputs % (2 * SIDE) == 0 && may_use_tiles(); }

/* Tiles 0 and 1 are sums of the upper rows, 2 and 3 of the lower ones; 4 and 5 are rows, 6 and 7 weights. */
static void shape_tiles(int64_t rows) {
    int64_t upper = least(rows, SIDE), lower = rows > SIDE ? rows - SIDE : 1;
    tile_shapes_t shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.row_bytes[t] = LINE;
        shapes.rows[t] = (uint8_t)(t >= 6 ? SIDE : t == 2 || t == 3 || t == 5 ? lower : upper);
    }
    _tile_loadconfig(&shapes);
}

/* Multiplies `rows` rows from `first` with the panel `w`, whose first output is `begin`, over all inputs. For every
   tile of inputs, `step` bytes from `ahead` are prefetched. */
INLINE void block_of_tiles(int has_lower, const panels_t *all, int64_t first, int64_t rows, int64_t begin, const char *w,
                           const char *ahead, int64_t step) {
    const char *x = all->x + first * all->x_stride, *below = x + SIDE * all->x_stride;
    float sums[BLOCK_ROWS][PANEL_OUTPUTS] __attribute__((aligned(LINE)));
    _tile_zero(0);
    _tile_zero(1);
    if (has_lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < all->units; i += SIDE, x += LINE, below += LINE, w += 2 * LINE * SIDE, ahead += step) {
        for (int64_t at = 0; at < step; at += LINE) __builtin_prefetch(ahead + at);
        _tile_loadd(6, w, 2 * LINE);
        _tile_loadd(7, w + LINE, 2 * LINE);
        _tile_loadd(4, x, all->x_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (has_lower) {
            _tile_loadd(5, below, all->x_stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], sizeof sums[0]);
    _tile_stored(1, sums[0] + LANES, sizeof sums[0]);
    if (has_lower) {
        _tile_stored(2, sums[SIDE], sizeof sums[0]);
        _tile_stored(3, sums[SIDE] + LANES, sizeof sums[0]);
    }
    for (int64_t r = 0; r < rows; r++)
        put_sums(all->job, first + r, begin, least(PANEL_OUTPUTS, all->outputs - begin), _mm512_load_ps(sums[r]),
                 _mm512_load_ps(sums[r] + LANES));
}

/* As `multiply_panel`. A panel that only one block reads is not prefetched: its tiles already come as fast as memory
   delivers, 32 lines at once, and prefetches would only compete with them. */
static void multiply_panel_of_tiles(const panels_t *all, int64_t begin, const char *w, const char *ahead) {
    int64_t blocks = (all->rows + BLOCK_ROWS - 1) / BLOCK_ROWS, bytes = 4 * PANEL_OUTPUTS * all->units, shaped = 0;
    int64_t sharing = least(blocks, TILES_AHEAD), whole = 4 * PANEL_OUTPUTS * SIDE;
    int64_t step = blocks == 1 ? 0 : (whole / sharing + LINE - 1) / LINE * LINE;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t first = b * BLOCK_ROWS, rows = least(BLOCK_ROWS, all->rows - first);
        const char *from = ahead + bytes * b / sharing;
        if (rows != shaped) shape_tiles(shaped = rows);
        if (rows > SIDE) block_of_tiles(1, all, first, rows, begin, w, from, b < sharing ? step : 0);
        else block_of_tiles(0, all, first, rows, begin, w, from, b < sharing ? step : 0);
    }
}
#endif
