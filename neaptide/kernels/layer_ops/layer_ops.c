/* What a decoder layer computes between its products, in fp32: each in one pass over its rows. Loops are written so that
   compilers make vectors of them; sums are kept by lane, because compilers must not reorder those of one variable. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

typedef struct {
    const float *x, *weight; /* of a norm: [rows, size], [size]; of a gate: [rows, 2 * size], none */
    float *y;                /* [rows, size] */
    int64_t rows, size, x_stride;
    float epsilon;
} rows_t;

typedef struct {
    float *x;            /* [tokens, heads, dim], a token every x_stride elements */
    const float *weight; /* [dim] */
    int64_t tokens, heads, dim, x_stride;
    float epsilon;
} heads_t;

typedef struct {
    float *qkv;            /* [tokens, heads + 2 * kv_heads, dim], rotated in place but for the values */
    const float *rotation; /* [tokens, dim / 2] complex */
    const int64_t *slots;  /* [tokens] */
    float *cache;          /* [slots, 2 * kv_heads, dim] */
    int64_t tokens, heads, kv_heads, dim;
} store_t;

static inline float scale_of(const float *x, int64_t size, float epsilon) {
    float lanes[LANES] = {0}, sum = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += x[i + lane] * x[i + lane];
    for (; i < size; i++) sum += x[i] * x[i];
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return 1.0f / sqrtf(sum / size + epsilon);
}

/* x / sqrt(mean(x^2) + epsilon) * weight */
void neaptide_rms_norm(const rows_t *job) {
    for (int64_t row = 0; row < job->rows; row++) {
        const float *x = job->x + row * job->x_stride;
        float *y = job->y + row * job->size, scale = scale_of(x, job->size, job->epsilon);
        for (int64_t j = 0; j < job->size; j++) y[j] = x[j] * scale * job->weight[j];
    }
}

/* The same for each head, in place. */
void neaptide_norm_heads(const heads_t *job) {
    for (int64_t token = 0; token < job->tokens; token++)
        for (int64_t head = 0; head < job->heads; head++) {
            float *x = job->x + token * job->x_stride + head * job->dim, scale = scale_of(x, job->dim, job->epsilon);
            for (int64_t j = 0; j < job->dim; j++) x[j] = x[j] * scale * job->weight[j];
        }
}

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* e^x to the last place or two, between e^-87 and e^88; NaN stays NaN. */
static inline float exp_(float x) {
    float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float shifted = bounded * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the low bits hold the nearest integer */
    float n = shifted - 12582912.0f;
    float f = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    float power = 1.38888889e-3f;
    power = power * f + 8.33333333e-3f;
    power = power * f + 4.16666667e-2f;
    power = power * f + 1.66666667e-1f;
    power = power * f + 0.5f;
    power = power * f + 1.0f;
    power = power * f + 1.0f;
    return power * as_float((as_bits(shifted) << 23) + 0x3f800000u);
}

/* gate / (1 + e^-gate) * up */
void neaptide_silu_multiply(const rows_t *job) {
    for (int64_t row = 0; row < job->rows; row++) {
        const float *gate = job->x + row * job->x_stride, *up = gate + job->size;
        float *y = job->y + row * job->size;
        for (int64_t i = 0; i < job->size; i++) y[i] = gate[i] / (1.0f + exp_(-gate[i])) * up[i];
    }
}

/* Rotates interleaved pairs of queries and keys, and writes keys and values to the tokens' slots. */
void neaptide_rotate_and_store(const store_t *job) {
    int64_t dim = job->dim, width = (job->heads + 2 * job->kv_heads) * dim, stored = 2 * job->kv_heads * dim;
    for (int64_t token = 0; token < job->tokens; token++) {
        float *heads = job->qkv + token * width;
        const float *rotation = job->rotation + token * dim;
        for (int64_t head = 0; head < job->heads + job->kv_heads; head++)
            for (int64_t i = 0; i < dim; i += 2) {
                float *pair = heads + head * dim + i, real = pair[0], imaginary = pair[1];
                pair[0] = real * rotation[i] - imaginary * rotation[i + 1];
                pair[1] = real * rotation[i + 1] + imaginary * rotation[i];
            }
        memcpy(job->cache + job->slots[token] * stored, heads + job->heads * dim, sizeof(float) * stored);
    }
}
