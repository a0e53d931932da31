/* Products of quantize.c's rows with 8-bit weights. The same call first quantizes the rows. A weight is packed in panels
   with groups of four adjacent inputs, [outputs / 32][size / 4][32][4]; groups are padded with zeros.

   With AVX512_VNNI an instruction multiplies groups of four bytes: it makes four products per lane and adds them in 32
   bits. With AVX2 alone the products are those of words.h.

   Sums are exact, so their order does not matter. */

#define MOST_INPUTS 65536 /* with the largest numbers, sums stay below 2^31 */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define NUMBER_BYTES 1 /* of a row */
#else
#define NUMBER_BYTES 2
#endif

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
INLINE int64_t stride_of(int64_t size) { return NUMBER_BYTES * (4 * units_of(size) + 64); }

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

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define PANEL_JOB product_t
#define SUM __m512i
#include <immintrin.h>

/* Not the intrinsic, because gcc 12 copies its sums between registers, once per instruction. */
INLINE __m512i add_unit(__m512i sum, __m512i row, __m512i weight) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(row), "v"(weight));
    return sum;
}

__attribute__((noinline)) static void put_sums(const product_t *job, int64_t row, int64_t begin, int64_t width,
                                               __m512i left, __m512i right) {
    int32_t sums[32];
    _mm512_storeu_si512(sums, left);
    _mm512_storeu_si512(sums + 16, right);
    if (!job->rows.is_bfloat16) put_results(job, row, begin, width, sums, 0);
    else if (width == 32) put_results(job, row, begin, 32, sums, 1);
    else put_results(job, row, begin, width, sums, 1);
}

#include "../panels.h"

#define QUANTIZE_ROWS quantize
#elif defined(__AVX2__)
#include "words.h"
#define QUANTIZE_ROWS quantize_to_words
#endif

#if defined(QUANTIZE_ROWS)
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
    run(QUANTIZE_ROWS, rows, rows->rows <= rows_at_once(rows));
    run(multiply, rows, 0);
}
#else
int64_t neaptide_product_takes(int64_t size) { return (void)size, 0; }

void neaptide_product(product_t *job) { (void)job; }
#endif
