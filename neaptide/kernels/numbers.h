/* Numbers of tensors that hold fp32 or (`half`) bf16, for the sources in all folders here. */

#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* The nearest bf16 number, with ties to even; NaN stays NaN. */
INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits = as_bits(value);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float get(const void *from, int64_t i, int half) {
    return half ? as_float((uint32_t)((const uint16_t *)from)[i] << 16) : ((const float *)from)[i];
}

INLINE void put(void *to, int64_t i, float value, int half) {
    if (half) ((uint16_t *)to)[i] = to_bfloat16(value);
    else ((float *)to)[i] = value;
}
