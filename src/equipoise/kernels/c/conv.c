/* Sparse convolution: forward, input gradient, weight gradient on active weights. */
#include "kernels.h"

#define MAX_TILE 8
#define CACHED_SUMS (1 << 20) /* bytes of sums that stay in the second-level cache */

/* A wide tile saves work per tap. A narrow tile keeps more planes in cache and is faster if there are many. */
static int64_t tile_width(const map *x, int64_t taps, int64_t rows) {
    const int64_t most = eq_accumulators() / 2;
    return most > 4 && (x->c > 128 || taps < 64 * rows) ? 4 : most;
}

/* Positions in tile i. */
static int tile_at(int64_t i, int64_t width, int64_t positions) {
    const int64_t left = positions - i * width;
    return left < width ? left : width;
}

/* Source and destination pointers of up to MAX_TILE consecutive positions. */
typedef struct {
    const float *x[MAX_TILE];
    float *y[MAX_TILE];
    int64_t block;       /* block of images of the last position */
    const float *unread; /* start of the part of a plane that this tile reads and the previous one did not */
    int64_t lines;       /* length of that part in positions; 0 if the tile spans several small planes */
} tile;

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

INLINE void set_tile(tile *t, const map *x, const map *y, int64_t first, int count) {
    for (int i = 0; i < count; i++) {
        int64_t p = first + i, w = p % y->w, h = p / y->w % y->h, n = p / y->w / y->h;
        t->x[i] = x->data + n * x->sn + h * x->sh + w * x->sw;
        t->y[i] = y->data + n * y->sn + h * y->sh + w * y->sw;
        t->block = n;
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

/* ---- convolution: forward, and input gradient on the transposed pattern ---- */

typedef struct {
    const map *x, *y;
    const tap *taps;
    const int32_t *start; /* blocks x rows + 1 */
    int64_t blocks;
    int64_t reach; /* largest offset of a tap within a plane */
    const float *bias;
    int relu, stream;
} conv_work;

INLINE void conv_rows(const conv_work *a, const tile *t, const tile *next, int64_t block, const int64_t from,
                      const int64_t end, const int T, const int past) {
    const int32_t *start = a->start + block * a->y->c;
    const int first = block == 0, last = block == a->blocks - 1;
    for (int64_t row = from; row < end; row++) {
        const tap *k = a->taps + start[row], *stop = a->taps + start[row + 1];
        const int64_t to = row * a->y->sc;
        if (last && next) fetch_next(next, a->x, past ? -1 : to, 1, row - from, end - from, T);
        if (k == stop && !first && !(last && a->relu)) continue;
        vec acc[MAX_TILE][2];
        if (first) {
            const vec b = splat(a->bias ? a->bias[row] : 0);
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) acc[i][0] = acc[i][1] = b;
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) acc[i][0] = load(t->y[i] + to), acc[i][1] = load(t->y[i] + to + 8);
        }
        for (; k < stop; k++) {
            const vec w = splat(k->weight);
            const int64_t o = k->offset;
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) {
                acc[i][0] += w * load(t->x[i] + o);
                acc[i][1] += w * load(t->x[i] + o + 8);
            }
        }
        if (last && a->relu) {
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) acc[i][0] = relu(acc[i][0]), acc[i][1] = relu(acc[i][1]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) {
            if (past)
                stream(t->y[i] + to, acc[i][0]), stream(t->y[i] + to + 8, acc[i][1]);
            else
                store(t->y[i] + to, acc[i][0]), store(t->y[i] + to + 8, acc[i][1]);
        }
    }
}

#define FOR_EACH_TILE_WIDTH(CASE) CASE(8) CASE(7) CASE(6) CASE(5) CASE(4) CASE(3) CASE(2) CASE(1)

CLONES static void conv_tile(const conv_work *a, const tile *t, const tile *next, int count, int64_t row,
                             int64_t end) {
#define CASE(T)                                              \
    case T:                                                  \
        if (a->stream)                                       \
            conv_rows(a, t, next, b, row, end, T, 1);        \
        else                                                 \
            conv_rows(a, t, next, b, row, end, T, 0);        \
        break;
    for (int64_t b = 0; b < a->blocks; b++) switch (count) { FOR_EACH_TILE_WIDTH(CASE) }
#undef CASE
}

