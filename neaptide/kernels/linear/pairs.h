/* Products of linear.c for bf16 rows on processors that multiply pairs of bf16 numbers: an instruction multiplies
   two pairs per lane and adds both products in fp32. Weights are packed in panels as there, but pairs of inputs are
   adjacent: [n / 32][k / 2][32][2]. */

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define MULTIPLIES_PAIRS 1
#define PANEL_JOB job_t
#define SUM __m512
#include <immintrin.h>

INLINE __m512 add_unit(__m512 sum, __m512i row, __m512i weight) {
    return _mm512_dpbf16_ps(sum, (__m512bh)row, (__m512bh)weight);
}

INLINE __m512 wide_half(__m512i numbers, int upper) {
    __m256i half = upper ? _mm512_extracti64x4_epi64(numbers, 1) : _mm512_castsi512_si256(numbers);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE void put_sums(const job_t *job, int64_t row, int64_t begin, int64_t width, __m512 left, __m512 right) {
    __mmask32 mask = width == PANEL ? 0xffffffff : ((__mmask32)1 << width) - 1;
    uint16_t *y = job->narrow_y + row * job->y_stride + begin;
    if (job->bias) {
        left = _mm512_add_ps(left, _mm512_maskz_loadu_ps((__mmask16)mask, job->bias + begin));
        right = _mm512_add_ps(right, _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), job->bias + begin + LANES));
    }
    if (job->adds) {
        __m512i held = _mm512_maskz_loadu_epi16(mask, y);
        left = _mm512_add_ps(left, wide_half(held, 0));
        right = _mm512_add_ps(right, wide_half(held, 1));
    }
    _mm512_mask_storeu_epi16(y, mask, (__m512i)_mm512_cvtne2ps_pbh(right, left));
}

#include "../panels.h"
#include "tiles.h"

static void take_panels_of_pairs(job_t *job) {
    panels_t all = {job, (const char *)job->narrow_x, job->packed, job->rows, job->k / 2, 2 * job->x_stride, job->n};
#if MULTIPLIES_TILES
    if (fits_tiles(job->k)) {
        take_panels(&all, multiply_panel_of_tiles, &job->next, job->num_threads);
        _tile_release();
        return;
    }
#endif
    take_panels(&all, multiply_panel, &job->next, job->num_threads);
}
#endif
