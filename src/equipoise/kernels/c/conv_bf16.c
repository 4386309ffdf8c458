/* Tiles of a convolution of bf16 maps by the instructions of AVX512-BF16, which flush denormal numbers to zero. That
 * for dot products adds the products of an even and an odd image to one float sum, so that nothing is converted. */
#define VECTOR_BYTES 64
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(EQ_NO_CLONES)
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#endif
#if defined(__AVX512BF16__)
#include "conv_tiles.h"

void eq_conv_tile_bf16(const conv_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                       float *sums) {
    if (a->stream)
        conv_tile_of(a, t, next, count, row, end, sums, 1, 1);
    else
        conv_tile_of(a, t, next, count, row, end, sums, 1, 0);
}

INLINE vec add_dot(vec sum, vec a, vec b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

INLINE void dot_rows(const grad_work *a, const tile *t, const tile *next, int64_t block, const int64_t row,
                     const int64_t end, sum8 *dot, sum8 *dbias, const int T, const int in_row) {
    const int32_t *start = a->start + block * a->dy->c;
    const tap *base = a->taps + start[row];
    const vec ones = (vec)((words){0} + 0x3f803f80u);
    for (int64_t r = row; r < end; r++) {
        const tap *k = a->taps + start[r], *stop = a->taps + start[r + 1];
        if (next) fetch_next(next, a->x, r * a->dy->sc, 0, r - row, end - row, T);
        if (k == stop && !dbias) continue;
        vec g[DOT_TILE];
#pragma GCC unroll 16
        for (int i = 0; i < T; i++) g[i] = load((in_row ? t->y[0] + i * LANES : t->y[i]) + r * a->dy->sc);
        if (dbias) {
            vec s = splat(0);
#pragma GCC unroll 16
            for (int i = 0; i < T; i++) s = add_dot(s, g[i], ones);
            dbias[r - row] += eight(s);
        }
        for (; k < stop; k++) {
            const int64_t o = k->offset;
            vec sums[4] = {splat(0), splat(0), splat(0), splat(0)}; /* four chains hide the latency */
#pragma GCC unroll 16
            for (int i = 0; i < T; i++)
                sums[i % 4] = add_dot(sums[i % 4], g[i], load((in_row ? t->x[0] + i * LANES : t->x[i]) + o));
            dot[k - base] += eight((sums[0] + sums[1]) + (sums[2] + sums[3]));
        }
    }
}

void eq_grad_tile_bf16(const grad_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                       sum8 *dot, sum8 *dbias) {
    for (int64_t b = 0; b < a->blocks; b++) {
        const tile *ahead = b == a->blocks - 1 ? next : NULL;
        sum8 *bias = b == 0 ? dbias : NULL;
#define CASE(T) \
    case T: dot_rows(a, t, ahead, b, row, end, dot, bias, T, 0); break;
        if (count == DOT_TILE)
            dot_rows(a, t, ahead, b, row, end, dot, bias, DOT_TILE, 1);
        else if (count == MAX_TILE && t->row)
            dot_rows(a, t, ahead, b, row, end, dot, bias, MAX_TILE, 1);
        else
            switch (count) { FOR_EACH_TILE_WIDTH(CASE) }
#undef CASE
        dot += a->start[b * a->dy->c + end] - a->start[b * a->dy->c + row];
    }
}
#else
#undef VECTOR_BYTES
#include "conv_tiles.h"

void eq_conv_tile_bf16(const conv_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                       float *sums) {}
void eq_grad_tile_bf16(const grad_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                       sum8 *dot, sum8 *dbias) {}
#endif
