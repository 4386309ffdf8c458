/* Linear layers in vectors of 64 bytes. Compiled for machines that have them, whatever the flags are. */
#define VECTOR_BYTES 64
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(EQ_NO_CLONES)
#pragma GCC target("arch=x86-64-v4")
#endif
#if defined(__AVX512VL__)
#include "linear_tiles.h"

static void wide_product(const product *a, const float *x, float *y, int64_t row, int64_t end, int64_t vecs) {
    any_product(a, x, y, row, end, vecs);
}

static void wide_grad(const weight_grad *a, const float *x, const float *dy, int64_t vecs) {
    any_grad(a, x, dy, vecs);
}

const linear_kernels eq_linear_wide = {WORDS, wide_product, wide_grad};
#else
#undef VECTOR_BYTES
#include "linear_tiles.h"

const linear_kernels eq_linear_wide = {0, NULL, NULL};
#endif
