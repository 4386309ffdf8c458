/* Both gradients of a convolution of bf16 maps with stride 1, in one pass over dy: each of its numbers that a tap reads
 * is multiplied by the weight, for dx, and by the input, for the gradient of the weight. Reading dy is what takes the
 * time. The instructions are those of AVX512-BF16. */
#define VECTOR_BYTES 64
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(EQ_NO_CLONES)
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#endif
#if defined(__AVX512BF16__)
#include "conv_tiles.h"

typedef struct {
    const map *x, *dy, *dx;
    const tap *taps;              /* of the input gradient: rows are channels of x, sources those of dy */
    const int32_t *start, *order; /* order: index of each tap in the vector of values */
    int64_t blocks, reach;
    float *dvalues, *dbias;
    int64_t tiles, bias_tiles;
    sum8 *dots; /* one for each tap, and one for each channel of dy; of every thread if threads divide the tiles */
    float *sums; /* of dx between blocks, for each thread */
    int stream;
} back_work;

/* A tile of positions: t.x is dy, t.y is dx, own.y is x. */
typedef struct {
    tile t, own;
} place;

INLINE vec add_dot(vec sum, vec a, vec b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

INLINE void set_place(place *p, const back_work *a, int64_t i, int count) {
    set_tile(&p->t, a->dy, a->dx, i * MAX_TILE, count);
    set_tile(&p->own, a->dy, a->x, i * MAX_TILE, count);
}

INLINE void back_rows(const back_work *a, const place *now, const place *next, int64_t block, const int64_t from,
                      const int64_t end, sum8 *dot, float *sums, const int T, const int in_row) {
    const int32_t *start = a->start + block * a->dx->c;
    const tap *base = a->taps + start[from];
    const int first = block == 0, last = block == a->blocks - 1;
    for (int64_t row = from; row < end; row++) {
        const tap *k = a->taps + start[row], *stop = a->taps + start[row + 1];
        const int64_t own = row * a->x->sc, to = row * a->dx->sc;
        if (last && next) {
            fetch_next(&next->t, a->dy, a->stream ? -1 : to, 1, row - from, end - from, T);
            for (int i = 0; i < T; i++) __builtin_prefetch(next->own.y[i] + own);
        }
        if (k == stop && !first && !last) continue;
        vec acc[MAX_TILE][2], x[MAX_TILE];
        float *kept = sums + (row - from) * T * 2 * WORDS;
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) {
            x[i] = load((in_row ? now->own.y[0] + i * LANES : now->own.y[i]) + own);
#pragma GCC unroll 2
            for (int e = 0; e < 2; e++) acc[i][e] = first ? splat(0) : load(kept + (2 * i + e) * WORDS);
        }
        for (; k < stop; k++) {
            const vec w = splat(k->weight);
            const int64_t o = k->offset;
            vec found[2] = {splat(0), splat(0)}; /* two chains hide the latency */
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) {
                const vec g = load((in_row ? now->t.x[0] + i * LANES : now->t.x[i]) + o);
                found[i % 2] = add_dot(found[i % 2], x[i], g);
                acc[i][0] += w * (vec)((words)g << 16);
                acc[i][1] += w * (vec)((words)g & 0xffff0000u);
            }
            dot[k - base] += eight(found[0] + found[1]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) {
            if (last)
                put((in_row ? now->t.y[0] + i * LANES : now->t.y[i]) + to, acc[i], 1, a->stream);
            else
                store(kept + 2 * i * WORDS, acc[i][0]), store(kept + (2 * i + 1) * WORDS, acc[i][1]);
        }
    }
}

static void back_tile(const back_work *a, const place *now, const place *next, int count, int64_t row, int64_t end,
                      sum8 *dot, float *sums) {
    for (int64_t b = 0; b < a->blocks; b++) {
#define CASE(T) \
    case T: back_rows(a, now, next, b, row, end, dot, sums, T, 0); break;
        if (count == MAX_TILE && now->t.row && now->own.row)
            back_rows(a, now, next, b, row, end, dot, sums, MAX_TILE, 1);
        else
            switch (count) { FOR_EACH_TILE_WIDTH(CASE) }
#undef CASE
        dot += a->start[b * a->dx->c + end] - a->start[b * a->dx->c + row];
    }
}

/* Adds dy over the positions of some tiles. */
static void add_bias(const back_work *a, int64_t first, int64_t stop, int64_t row, int64_t end, sum8 *dbias) {
    const int64_t positions = a->dy->n * a->dy->h * a->dy->w;
    const vec ones = (vec)((words){0} + 0x3f803f80u);
    for (int64_t i = first; i < stop; i++) {
        tile t;
        const int count = tile_at(i, MAX_TILE, positions);
        set_tile(&t, a->dy, a->dy, i * MAX_TILE, count);
        for (int64_t r = row; r < end; r++) {
            vec s = splat(0);
            for (int j = 0; j < count; j++) s = add_dot(s, load(t.y[j] + r * a->dy->sc), ones);
            dbias[r - row] += eight(s);
        }
    }
}

