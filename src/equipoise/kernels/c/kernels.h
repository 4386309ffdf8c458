#ifndef EQUIPOISE_KERNELS_H
#define EQUIPOISE_KERNELS_H
/* Sparse convolution on batch-blocked activations, and the layers around it.
 *
 * A map is (n, c, h, w, 16). Its innermost axis ("lanes") is sixteen words side by side, so that one weight
 * multiplies full vectors and every pattern of weights vectorises. A word is the float of one image, or two bf16
 * numbers (`half`): those of an even image, in the low bits, and of the next one. Both kinds thus have the same
 * steps, counted in words. A map is described by a pointer to its first interior element and by steps. A border
 * of zeros around each plane replaces bounds checks. Lanes beyond the batch size hold any finite values in
 * activations and zeros in gradients. All sums are float.
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
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define EQ_ABI 10 /* raise with any change of a signature or struct, here and in library.py */
#define LANES 16
#ifndef STREAM_BYTES
#define STREAM_BYTES (2 << 20)
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(EQ_NO_CLONES)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define NARROW_CLONES __attribute__((target_clones("arch=x86-64-v3", "default"))) /* level 0 only, see eq_level */
#else
#define CLONES
#define NARROW_CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

#ifndef VECTOR_BYTES
#define VECTOR_BYTES 32 /* GCC splits wider vectors into scalars if the machine lacks them */
#endif
#define WORDS (VECTOR_BYTES / 4)
#define PARTS (LANES / WORDS) /* vectors of words in one position */
typedef float vec __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t bits __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

typedef struct {
    float *data;
    int64_t n, c, h, w;          /* extent: blocks of images, channels, rows, columns */
    int64_t sn, sc, sh, sw;      /* steps, in words */
} map;

typedef struct {
    float weight;
    int32_t offset;
} tap;

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
/* Writes past the caches: the lines of a large map would be read only to be overwritten. */
INLINE void stream(float *p, vec v) {
#if VECTOR_BYTES == 64
    typedef float aligned_vec __attribute__((vector_size(64)));
    __builtin_ia32_movntps512(p, (aligned_vec)v);
#elif defined(__SSE__)
    typedef float quad __attribute__((vector_size(16)));
    __builtin_ia32_movntps(p, (quad){v[0], v[1], v[2], v[3]});
    __builtin_ia32_movntps(p + 4, (quad){v[4], v[5], v[6], v[7]});
#else
    store(p, v);
#endif
}
/* One broadcast; of a list of floats GCC 12 inserts the elements one by one. */
INLINE vec splat(float a) { return (vec)(((union { float number; int32_t bits; }){a}).bits - (bits){0}); }
/* Reads the first `count` words only, if that is fewer than a vector has. */
INLINE vec load_some(const float *p, int64_t count) {
    if (count >= WORDS) return load(p);
    vec v = splat(0);
    for (int i = 0; i < count; i++) v[i] = p[i];
    return v;
}
/* Writes the first `count` words only, if that is fewer than a vector has. */
INLINE void store_some(float *p, vec v, int64_t count) {
    if (count >= WORDS) {
        store(p, v);
        return;
    }
    for (int i = 0; i < count; i++) p[i] = v[i];
}
INLINE vec where(bits mask, vec v) { return (vec)(mask & (bits)v); }
/* The result of a comparison: one bit for each number if the machine has masks, else a word of ones or zeros. */
#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
typedef __mmask16 flags;
INLINE flags above(vec a, vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
INLINE flags unordered(vec a, vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q); }
INLINE vec pick(flags f, vec yes, vec no) { return (vec)_mm512_mask_blend_ps(f, (__m512)no, (__m512)yes); }
INLINE vec only(flags f, vec v) { return (vec)_mm512_maskz_mov_ps(f, (__m512)v); }
#else
typedef bits flags;
INLINE flags above(vec a, vec b) { return a > b; }
INLINE flags unordered(vec a, vec b) { return (a != a) | (b != b); }
INLINE vec pick(flags f, vec yes, vec no) { return (vec)((f & (bits)yes) | (~f & (bits)no)); }
INLINE vec only(flags f, vec v) { return where(f, v); }
#endif
/* relu and larger pass NaN on, as torch does: a diverged run must not look healthy. */
INLINE vec relu(vec v) { return where(~(v < splat(0)), v); }
INLINE vec larger(vec a, vec b) { return pick(above(a, b) | unordered(a, a), a, b); }
/* The numbers of the even (`odd` = 0) or odd images in a vector of words. Words of floats have even images only. */
INLINE vec take(const float *p, const int odd, const int half) {
    if (!half) return load(p);
    const words w = *(const words *)p;
    return odd ? (vec)(w & 0xffff0000u) : (vec)(w << 16);
}
/* To the nearest bf16 number, ties to even, in the high bits; NaN stays NaN. */
INLINE words rounded(vec v) {
    const words w = (words)v, nan = (words)(v != v);
    return (w + 0x7fff + ((w >> 16) & 1)) | (nan & 0x7fc00000u);
}
/* Writes a vector of words: v[0], or v[0] of even and v[1] of odd images; past the caches if `past`. */
INLINE void put(float *p, const vec v[2], const int half, const int past) {
#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
    const words pairs = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                         0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)v[half], (__m512)v[0]);
    const vec w = half ? (vec)_mm512_permutexvar_epi16((__m512i)pairs, both) : v[0];
