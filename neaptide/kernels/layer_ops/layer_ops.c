/* The parts of a decoder layer between its products, computed in fp32 for any type of its tensors, each in one pass
   over its rows. Loops are written so that compilers vectorize them. Sums are kept per lane, because compilers must not
   reorder those of one variable.

   Every function is compiled for fp32 and for bf16 tensors (`half`). Threads share the rows. */

#include <math.h>

#include "../numbers.h"

#define LANES 16
#define NUMBERS_ALONE 16384 /* for fewer, one thread needs less time than waking the others */

typedef struct {
    void *parallel; /* GOMP_parallel of the process, or NULL */
    int64_t count;
} threads_t;

typedef struct {
    const char *x, *weight; /* of a norm: [rows, size], [size]; of a gate: [rows, 2 * size], none */
    char *y;                /* [rows, size] */
    int64_t rows, size, x_stride, is_bfloat16;
    threads_t threads;
    float epsilon;
} rows_t;

typedef struct {
    char *x;            /* [tokens, heads, dim], a token every x_stride elements */
    const char *weight; /* [dim] */
    int64_t tokens, heads, dim, x_stride, is_bfloat16;
    threads_t threads;
    float epsilon;
} heads_t;

typedef struct {
    char *qkv;             /* [tokens, heads + 2 * kv_heads, dim], rotated in place except the values */
    const float *rotation; /* [tokens, dim / 2] complex, or NULL: nothing is rotated */
    const int64_t *slots;  /* [tokens] */
    char *cache;           /* [slots, 2 * kv_heads, dim] */
    int64_t tokens, heads, kv_heads, dim, is_bfloat16;
    threads_t threads;
} store_t;

typedef void (*some_rows_t)(const void *job, int64_t first, int64_t last);

typedef struct {
    some_rows_t some_rows;
    const void *job;
    int64_t rows, parts, next;
} shared_t;

static void take_parts(void *argument) {
    shared_t *shared = argument;
    for (int64_t part; (part = __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED)) < shared->parts;)
        shared->some_rows(shared->job, shared->rows * part / shared->parts, shared->rows * (part + 1) / shared->parts);
}

/* Shares rows of `size` numbers each among threads. There are several parts per thread, so that the others wait less
   for one that has lost its core. */
static void share(some_rows_t some_rows, const void *job, int64_t rows, int64_t size, const threads_t *threads) {
    typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);
    shared_t shared = {some_rows, job, rows, 4 * threads->count, 0};
    if (threads->count == 1 || !threads->parallel || rows * size < NUMBERS_ALONE) some_rows(job, 0, rows);
    else ((parallel_t)threads->parallel)(take_parts, &shared, (unsigned)threads->count, 0);
}

/* Defines the part of a thread, for a function that is compiled for fp32 and for bf16. */
#define IN_BOTH_TYPES(name, of_type, job_t)                               \
    static void name(const void *argument, int64_t first, int64_t last) { \
        const job_t *job = argument;                                      \
        if (job->is_bfloat16) of_type(job, first, last, 1);               \
        else of_type(job, first, last, 0);                                \
    }

INLINE int64_t item(int half) { return half ? 2 : 4; }

/* x / sqrt(mean(x^2) + epsilon) * weight; y may be x. */
INLINE void norm(const char *x, const char *weight, char *y, int64_t size, float epsilon, int half) {
    float lanes[LANES] = {0}, sum = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float value = get(x, i + lane, half);
            lanes[lane] += value * value;
        }
    for (; i < size; i++) sum += get(x, i, half) * get(x, i, half);
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    float scale = 1.0f / sqrtf(sum / size + epsilon);
    for (int64_t j = 0; j < size; j++) put(y, j, get(x, j, half) * scale * get(weight, j, half), half);
}

INLINE void norm_rows(const rows_t *job, int64_t first, int64_t last, int half) {
    for (int64_t row = first; row < last; row++)
        norm(job->x + row * job->x_stride * item(half), job->weight, job->y + row * job->size * item(half), job->size,
             job->epsilon, half);
}

IN_BOTH_TYPES(norm_some, norm_rows, rows_t)

void neaptide_rms_norm(const rows_t *job) { share(norm_some, job, job->rows, job->size, &job->threads); }

/* The same for each head, in place. */
INLINE void norm_heads(const heads_t *job, int64_t first, int64_t last, int half) {
    for (int64_t token = first; token < last; token++)
        for (int64_t head = 0; head < job->heads; head++) {
            char *x = job->x + (token * job->x_stride + head * job->dim) * item(half);
            norm(x, job->weight, x, job->dim, job->epsilon, half);
        }
}

IN_BOTH_TYPES(norm_some_heads, norm_heads, heads_t)

void neaptide_norm_heads(const heads_t *job) {
    share(norm_some_heads, job, job->tokens, job->heads * job->dim, &job->threads);
}

/* `yes` where `a` is less than `b` (never if either is NaN), else `no`. It selects by bits: compilers for CPUs
   without masks do not vectorize a loop with a real choice. */
INLINE float where_less(float a, float b, float yes, float no) {
    uint32_t mask = -(uint32_t)(a < b);
    return as_float((as_bits(yes) & mask) | (as_bits(no) & ~mask));
}

/* e^x with an error of one or two units in the last place, for x between -87 and 88; NaN stays NaN. */
INLINE float exp_(float x) {
    float bounded = where_less(x, -87.0f, -87.0f, where_less(88.0f, x, 88.0f, x));
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
INLINE void gate_rows(const rows_t *job, int64_t first, int64_t last, int half) {
    for (int64_t row = first; row < last; row++) {
        const char *gates = job->x + row * job->x_stride * item(half), *ups = gates + job->size * item(half);
        char *y = job->y + row * job->size * item(half);
        for (int64_t i = 0; i < job->size; i++) {
            float gate = get(gates, i, half);
            put(y, i, gate / (1.0f + exp_(-gate)) * get(ups, i, half), half);
        }
    }
}

IN_BOTH_TYPES(gate_some, gate_rows, rows_t)

void neaptide_silu_multiply(const rows_t *job) { share(gate_some, job, job->rows, job->size, &job->threads); }

/* Rotates interleaved pairs of queries and keys, if there is a rotation, and writes keys and values to the tokens'
   slots. */
INLINE void rotate_and_store(const store_t *job, int64_t first, int64_t last, int half) {
    int64_t dim = job->dim, width = (job->heads + 2 * job->kv_heads) * dim, stored = 2 * job->kv_heads * dim;
    int64_t rotated = job->rotation ? job->heads + job->kv_heads : 0;
    for (int64_t token = first; token < last; token++) {
        char *heads = job->qkv + token * width * item(half);
        for (int64_t head = 0; head < rotated; head++) {
            const float *rotation = job->rotation + token * dim;
            char *pairs = heads + head * dim * item(half);
            for (int64_t i = 0; i < dim; i += 2) {
                float real = get(pairs, i, half), imaginary = get(pairs, i + 1, half);
                put(pairs, i, real * rotation[i] - imaginary * rotation[i + 1], half);
                put(pairs, i + 1, real * rotation[i + 1] + imaginary * rotation[i], half);
            }
        }
        memcpy(job->cache + job->slots[token] * stored * item(half), heads + job->heads * dim * item(half),
               stored * item(half));
    }
}

IN_BOTH_TYPES(store_some, rotate_and_store, store_t)

void neaptide_rotate_and_store(const store_t *job) {
    share(store_some, job, job->tokens, (job->heads + 2 * job->kv_heads) * job->dim, &job->threads);
}
