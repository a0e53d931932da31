/* Products of quantize.c's rows with 8-bit weights, in one call with the quantization. A weight is packed in panels with
   groups of four adjacent inputs, [outputs / 32][size / 4][32][4]; groups are padded with zeros. bytes.h or words.h
   multiplies a panel.

   Sums are exact, so their order does not matter. */

#define MOST_INPUTS 65536 /* with the largest numbers, sums stay below 2^31 */

typedef struct {
    job_t rows;           /* to be quantized; y, scales and zeros are set here, in scratch */
    const int8_t *packed; /* then scales and sums of the weight's outputs; bias is in `rows` */
    const float *weight_scales;
    const int32_t *weight_sums;
    char *out; /* [rows, outputs], with out_stride elements between rows, of the type of x */
    int64_t outputs, out_stride;
    float *scratch; /* [rows, neaptide_product_scratch_floats] */
} product_t;

INLINE int64_t units_of(int64_t size) { return (size + 3) / 4; }

/* Bytes between the numbers of two rows. A tile's rows are read in parallel; a stride of whole kilobytes would map
   them to the same few sets of the first-level cache. */
INLINE int64_t stride_of(int64_t size) { return (int64_t)sizeof(number_t) * (4 * units_of(size) + 64); }

int64_t neaptide_product_job_bytes(void) { return sizeof(product_t); }

/* Numbers, a scale and a zero. */
int64_t neaptide_product_scratch_floats(int64_t size) { return stride_of(size) / 4 + 2; }

int64_t neaptide_product_packed_bytes(int64_t outputs, int64_t size) {
    return (outputs + 31) / 32 * 32 * units_of(size) * 4;
}

/* weight [outputs, size] -> packed. */
void neaptide_product_pack(const int8_t *weight, int64_t outputs, int64_t size, int8_t *packed) {
    memset(packed, 0, neaptide_product_packed_bytes(outputs, size));
    for (int64_t j = 0; j < outputs; j++) {
        int8_t *to = packed + j / 32 * units_of(size) * 128 + j % 32 * 4;
        for (int64_t i = 0; i < size; i++) to[i / 4 * 128 + i % 4] = weight[j * size + i];
    }
}

INLINE void put_results(const product_t *job, int64_t row, int64_t begin, int64_t width, const int32_t *sums, int half) {
    char *y = job->out + (half ? 2 : 4) * (row * job->out_stride + begin);
    const int32_t *weight_sums = job->weight_sums + begin, zero = (int32_t)job->rows.zeros[row];
    const float *scales = job->weight_scales + begin, *bias = job->rows.bias, scale = job->rows.scales[row];
    int64_t adds = job->rows.adds;
#pragma GCC ivdep
    for (int64_t j = 0; j < width; j++) {
        float value = (float)(sums[j] - zero * weight_sums[j]) * scales[j] * scale;
        if (bias) value += bias[begin + j];
        if (adds) value += get(y, j, half);
        put(y, j, value, half);
    }
}

#if MULTIPLIES_BYTES
#include "bytes.h"
#elif MULTIPLIES_WORDS
#include "words.h"
#endif

#if MULTIPLIES_BYTES || MULTIPLIES_WORDS
static void multiply(void *argument) {
    product_t *job = argument;
    const job_t *rows = &job->rows;
    panels_t all = {job, rows->y, (const char *)job->packed, rows->rows, units_of(rows->size), rows->y_stride, job->outputs};
    take_panels(&all, multiply_panel, &job->rows.next, job->rows.num_threads);
}

/* Whether rows of `size` numbers are multiplied here. */
int64_t neaptide_product_takes(int64_t size) { return size <= MOST_INPUTS; }

void neaptide_product(product_t *job) {
    job_t *rows = &job->rows;
    rows->scales = job->scratch;
    rows->zeros = rows->scales + rows->rows;
    rows->y = (char *)(rows->zeros + rows->rows);
    rows->y_stride = stride_of(rows->size);
    run(quantize, rows, rows->rows <= rows_at_once(rows));
    run(multiply, rows, 0);
}
#else
int64_t neaptide_product_takes(int64_t size) { return (void)size, 0; }

void neaptide_product(product_t *job) { (void)job; }
#endif