static void conv_job(const void *work, int part, int parts) {
    const conv_work *a = work;
    const int64_t positions = a->y->n * a->y->h * a->y->w, rows = a->y->c;
    const int64_t width = tile_width(a->x, a->start[a->blocks * rows] - a->start[0], rows);
    const int64_t tiles = (positions + width - 1) / width;
    int64_t first = 0, stop = tiles, row = 0, end = rows;
    if (tiles >= 8 * parts) { /* divide the tiles if there are enough, else the rows */
        first = tiles * part / parts;
        stop = tiles * (part + 1) / parts;
    } else {
        row = eq_split_rows(a->start, a->blocks, rows, part, parts);
        end = eq_split_rows(a->start, a->blocks, rows, part + 1, parts);
    }
    tile now, next;
    for (int64_t i = first; i < stop; i++) {
        const int count = tile_at(i, width, positions);
        if (i == first) set_tile(&now, a->x, a->y, i * width, count);
        const int then = i + 1 < stop ? tile_at(i + 1, width, positions) : 0;
        if (then) set_next_tile(&next, then, &now, count, a->x, a->y, (i + 1) * width, a->reach);
        conv_tile(a, &now, then == count ? &next : NULL, count, row, end);
        now = next;
    }
}

/* y[row] = bias[row] + sum of weight * x[position + offset]. The steps of x are per output position. */
void eq_conv(const map *x, const map *y, const tap *taps, const int32_t *start, int64_t blocks,
             int64_t reach, const float *bias, int relu, int threads) {
    conv_work a = {x, y, taps, start, blocks, reach, bias, relu, blocks == 1 && streams(y)};
    eq_run(conv_job, &a, threads);
}

/* ---- weight gradient, for active weights only ---- */

typedef struct {
    const map *x, *dy;
    const tap *taps;
    const int32_t *start, *order; /* order: index of each tap in the vector of values */
    int64_t blocks, reach;
    float *dvalues, *dbias;
    int64_t width, tiles;
    vec *sums; /* one for each tap and each row; of every thread if threads divide the tiles */
} grad_work;

/* dot[k] += <dy tile, x tile at the offset of k>, lane by lane; lanes are summed once, at the end. */
INLINE void grad_rows(const grad_work *a, const tile *t, const tile *next, int64_t block, const int64_t row,
                      const int64_t end, vec *dot, vec *dbias, const int T) {
    const int32_t *start = a->start + block * a->dy->c;
    const tap *base = a->taps + start[row];
    for (int64_t r = row; r < end; r++) {
        const tap *k = a->taps + start[r], *stop = a->taps + start[r + 1];
        if (next) fetch_next(next, a->x, r * a->dy->sc, 0, r - row, end - row, T);
        if (k == stop && !dbias) continue;
        vec g[MAX_TILE][2];
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) {
            g[i][0] = load(t->y[i] + r * a->dy->sc);
            g[i][1] = load(t->y[i] + r * a->dy->sc + 8);
        }
        if (dbias) {
            vec s = g[0][0] + g[0][1];
#pragma GCC unroll 8
            for (int i = 1; i < T; i++) s += g[i][0] + g[i][1];
            dbias[r - row] += s;
        }
        for (; k < stop; k++) {
            const int64_t o = k->offset;
            vec sums[4] = {dot[k - base], splat(0), splat(0), splat(0)}; /* four chains hide the latency */
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) {
                sums[i % 2] += g[i][0] * load(t->x[i] + o);
                sums[i % 2 + 2] += g[i][1] * load(t->x[i] + o + 8);
            }
            dot[k - base] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        }
    }
}

/* Runs all blocks of source channels of one tile, so that its part of dy stays in cache. */
CLONES static void grad_tile(const grad_work *a, const tile *t, const tile *next, int count, int64_t row,
                             int64_t end, vec *dot, vec *dbias) {
    for (int64_t b = 0; b < a->blocks; b++) {
        const tile *ahead = b == a->blocks - 1 ? next : NULL;
        vec *bias = b == 0 ? dbias : NULL;
#define CASE(T) \
    case T: grad_rows(a, t, ahead, b, row, end, dot, bias, T); break;
        switch (count) { FOR_EACH_TILE_WIDTH(CASE) }
#undef CASE
        dot += a->start[b * a->dy->c + end] - a->start[b * a->dy->c + row];
    }
}

