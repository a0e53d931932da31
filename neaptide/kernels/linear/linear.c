/* y [rows, n] = x [rows, k] . w^T, or added to the content of y; weights are packed once. The README in this directory
   explains it.

   Weights that are bf16 numbers are kept as such and widened, which is exact. It halves the bytes to read, and
   reading them takes all the time for few rows. Rows of bf16 numbers are also widened, and their results are rounded
   once. */

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
#define DEPTH (12288 / PANEL) /* inputs at a time for many rows: 48 kB of stack hold that part of a panel widened */
#define ROWS_AT_ONCE 256      /* rows at a time: the caches hold them together with it */
#define TILES_ON_THE_WAY 3    /* up to this many tiles widen a weight separately; more share a copy */
#define INPUTS_AT_ONCE 4
#define AHEAD 2048 /* bytes of the weight that are fetched ahead of their first use */
#define LINE 64

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    const float *x, *bias; /* [rows, k]; [n] or NULL */
    float *y;              /* [rows, n] */
    const char *packed;
    const uint16_t *narrow_x; /* bf16 rows, or NULL: x is then room for rows of k and of n in fp32, without gaps */
    uint16_t *narrow_y;       /* [rows, n], likewise without gaps */
    int64_t rows, k, n, x_stride, y_stride, is_bfloat16, adds;
    int64_t in_pairs; /* as in pairs.h: rows are bf16, and x and y are not used */
    int64_t num_threads;
    void *parallel; /* GOMP_parallel of the process, or NULL */
    int64_t next;
} job_t;

#include "pairs.h"

INLINE vec load(const float *from) { return *(const vec *)from; }

/* Loads the weights of one input for a panel's outputs. bf16 numbers of the left and the right half alternate, so
   that a shift and a mask convert all of them to fp32. */
INLINE void load_panel(int is_bfloat16, const char *w, vec *left, vec *right) {
    if (is_bfloat16) {
        bits_t both = *(const bits_t *)w;
        *left = (vec)(both << 16);
        *right = (vec)(both & 0xffff0000u);
    } else {
        *left = load((const float *)w);
        *right = load((const float *)w + LANES);
    }
}

/* y [rows, PANEL] = start [rows, PANEL] + x [rows, depth] . w [depth, PANEL]

   Meanwhile `fetched` bytes of the weight, AHEAD of those in use, are prefetched for every INPUTS_AT_ONCE. A product
   of few rows takes as long as reading its weight, and the processor's own prefetching does not reach far enough. */
INLINE void tile(int rows, int is_bfloat16, int64_t depth, const float *x, int64_t x_stride, const char *w,
                 int64_t fetched, const float *start, int64_t start_stride, float *y, int64_t y_stride) {
    const int64_t input = PANEL * (is_bfloat16 ? 2 : 4);
    vec sum[ROWS][2], left, right;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) sum[r][j] = load(start + r * start_stride + j * LANES);
#define ADD_INPUT(at) \
    load_panel(is_bfloat16, w + (at) * input, &left, &right); \
    for (int r = 0; r < rows; r++) { \
        sum[r][0] += x[r * x_stride + (at)] * left; \
        sum[r][1] += x[r * x_stride + (at)] * right; \
    }
    int64_t i = 0;
    for (; i + INPUTS_AT_ONCE <= depth; i += INPUTS_AT_ONCE) {
        for (int64_t at = 0; at < fetched; at += LINE) __builtin_prefetch(w + i * input + AHEAD + at);
        for (int j = 0; j < INPUTS_AT_ONCE; j++) { ADD_INPUT(i + j) }
    }
    for (; i < depth; i++) { ADD_INPUT(i) }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) *(vec *)(y + r * y_stride + j * LANES) = sum[r][j];
}

#define TILE(count) \
    case count: \
        if (is_bfloat16) tile(count, 1, depth, x, x_stride, w, fetched, start, start_stride, y, y_stride); \
        else tile(count, 0, depth, x, x_stride, w, fetched, start, start_stride, y, y_stride); \
        return;

