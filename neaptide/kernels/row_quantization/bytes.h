/* Products of product.h for processors that multiply groups of four bytes (AVX512_VNNI): an instruction makes four
   products per lane and adds them in 32 bits. */

#define PANEL_JOB product_t
#define SUM __m512i

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