/* Tiles `first` to `stop` for rows `row` to `end`. `dot` has a sum for each of their taps, block by block. */
static void grad_tiles(const grad_work *a, int64_t first, int64_t stop, int64_t row, int64_t end, vec *dot,
                       vec *dbias) {
    const int64_t positions = a->dy->n * a->dy->h * a->dy->w;
    tile now, next;
    for (int64_t i = first; i < stop; i++) {
        const int count = tile_at(i, a->width, positions);
        if (i == first) set_tile(&now, a->x, a->dy, i * a->width, count);
        const int then = i + 1 < stop ? tile_at(i + 1, a->width, positions) : 0;
        if (then) set_next_tile(&next, then, &now, count, a->x, a->dy, (i + 1) * a->width, a->reach);
        grad_tile(a, &now, then == count ? &next : NULL, count, row, end, dot, dbias);
        now = next;
    }
}

/* Threads divide the rows, for many taps: the sums of a tap stay with one thread. */
static void grad_by_rows(const void *work, int part, int parts) {
    const grad_work *a = work;
    const int64_t rows = a->dy->c;
    const int64_t row = eq_split_rows(a->start, a->blocks, rows, part, parts);
    const int64_t end = eq_split_rows(a->start, a->blocks, rows, part + 1, parts);
    int64_t before = 0, taps = 0; /* taps of the rows before these, and of these */
    for (int64_t b = 0; b < a->blocks; b++) {
        before += a->start[b * rows + row] - a->start[b * rows];
        taps += a->start[b * rows + end] - a->start[b * rows + row];
    }
    vec *dot = a->sums + before, *seen = dot;
    vec *dbias = a->dbias ? a->sums + (a->start[a->blocks * rows] - a->start[0]) + row : NULL;
    memset(dot, 0, taps * sizeof(vec));
    if (dbias) memset(dbias, 0, (end - row) * sizeof(vec));
    grad_tiles(a, 0, a->tiles, row, end, dot, dbias);
    for (int64_t b = 0; b < a->blocks; b++)
        for (int32_t k = a->start[b * rows + row]; k < a->start[b * rows + end]; k++)
            a->dvalues[a->order[k]] = sum(*seen++);
    for (int64_t r = row; dbias && r < end; r++) a->dbias[r] = sum(dbias[r - row]);
}

/* Threads divide the tiles, for few taps: no activation is read twice. */
static void grad_by_tiles(const void *work, int part, int parts) {
    const grad_work *a = work;
    const int64_t rows = a->dy->c, taps = a->start[a->blocks * rows] - a->start[0];
    vec *dot = a->sums + part * (taps + rows), *dbias = a->dbias ? dot + taps : NULL;
    grad_tiles(a, a->tiles * part / parts, a->tiles * (part + 1) / parts, 0, rows, dot, dbias);
}

static void add_up(const grad_work *a, int parts) {
    const int64_t rows = a->dy->c, taps = a->start[a->blocks * rows] - a->start[0], step = taps + rows;
    for (int64_t k = 0; k < step; k++) {
        vec s = a->sums[k];
        for (int p = 1; p < parts; p++) s += a->sums[p * step + k];
        if (k < taps)
            a->dvalues[a->order[a->start[0] + k]] = sum(s);
        else if (a->dbias)
            a->dbias[k - taps] = sum(s);
    }
}

int eq_conv_grad(const map *x, const map *dy, const tap *taps, const int32_t *start, const int32_t *order,
                 int64_t blocks, int64_t reach, float *dvalues, float *dbias, int threads) {
    const int64_t count = start[blocks * dy->c] - start[0], positions = dy->n * dy->h * dy->w;
    const int64_t width = tile_width(x, count, dy->c);
    const int64_t tiles = (positions + width - 1) / width, room = (count + dy->c) * sizeof(vec);
    const int by_rows = threads <= 1 || room > CACHED_SUMS || tiles < 8 * threads;
    vec *sums = eq_scratch(by_rows ? room : room * threads);
    if (!sums) return 1;
    grad_work a = {x, dy, taps, start, order, blocks, reach, dvalues, dbias, width, tiles, sums};
    if (by_rows) {
        eq_run(grad_by_rows, &a, threads);
    } else {
        memset(sums, 0, room * threads); /* all of it: there may be fewer threads */
        eq_run(grad_by_tiles, &a, threads);
        add_up(&a, threads);
    }
    free(sums);
    return 0;
}