/* Tiles `first` to `stop` for channels `row` to `end` of x, and the same share of dy for the bias. */
static void back_tiles(const back_work *a, int64_t first, int64_t stop, int64_t row, int64_t end, sum8 *dot,
                       int64_t bias_row, int64_t bias_end, sum8 *dbias, float *sums) {
    const int64_t positions = a->dx->n * a->dx->h * a->dx->w;
    place now, next;
    for (int64_t i = first; i < stop; i++) {
        const int count = tile_at(i, MAX_TILE, positions);
        if (i == first) set_place(&now, a, i, count);
        const int then = i + 1 < stop ? tile_at(i + 1, MAX_TILE, positions) : 0;
        if (then) {
            set_place(&next, a, i + 1, then);
            set_next_tile(&next.t, then, &now.t, count, a->dy, a->dx, (i + 1) * MAX_TILE, a->reach);
        }
        back_tile(a, &now, then == count ? &next : NULL, count, row, end, dot, sums);
        if (dbias) /* while this part of dy is in cache */
            add_bias(a, i * a->bias_tiles / a->tiles, (i + 1) * a->bias_tiles / a->tiles, bias_row, bias_end, dbias);
        now = next;
    }
}

static float *sums_of(const back_work *a, int part) {
    return a->sums + part * a->dx->c * MAX_TILE * 2 * WORDS;
}

/* Threads divide the channels, for many taps: the sums of a tap stay with one thread. */
static void back_by_rows(const void *work, int part, int parts) {
    const back_work *a = work;
    const int64_t rows = a->dx->c, row = eq_split_rows(a->start, a->blocks, rows, part, parts);
    const int64_t end = eq_split_rows(a->start, a->blocks, rows, part + 1, parts);
    const int64_t bias_row = a->dy->c * part / parts, bias_end = a->dy->c * (part + 1) / parts;
    int64_t before = 0, taps = 0; /* taps of the rows before these, and of these */
    for (int64_t b = 0; b < a->blocks; b++) {
        before += a->start[b * rows + row] - a->start[b * rows];
        taps += a->start[b * rows + end] - a->start[b * rows + row];
    }
    sum8 *dot = a->dots + before, *seen = dot;
    sum8 *dbias = a->dbias ? a->dots + (a->start[a->blocks * rows] - a->start[0]) + bias_row : NULL;
    memset(dot, 0, taps * sizeof(sum8));
    if (dbias) memset(dbias, 0, (bias_end - bias_row) * sizeof(sum8));
    back_tiles(a, 0, a->tiles, row, end, dot, bias_row, bias_end, dbias, sums_of(a, part));
    for (int64_t b = 0; b < a->blocks; b++)
        for (int32_t k = a->start[b * rows + row]; k < a->start[b * rows + end]; k++)
            a->dvalues[a->order[k]] = sum_of_eight(*seen++);
    for (int64_t r = bias_row; dbias && r < bias_end; r++) a->dbias[r] = sum_of_eight(dbias[r - bias_row]);
}

/* Threads divide the tiles, for few taps: no activation is read twice. */
static void back_by_tiles(const void *work, int part, int parts) {
    const back_work *a = work;
    const int64_t rows = a->dx->c, taps = a->start[a->blocks * rows] - a->start[0];
    sum8 *dot = a->dots + part * (taps + a->dy->c);
    back_tiles(a, a->tiles * part / parts, a->tiles * (part + 1) / parts, 0, rows, dot, 0, a->dy->c,
               a->dbias ? dot + taps : NULL, sums_of(a, part));
}

static void add_up(const back_work *a, int parts) {
    const int64_t taps = a->start[a->blocks * a->dx->c] - a->start[0], step = taps + a->dy->c;
    for (int64_t k = 0; k < step; k++) {
        sum8 s = a->dots[k];
        for (int p = 1; p < parts; p++) s += a->dots[p * step + k];
        if (k < taps)
            a->dvalues[a->order[a->start[0] + k]] = sum_of_eight(s);
        else if (a->dbias)
            a->dbias[k - taps] = sum_of_eight(s);
    }
}

int eq_conv_back(const map *x, const map *dy, const map *dx, const tap *taps, const int32_t *start,
                 const int32_t *order, int64_t blocks, int64_t reach, float *dvalues, float *dbias, int threads) {
    const int64_t count = start[blocks * dx->c] - start[0], room = (count + dy->c) * sizeof(sum8);
    const int64_t tiles = (dx->n * dx->h * dx->w + MAX_TILE - 1) / MAX_TILE;
    const int64_t bias_tiles = (dy->n * dy->h * dy->w + MAX_TILE - 1) / MAX_TILE;
    const int by_rows = threads <= 1 || room > CACHED_SUMS || tiles < 8 * threads, parts = threads > 1 ? threads : 1;
    sum8 *dots = eq_scratch(by_rows ? room : room * parts);
    float *sums = eq_scratch(blocks > 1 ? parts * dx->c * MAX_TILE * 2 * WORDS * sizeof *sums : 1);
    if (dots && sums) {
        back_work a = {x, dy, dx, taps, start, order, blocks, reach, dvalues, dbias, tiles, bias_tiles, dots, sums,
                       streams(dx)};
        if (by_rows) {
            eq_run(back_by_rows, &a, threads);
        } else {
            memset(dots, 0, room * parts); /* all of it: there may be fewer threads */
            eq_run(back_by_tiles, &a, threads);
            add_up(&a, parts);
        }
    }
    const int failed = !dots || !sums;
    free(dots), free(sums);
    return failed;
}
#else
#undef VECTOR_BYTES
#include "kernels.h"

int eq_conv_back(const map *x, const map *dy, const map *dx, const tap *taps, const int32_t *start,
                 const int32_t *order, int64_t blocks, int64_t reach, float *dvalues, float *dbias, int threads) {
    return 1; /* not called: see eq_level */
}
#endif
