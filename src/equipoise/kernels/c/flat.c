/* Inference of few images: vectors run along the columns of a plane instead of over images.
 *
 * A plane is (h, w) with unit step along w. The last vector of a row may reach beyond w. Rows are long enough
 * that it ends within the border, and it writes zeros there. */
#include "kernels.h"

#define WIDTH 8 /* columns in a vector */
#define MAX_VECTORS 16

typedef struct {
    const float *x[MAX_VECTORS];
    float *y[MAX_VECTORS];
    bits keep[MAX_VECTORS]; /* columns that exist */
} strip;

typedef struct {
    const map *x, *y;
    const tap *taps;
    const int32_t *start;
    const float *bias;
    int relu;
} flat_work;

INLINE void set_strip(strip *t, const map *x, const map *y, int64_t first, int count) {
    const int64_t per_row = (y->w + WIDTH - 1) / WIDTH;
    for (int i = 0; i < count; i++) {
        const int64_t p = first + i, w = p % per_row * WIDTH, h = p / per_row % y->h, n = p / per_row / y->h;
        t->x[i] = x->data + n * x->sn + h * x->sh + w;
        t->y[i] = y->data + n * y->sn + h * y->sh + w;
        for (int j = 0; j < WIDTH; j++) t->keep[i][j] = -(w + j < y->w);
    }
}

/* T vectors of output at once. If T is small, CHAINS independent sums hide the latency of additions. */
INLINE void flat_rows(const flat_work *a, const strip *t, int64_t row, int64_t end, const int T, const int CHAINS) {
    for (; row < end; row++) {
        const tap *k = a->taps + a->start[row], *stop = a->taps + a->start[row + 1];
        vec acc[4][MAX_VECTORS];
#pragma GCC unroll 16
        for (int i = 0; i < T; i++) {
            acc[0][i] = splat(a->bias ? a->bias[row] : 0);
#pragma GCC unroll 4
            for (int c = 1; c < CHAINS; c++) acc[c][i] = splat(0);
        }
        for (; k + CHAINS <= stop; k += CHAINS) {
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; c++) {
                const vec w = splat(k[c].weight);
                const int64_t o = k[c].offset;
#pragma GCC unroll 16
                for (int i = 0; i < T; i++) acc[c][i] += w * load(t->x[i] + o);
            }
        }
        for (; k < stop; k++) {
            const vec w = splat(k->weight);
#pragma GCC unroll 16
            for (int i = 0; i < T; i++) acc[0][i] += w * load(t->x[i] + k->offset);
        }
#pragma GCC unroll 16
        for (int i = 0; i < T; i++) {
#pragma GCC unroll 4
            for (int c = 1; c < CHAINS; c++) acc[0][i] += acc[c][i];
            const vec v = a->relu ? relu(acc[0][i]) : acc[0][i];
            store(t->y[i] + row * a->y->sc, where(t->keep[i], v));
        }
    }
}

CLONES static void flat_strip(const flat_work *a, const strip *t, int count, int64_t row, int64_t end) {
    switch (count) {
    case 16: flat_rows(a, t, row, end, 16, 1); break;
    case 14: flat_rows(a, t, row, end, 14, 1); break;
    case 12: flat_rows(a, t, row, end, 12, 1); break;
    case 10: flat_rows(a, t, row, end, 10, 1); break;
    case 8: flat_rows(a, t, row, end, 8, 1); break;
    case 7: flat_rows(a, t, row, end, 7, 1); break;
    case 6: flat_rows(a, t, row, end, 6, 1); break;
    case 5: flat_rows(a, t, row, end, 5, 2); break;
    case 4: flat_rows(a, t, row, end, 4, 2); break;
    case 3: flat_rows(a, t, row, end, 3, 2); break;
    case 2: flat_rows(a, t, row, end, 2, 4); break;
    default: flat_rows(a, t, row, end, 1, 4);
    }
}

static void flat_job(const void *work, int part, int parts) {
    const flat_work *a = work;
    const int64_t vectors = a->y->n * a->y->h * ((a->y->w + WIDTH - 1) / WIDTH), most = eq_accumulators();
    const int64_t strips = (vectors + most - 1) / most, even = (vectors + strips - 1) / strips;
    const int64_t row = eq_split_rows(a->start, 1, a->y->c, part, parts);
    const int64_t end = eq_split_rows(a->start, 1, a->y->c, part + 1, parts);
    strip t;
    for (int64_t first = 0, count; first < vectors; first += count) { /* 5 + 5 vectors instead of 8 + 2 */
        count = vectors - first < even ? vectors - first : even;
        if (count > 8) count &= ~1; /* above 8 there is code for even sizes only */
        set_strip(&t, a->x, a->y, first, count);
        flat_strip(a, &t, (int)count, row, end);
    }
}

/* Like eq_conv with stride 1, on planes, for a pattern of one block. */
void eq_flat_conv(const map *x, const map *y, const tap *taps, const int32_t *start, const float *bias, int relu,
                  int threads) {
    flat_work a = {x, y, taps, start, bias, relu};
    eq_run(flat_job, &a, threads);
}
