/* y [rows, n] = x [rows, k] . w^T, or added to what y holds; weights packed once. The README beside this file explains.

   Weights that are bf16 numbers are kept as such and widened, which is exact: half the bytes to read, and where few rows
   are computed reading them is all there is to it. So are rows of bf16 numbers, whose results are rounded once. */

#include "../numbers.h"

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12
#elif defined(__AVX__)
#define LANES 8
#define ROWS 6
#else
#define LANES 4
#define ROWS 4
#endif
#define PANEL (2 * LANES) /* outputs; ROWS x 2 sums, 2 loads and a broadcast fit into the registers */
#define DEPTH 256         /* inputs at a time: such a piece of a panel lies in the first-level cache */
#define ROWS_AT_ONCE 96   /* rows at a time: their pieces lie in the second-level cache */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits_t __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves_t __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

typedef struct {
    const float *x, *bias; /* [rows, k]; [n] or NULL */
    float *y;              /* [rows, n] */
    const char *packed;
    const uint16_t *narrow_x; /* bf16 rows, or NULL: x is then room for rows of k and of n in fp32, without gaps */
    uint16_t *narrow_y;       /* [rows, n], likewise without gaps */
    int64_t rows, k, n, x_stride, y_stride, is_bfloat16, adds;
    int64_t in_pairs; /* as pairs.h has it: rows are bf16, and x and y are not looked at */
    float *scratch;   /* [threads, DEPTH * PANEL] */
    int64_t num_threads;
    void *parallel; /* GOMP_parallel of the process, or NULL */
    int64_t next, arrived;
} job_t;

#include "pairs.h"

INLINE vec load(const float *from) { return *(const vec *)from; }

INLINE vec widen(const uint16_t *from) {
    return (vec)(__builtin_convertvector(*(const halves_t *)from, bits_t) << 16);
}

/* y [rows, PANEL] += x [rows, depth] . w [depth, PANEL] */
INLINE void tile(int rows, int is_bfloat16, int64_t depth, const float *x, int64_t x_stride, const void *w, float *y,
                 int64_t y_stride) {
    vec sum[ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) sum[r][j] = load(y + r * y_stride + j * LANES);
    for (int64_t i = 0; i < depth; i++) {
        vec left, right;
        if (is_bfloat16) {
            left = widen((const uint16_t *)w + i * PANEL);
            right = widen((const uint16_t *)w + i * PANEL + LANES);
        } else {
            left = load((const float *)w + i * PANEL);
            right = load((const float *)w + i * PANEL + LANES);
        }
        for (int r = 0; r < rows; r++) {
            sum[r][0] += x[r * x_stride + i] * left;
            sum[r][1] += x[r * x_stride + i] * right;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) *(vec *)(y + r * y_stride + j * LANES) = sum[r][j];
}

#define TILE(count) \
    case count: \
        if (is_bfloat16) tile(count, 1, depth, x, x_stride, w, y, y_stride); \
        else tile(count, 0, depth, x, x_stride, w, y, y_stride); \
        return;

static void tile_of(int64_t rows, int64_t is_bfloat16, int64_t depth, const float *x, int64_t x_stride, const void *w,
                    float *y, int64_t y_stride) {
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4)
#if ROWS > 4
        TILE(5) TILE(6)
#endif
#if ROWS > 6
        TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
    }
}

/* All rows [first, last) of a panel, from inputs [from, from + depth). */
static void panel_rows(const job_t *job, int64_t panel, int64_t from, int64_t depth, int64_t first, int64_t last,
                       const void *w, int64_t is_bfloat16) {
    int64_t tiles = (last - first + ROWS - 1) / ROWS, begin = panel * PANEL, width = least(PANEL, job->n - begin);
    for (int64_t t = 0; t < tiles; t++) {
        int64_t row = first + (last - first) * t / tiles, rows = first + (last - first) * (t + 1) / tiles - row;
        const float *x = job->x + row * job->x_stride + from;
        float *y = job->y + row * job->y_stride + begin;
        if (from == 0 && !job->adds)
            for (int64_t r = 0; r < rows; r++) {
                if (job->bias) memcpy(y + r * job->y_stride, job->bias + begin, sizeof(float) * width);
                else memset(y + r * job->y_stride, 0, sizeof(float) * width);
            }
        if (width == PANEL) {
            tile_of(rows, is_bfloat16, depth, x, job->x_stride, w, y, job->y_stride);
            continue;
        }
        float edge[ROWS * PANEL] = {0};
        for (int64_t r = 0; r < rows; r++) memcpy(edge + r * PANEL, y + r * job->y_stride, sizeof(float) * width);
        tile_of(rows, is_bfloat16, depth, x, job->x_stride, w, edge, PANEL);
        for (int64_t r = 0; r < rows; r++) memcpy(y + r * job->y_stride, edge + r * PANEL, sizeof(float) * width);
    }
}