#else
    const vec w = half ? (vec)((rounded(v[0]) >> 16) | (rounded(v[1]) & 0xffff0000u)) : v[0];
#endif
    if (past)
        stream(p, w);
    else
        store(p, w);
}

/* Sums of eight lanes are kept: those of a wide vector are folded. */
typedef float sum8 __attribute__((vector_size(32), aligned(4), may_alias));
#if VECTOR_BYTES == 32
INLINE sum8 eight(vec v) { return v; }
#else
INLINE sum8 eight(vec v) {
    const union { vec v; sum8 halves[2]; } u = {v};
    return u.halves[0] + u.halves[1];
}
#endif

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t order8 __attribute__((vector_size(32)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (order8){__VA_ARGS__})
#endif

INLINE float sum_of_eight(sum8 v) {
    typedef float quad __attribute__((vector_size(16)));
    const union { sum8 v; quad halves[2]; } u = {v};
    const quad four = u.halves[0] + u.halves[1];
    return (four[0] + four[2]) + (four[1] + four[3]);
}
INLINE float sum(vec v) { return sum_of_eight(eight(v)); }

INLINE void transpose8(sum8 v[8]) {
    sum8 a[8], b[8];
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

/* Positions from the first to the last one of a plane whose columns are neighbours, with the border between its rows. */
INLINE int64_t flat_positions(const map *m) { return m->h && m->w ? (m->h - 1) * m->sh + m->w : 0; }

/* Does part number `part` of `parts` parts of the work. */
typedef void (*job)(const void *work, int part, int parts);

void eq_run(job work, const void *arguments, int threads);
/* to[j][i] = from[i][j] for i < rows and j < columns. */
void eq_transpose(const float *from, int64_t from_step, float *to, int64_t to_step, int64_t rows, int64_t columns);
void eq_transpose_wide(const float *from, int64_t from_step, float *to, int64_t to_step, int64_t rows,
                       int64_t columns); /* for level 1; multiples of 16 */
int eq_level(void); /* 1 if library and machine have vectors of 64 bytes, 2 if they have AVX512-BF16, else 0 */
int eq_accumulators(void); /* vectors that a kernel can keep in registers, a power of two */
int64_t eq_split_rows(const int32_t *start, int64_t blocks, int64_t rows, int part, int parts);
/* Not initialised, aligned to a cache line; NULL if there is no memory; release with free(). Functions that need
 * scratch allocate it before they start threads, and return whether they ran out of memory. */
void *eq_scratch(size_t bytes);

#endif
