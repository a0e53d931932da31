/* Quantizes rows to 8-bit numbers, and converts sums of their products back. The README in this directory has the
   maths. */

#include <math.h>

#include "../numbers.h"

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define IN_LANES 1 /* gcc would keep the lanes' results in memory, four times as slow */
#include <immintrin.h>
#endif

#define LANES 16
#define LEAST_SCALE 1e-30f   /* for a row of zeros: its inverse must be a number */
#define ROUNDS 12582912.0f   /* 1.5 * 2^23: adding and subtracting it rounds to the nearest integer */
#define ELEMENTS_AT_ONCE 16384 /* per thread */

typedef struct {
    const char *x;  /* to quantize: [rows, size], x_stride elements between rows; else the sums, [rows, size] fp32 */
    char *y;        /* quantized: u8, else the type of x; [rows, size], y_stride elements between rows */
    float *scales;  /* [rows] */
    float *zeros;   /* [rows] integers from 0 to 255 */
    const float *of_ones, *bias; /* [size]: products of a row of ones with the weight; added bias, or NULL */
    int64_t rows, size, x_stride, y_stride, is_bfloat16, adds, num_threads;
    void *parallel; /* GOMP_parallel of the process, or NULL */
    int64_t next;
} job_t;

typedef struct {
    float low, high, none; /* least and largest number or 0; NaN if one is NaN */
} range_t;

#if IN_LANES
INLINE __mmask16 lanes_left(int64_t left) { return left < LANES ? (__mmask16)((1 << left) - 1) : 0xffff; }

INLINE __m512 get_lanes(const char *x, int64_t i, __mmask16 mask, int half) {
    if (!half) return _mm512_maskz_loadu_ps(mask, (const float *)x + i);
    __m256i numbers = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

INLINE range_t range_of(const char *x, int64_t size, int half) {
    __m512 zero = _mm512_setzero_ps(), low = zero, high = zero, none = zero;
    for (int64_t i = 0; i < size; i += LANES) {
        __m512 value = get_lanes(x, i, lanes_left(size - i), half);
        low = _mm512_min_ps(low, value);
        high = _mm512_max_ps(high, value);
        none = _mm512_fmadd_ps(value, zero, none);
    }
    return (range_t){_mm512_reduce_min_ps(low), _mm512_reduce_max_ps(high), _mm512_reduce_add_ps(none)};
}

INLINE void round_row(const char *x, uint8_t *y, int64_t size, float inverse, float at, int half) {
    __m512 rounds = _mm512_set1_ps(ROUNDS), zero = _mm512_setzero_ps(), most = _mm512_set1_ps(255.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        __mmask16 mask = lanes_left(size - i);
        __m512 value = _mm512_fmadd_ps(get_lanes(x, i, mask, half), _mm512_set1_ps(inverse), rounds);
        value = _mm512_add_ps(_mm512_sub_ps(value, rounds), _mm512_set1_ps(at));
        value = _mm512_min_ps(_mm512_max_ps(value, zero), most);
        _mm512_mask_cvtepi32_storeu_epi8(y + i, mask, _mm512_cvttps_epi32(value));
    }
}
#else
INLINE range_t range_of(const char *x, int64_t size, int half) {
    float low[LANES] = {0}, high[LANES] = {0}, none[LANES] = {0};
    for (int64_t first = 0; first < size; first += LANES)
        for (int lane = 0; lane < least(LANES, size - first); lane++) {
            float value = get(x, first + lane, half);
            low[lane] = value < low[lane] ? value : low[lane];
            high[lane] = value > high[lane] ? value : high[lane];
            none[lane] += value * 0.0f;
        }
    for (int lane = 1; lane < LANES; lane++) {
        low[0] = low[lane] < low[0] ? low[lane] : low[0];
        high[0] = high[lane] > high[0] ? high[lane] : high[0];
        none[0] += none[lane];
    }
    return (range_t){low[0], high[0], none[0]};
}

INLINE void round_row(const char *x, uint8_t *y, int64_t size, float inverse, float at, int half) {
    for (int64_t j = 0; j < size; j++) {
        float value = (get(x, j, half) * inverse + ROUNDS) - ROUNDS + at;
        value = value < 0.0f ? 0.0f : value > 255.0f ? 255.0f : value;
        y[j] = (uint8_t)(int32_t)value;
    }
}
#endif

/* The range includes zero, so that zero is exact. A row with NaN gets the scale NaN. */
INLINE void quantize_row(const char *x, uint8_t *y, int64_t size, float *scale, float *zero, int half) {
    range_t range = range_of(x, size, half);
    if (range.none != 0.0f) { /* NaN */
        *scale = range.none;
        *zero = 0.0f;
        memset(y, 0, size);
        return;
    }
    float step = (range.high - range.low) * (1.0f / 255.0f);
    if (step < LEAST_SCALE) step = LEAST_SCALE;
    float inverse = 1.0f / step, at = (-range.low * inverse + ROUNDS) - ROUNDS;
    round_row(x, y, size, inverse, at, half);
    *scale = step;
    *zero = at;
}

INLINE void restore_row(const float *sums, char *y, const job_t *job, float scale, float zero, int half) {
    for (int64_t j = 0; j < job->size; j++) {
        float value = scale * (sums[j] - zero * job->of_ones[j]);
        if (job->bias) value += job->bias[j];
        if (job->adds) value += get(y, j, half);
        put(y, j, value, half);
    }
}

INLINE void quantize_rows(const job_t *job, int64_t first, int64_t last, int half) {
    int64_t bytes = half ? 2 : 4;
    for (int64_t row = first; row < last; row++)
        quantize_row(job->x + row * job->x_stride * bytes, (uint8_t *)job->y + row * job->y_stride, job->size,
                     job->scales + row, job->zeros + row, half);
}

INLINE void restore_rows(const job_t *job, int64_t first, int64_t last, int half) {
    int64_t bytes = half ? 2 : 4;
    for (int64_t row = first; row < last; row++)
        restore_row((const float *)job->x + row * job->size, job->y + row * job->y_stride * bytes, job,
                    job->scales[row], job->zeros[row], half);
}

static int64_t rows_at_once(const job_t *job) {
    int64_t rows = ELEMENTS_AT_ONCE / job->size;
    return rows < 1 ? 1 : rows;
}

#define WORK(name, of_rows) \
    static void name(void *argument) { \
        job_t *job = argument; \
        int64_t step = rows_at_once(job), first; \
        while ((first = __atomic_fetch_add(&job->next, step, __ATOMIC_RELAXED)) < job->rows) { \
            int64_t last = first + step < job->rows ? first + step : job->rows; \
            if (job->is_bfloat16) of_rows(job, first, last, 1); \
            else of_rows(job, first, last, 0); \
        } \
    }

WORK(quantize, quantize_rows)
WORK(restore, restore_rows)

static void run(void (*work)(void *), job_t *job, int64_t alone) {
    typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);
    parallel_t parallel = (parallel_t)job->parallel;
    job->next = 0;
    if (!parallel || job->num_threads == 1 || alone) work(job);
    else parallel(work, job, (unsigned)job->num_threads, 0);
}

int64_t neaptide_quantize_job_bytes(void) { return sizeof(job_t); }

void neaptide_quantize_rows(job_t *job) { run(quantize, job, job->rows <= rows_at_once(job)); }

void neaptide_restore_rows(job_t *job) { run(restore, job, job->rows <= rows_at_once(job)); }

#include "bytes.h"
