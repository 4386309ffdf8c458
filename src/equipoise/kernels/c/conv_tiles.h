#ifndef EQUIPOISE_CONV_TILES_H
#define EQUIPOISE_CONV_TILES_H
/* Sparse convolution of one tile of positions. conv.c includes this for vectors of 32 bytes, conv_wide.c for 64. */
#include "kernels.h"

#define MAX_TILE 8
#define CACHED_SUMS (1 << 20) /* bytes of sums that stay in the second-level cache */
#define DOT_TILE 16 /* of neighbours in memory; for dot products, which need one register for each position */

/* Source and destination pointers of up to DOT_TILE consecutive positions. */
typedef struct {
    const float *x[DOT_TILE];
    float *y[DOT_TILE];
    int64_t block;       /* block of images of the last position */
    const float *unread; /* start of the part of a plane that this tile reads and the previous one did not */
    int64_t lines;       /* length of that part in positions; 0 if the tile spans several small planes */
    int row;             /* whether the positions are neighbours in memory */
} tile;

/* Positions in tile i. */
INLINE int tile_at(int64_t i, int64_t width, int64_t positions) {
    const int64_t left = positions - i * width;
    return left < width ? left : width;
}

INLINE void set_tile(tile *t, const map *x, const map *y, int64_t first, int count) {
    t->row = 1;
    for (int i = 0; i < count; i++) {
        int64_t p = first + i, w = p % y->w, h = p / y->w % y->h, n = p / y->w / y->h;
        t->x[i] = x->data + n * x->sn + h * x->sh + w * x->sw;
        t->y[i] = y->data + n * y->sn + h * y->sh + w * y->sw;
        t->block = n;
        t->row &= t->x[i] - t->x[0] == i * LANES && t->y[i] - t->y[0] == i * LANES;
    }
}

/* Sets the tile after `now`. Taps read at most `reach` ahead and as much back. */
INLINE void set_next_tile(tile *next, int next_count, const tile *now, int count, const map *x, const map *y,
                          int64_t first, int64_t reach) {
    set_tile(next, x, y, first, next_count);
    const float *end = next->x[next_count - 1] + reach;
    next->unread = next->block == now->block ? now->x[count - 1] + reach + LANES
                                             : x->data + next->block * x->sn - (reach < 0 ? -reach : reach);
    next->lines = y->h * y->w < next_count ? 0 : (end - next->unread) / LANES + 1;
}

/* Hides the latency of memory: each row of a tile prefetches a share of the planes that the next tile reads. */
INLINE void fetch_next(const tile *next, const map *x, int64_t y_row, int write, int64_t row, int64_t rows,
                       const int T) {
    for (int64_t c = x->c * row / rows; c < x->c * (row + 1) / rows; c++) {
        for (int64_t i = 0; i < next->lines; i++) __builtin_prefetch(next->unread + c * x->sc + i * LANES);
        for (int i = 0; i < T && !next->lines; i++) __builtin_prefetch(next->x[i] + c * x->sc);
    }
    for (int i = 0; i < T && y_row >= 0; i++) {
        if (write)
            __builtin_prefetch(next->y[i] + y_row, 1);
        else
            __builtin_prefetch(next->y[i] + y_row);
    }
}

typedef struct {
    const map *x, *y;
    const tap *taps;
    const int32_t *start; /* blocks x rows + 1 */
    int64_t blocks;
    int64_t reach; /* largest offset of a tap within a plane */
    const float *bias;
    float *sums; /* of the rows of a tile between blocks, for each thread; only of bf16 maps with several blocks */
    int relu, half, stream, level;
} conv_work;

typedef struct {
    const map *x, *dy;
    const tap *taps;
    const int32_t *start, *order; /* order: index of each tap in the vector of values */
    int64_t blocks, reach;
    float *dvalues, *dbias;
    int64_t width, tiles;
    sum8 *sums; /* one for each tap and each row; of every thread if threads divide the tiles */
    int half, level;
} grad_work;

void eq_conv_tile_wide(const conv_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                       float *sums);
void eq_grad_tile_wide(const grad_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                       sum8 *dot, sum8 *dbias);
void eq_conv_tile_bf16(const conv_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                       float *sums);
void eq_grad_tile_bf16(const grad_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                       sum8 *dot, sum8 *dbias);

