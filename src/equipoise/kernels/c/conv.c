/* Sparse convolution: forward, input gradient, weight gradient on active weights. */
#include "conv_tiles.h"

/* A wide tile saves work per tap. A narrow tile keeps more planes in cache and is faster if there are many. */
static int64_t tile_width(const map *x, int64_t taps, int64_t rows, int half, int level) {
    if (half) return level ? MAX_TILE : eq_accumulators() / 4;
    const int64_t most = eq_accumulators() / 2;
    return most > 4 && (x->c > 128 || taps < 64 * rows) ? 4 : most;
}

/* ---- convolution: forward, and input gradient on the transposed pattern ---- */

NARROW_CLONES static void conv_tile(const conv_work *a, const tile *t, const tile *next, int count, int64_t row,
                                    int64_t end, float *sums) {
    conv_any_tile(a, t, next, count, row, end, sums);
}

static void conv_job(const void *work, int part, int parts) {
    const conv_work *a = work;
    const int64_t positions = a->y->n * a->y->h * a->y->w, rows = a->y->c;
    const int64_t width = tile_width(a->x, a->start[a->blocks * rows] - a->start[0], rows, a->half, a->level);
    const int64_t tiles = (positions + width - 1) / width;
    int64_t first = 0, stop = tiles, row = 0, end = rows;
    if (tiles >= 8 * parts) { /* divide the tiles if there are enough, else the rows */
        first = tiles * part / parts;
        stop = tiles * (part + 1) / parts;
    } else {
        row = eq_split_rows(a->start, a->blocks, rows, part, parts);
        end = eq_split_rows(a->start, a->blocks, rows, part + 1, parts);
    }
    float *sums = a->sums ? a->sums + part * rows * MAX_TILE * 2 * LANES : NULL;
    void (*run)(const conv_work *, const tile *, const tile *, int, int64_t, int64_t, float *) =
        a->level == 2 && a->half ? eq_conv_tile_bf16 : a->level ? eq_conv_tile_wide : conv_tile;
    tile now, next;
    for (int64_t i = first; i < stop; i++) {
        const int count = tile_at(i, width, positions);
        if (i == first) set_tile(&now, a->x, a->y, i * width, count);
        const int then = i + 1 < stop ? tile_at(i + 1, width, positions) : 0;
        if (then) set_next_tile(&next, then, &now, count, a->x, a->y, (i + 1) * width, a->reach);
        run(a, &now, then == count ? &next : NULL, count, row, end, sums);
        now = next;
    }
}

/* y[row] = bias[row] + sum of weight * x[position + offset]. The steps of x are per output position. */
int eq_conv(const map *x, const map *y, const tap *taps, const int32_t *start, int64_t blocks,
             int64_t reach, const float *bias, int relu, int half, int threads) {
    float *sums = NULL;
    if (half && blocks > 1) {
        sums = eq_scratch((threads > 1 ? threads : 1) * y->c * MAX_TILE * 2 * LANES * sizeof *sums);
        if (!sums) return 1;
    }
    const int level = eq_level(), past = (half ? level > 0 : blocks == 1) && streams(y);
    conv_work a = {x, y, taps, start, blocks, reach, bias, sums, relu, half, past, level};
    eq_run(conv_job, &a, threads);
    free(sums);
    return 0;
}

/* ---- weight gradient, for active weights only ---- */

CLONES static void grad_tile(const grad_work *a, const tile *t, const tile *next, int count, int64_t row,
                             int64_t end, sum8 *dot, sum8 *dbias) {
    grad_any_tile(a, t, next, count, row, end, dot, dbias, 0);
}

NARROW_CLONES static void grad_half_tile(const grad_work *a, const tile *t, const tile *next, int count, int64_t row,
                                         int64_t end, sum8 *dot, sum8 *dbias) {
    grad_any_tile(a, t, next, count, row, end, dot, dbias, 1);
}

/* Tiles `first` to `stop` for rows `row` to `end`. `dot` has a sum for each of their taps, block by block. */
static void grad_tiles(const grad_work *a, int64_t first, int64_t stop, int64_t row, int64_t end, sum8 *dot,
                       sum8 *dbias) {
    const int64_t positions = a->dy->n * a->dy->h * a->dy->w;
    void (*run)(const grad_work *, const tile *, const tile *, int, int64_t, int64_t, sum8 *, sum8 *) =
        a->level == 2 ? eq_grad_tile_bf16 : a->level ? eq_grad_tile_wide : a->half ? grad_half_tile : grad_tile;
    tile now, next;
    for (int64_t i = first; i < stop; i++) {
        const int count = tile_at(i, a->width, positions);
        if (i == first) set_tile(&now, a->x, a->dy, i * a->width, count);
        const int then = i + 1 < stop ? tile_at(i + 1, a->width, positions) : 0;
        if (then) set_next_tile(&next, then, &now, count, a->x, a->dy, (i + 1) * a->width, a->reach);
        run(a, &now, then == count ? &next : NULL, count, row, end, dot, dbias);
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
    sum8 *dot = a->sums + before, *seen = dot;
    sum8 *dbias = a->dbias ? a->sums + (a->start[a->blocks * rows] - a->start[0]) + row : NULL;
    memset(dot, 0, taps * sizeof(sum8));
    if (dbias) memset(dbias, 0, (end - row) * sizeof(sum8));
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
    sum8 *dot = a->sums + part * (taps + rows), *dbias = a->dbias ? dot + taps : NULL;
    grad_tiles(a, a->tiles * part / parts, a->tiles * (part + 1) / parts, 0, rows, dot, dbias);
}

static void add_up(const grad_work *a, int parts) {
    const int64_t rows = a->dy->c, taps = a->start[a->blocks * rows] - a->start[0], step = taps + rows;
    for (int64_t k = 0; k < step; k++) {
        sum8 s = a->sums[k];
        for (int p = 1; p < parts; p++) s += a->sums[p * step + k];
        if (k < taps)
            a->dvalues[a->order[a->start[0] + k]] = sum(s);
        else if (a->dbias)
            a->dbias[k - taps] = sum(s);
    }
}

int eq_conv_grad(const map *x, const map *dy, const tap *taps, const int32_t *start, const int32_t *order,
                 int64_t blocks, int64_t reach, float *dvalues, float *dbias, int half, int threads) {
    const int level = half ? eq_level() : 0; /* the order of float sums is that of narrow vectors */
    const int64_t count = start[blocks * dy->c] - start[0], positions = dy->n * dy->h * dy->w;
    const int rows_of_tiles = dy->w % DOT_TILE == 0 && x->sw == LANES && dy->sw == LANES;
    const int64_t width = level == 2 && rows_of_tiles ? DOT_TILE : tile_width(x, count, dy->c, half, level);
    const int64_t tiles = (positions + width - 1) / width, room = (count + dy->c) * sizeof(sum8);
    const int by_rows = threads <= 1 || room > CACHED_SUMS || tiles < 8 * threads;
    sum8 *sums = eq_scratch(by_rows ? room : room * threads);
    if (!sums) return 1;
    grad_work a = {x, dy, taps, start, order, blocks, reach, dvalues, dbias, width, tiles, sums, half, level};
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
