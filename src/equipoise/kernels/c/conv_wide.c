/* Tiles of a convolution in vectors of 64 bytes. Compiled for machines that have them, whatever the flags are. */
#define VECTOR_BYTES 64
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(EQ_NO_CLONES)
#pragma GCC target("arch=x86-64-v4")
#endif
#if defined(__AVX512VL__)
#include "conv_tiles.h"

void eq_conv_tile_wide(const conv_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                       float *sums) {
    conv_any_tile(a, t, next, count, row, end, sums);
}

void eq_grad_tile_wide(const grad_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                       sum8 *dot, sum8 *dbias) {
    grad_any_tile(a, t, next, count, row, end, dot, dbias, 1);
}
#else
#undef VECTOR_BYTES
#include "conv_tiles.h"

void eq_conv_tile_wide(const conv_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                       float *sums) {}
void eq_grad_tile_wide(const grad_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                       sum8 *dot, sum8 *dbias) {}
#endif