#define SUM(row, i, j, e) (sums + ((((row) - from) * T + (i)) * PARTS + (j)) * 2 * WORDS + (e) * WORDS)
/* Sums that several blocks of source channels add to wait in y, or in `sums` if y is bf16. */
INLINE void conv_rows(const conv_work *a, const tile *t, const tile *next, int64_t block, const int64_t from,
                      const int64_t end, float *sums, const int T, const int in_row, const int half, const int past) {
    const int32_t *start = a->start + block * a->y->c;
    const int first = block == 0, last = block == a->blocks - 1;
    const float *x[MAX_TILE];
    float *y[MAX_TILE];
#pragma GCC unroll 8
    for (int i = 0; i < T; i++) {
        x[i] = in_row ? t->x[0] + i * LANES : t->x[i];
        y[i] = in_row ? t->y[0] + i * LANES : t->y[i];
    }
    for (int64_t row = from; row < end; row++) {
        const tap *k = a->taps + start[row], *stop = a->taps + start[row + 1];
        const int64_t to = row * a->y->sc;
        if (last && next) fetch_next(next, a->x, past ? -1 : to, 1, row - from, end - from, T);
        if (k == stop && !first && !(last && (half || a->relu))) continue;
        vec acc[MAX_TILE][PARTS][2];
        const vec b = splat(a->bias ? a->bias[row] : 0);
#pragma GCC unroll 8
        for (int i = 0; i < T; i++)
#pragma GCC unroll 2
            for (int j = 0; j < PARTS; j++)
#pragma GCC unroll 2
                for (int e = 0; e <= half; e++)
                    acc[i][j][e] = first ? b : load(half ? SUM(row, i, j, e) : y[i] + to + j * WORDS);
        for (; k < stop; k++) {
            const vec w = splat(k->weight);
            const int64_t o = k->offset;
#pragma GCC unroll 8
            for (int i = 0; i < T; i++)
#pragma GCC unroll 2
                for (int j = 0; j < PARTS; j++)
#pragma GCC unroll 2
                    for (int e = 0; e <= half; e++) acc[i][j][e] += w * take(x[i] + o + j * WORDS, e, half);
        }
        if (half && !last) {
#pragma GCC unroll 8
            for (int i = 0; i < T; i++)
#pragma GCC unroll 2
                for (int j = 0; j < PARTS; j++)
#pragma GCC unroll 2
                    for (int e = 0; e < 2; e++) store(SUM(row, i, j, e), acc[i][j][e]);
            continue;
        }
        if (last && a->relu) {
#pragma GCC unroll 8
            for (int i = 0; i < T; i++)
#pragma GCC unroll 2
                for (int j = 0; j < PARTS; j++)
#pragma GCC unroll 2
                    for (int e = 0; e <= half; e++) acc[i][j][e] = relu(acc[i][j][e]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < T; i++)
#pragma GCC unroll 2
            for (int j = 0; j < PARTS; j++) put(y[i] + to + j * WORDS, acc[i][j], half, past);
    }
}

/* Narrow vectors have no registers for wider tiles of bf16 numbers; see tile_width. */
#define WIDEST(half) (VECTOR_BYTES == 32 && (half) ? 4 : MAX_TILE)
#define FOR_EACH_TILE_WIDTH(CASE) CASE(8) CASE(7) CASE(6) CASE(5) CASE(4) CASE(3) CASE(2) CASE(1)

INLINE void conv_tile_of(const conv_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                         float *sums, const int half, const int past) {
    for (int64_t b = 0; b < a->blocks; b++) {
        if (count == WIDEST(half) && t->row) {
            conv_rows(a, t, next, b, row, end, sums, WIDEST(half), 1, half, past);
            continue;
        }
#define CASE(T) \
    case T: \
        if (T <= WIDEST(half)) conv_rows(a, t, next, b, row, end, sums, T, 0, half, past); \
        break;
        switch (count) { FOR_EACH_TILE_WIDTH(CASE) }
#undef CASE
    }
}

INLINE void conv_any_tile(const conv_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                          float *sums) {
    if (VECTOR_BYTES == 64 && a->half && a->stream)
        conv_tile_of(a, t, next, count, row, end, sums, 1, 1);
    else if (a->half)
        conv_tile_of(a, t, next, count, row, end, sums, 1, 0);
    else if (a->stream)
        conv_tile_of(a, t, next, count, row, end, NULL, 0, 1);
    else
        conv_tile_of(a, t, next, count, row, end, NULL, 0, 0);
}

#if VECTOR_BYTES == 32
#define FIRST_SUM(kept) kept
#define ADD_SUM(kept, found) kept = found
#else
#define FIRST_SUM(kept) splat(0)
#define ADD_SUM(kept, found) kept += eight(found)
#endif

/* dot[k] += <dy tile, x tile at the offset of k>, lane by lane; lanes are summed once, at the end. */
INLINE void grad_rows(const grad_work *a, const tile *t, const tile *next, int64_t block, const int64_t row,
                      const int64_t end, sum8 *dot, sum8 *dbias, const int T, const int in_row, const int half) {
    const int32_t *start = a->start + block * a->dy->c;
    const tap *base = a->taps + start[row];
    const float *x[MAX_TILE], *dy[MAX_TILE];
#pragma GCC unroll 8
    for (int i = 0; i < T; i++) {
        x[i] = in_row ? t->x[0] + i * LANES : t->x[i];
        dy[i] = in_row ? t->y[0] + i * LANES : t->y[i];
    }
    for (int64_t r = row; r < end; r++) {
        const tap *k = a->taps + start[r], *stop = a->taps + start[r + 1];
        if (next) fetch_next(next, a->x, r * a->dy->sc, 0, r - row, end - row, T);
        if (k == stop && !dbias) continue;
        enum { PAIRS = VECTOR_BYTES == 32 ? 2 : 1 };
        vec g[MAX_TILE][PAIRS][2]; /* pairs of vectors: the whole position, or even and odd images of words */
        const int pairs = half ? PARTS : PARTS / 2;
#pragma GCC unroll 8
        for (int i = 0; i < T; i++)
#pragma GCC unroll 2
            for (int j = 0; j < pairs; j++)
#pragma GCC unroll 2
                for (int e = 0; e < 2; e++) {
                    const float *p = dy[i] + r * a->dy->sc + (half ? j * WORDS : e * WORDS);
                    g[i][j][e] = take(p, e, half);
                }
        if (dbias) {
            vec s = g[0][0][0] + g[0][0][1];
#pragma GCC unroll 8
            for (int i = 0; i < T; i++)
#pragma GCC unroll 2
                for (int j = i == 0; j < pairs; j++) s += g[i][j][0] + g[i][j][1];
            dbias[r - row] += eight(s);
        }
        for (; k < stop; k++) {
            const int64_t o = k->offset;
            vec sums[4] = {FIRST_SUM(dot[k - base]), splat(0), splat(0), splat(0)}; /* four chains hide the latency */
#pragma GCC unroll 8
            for (int i = 0; i < T; i++)
#pragma GCC unroll 2
                for (int j = 0; j < pairs; j++)
#pragma GCC unroll 2
                    for (int e = 0; e < 2; e++) {
                        const float *p = x[i] + o + (half ? j * WORDS : e * WORDS);
                        sums[(i + j) % 2 + 2 * e] += g[i][j][e] * take(p, e, half);
                    }
            ADD_SUM(dot[k - base], (sums[0] + sums[1]) + (sums[2] + sums[3]));
        }
    }
}

/* Runs all blocks of source channels of one tile, so that its part of dy stays in cache. */
INLINE void grad_any_tile(const grad_work *a, const tile *t, const tile *next, int count, int64_t row, int64_t end,
                          sum8 *dot, sum8 *dbias, const int half) {
    for (int64_t b = 0; b < a->blocks; b++) {
        const tile *ahead = b == a->blocks - 1 ? next : NULL;
        sum8 *bias = b == 0 ? dbias : NULL;
        if (count == WIDEST(half) && t->row) {
            grad_rows(a, t, ahead, b, row, end, dot, bias, WIDEST(half), 1, half);
        } else {
#define CASE(T) \
    case T: \
        if (T <= WIDEST(half)) grad_rows(a, t, ahead, b, row, end, dot, bias, T, 0, half); \
        break;
            switch (count) { FOR_EACH_TILE_WIDTH(CASE) }
#undef CASE
        }
        dot += a->start[b * a->dy->c + end] - a->start[b * a->dy->c + row];
    }
}

#endif
