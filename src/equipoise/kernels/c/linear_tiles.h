#ifndef EQUIPOISE_LINEAR_TILES_H
#define EQUIPOISE_LINEAR_TILES_H
/* Sparse linear layers on one chunk of tokens in scratch: channels x CHUNK. linear.c includes this for vectors of 32
 * bytes, linear_wide.c for 64. */
#include "kernels.h"

#define CHUNK 64 /* tokens; as in library.py */
#define VECS (CHUNK / WORDS)

typedef struct {
    const tap *taps;
    const int32_t *start; /* blocks x rows + 1 */
    int64_t blocks, rows;
    const float *bias;
} product;

typedef struct {
    const tap *taps;
    const int32_t *start;
    int64_t blocks, rows;
    float *sums, *dbias; /* one for each tap, and for each row */
} weight_grad;

typedef struct {
    int64_t width; /* tokens in a vector */
    void (*product)(const product *a, const float *x, float *y, int64_t row, int64_t end, int64_t vecs);
    void (*grad)(const weight_grad *a, const float *x, const float *dy, int64_t vecs);
} linear_kernels;

extern const linear_kernels eq_linear_wide; /* for level 1 of eq_level */

/* Calls a function with a constant number of vectors as its last argument. */
#define CASE(T, CALL, ...) \
    case T: \
        if (T <= VECS) CALL(__VA_ARGS__, T <= VECS ? T : VECS); \
        break;
#define WITH_VECTORS(vecs, ...) \
    switch (vecs) { \
        CASE(8, __VA_ARGS__) CASE(7, __VA_ARGS__) CASE(6, __VA_ARGS__) CASE(5, __VA_ARGS__) \
        CASE(4, __VA_ARGS__) CASE(3, __VA_ARGS__) CASE(2, __VA_ARGS__) CASE(1, __VA_ARGS__) \
    }

/* ---- forward, and input gradient on the transposed pattern ---- */

INLINE void product_rows(const product *a, const float *x, float *y, int64_t block, int64_t row, int64_t end,
                         const int T) {
    const int32_t *start = a->start + block * a->rows;
    for (; row < end; row++, y += CHUNK) {
        const tap *k = a->taps + start[row], *stop = a->taps + start[row + 1];
        if (k == stop && block) continue;
        vec acc[VECS];
        const vec bias = splat(a->bias ? a->bias[row] : 0);
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) acc[i] = block ? load(y + i * WORDS) : bias;
        for (; k < stop; k++) {
            const vec w = splat(k->weight);
            const float *source = x + k->offset;
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) acc[i] += w * load(source + i * WORDS);
        }
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) store(y + i * WORDS, acc[i]);
    }
}

/* Rows `row` to `end`; y begins with the first of them. */
INLINE void any_product(const product *a, const float *x, float *y, int64_t row, int64_t end, int64_t vecs) {
    for (int64_t b = 0; b < a->blocks; b++) WITH_VECTORS(vecs, product_rows, a, x, y, b, row, end)
}

/* ---- weight gradient, for active weights only ---- */

INLINE sum8 dot(const float *x, const vec *g, const int T) {
    vec v = g[0] * load(x);
#pragma GCC unroll 8
    for (int i = 1; i < T; i++) v += g[i] * load(x + i * WORDS);
    return eight(v);
}

/* The sums over the lanes of eight vectors. */
INLINE sum8 sum_each(sum8 v[8]) {
    transpose8(v);
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

INLINE void grad_rows(const weight_grad *a, const float *x, const float *dy, int64_t block, const int T) {
    const int32_t *start = a->start + block * a->rows;
    for (int64_t row = 0; row < a->rows; row++, dy += CHUNK) {
        int64_t k = start[row];
        const int64_t stop = start[row + 1];
        if (k == stop && block) continue;
        vec g[VECS];
        sum8 v[8];
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) g[i] = load(dy + i * WORDS);
        if (!block) {
            vec total = g[0];
#pragma GCC unroll 8
            for (int i = 1; i < T; i++) total += g[i];
            a->dbias[row] += sum(total);
        }
        for (; k + 8 <= stop; k += 8) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) v[i] = dot(x + a->taps[k + i].offset, g, T);
            sum8 *to = (sum8 *)(a->sums + k);
            *to += sum_each(v);
        }
        if (k < stop) {
            const int64_t left = stop - k;
            for (int i = 0; i < 8; i++) v[i] = i < left ? dot(x + a->taps[k + i].offset, g, T) : (sum8){0};
            const sum8 s = sum_each(v);
            for (int i = 0; i < left; i++) a->sums[k + i] += s[i];
        }
    }
}

INLINE void any_grad(const weight_grad *a, const float *x, const float *dy, int64_t vecs) {
    for (int64_t b = 0; b < a->blocks; b++) WITH_VECTORS(vecs, grad_rows, a, x, dy, b)
}

#endif