static void tile_of(int64_t rows, int64_t is_bfloat16, int64_t depth, const float *x, int64_t x_stride, const char *w,
                    int64_t fetched, const float *start, int64_t start_stride, float *y, int64_t y_stride) {
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

/* Computes rows [first, last) of a panel from inputs [from, from + depth). `w` are their weights, of the type given
   by `is_bfloat16`. */
static void panel_rows(const job_t *job, int64_t panel, int64_t from, int64_t depth, int64_t first, int64_t last,
                       const char *w, int64_t is_bfloat16) {
    static const float zeros[PANEL];
    int64_t tiles = (last - first + ROWS - 1) / ROWS, begin = panel * PANEL, width = least(PANEL, job->n - begin);
    int is_sum = from || job->adds; /* to the content of y */
    for (int64_t t = 0; t < tiles; t++) {
        int64_t row = first + (last - first) * t / tiles, rows = first + (last - first) * (t + 1) / tiles - row;
        const float *x = job->x + row * job->x_stride + from;
        float *y = job->y + row * job->y_stride + begin;
        const float *start = is_sum ? y : job->bias ? job->bias + begin : zeros;
        int64_t start_stride = is_sum ? job->y_stride : 0;
        int64_t fetched = t || (job->is_bfloat16 && !is_bfloat16) ? 0 : INPUTS_AT_ONCE * PANEL * (is_bfloat16 ? 2 : 4);
        if (width == PANEL) {
            tile_of(rows, is_bfloat16, depth, x, job->x_stride, w, fetched, start, start_stride, y, job->y_stride);
            continue;
        }
        float edge[ROWS * PANEL] = {0};
        for (int64_t r = 0; r < rows; r++) memcpy(edge + r * PANEL, start + r * start_stride, sizeof(float) * width);
        tile_of(rows, is_bfloat16, depth, x, job->x_stride, w, fetched, edge, PANEL, edge, PANEL);
        for (int64_t r = 0; r < rows; r++) memcpy(y + r * job->y_stride, edge + r * PANEL, sizeof(float) * width);
    }
}

/* Widens weights to fp32, for many tiles. */
static void widen(const char *w, int64_t depth, float *wide) {
    for (int64_t i = 0; i < depth; i++, w += 2 * PANEL, wide += PANEL) {
        __builtin_prefetch(w + AHEAD);
        vec left, right;
        load_panel(1, w, &left, &right);
        *(vec *)wide = left;
        *(vec *)(wide + LANES) = right;
    }
}

/* Computes panels [begin, end), each over all its inputs. */
static void run_panels(const job_t *job, int64_t begin, int64_t end) {
    float wide[DEPTH * PANEL];
    int64_t input = PANEL * (job->is_bfloat16 ? 2 : 4);
    for (int64_t first = 0; first < job->rows; first += ROWS_AT_ONCE) {
        int64_t last = least(first + ROWS_AT_ONCE, job->rows);
        if (!job->is_bfloat16 || last - first <= TILES_ON_THE_WAY * ROWS) {
            for (int64_t p = begin; p < end; p++)
                panel_rows(job, p, 0, job->k, first, last, job->packed + input * job->k * p, job->is_bfloat16);
            continue;
        }
        for (int64_t p = begin; p < end; p++)
            for (int64_t from = 0; from < job->k; from += DEPTH) {
                int64_t depth = least(DEPTH, job->k - from);
                widen(job->packed + input * (job->k * p + from), depth, wide);
                panel_rows(job, p, from, depth, first, last, (const char *)wide, 0);
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
    int64_t panels = (job->n + PANEL - 1) / PANEL, parts = job->num_threads == 1 ? 1 : least(panels, 4 * job->num_threads);
    for (int64_t part; (part = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < parts;)
        run_panels(job, panels * part / parts, panels * (part + 1) / parts);
}

int64_t neaptide_linear_job_bytes(void) { return sizeof(job_t); }

/* Number of outputs as packed, in whole panels. */
int64_t neaptide_linear_padded(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* Whether bf16 rows of k numbers are multiplied in pairs on this processor. */
int64_t neaptide_linear_takes_pairs(int64_t k) {
#if MULTIPLIES_PAIRS
    return k % 2 == 0;
#else
    return (void)k, 0;
#endif
}

/* weight [n, k] bf16 -> packed as in pairs.h. */
void neaptide_linear_pack_pairs(const uint16_t *weight, int64_t n, int64_t k, uint16_t *packed) {
    for (int64_t begin = 0; begin < n; begin += PANEL)
        for (int64_t i = 0; i < k; i += 2)
            for (int64_t j = begin; j < begin + PANEL; j++, packed += 2) {
                if (j < n) memcpy(packed, weight + j * k + i, 4);
                else memset(packed, 0, 4);
            }
}

/* weight [n, k] fp32 -> packed [n / PANEL][k][PANEL], in fp32 or as the upper halves that `load_panel` reads. */
void neaptide_linear_pack(const float *weight, int64_t n, int64_t k, int64_t is_bfloat16, void *packed) {
    int64_t at = 0;
    for (int64_t begin = 0; begin < n; begin += PANEL)
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < PANEL; j++, at++) {
                int64_t output = begin + (is_bfloat16 ? j / 2 + j % 2 * LANES : j);
                uint32_t bits = 0;
                if (output < n) memcpy(&bits, weight + output * k + i, 4);
                if (is_bfloat16) ((uint16_t *)packed)[at] = (uint16_t)(bits >> 16);
                else ((uint32_t *)packed)[at] = bits;
            }
}

/* Widens bf16 rows to fp32. */
static void widen_rows(const job_t *job, int64_t narrow_stride) {
    for (int64_t r = 0; r < job->rows; r++)
        for (int64_t i = 0; i < job->k; i++)
            ((float *)job->x)[r * job->k + i] = get(job->narrow_x, r * narrow_stride + i, 1);
}

/* Rounds results to bf16 rows, or adds them to those. */
static void narrow_rows(const job_t *job, int64_t adds) {
    if (adds)
        for (int64_t i = 0; i < job->rows * job->n; i++) put(job->narrow_y, i, get(job->narrow_y, i, 1) + job->y[i], 1);
    else
        for (int64_t i = 0; i < job->rows * job->n; i++) put(job->narrow_y, i, job->y[i], 1);
}

static void multiply(job_t *job) {
    typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);
    parallel_t parallel = (parallel_t)job->parallel;
    job->next = 0;
    if (!parallel) job->num_threads = 1;
    if (job->num_threads == 1) work(job);
    else parallel(work, job, (unsigned)job->num_threads, 0);
}

void neaptide_linear(job_t *job) {
    if (!job->narrow_x || job->in_pairs) {
        multiply(job);
        return;
    }
    job_t wide = *job; /* a copy, since the caller's job may run again */
    wide.y = (float *)wide.x + wide.rows * wide.k;
    widen_rows(&wide, job->x_stride);
    wide.x_stride = wide.k;
    wide.adds = 0;
    multiply(&wide);
    narrow_rows(&wide, job->adds);
}
