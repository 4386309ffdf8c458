/* Conversion between plain maps (images, c, h, w) with any steps and the blocked layout. */
#include "kernels.h"

#define TILE 16 /* floats in a cache line */

/* Columns j and rows i of up to TILE each, in multiples of 8. */
INLINE void transpose_tile(const float *from, int64_t from_step, float *to, int64_t to_step, int64_t rows,
                           int64_t columns) {
    for (int64_t i = 0; i < rows; i += 8)
        for (int64_t j = 0; j < columns; j += 8) {
            vec v[8];
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) v[k] = load(from + (i + k) * from_step + j);
            transpose8(v);
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) store(to + (j + k) * to_step + i, v[k]);
        }
}

INLINE int64_t up_to_tile(int64_t left) { return left < TILE ? left : TILE; }

/* Tile by tile, so that whole cache lines are read and written: rows may be a power of two apart, and few of their
 * lines then fit into the first-level cache. The inner loop runs along the longer rows. */
CLONES static void transpose(const float *from, int64_t from_step, float *to, int64_t to_step, int64_t rows,
                             int64_t columns) {
    const int64_t whole_rows = rows / 8 * 8, whole_columns = columns / 8 * 8;
    const int by_rows = from_step >= to_step;
    const int64_t outer = by_rows ? whole_rows : whole_columns, inner = by_rows ? whole_columns : whole_rows;
    for (int64_t a = 0; a < outer; a += TILE)
        for (int64_t b = 0; b < inner; b += TILE) {
            const int64_t i = by_rows ? a : b, j = by_rows ? b : a;
            transpose_tile(from + i * from_step + j, from_step, to + j * to_step + i, to_step,
                           up_to_tile(whole_rows - i), up_to_tile(whole_columns - j));
        }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; j++)
            to[j * to_step + i] = from[i * from_step + j];
}

void eq_transpose(const float *from, int64_t from_step, float *to, int64_t to_step, int64_t rows, int64_t columns) {
    if (!eq_level()) {
        transpose(from, from_step, to, to_step, rows, columns);
        return;
    }
    const int64_t whole_rows = rows / TILE * TILE, whole_columns = columns / TILE * TILE;
    eq_transpose_wide(from, from_step, to, to_step, whole_rows, whole_columns);
    if (whole_columns < columns)
        transpose(from + whole_columns, from_step, to + whole_columns * to_step, to_step, whole_rows,
                  columns - whole_columns);
    if (whole_rows < rows)
        transpose(from + whole_rows * from_step, from_step, to + whole_rows, to_step, rows - whole_rows, columns);
}

typedef struct {
    const map *plain, *blocked; /* plain: n counts images */
    int to_blocked, half;
} layout_work;

CLONES static void layout_plane(const layout_work *a, int64_t n, int64_t c) {
    const map *x = a->plain, *y = a->blocked;
    const int64_t left = x->n - n * LANES, real = left < LANES ? left : LANES;
    for (int64_t h = 0; h < y->h; h++) {
        float *p = x->data + n * LANES * x->sn + c * x->sc + h * x->sh, *q = at(y, n, c, h);
        if (x->sw == 1 && real == LANES) {
            if (a->to_blocked)
                eq_transpose(p, x->sn, q, LANES, LANES, y->w);
            else
                eq_transpose(q, LANES, p, x->sn, y->w, LANES);
            continue;
        }
        for (int64_t w = 0; w < y->w; w++, p += x->sw, q += LANES) {
            if (a->to_blocked)
                for (int64_t i = 0; i < LANES; i++) q[i] = i < real ? p[i * x->sn] : 0;
            else
                for (int64_t i = 0; i < real; i++) p[i * x->sn] = q[i];
        }
    }
}

/* A position has the bf16 numbers of 32 images. */
CLONES static void layout_half_plane(const layout_work *a, int64_t n, int64_t c) {
    const map *x = a->plain, *y = a->blocked;
    const int64_t left = x->n - n * 2 * LANES, real = left < 2 * LANES ? left : 2 * LANES;
    for (int64_t h = 0; h < y->h; h++)
        for (int64_t w = 0; w < y->w; w++) {
            float *p = x->data + n * 2 * LANES * x->sn + c * x->sc + h * x->sh + w * x->sw;
            float *q = at(y, n, c, h) + w * LANES;
            for (int64_t j = 0; j < LANES; j += WORDS) {
                vec v[2] = {splat(0), splat(0)};
                if (!a->to_blocked) v[0] = take(q + j, 0, 1), v[1] = take(q + j, 1, 1);
                for (int64_t i = 2 * j, k = 0; k < WORDS; k++, i += 2)
                    for (int e = 0; e < 2; e++) {
                        if (i + e >= real) continue;
                        if (a->to_blocked)
                            v[e][k] = p[(i + e) * x->sn];
                        else
                            p[(i + e) * x->sn] = v[e][k];
                    }
                if (a->to_blocked) put(q + j, v, 1, 0);
            }
        }
}

static void layout_job(const void *work, int part, int parts) {
    const layout_work *a = work;
    const int64_t planes = a->blocked->n * a->blocked->c;
    for (int64_t i = planes * part / parts; i < planes * (part + 1) / parts; i++)
        (a->half ? layout_half_plane : layout_plane)(a, i / a->blocked->c, i % a->blocked->c);
}

void eq_layout(const map *plain, const map *blocked, int to_blocked, int half, int threads) {
    layout_work a = {plain, blocked, to_blocked, half};
    eq_run(layout_job, &a, threads);
}
