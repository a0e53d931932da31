/* Rows as 8-bit numbers, and back from sums of products of such. The README beside this file has the maths. */

#include <math.h>

#include "../numbers.h"

#define LANES 16
#define LEAST_SCALE 1e-30f   /* of a row of zeros: its inverse is a number */
#define ROUNDS 12582912.0f   /* 1.5 * 2^23: added and taken away it leaves the nearest whole number */
#define ELEMENTS_AT_ONCE 16384 /* of a thread */

typedef struct {
    const char *x;  /* to quantize: [rows, size], a row every x_stride elements; else the sums, [rows, size] fp32 */
    char *y;        /* quantized: [rows, size] u8; else [rows, size], a row every y_stride elements */
    float *scales;  /* [rows] */
    float *zeros;   /* [rows] whole numbers from 0 to 255 */
    const float *of_ones, *bias; /* [size]: what a row of ones makes of the weight; what is added, or NULL */
    int64_t rows, size, x_stride, y_stride, is_bfloat16, adds, num_threads;
    void *parallel; /* GOMP_parallel of the process, or NULL */
    int64_t next;
} job_t;

/* Zero is among the numbers, so that it stays itself. A row with a number that is none gets a scale that is none. */
INLINE void quantize_row(const char *x, uint8_t *y, int64_t size, float *scale, float *zero, int half) {
    float low[LANES] = {0}, high[LANES] = {0}, sum[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float value = get(x, i + lane, half);
            low[lane] = value < low[lane] ? value : low[lane];
            high[lane] = value > high[lane] ? value : high[lane];
            sum[lane] += value * 0.0f;
        }
    for (; i < size; i++) {
        float value = get(x, i, half);
        low[0] = value < low[0] ? value : low[0];
        high[0] = value > high[0] ? value : high[0];
        sum[0] += value * 0.0f;
    }
    for (int lane = 1; lane < LANES; lane++) {
        low[0] = low[lane] < low[0] ? low[lane] : low[0];
        high[0] = high[lane] > high[0] ? high[lane] : high[0];
        sum[0] += sum[lane];
    }
    if (sum[0] != 0.0f) { /* NaN */
        *scale = sum[0];
        *zero = 0.0f;
        memset(y, 0, size);
        return;
    }
    float step = (high[0] - low[0]) * (1.0f / 255.0f);
    if (step < LEAST_SCALE) step = LEAST_SCALE;
    float inverse = 1.0f / step, at = (-low[0] * inverse + ROUNDS) - ROUNDS;
    for (int64_t j = 0; j < size; j++) {
        float value = (get(x, j, half) * inverse + ROUNDS) - ROUNDS + at;
        value = value < 0.0f ? 0.0f : value > 255.0f ? 255.0f : value;
        y[j] = (uint8_t)(int32_t)value;
    }
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
        quantize_row(job->x + row * job->x_stride * bytes, (uint8_t *)job->y + row * job->size, job->size,
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

static void run(void (*work)(void *), job_t *job) {
    typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);
    parallel_t parallel = (parallel_t)job->parallel;
    job->next = 0;
    if (!parallel || job->num_threads == 1 || job->rows <= rows_at_once(job)) work(job);
    else parallel(work, job, (unsigned)job->num_threads, 0);
}

int64_t neaptide_quantize_job_bytes(void) { return sizeof(job_t); }

void neaptide_quantize_rows(job_t *job) { run(quantize, job); }

void neaptide_restore_rows(job_t *job) { run(restore, job); }
