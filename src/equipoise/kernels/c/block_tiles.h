#ifndef EQUIPOISE_BLOCK_TILES_H
#define EQUIPOISE_BLOCK_TILES_H
/* Kernels of blocks of 16 outputs x 1 input for one tile, position or strip. blocks.c includes this for vectors of 32
 * bytes, blocks_wide.c and blocks_bf16.c for 64, of bf16 maps only. */
#include "kernels.h"

#define GROUP 16 /* outputs */
#define EIGHT 8
#define MAX_WIDTH 6
#define STRIP 32 /* positions whose gradients stay in the first-level cache */

typedef struct {
    const map *x, *y;
    const int32_t *start, *offset;
    const float *weights, *bias;
    int64_t kernel, width, reach; /* reach: largest offset of a tap within a plane */
    int relu, half, stream;
} block_work;

typedef struct {
    const map *dy, *dx;
    const int32_t *start, *source; /* source: input channel of each tap */
    const float *weights;
    const int64_t *reach; /* rows and columns from a position's first input to that of each position in the kernel */
    int64_t kernel, columns, stride[2]; /* columns: of the kernel */
    float *sums;        /* of all input channels at one position, for each thread */
    const float **from; /* outputs that reach a position through each position in the kernel, for each thread */
    int half, stream;
} back_work;

/* Positions in a row, and the rows of a strip. */
typedef struct {
    const float *x[STRIP], *dy[STRIP];
    int64_t rows, length, x_step, dy_step;
} strip;

typedef struct {
    map x, dy;
    const int32_t *start, *offset;
    int64_t kernel;
    float *sums, *dbias; /* sums: 16 for each tap */
    int half;
} block_grad_work;

typedef struct {
    void (*tile)(const block_work *a, const float *const x[], float *const y[], int count, int64_t group);
    void (*back)(const back_work *a, float *dx, const float *const from[], const float *ahead, float *sums);
    void (*grad)(const block_grad_work *a, const strip *p, int64_t group, int64_t first, int64_t stop);
    void (*bias)(const block_grad_work *a, const strip *p, int64_t row, int64_t end);
} block_kernels;

extern const block_kernels eq_blocks_wide, eq_blocks_bf16; /* for the levels 1 and 2 of eq_level */

/* ---- forward ---- */

/* R outputs at P positions of H vectors of words at a time: a vector of inputs is loaded once for R outputs. With
 * `keep`, which zeroes the border, positions are words: `left` of them exist. */
INLINE void block_rows(const block_work *a, const float *const x[], float *const y[], const bits keep[], int64_t left,
                       int64_t group, const int R, const int P, const int H, const int half, const int past) {
    const int32_t *t0 = a->offset + a->start[group * a->kernel], *end = a->offset + a->start[(group + 1) * a->kernel];
    const int Z = half ? 2 : H; /* vectors of numbers */
    for (int j = 0; j < GROUP; j += R) {
        const int64_t row = group * GROUP + j;
        const float *w = a->weights + a->start[group * a->kernel] * (int64_t)GROUP + j;
        vec acc[EIGHT][MAX_WIDTH][2];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const vec b = splat(a->bias ? a->bias[row + r] : 0);
#pragma GCC unroll 6
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int z = 0; z < Z; z++) acc[r][p][z] = b;
        }
        for (const int32_t *t = t0; t < end; t++, w += GROUP) {
            vec v[MAX_WIDTH][2];
#pragma GCC unroll 6
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int z = 0; z < Z; z++) v[p][z] = take(x[p] + *t + (half ? 0 : z * WORDS), z, half);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const vec s = splat(w[r]);
#pragma GCC unroll 6
                for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                    for (int z = 0; z < Z; z++) acc[r][p][z] += s * v[p][z];
            }
        }
        if (a->relu) {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 6
                for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                    for (int z = 0; z < Z; z++) acc[r][p][z] = relu(acc[r][p][z]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 6
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int i = 0; i < H; i++) {
                    float *to = y[p] + (row + r) * a->y->sc + i * WORDS;
                    const vec found[2] = {acc[r][p][i], acc[r][p][1]};
                    if (keep)
                        store_some(to, where(keep[p], found[0]), left - p * WORDS);
                    else
                        put(to, found, half, past);
                }
    }
}

