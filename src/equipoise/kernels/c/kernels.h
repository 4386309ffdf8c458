#ifndef EQUIPOISE_KERNELS_H
#define EQUIPOISE_KERNELS_H
/* Sparse convolution on batch-blocked activations, and the layers around it.
 *
 * A map is (n, c, h, w, 16). Its innermost axis ("lanes") is sixteen images side by side, so that one weight
 * multiplies two full vectors and every pattern of weights vectorises. A map is described by a pointer to its
 * first interior element and by steps in floats. A border of zeros around each plane replaces bounds checks.
 * Lanes beyond the batch size hold any finite values in activations and zeros in gradients.
 *
 * A pattern is a list of taps (weight, offset into the source map), sorted by block of source channels and
 * then by destination channel. The planes that the taps of a block read fit into the first-level cache.
 *
 * The order of every loop depends on the number of threads only, so results are reproducible.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EQ_ABI 5 /* raise with any change of a signature or struct, here and in library.py */
#define LANES 16
#ifndef STREAM_BYTES
#define STREAM_BYTES (2 << 20)
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(EQ_NO_CLONES)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

/* 32 bytes: GCC splits wider vectors into scalars if the machine lacks them. */
typedef float vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t bits __attribute__((vector_size(32), aligned(4), may_alias));

typedef struct {
    float *data;
    int64_t n, c, h, w;          /* extent: blocks of images, channels, rows, columns */
    int64_t sn, sc, sh, sw;      /* steps, in floats */
} map;

typedef struct {
    float weight;
    int32_t offset;
} tap;

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
/* Writes past the caches: the lines of a large map would be read only to be overwritten. */
INLINE void stream(float *p, vec v) {
#if defined(__SSE__)
    typedef float quad __attribute__((vector_size(16)));
    __builtin_ia32_movntps(p, (quad){v[0], v[1], v[2], v[3]});
    __builtin_ia32_movntps(p + 4, (quad){v[4], v[5], v[6], v[7]});
#else
    store(p, v);
#endif
}
/* One broadcast; of a list of floats GCC 12 inserts the elements one by one. */
INLINE vec splat(float a) {
    const int32_t i = ((union { float number; int32_t bits; }){a}).bits;
    return (vec)(bits){i, i, i, i, i, i, i, i};
}
INLINE vec where(bits mask, vec v) { return (vec)(mask & (bits)v); }
/* relu and larger pass NaN on, as torch does: a diverged run must not look healthy. */
INLINE vec relu(vec v) { return where(~(v < splat(0)), v); }
INLINE vec larger(vec a, vec b) {
    const bits a_wins = (a > b) | (a != a);
    return (vec)((a_wins & (bits)a) | (~a_wins & (bits)b));
}
INLINE float sum(vec v) {
    float s = 0;
    for (int i = 0; i < 8; i++) s += v[i];
    return s;
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (bits){__VA_ARGS__})
#endif

INLINE void transpose8(vec v[8]) {
    vec a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = SHUFFLE(v[i], v[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        a[i + 1] = SHUFFLE(v[i], v[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = SHUFFLE(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[i + 2 * j + 1] = SHUFFLE(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        v[i] = SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        v[i + 4] = SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* Whether a map is large enough for writes past the caches, and aligned to cache lines. */
INLINE int streams(const map *m) {
    const int64_t bytes = m->n * m->c * m->h * m->w * LANES * (int64_t)sizeof(float);
    return bytes >= STREAM_BYTES && ((uintptr_t)m->data & 63) == 0;
}

INLINE float *at(const map *m, int64_t n, int64_t c, int64_t h) {
    return m->data + n * m->sn + c * m->sc + h * m->sh;
}

/* Does part number `part` of `parts` parts of the work. */
typedef void (*job)(const void *work, int part, int parts);

void eq_run(job work, const void *arguments, int threads);
/* to[j][i] = from[i][j] for i < rows and j < columns. */
void eq_transpose(const float *from, int64_t from_step, float *to, int64_t to_step, int64_t rows, int64_t columns);
int eq_accumulators(void); /* vectors that a kernel can keep in registers, a power of two */
int64_t eq_split_rows(const int32_t *start, int64_t blocks, int64_t rows, int part, int parts);
/* Not initialised, aligned to a cache line; NULL if there is no memory; release with free(). Functions that need
 * scratch allocate it before they start threads, and return whether they ran out of memory. */
void *eq_scratch(size_t bytes);

#endif