/* Panels [begin, end), piece of the inputs by piece: in the order in which they are packed. */
static void run_panels(const job_t *job, int64_t begin, int64_t end, float *scratch) {
    int64_t padded = (job->n + PANEL - 1) / PANEL * PANEL, item = job->is_bfloat16 ? 2 : 4;
    for (int64_t first = 0; first < job->rows; first += ROWS_AT_ONCE) {
        int64_t last = least(first + ROWS_AT_ONCE, job->rows);
        for (int64_t from = 0; from < job->k; from += DEPTH) {
            int64_t depth = least(DEPTH, job->k - from);
            for (int64_t panel = begin; panel < end; panel++) {
                const char *w = job->packed + item * (from * padded + panel * depth * PANEL);
                if (job->is_bfloat16 && last - first > 2 * ROWS) { /* widened once for many tiles */
                    for (int64_t i = 0; i < depth * PANEL; i += LANES)
                        *(vec *)(scratch + i) = widen((const uint16_t *)w + i);
                    panel_rows(job, panel, from, depth, first, last, scratch, 0);
                } else {
                    panel_rows(job, panel, from, depth, first, last, w, job->is_bfloat16);
                }
            }
        }
    }
}

static void work(void *argument) {
    job_t *job = argument;
#if MULTIPLIES_PAIRS
    if (job->in_pairs) {
        take_panels_of_pairs(job);
        return;
    }
#endif
    int64_t thread = __atomic_fetch_add(&job->arrived, 1, __ATOMIC_RELAXED);
    if (thread >= job->num_threads) return;
    int64_t panels = (job->n + PANEL - 1) / PANEL, parts = job->num_threads == 1 ? 1 : least(panels, 4 * job->num_threads);
    for (int64_t part; (part = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < parts;) {
        run_panels(job, panels * part / parts, panels * (part + 1) / parts, job->scratch + thread * DEPTH * PANEL);
    }
}

int64_t neaptide_linear_job_bytes(void) { return sizeof(job_t); }

int64_t neaptide_linear_scratch_floats(void) { return DEPTH * PANEL; }

/* Outputs as packed: whole panels. */
int64_t neaptide_linear_padded(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* Whether bf16 rows of so many numbers are multiplied in pairs here. */
int64_t neaptide_linear_takes_pairs(int64_t k) {
#if MULTIPLIES_PAIRS
    return k % 2 == 0;
#else
    return (void)k, 0;
#endif
}

/* weight [n, k] bf16 -> packed as pairs.h has it. */
void neaptide_linear_pack_pairs(const uint16_t *weight, int64_t n, int64_t k, uint16_t *packed) {
    for (int64_t begin = 0; begin < n; begin += PANEL)
        for (int64_t i = 0; i < k; i += 2)
            for (int64_t j = begin; j < begin + PANEL; j++, packed += 2) {
                if (j < n) memcpy(packed, weight + j * k + i, 4);
                else memset(packed, 0, 4);
            }
}

/* weight [n, k] fp32 -> packed [k / DEPTH][n / PANEL][DEPTH][PANEL], fp32 or the upper halves. */
void neaptide_linear_pack(const float *weight, int64_t n, int64_t k, int64_t is_bfloat16, void *packed) {
    int64_t panels = (n + PANEL - 1) / PANEL, at = 0;
    for (int64_t from = 0; from < k; from += DEPTH)
        for (int64_t panel = 0; panel < panels; panel++)
            for (int64_t i = from; i < least(from + DEPTH, k); i++)
                for (int64_t j = panel * PANEL; j < (panel + 1) * PANEL; j++, at++) {
                    uint32_t bits = 0;
                    if (j < n) memcpy(&bits, weight + j * k + i, 4);
                    if (is_bfloat16) ((uint16_t *)packed)[at] = (uint16_t)(bits >> 16);
                    else ((uint32_t *)packed)[at] = bits;
                }
}

/* bf16 rows in fp32. */
static void widen_rows(const job_t *job, int64_t narrow_stride) {
    for (int64_t r = 0; r < job->rows; r++)
        for (int64_t i = 0; i < job->k; i++)
            ((float *)job->x)[r * job->k + i] = get(job->narrow_x, r * narrow_stride + i, 1);
}

/* Results as bf16 rows, or added to them. */
static void narrow_rows(const job_t *job, int64_t adds) {
    if (adds)
        for (int64_t i = 0; i < job->rows * job->n; i++) put(job->narrow_y, i, get(job->narrow_y, i, 1) + job->y[i], 1);
    else
        for (int64_t i = 0; i < job->rows * job->n; i++) put(job->narrow_y, i, job->y[i], 1);
}

static void multiply(job_t *job) {
    typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);
    parallel_t parallel = (parallel_t)job->parallel;
    job->next = job->arrived = 0;
    if (!parallel) job->num_threads = 1;
    if (job->num_threads == 1) work(job);
    else parallel(work, job, (unsigned)job->num_threads, 0);
}

void neaptide_linear(job_t *job) {
    if (!job->narrow_x || job->in_pairs) {
        multiply(job);
        return;
    }
    job_t wide = *job; /* the caller's stays as it is: it may be run again */
    wide.y = (float *)wide.x + wide.rows * wide.k;
    widen_rows(&wide, job->x_stride);
    wide.x_stride = wide.k;
    wide.adds = 0;
    multiply(&wide);
    narrow_rows(&wide, job->adds);
}
