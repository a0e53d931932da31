/* Vectors for attention.c: the machine's, if the compiler supports them; else a vector is one float, with the same
   code. */

#include "../numbers.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__GNUC__)
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 6
#define KEYS 8
#elif defined(__AVX__)
#define LANES 8
#define ROWS 3
#define KEYS 4
#else
#define LANES 4
#define ROWS 3
#define KEYS 4
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t bits_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words_t __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves_t __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
#define FETCH_ADD(counter) __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED)
#define PREFETCH(address) __builtin_prefetch(address, 0, 2) /* into the second-level cache */
#else
#define LANES 1
#define ROWS 3
#define KEYS 4
typedef float vec;
typedef int32_t bits_t;
#define FETCH_ADD(counter) ((*(counter))++)
#define PREFETCH(address) ((void)(address))
#endif
#define COLUMNS 4 /* ROWS x COLUMNS sums, COLUMNS loads and a broadcast fit into the registers */
#define COLUMNS_OF_SCORES 3 /* KEYS x COLUMNS_OF_SCORES sums fit likewise */

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec value) { *(vec *)to = value; }

INLINE float total(vec value) {
#if LANES == 1
    return value;
#else
    union { vec whole; vec4 quarters[LANES / 4]; } parts = {value};
    vec4 sum = parts.quarters[0];
    for (int i = 1; i < LANES / 4; i++) sum += parts.quarters[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
#endif
}

/* The largest lane. */
INLINE float greatest(vec value) {
    float lanes[LANES];
    store(lanes, value);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] < lanes[i + half] ? lanes[i + half] : lanes[i];
    return lanes[0];
}

/* LANES numbers, from element i. */
INLINE vec load_any(const void *from, int64_t i, int half) {
#if LANES == 1
    return get(from, i, half);
#else
    if (!half) return load((const float *)from + i);
    return (vec)(__builtin_convertvector(*(const halves_t *)((const uint16_t *)from + i), words_t) << 16);
#endif
}

INLINE vec vec_of_bits(bits_t bits) {
    vec value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE bits_t bits_of_vec(vec value) {
    bits_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE vec all(float value) { return (vec){0} + value; }

/* `yes` where a is less than b (never if either is NaN), else `no`. */
INLINE vec where_less(vec a, vec b, vec yes, vec no) {
#if LANES == 1
    return a < b ? yes : no;
#else
    bits_t less = a < b;
    return vec_of_bits((bits_of_vec(yes) & less) | (bits_of_vec(no) & ~less));
#endif
}

/* The larger number of each lane; b if either is NaN. */
INLINE vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX__)
    return _mm256_max_ps(a, b);
#else
    return where_less(b, a, a, b);
#endif
}

/* 2^x for x <= 0, with an error of one or two units in the last place. Less than 2^-126 becomes 2^-126, which is
   negligible next to a weight of 1. NaN stays NaN. */
INLINE vec exp2_(vec x) {
    vec bounded = larger(all(-126.0f), x);
    vec shifted = bounded + 12582912.0f; /* 1.5 * 2^23: the low bits hold the nearest integer */
    vec f = bounded - (shifted - 12582912.0f);
    vec power = all(1.54035304e-4f);
    power = power * f + 1.33335581e-3f;
    power = power * f + 9.61812911e-3f;
    power = power * f + 5.55041087e-2f;
    power = power * f + 2.40226507e-1f;
    power = power * f + 6.93147181e-1f;
    power = power * f + 1.0f;
    return power * vec_of_bits((bits_t)((bits_of_vec(shifted) - 0x4b400000 + 127) << 23));
}

INLINE float exp2_of(float x) {
    float lanes[LANES];
    store(lanes, exp2_(all(x)));
    return lanes[0];
}
