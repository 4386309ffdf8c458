/* Inference of few images: vectors run over the positions of a plane instead of over images.
 *
 * A plane is (h, w) with unit step along w, and its rows are equally far apart in x and y. All positions from the
 * first to the last one are computed, those of the border between two rows too, where zeros are written: a small map
 * takes few vectors. Nothing is written beyond the last position. The last vector of x may read up to 7 floats beyond.
 * Wider vectors were slower: nearly all of their loads cross a cache line. */
#include "kernels.h"

#define MAX_VECTORS 16

typedef struct {
    const map *x, *y;
    const tap *taps;
    const int32_t *start; /* blocks x rows + 1 */
    int64_t blocks;
    const float *bias;
    int relu;
} flat_work;

/* Vectors that follow one another in a plane. */
typedef struct {
    const float *x;
    float *y;
    int32_t keep[MAX_VECTORS * WORDS]; /* for each position: -1 inside the plane, 0 in the border between two rows */
    int64_t left;                      /* positions up to the end of the plane */
} strip;

/* T vectors of output at once. If T is small, CHAINS independent sums hide the latency of additions. */
INLINE void flat_rows(const flat_work *a, const strip *t, int64_t block, int64_t row, int64_t end, const int T,
                      const int CHAINS) {
    const int32_t *start = a->start + block * a->y->c;
    const int first = block == 0, last = block == a->blocks - 1;
    for (; row < end; row++) {
        const tap *k = a->taps + start[row], *stop = a->taps + start[row + 1];
        float *to = t->y + row * a->y->sc;
        vec acc[4][MAX_VECTORS];
#pragma GCC unroll 16
        for (int i = 0; i < T; i++) {
            acc[0][i] = first ? splat(a->bias ? a->bias[row] : 0) : load_some(to + i * WORDS, t->left - i * WORDS);
#pragma GCC unroll 4
            for (int c = 1; c < CHAINS; c++) acc[c][i] = splat(0);
        }
        for (; k + CHAINS <= stop; k += CHAINS) {
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; c++) {
                const vec w = splat(k[c].weight);
                const float *from = t->x + k[c].offset;
#pragma GCC unroll 16
                for (int i = 0; i < T; i++) acc[c][i] += w * load(from + i * WORDS);
            }
        }
        for (; k < stop; k++) {
            const vec w = splat(k->weight);
            const float *from = t->x + k->offset;
#pragma GCC unroll 16
            for (int i = 0; i < T; i++) acc[0][i] += w * load(from + i * WORDS);
        }
#pragma GCC unroll 16
        for (int i = 0; i < T; i++) {
#pragma GCC unroll 4
            for (int c = 1; c < CHAINS; c++) acc[0][i] += acc[c][i];
            const vec v = last && a->relu ? relu(acc[0][i]) : acc[0][i];
            store_some(to + i * WORDS, where(*(const bits *)(t->keep + i * WORDS), v), t->left - i * WORDS);
        }
    }
}

CLONES static void flat_strip(const flat_work *a, const strip *t, int count, int64_t b, int64_t row, int64_t end) {
    switch (count) {
    case 16: flat_rows(a, t, b, row, end, 16, 1); break;
    case 14: flat_rows(a, t, b, row, end, 14, 1); break;
    case 12: flat_rows(a, t, b, row, end, 12, 1); break;
    case 10: flat_rows(a, t, b, row, end, 10, 1); break;
    case 8: flat_rows(a, t, b, row, end, 8, 1); break;
    case 7: flat_rows(a, t, b, row, end, 7, 1); break;
    case 6: flat_rows(a, t, b, row, end, 6, 1); break;
    case 5: flat_rows(a, t, b, row, end, 5, 2); break;
    case 4: flat_rows(a, t, b, row, end, 4, 2); break;
    case 3: flat_rows(a, t, b, row, end, 3, 2); break;
    case 2: flat_rows(a, t, b, row, end, 2, 4); break;
    default: flat_rows(a, t, b, row, end, 1, 4);
    }
}

static void set_strip(strip *t, const flat_work *a, int64_t image, int64_t first, int64_t length, int64_t positions) {
    t->x = a->x->data + image * a->x->sn + first;
    t->y = a->y->data + image * a->y->sn + first;
    t->left = positions - first;
    for (int64_t i = 0, column = first % a->y->sh; i < length; i++, column = column + 1 == a->y->sh ? 0 : column + 1)
        t->keep[i] = -(column < a->y->w);
}

static void flat_job(const void *work, int part, int parts) {
    const flat_work *a = work;
    const int64_t positions = flat_positions(a->y), vectors = (positions + WORDS - 1) / WORDS, most = eq_accumulators();
    const int64_t strips = (vectors + most - 1) / most, even = strips ? (vectors + strips - 1) / strips : 0;
    const int64_t row = eq_split_rows(a->start, a->blocks, a->y->c, part, parts);
    const int64_t end = eq_split_rows(a->start, a->blocks, a->y->c, part + 1, parts);
    strip t;
    for (int64_t n = 0; n < a->y->n; n++)
        for (int64_t first = 0, count; first < vectors; first += count) { /* 5 + 5 vectors instead of 8 + 2 */
            count = vectors - first < even ? vectors - first : even;
            if (count > 8) count &= ~1; /* above 8 there is code for even sizes only */
            set_strip(&t, a, n, first * WORDS, count * WORDS, positions);
            for (int64_t b = 0; b < a->blocks; b++) flat_strip(a, &t, (int)count, b, row, end);
        }
}

/* Like eq_conv with stride 1, on planes. */
void eq_flat_conv(const map *x, const map *y, const tap *taps, const int32_t *start, int64_t blocks, const float *bias,
                  int relu, int threads) {
    flat_work a = {x, y, taps, start, blocks, bias, relu};
    eq_run(flat_job, &a, threads);
}