/* One position of a bf16 map. Narrow vectors have registers for 4 outputs at half of its words. */
INLINE void half_tile(const block_work *a, const float *const x[], float *const y[], int64_t group) {
    for (int i = 0; i < LANES; i += WORDS) {
        const float *from[] = {x[0] + i};
        float *to[] = {y[0] + i};
        if (VECTOR_BYTES == 32)
            block_rows(a, from, to, NULL, 0, group, EIGHT / 2, 1, 1, 1, 0);
        else if (a->stream)
            block_rows(a, from, to, NULL, 0, group, EIGHT, 1, 1, 1, 1);
        else
            block_rows(a, from, to, NULL, 0, group, EIGHT, 1, 1, 1, 0);
    }
}

/* ---- input gradient ---- */

/* Adds R outputs at one position, times their weights in the taps from `t` to `end`, to the sums of inputs. */
INLINE void add_taps(const back_work *a, float *sums, const vec g[][2], int64_t t, int64_t end, int j, const int R) {
    const float *w = a->weights + t * GROUP + j;
    for (; t < end; t++, w += GROUP) {
        float *to = sums + a->source[t] * (int64_t)(2 * WORDS);
        vec s[4] = {load(to), load(to + WORDS), splat(w[0]) * g[0][0], splat(w[0]) * g[0][1]}; /* short chains */
#pragma GCC unroll 8
        for (int r = 1; r < R; r++) {
            const vec b = splat(w[r]);
            s[r % 2 ? 0 : 2] += b * g[r][0];
            s[r % 2 ? 1 : 3] += b * g[r][1];
        }
        store(to, s[0] + s[2]), store(to + WORDS, s[1] + s[3]);
    }
}

/* The gradient of all inputs at one position, R outputs at a time, of two vectors of numbers. */
INLINE void back_vectors(const back_work *a, float *dx, const float *const from[], const float *ahead, float *sums,
                         const int part, const int R, const int half) {
    const int64_t kernel = a->kernel, columns = a->columns, step = a->dy->sc;
    memset(sums, 0, a->dx->c * 2 * WORDS * sizeof *sums);
    for (int64_t first = kernel - columns; first >= 0; first -= columns) /* rows of the kernel */
        for (int64_t row = 0; row < a->dy->c; row += R) {
            const int32_t *start = a->start + row / GROUP * kernel;
            for (int r = 0; r < R && ahead && !first; r++) __builtin_prefetch(ahead + (row + r) * step);
            for (int64_t k = first + columns - 1; k >= first; k--) {
                if (!from[k] || start[k] == start[k + 1]) continue;
                vec g[EIGHT][2];
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const float *dy = from[k] + part + (row + r) * step;
                    g[r][0] = take(dy, 0, half), g[r][1] = take(dy + (half ? 0 : WORDS), 1, half);
                }
                add_taps(a, sums, g, start[k], start[k + 1], row % GROUP, R);
            }
        }
    for (int64_t c = 0; c < a->dx->c; c++, sums += 2 * WORDS) {
        const vec found[2] = {load(sums), load(sums + WORDS)};
        float *to = dx + part + c * a->dx->sc;
        if (VECTOR_BYTES == 64 && a->stream)
            put(to, found, half, 1);
        else
            put(to, found, half, 0);
        if (!half) store(to + WORDS, found[1]);
    }
}

INLINE void back_position(const back_work *a, float *dx, const float *const from[], const float *ahead, float *sums,
                          const int R, const int half) {
    for (int part = 0; part < (half ? LANES : 1); part += WORDS) back_vectors(a, dx, from, ahead, sums, part, R, half);
}

/* ---- weight gradient ---- */

