/* Products of rows with 8-bit weights: quantizes the rows, multiplies them and converts the sums back, in one call. The
   README in this directory has the maths. Here are the rows; bytes.h and words.h have the products. */

#include <math.h>

#include "../numbers.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MULTIPLIES_BYTES 1
typedef uint8_t number_t; /* of a row */
#else
typedef int16_t number_t;
#if defined(__AVX2__) && defined(__FMA__)
#define MULTIPLIES_WORDS 1
#endif
#endif

#if MULTIPLIES_BYTES || MULTIPLIES_WORDS
#include <immintrin.h>
#endif

#define LEAST_SCALE 1e-30f   /* for a row of zeros: its inverse must be a number */
#define ROUNDS 12582912.0f   /* 1.5 * 2^23: adding and subtracting it rounds to the nearest integer */
#define ELEMENTS_AT_ONCE 16384 /* per thread */

typedef struct {
    const char *x;     /* [rows, size], x_stride elements between rows */
    char *y;           /* quantized: [rows, size] numbers, y_stride bytes between rows */
    float *scales;     /* [rows] */
    float *zeros;      /* [rows] integers from 0 to 255 */
    const float *bias; /* of the product, or NULL */
    int64_t rows, size, x_stride, y_stride, is_bfloat16, adds, num_threads;
    void *parallel; /* GOMP_parallel of the process, or NULL */
    int64_t next;
} job_t;

typedef struct {
    float low, high, none; /* least and largest number or 0; NaN if one is NaN */
} range_t;

/* In intrinsics, because gcc would keep the lanes' results in memory, four times as slow. */
#if MULTIPLIES_BYTES
#define LANES 16

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
#elif MULTIPLIES_WORDS
#define LANES 8

INLINE __m256 get_lanes(const char *x, int64_t i, int64_t size, int half) {
    if (size - i < LANES) {
        float left[LANES] = {0};
        for (int64_t j = 0; j < size - i; j++) left[j] = get(x, i + j, half);
        return _mm256_loadu_ps(left);
    }
    if (!half) return _mm256_loadu_ps((const float *)x + i);
    __m128i numbers = _mm_loadu_si128((const __m128i *)((const uint16_t *)x + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers), 16));
}

INLINE range_t range_of(const char *x, int64_t size, int half) {
    __m256 zero = _mm256_setzero_ps(), low = zero, high = zero, none = zero;
    for (int64_t i = 0; i < size; i += LANES) {
        __m256 value = get_lanes(x, i, size, half);
        low = _mm256_min_ps(low, value);
        high = _mm256_max_ps(high, value);
        none = _mm256_fmadd_ps(value, zero, none);
    }
    float lows[LANES], highs[LANES], nones[LANES];
    _mm256_storeu_ps(lows, low);
    _mm256_storeu_ps(highs, high);
    _mm256_storeu_ps(nones, none);
    range_t range = {0.0f, 0.0f, 0.0f};
    for (int lane = 0; lane < LANES; lane++) {
        range.low = lows[lane] < range.low ? lows[lane] : range.low;
        range.high = highs[lane] > range.high ? highs[lane] : range.high;
        range.none += nones[lane];
    }
    return range;
}

/* Writes up to a whole LANES of numbers after the last one. */
INLINE void round_row(const char *x, int16_t *y, int64_t size, float inverse, float at, int half) {
    __m256 rounds = _mm256_set1_ps(ROUNDS), zero = _mm256_setzero_ps(), most = _mm256_set1_ps(255.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        __m256 value = _mm256_fmadd_ps(get_lanes(x, i, size, half), _mm256_set1_ps(inverse), rounds);
        value = _mm256_add_ps(_mm256_sub_ps(value, rounds), _mm256_set1_ps(at));
        __m256i whole = _mm256_cvttps_epi32(_mm256_min_ps(_mm256_max_ps(value, zero), most));
        __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storeu_si128((__m128i *)(y + i), words);
    }
}
#endif

#if MULTIPLIES_BYTES || MULTIPLIES_WORDS
/* The range includes zero, so that zero is exact. A row with NaN gets the scale NaN. */
INLINE void quantize_row(const char *x, number_t *y, int64_t size, float *scale, float *zero, int half) {
    range_t range = range_of(x, size, half);
    if (range.none != 0.0f) { /* NaN */
        *scale = range.none;
        *zero = 0.0f;
        memset(y, 0, sizeof(number_t) * size);
        return;
    }
    float step = (range.high - range.low) * (1.0f / 255.0f);
    if (step < LEAST_SCALE) step = LEAST_SCALE;
    float inverse = 1.0f / step, at = (-range.low * inverse + ROUNDS) - ROUNDS;
    round_row(x, y, size, inverse, at, half);
    *scale = step;
    *zero = at;
}

INLINE void quantize_rows(const job_t *job, int64_t first, int64_t last, int half) {
    int64_t bytes = half ? 2 : 4;
    for (int64_t row = first; row < last; row++)
        quantize_row(job->x + row * job->x_stride * bytes, (number_t *)(job->y + row * job->y_stride), job->size,
                     job->scales + row, job->zeros + row, half);
}

static int64_t rows_at_once(const job_t *job) {
    int64_t rows = ELEMENTS_AT_ONCE / job->size;
    return rows < 1 ? 1 : rows;
}

static void quantize(void *argument) {
    job_t *job = argument;
    int64_t step = rows_at_once(job), first;
    while ((first = __atomic_fetch_add(&job->next, step, __ATOMIC_RELAXED)) < job->rows) {
        int64_t last = least(first + step, job->rows);
        if (job->is_bfloat16) quantize_rows(job, first, last, 1);
        else quantize_rows(job, first, last, 0);
    }
}

static void run(void (*work)(void *), job_t *job, int64_t alone) {
    typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);
    parallel_t parallel = (parallel_t)job->parallel;
    job->next = 0;
    if (!parallel || job->num_threads == 1 || alone) work(job);
    else parallel(work, job, (unsigned)job->num_threads, 0);
}
#endif

#include "product.h"
