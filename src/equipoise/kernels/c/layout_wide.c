/* Transposition in vectors of 64 bytes. Compiled for machines that have them, whatever the flags are. */
#define VECTOR_BYTES 64
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(EQ_NO_CLONES)
#pragma GCC target("arch=x86-64-v4")
#endif
#if defined(__AVX512VL__)
#include "kernels.h"

/* Exchanges squares of 1, 2, 4 and 8 elements across the diagonal. */
INLINE void transpose16(vec v[16]) {
    const bits lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int log = 0; log < 4; log++) {
        const int s = 1 << log;
        const bits left = lane + ((lane >> log) & 1) * (16 - s); /* from 16 on: lanes of the second vector */
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i & s) continue;
            const vec a = v[i], b = v[i + s];
            v[i] = __builtin_shuffle(a, b, left);
            v[i + s] = __builtin_shuffle(a, b, left + s);
        }
    }
}

/* As eq_transpose, for multiples of 16. Cache lines are written whole. */
void eq_transpose_wide(const float *from, int64_t from_step, float *to, int64_t to_step, int64_t rows,
                       int64_t columns) {
    const int by_rows = from_step >= to_step;
    const int64_t outer = by_rows ? rows : columns, inner = by_rows ? columns : rows;
    for (int64_t a = 0; a < outer; a += 16)
        for (int64_t b = 0; b < inner; b += 16) {
            const int64_t i = by_rows ? a : b, j = by_rows ? b : a;
            vec v[16];
#pragma GCC unroll 16
            for (int k = 0; k < 16; k++) v[k] = load(from + (i + k) * from_step + j);
            transpose16(v);
#pragma GCC unroll 16
            for (int k = 0; k < 16; k++) store(to + (j + k) * to_step + i, v[k]);
        }
}
#else
#undef VECTOR_BYTES
#include "kernels.h"

void eq_transpose_wide(const float *from, int64_t from_step, float *to, int64_t to_step, int64_t rows,
                       int64_t columns) {}
#endif