#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
#define DOTS 1 /* of even and odd images in one instruction, so that nothing is converted */
INLINE vec add_product(vec sum, vec a, vec b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#else
#define DOTS 0
INLINE vec add_product(vec sum, vec a, vec b) { return sum + a * b; }
#endif

/* Vector z of the numbers at a position. */
INLINE vec numbers(const float *p, int z, const int half) {
    return take(p + (half ? z / 2 : z) * WORDS, z % 2, half);
}

/* sums[s][r] += <dy of output r, x at tap s> over a strip, for S taps and 8 outputs. */
INLINE void strip_taps(const strip *p, const int32_t *offset, int64_t row_step, int64_t row, float *sums, const int S,
                       const int half) {
    const int dots = DOTS && half, Z = dots ? 1 : half ? 2 * PARTS : PARTS;
    vec acc[3][EIGHT];
#pragma GCC unroll 4
    for (int s = 0; s < S; s++)
#pragma GCC unroll 8
        for (int r = 0; r < EIGHT; r++) acc[s][r] = splat(0);
    for (int64_t i = 0; i < p->rows; i++) {
        const float *x = p->x[i], *dy = p->dy[i] + row * row_step;
        for (int64_t w = 0; w < p->length; w++, x += p->x_step, dy += p->dy_step)
            for (int z = 0; z < Z; z++) {
                vec v[3];
#pragma GCC unroll 4
                for (int s = 0; s < S; s++) v[s] = numbers(x + offset[s], z, half && !dots);
#pragma GCC unroll 8
                for (int r = 0; r < EIGHT; r++) {
                    const vec g = numbers(dy + r * row_step, z, half && !dots);
#pragma GCC unroll 4
                    for (int s = 0; s < S; s++) acc[s][r] = add_product(acc[s][r], g, v[s]);
                }
            }
    }
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) {
        sum8 v[EIGHT], *to = (sum8 *)(sums + s * GROUP);
#pragma GCC unroll 8
        for (int r = 0; r < EIGHT; r++) v[r] = eight(acc[s][r]);
        transpose8(v);
        *to += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    }
}

INLINE void any_grad(const block_grad_work *a, const strip *p, int64_t group, int64_t first, int64_t stop,
                     const int wide, const int half) {
    for (int64_t t = first; t < stop;) {
        const int64_t left = wide ? stop - t : 1;
        for (int j = 0; j < GROUP; j += EIGHT) {
            float *sums = a->sums + t * GROUP + j;
            const int64_t row = group * GROUP + j, step = a->dy.sc;
            switch (left) {
            case 1: strip_taps(p, a->offset + t, step, row, sums, 1, half); break;
            case 2: strip_taps(p, a->offset + t, step, row, sums, 2, half); break;
            default: strip_taps(p, a->offset + t, step, row, sums, 3, half);
            }
        }
        t += left < 3 ? left : 3;
    }
}

INLINE void any_bias(const block_grad_work *a, const strip *p, int64_t row, int64_t end, const int half) {
    for (; row < end; row++) {
        vec s = splat(0);
        for (int64_t i = 0; i < p->rows; i++) {
            const float *dy = p->dy[i] + row * a->dy.sc;
            for (int64_t w = 0; w < p->length; w++, dy += p->dy_step)
                for (int z = 0; z < (half ? 2 * PARTS : PARTS); z += 2)
                    s += numbers(dy, z, half) + numbers(dy, z + 1, half);
        }
        a->dbias[row] += sum(s);
    }
}

#if VECTOR_BYTES == 64
static void wide_tile(const block_work *a, const float *const x[], float *const y[], int count, int64_t group) {
    half_tile(a, x, y, group);
}

static void wide_back(const back_work *a, float *dx, const float *const from[], const float *ahead, float *sums) {
    back_position(a, dx, from, ahead, sums, EIGHT, 1);
}

static void wide_grad(const block_grad_work *a, const strip *p, int64_t group, int64_t first, int64_t stop) {
    any_grad(a, p, group, first, stop, 1, 1);
}

static void wide_bias(const block_grad_work *a, const strip *p, int64_t row, int64_t end) {
    any_bias(a, p, row, end, 1);
}
#define WIDE_KERNELS {wide_tile, wide_back, wide_grad, wide_bias}
#endif

#endif
