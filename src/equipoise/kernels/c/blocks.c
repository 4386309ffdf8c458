/* Convolution whose active weights form blocks of 16 outputs x 1 input: one offset for 16 weights.
 *
 * The 16 outputs of a group have the same taps. A tap is an offset into the source map with 16 weights. A vector of
 * inputs, once loaded, serves several outputs, so that arithmetic and not loading sets the pace.
 */
#include "kernels.h"

#define GROUP 16 /* outputs */
#define HALF 8
#define MAX_WIDTH 6
#define STRIP 32 /* positions whose gradients stay in the first-level cache */

/* Sorts active weights, given as ascending flat indices into (out, in / groups, taps), by group of outputs, position
 * in the kernel and input channel. `order` is the index of a tap among those of one output. Returns the number of
 * taps, 0 unless the weights form blocks. */
int64_t eq_find_blocks(int64_t count, const int32_t *flat, const int64_t *geometry, int32_t *start, int32_t *source,
                       int32_t *which, int32_t *order) {
    const int64_t in_group = geometry[0], out_group = geometry[1], kernel = geometry[2], groups = geometry[3];
    const int64_t row = in_group * kernel;
    if (!count || out_group % GROUP) return 0;
    memset(start, 0, (groups * kernel + 1) * sizeof *start);
    int64_t taps = 0;
    for (int64_t k = 0, group = 0; group < groups; group++) {
        const int64_t first = k, low = group * GROUP * row;
        int64_t length = 0;
        while (k + length < count && flat[k + length] < low + row) length++;
        for (int64_t i = 0; i < length * GROUP; i++)
            if (k + i >= count || flat[k + i] != flat[first + i % length] + i / length * row) return 0;
        k += length * GROUP;
        if (k < count && flat[k] < low + GROUP * row) return 0;
        int32_t *at = start + group * kernel;
        for (int64_t i = 0; i < length; i++) at[(flat[first + i] - low) % kernel + 1]++;
        for (int64_t i = 0; i < kernel; i++) at[i + 1] += at[i];
        for (int64_t i = 0; i < length; i++) {
            const int64_t tap = (flat[first + i] - low) % kernel, to = at[tap]++;
            source[to] = (flat[first + i] - low) / kernel + group * GROUP / out_group * in_group;
            which[to] = tap;
            order[to] = i;
        }
        memmove(at + 1, at, kernel * sizeof *at);
        at[0] = taps;
        taps += length;
    }
    return taps;
}

/* Copies between the vector of values, output by output, and 16 weights per tap. */
void eq_block_weights(int64_t groups, int64_t kernel, const int32_t *start, const int32_t *order, float *values,
                      float *weights, int to_values) {
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = start[g * kernel], length = start[(g + 1) * kernel] - first;
        for (int64_t t = first; t < first + length; t++)
            for (int64_t j = 0; j < GROUP; j++) {
                float *value = values + first * GROUP + j * length + order[t], *weight = weights + t * GROUP + j;
                if (to_values)
                    *value = *weight;
                else
                    *weight = *value;
            }
    }
}

/* ---- forward ---- */

typedef struct {
    const map *x, *y;
    const int32_t *start, *offset;
    const float *weights, *bias;
    int64_t kernel, width, reach; /* reach: largest offset of a tap within a plane */
    int relu, stream;
} block_work;

/* R outputs at P positions of H vectors at a time: a vector of inputs is loaded once for R outputs. */
INLINE void block_rows(const block_work *a, const float *const x[], float *const y[], const bits keep[], int64_t left,
                       int64_t group, const int R, const int P, const int H, const int past) {
    const int32_t *t0 = a->offset + a->start[group * a->kernel], *end = a->offset + a->start[(group + 1) * a->kernel];
    for (int j = 0; j < GROUP; j += R) {
        const int64_t row = group * GROUP + j;
        const float *w = a->weights + a->start[group * a->kernel] * (int64_t)GROUP + j;
        vec acc[4][MAX_WIDTH][2];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const vec b = splat(a->bias ? a->bias[row + r] : 0);
#pragma GCC unroll 6
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int i = 0; i < H; i++) acc[r][p][i] = b;
        }
        for (const int32_t *t = t0; t < end; t++, w += GROUP) {
            vec v[MAX_WIDTH][2];
#pragma GCC unroll 6
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int i = 0; i < H; i++) v[p][i] = load(x[p] + *t + 8 * i);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const vec s = splat(w[r]);
#pragma GCC unroll 6
                for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                    for (int i = 0; i < H; i++) acc[r][p][i] += s * v[p][i];
            }
        }
        if (a->relu) {
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 6
                for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                    for (int i = 0; i < H; i++) acc[r][p][i] = relu(acc[r][p][i]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 6
            for (int p = 0; p < P; p++)
#pragma GCC unroll 2
                for (int i = 0; i < H; i++) {
                    float *to = y[p] + (row + r) * a->y->sc + 8 * i;
                    if (H == 1)
                        store_some(to, where(keep[p], acc[r][p][i]), left - p * WORDS);
                    else if (past)
                        stream(to, acc[r][p][i]);
                    else
                        store(to, acc[r][p][i]);
                }
    }
}

CLONES static void block_tile(const block_work *a, const float *const x[], float *const y[], int count,
                              int64_t group) {
#define CASE(P)                                             \
    case P:                                                 \
        if (a->stream)                                      \
            block_rows(a, x, y, NULL, 0, group, 4, P, 2, 1);   \
        else                                                \
            block_rows(a, x, y, NULL, 0, group, 4, P, 2, 0);   \
        break;
    switch (count) { CASE(3) CASE(2) CASE(1) }
#undef CASE
}

/* Hides the latency of memory: the last line that each source channel of the next tile needs. */
INLINE void fetch(const block_work *a, const float *const x[], int count, int64_t from, int64_t end) {
    for (int64_t c = from; c < end; c++)
        for (int p = 0; p < count; p++) __builtin_prefetch(x[p] + c * a->x->sc + a->reach);
}

static int set_positions(const block_work *a, int64_t tile, const float *x[], float *y[]) {
    const map *to = a->y;
    const int64_t positions = to->n * to->h * to->w;
    int count = 0;
    for (int64_t p = tile * a->width; p < positions && count < a->width; p++, count++) {
        const int64_t w = p % to->w, h = p / to->w % to->h, n = p / to->w / to->h;
        x[count] = a->x->data + n * a->x->sn + h * a->x->sh + w * a->x->sw;
        y[count] = to->data + n * to->sn + h * to->sh + w * to->sw;
    }
    return count;
}

static void block_job(const void *work, int part, int parts) {
    const block_work *a = work;
    const int64_t tiles = (a->y->n * a->y->h * a->y->w + a->width - 1) / a->width;
    int64_t first = 0, stop = tiles, group = 0, end = a->y->c / GROUP;
    if (tiles >= 8 * parts) { /* divide the tiles if there are enough, else the groups */
        first = tiles * part / parts;
        stop = tiles * (part + 1) / parts;
    } else {
        group = end * part / parts;
        end = end * (part + 1) / parts;
    }
    const float *x[2][MAX_WIDTH];
    float *y[2][MAX_WIDTH];
    int count = set_positions(a, first, x[0], y[0]);
    for (int64_t i = first; i < stop; i++) {
        const int now = (i - first) % 2;
        const int then = i + 1 < stop ? set_positions(a, i + 1, x[!now], y[!now]) : 0;
        for (int64_t g = group; g < end; g++) {
            fetch(a, x[!now], then, a->x->c * (g - group) / (end - group), a->x->c * (g - group + 1) / (end - group));
            block_tile(a, x[now], y[now], count, g);
        }
        count = then;
    }
}

/* As eq_conv. `start` has the first tap of each group and position in the kernel. */
void eq_block_conv(const map *x, const map *y, const int32_t *start, const int32_t *offset, const float *weights,
                   int64_t kernel, int64_t reach, const float *bias, int relu, int threads) {
    const int64_t width = eq_accumulators() > 8 ? 3 : 1;
    block_work a = {x, y, start, offset, weights, bias, kernel, width, reach, relu, streams(y)};
    eq_run(block_job, &a, threads);
}

/* ---- forward of few images: vectors run over the positions of a plane, see flat.c ---- */

CLONES static void flat_tile(const block_work *a, const float *const x[], float *const y[], const bits keep[],
                             int64_t left, int count, int64_t group) {
#define CASE(P) \
    case P: block_rows(a, x, y, keep, left, group, 4, P, 1, 0); break;
    switch (count) { CASE(6) CASE(5) CASE(4) CASE(3) CASE(2) CASE(1) }
#undef CASE
}

/* Planes of one position: one vector for 8 outputs instead of one for the columns. */
CLONES static void one_position(const block_work *a, const float *x, float *y, int64_t group) {
    const int32_t *start = a->start + group * a->kernel;
    vec acc[2][2] = {{splat(0), splat(0)}, {splat(0), splat(0)}}; /* taps in turn: two chains hide the latency */
    for (int64_t t = start[0]; t < start[a->kernel]; t++) {
        const vec v = splat(x[a->offset[t]]);
        const float *w = a->weights + t * GROUP;
        acc[t & 1][0] += v * load(w);
        acc[t & 1][1] += v * load(w + HALF);
    }
    for (int j = 0; j < GROUP; j++) {
        const int64_t row = group * GROUP + j;
        const float found = acc[0][j / HALF][j % HALF] + acc[1][j / HALF][j % HALF] + (a->bias ? a->bias[row] : 0);
        y[row * a->y->sc] = a->relu && found < 0 ? 0 : found;
    }
}

static void flat_block_job(const void *work, int part, int parts) {
    const block_work *a = work;
    const map *from = a->x, *to = a->y;
    const int64_t positions = flat_positions(to), vectors = (positions + WORDS - 1) / WORDS, groups = to->c / GROUP;
    const int64_t strips = (vectors + a->width - 1) / a->width, even = strips ? (vectors + strips - 1) / strips : 0;
    const int64_t jobs = to->n * strips * groups;
    for (int64_t job = jobs * part / parts; job < jobs * (part + 1) / parts; job++) {
        const float *x[MAX_WIDTH];
        float *y[MAX_WIDTH];
        bits keep[MAX_WIDTH];
        const int64_t n = job / groups / strips, first = job / groups % strips * even;
        int count = 0;
        for (int64_t p = first; p < vectors && count < even; p++, count++) {
            x[count] = from->data + n * from->sn + p * WORDS;
            y[count] = to->data + n * to->sn + p * WORDS;
            for (int i = 0; i < WORDS; i++) keep[count][i] = -((p * WORDS + i) % to->sh < to->w);
        }
        if (positions == 1)
            one_position(a, x[0], y[0], job % groups);
        else if (count)
            flat_tile(a, x, y, keep, positions - first * WORDS, count, job % groups);
    }
}

/* As eq_flat_conv. */
void eq_flat_block_conv(const map *x, const map *y, const int32_t *start, const int32_t *offset, const float *weights,
                        int64_t kernel, const float *bias, int relu, int threads) {
    const int64_t width = eq_accumulators() > 8 ? 6 : 2;
    block_work a = {x, y, start, offset, weights, bias, kernel, width, 0, relu, 0};
    eq_run(flat_block_job, &a, threads);
}

/* ---- input gradient ---- */

typedef struct {
    const map *dy, *dx;
    const int32_t *start, *offset;
    const float *weights;
    const int64_t *reach; /* rows and columns from a position's first input to that of each position in the kernel */
    int64_t kernel, stride[2], last; /* last: largest row of `reach` */
} back_work;

/* Adds the taps from `t` to `end` of R outputs at one position to the inputs that they read. */
INLINE void add_taps(const back_work *a, float *dx, const vec g[][2], int64_t t, int64_t end, int j, const int R) {
    const float *w = a->weights + t * GROUP + j;
    for (; t < end; t++, w += GROUP) {
        float *to = dx + a->offset[t];
        vec sums[4] = {load(to), load(to + 8), splat(w[0]) * g[0][0], splat(w[0]) * g[0][1]}; /* short chains */
#pragma GCC unroll 8
        for (int r = 1; r < R; r++) {
            const vec s = splat(w[r]);
            sums[r % 2 ? 0 : 2] += s * g[r][0];
            sums[r % 2 ? 1 : 3] += s * g[r][1];
        }
        store(to, sums[0] + sums[2]), store(to + 8, sums[1] + sums[3]);
    }
}

/* Position (h, w) of R outputs from `row`. Only inputs in the rows from `top` to `bottom` are changed. */
INLINE void back_position(const back_work *a, int64_t n, int64_t h, int64_t w, int64_t row, int64_t top, int64_t bottom,
                          int inside, const int R) {
    const int32_t *start = a->start + row / GROUP * a->kernel;
    const int j = row % GROUP;
    const int64_t i = h * a->stride[0], k = w * a->stride[1];
    float *dx = at(a->dx, n, 0, i) + k * LANES;
    vec g[HALF][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const float *dy = at(a->dy, n, row + r, h) + w * a->dy->sw;
        g[r][0] = load(dy), g[r][1] = load(dy + 8);
    }
    if (inside) {
        add_taps(a, dx, g, start[0], start[a->kernel], j, R);
        return;
    }
    for (int64_t tap = 0; tap < a->kernel; tap++) {
        const int64_t at_row = i + a->reach[2 * tap], at_column = k + a->reach[2 * tap + 1];
        if (at_row >= top && at_row < bottom && at_column >= 0 && at_column < a->dx->w)
            add_taps(a, dx, g, start[tap], start[tap + 1], j, R);
    }
}

CLONES static void back_row(const back_work *a, int64_t n, int64_t h, int64_t top, int64_t bottom) {
    const int64_t *first = a->reach, *last = a->reach + 2 * (a->kernel - 1);
    const int64_t i = h * a->stride[0];
    const int rows_inside = i + first[0] >= top && i + last[0] < bottom, wide = eq_accumulators() > 8;
    for (int64_t row = 0; row < a->dy->c; row += wide ? HALF : HALF / 2)
        for (int64_t w = 0; w < a->dy->w; w++) {
            const int64_t k = w * a->stride[1];
            const int inside = rows_inside && k + first[1] >= 0 && k + last[1] < a->dx->w;
            if (wide)
                back_position(a, n, h, w, row, top, bottom, inside, HALF);
            else
                back_position(a, n, h, w, row, top, bottom, inside, HALF / 2);
        }
}

/* Zeros rows up to `end` just before they are added to, while they stay in cache. */
static int64_t zero_rows(const map *dx, int64_t n, int64_t row, int64_t end) {
    for (; row < end; row++)
        for (int64_t c = 0; c < dx->c; c++) memset(at(dx, n, c, row), 0, dx->w * LANES * sizeof(float));
    return row;
}

/* A thread owns bands of rows of dx and adds all that reaches them. */
static void back_job(const void *work, int part, int parts) {
    const back_work *a = work;
    const map *dx = a->dx;
    const int64_t bands = dx->n % parts && dx->n < 8 * parts ? parts : 1, jobs = dx->n * bands;
    for (int64_t job = jobs * part / parts; job < jobs * (part + 1) / parts; job++) {
        const int64_t n = job / bands, band = job % bands;
        const int64_t top = dx->h * band / bands, bottom = dx->h * (band + 1) / bands;
        int64_t zeroed = top;
        for (int64_t h = 0; h < a->dy->h; h++) {
            const int64_t low = h * a->stride[0] + a->reach[0], high = h * a->stride[0] + a->last + 1;
            if (high <= top || low >= bottom) continue;
            zeroed = zero_rows(dx, n, zeroed, high < bottom ? high : bottom);
            back_row(a, n, h, top, bottom);
        }
        zero_rows(dx, n, zeroed, bottom);
    }
}

void eq_block_input_grad(const map *dy, const map *dx, const int32_t *start, const int32_t *offset,
                         const float *weights, int64_t kernel, const int64_t *reach, const int64_t *stride,
                         int threads) {
    back_work a = {dy, dx, start, offset, weights, reach, kernel, {stride[0], stride[1]}, reach[2 * kernel - 2]};
    eq_run(back_job, &a, threads);
}

/* ---- weight gradient ---- */

/* Positions in a row, and the rows of a strip. */
typedef struct {
    const float *x[STRIP], *dy[STRIP];
    int64_t rows, length, x_step, dy_step;
} strip;

typedef struct {
    map x, dy;
    const int32_t *start, *offset;
    int64_t kernel;
    float *sums, *dbias; /* sums: 16 for each tap */
} grad_work;

/* sums[s][r] += <dy of output r, x at tap s> over a strip, for S taps and 8 outputs. */
INLINE void strip_taps(const strip *p, const int32_t *offset, int64_t row_step, int64_t row, float *sums, const int S) {
    vec acc[3][HALF];
#pragma GCC unroll 4
    for (int s = 0; s < S; s++)
#pragma GCC unroll 8
        for (int r = 0; r < HALF; r++) acc[s][r] = splat(0);
    for (int64_t i = 0; i < p->rows; i++) {
        const float *x = p->x[i], *dy = p->dy[i] + row * row_step;
        for (int64_t w = 0; w < p->length; w++, x += p->x_step, dy += p->dy_step)
            for (int half = 0; half < LANES; half += 8) {
                vec v[3];
#pragma GCC unroll 4
                for (int s = 0; s < S; s++) v[s] = load(x + offset[s] + half);
#pragma GCC unroll 8
                for (int r = 0; r < HALF; r++) {
                    const vec g = load(dy + r * row_step + half);
#pragma GCC unroll 4
                    for (int s = 0; s < S; s++) acc[s][r] += g * v[s];
                }
            }
    }
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) {
        vec *v = acc[s];
        transpose8(v);
        float *to = sums + s * GROUP;
        store(to, load(to) + (((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))));
    }
}

CLONES static void strip_grad(const grad_work *a, const strip *p, int64_t group, int64_t first, int64_t stop) {
    const int wide = eq_accumulators() > 8;
    for (int64_t t = first; t < stop;) {
        const int64_t left = wide ? stop - t : 1;
        for (int j = 0; j < GROUP; j += HALF) {
            float *sums = a->sums + t * GROUP + j;
            const int64_t row = group * GROUP + j, step = a->dy.sc;
            switch (left) {
            case 1: strip_taps(p, a->offset + t, step, row, sums, 1); break;
            case 2: strip_taps(p, a->offset + t, step, row, sums, 2); break;
            default: strip_taps(p, a->offset + t, step, row, sums, 3);
            }
        }
        t += left < 3 ? left : 3;
    }
}

CLONES static void strip_bias(const grad_work *a, const strip *p, int64_t row, int64_t end) {
    for (; row < end; row++) {
        vec s = splat(0);
        for (int64_t i = 0; i < p->rows; i++) {
            const float *dy = p->dy[i] + row * a->dy.sc;
            for (int64_t w = 0; w < p->length; w++, dy += p->dy_step) s += load(dy) + load(dy + 8);
        }
        a->dbias[row] += sum(s);
    }
}

/* A thread has an equal share of all taps. */
static void block_grad_job(const void *work, int part, int parts) {
    const grad_work *a = work;
    const map *x = &a->x, *dy = &a->dy;
    const int64_t groups = dy->c / GROUP, taps = a->start[groups * a->kernel];
    const int64_t first = taps * part / parts, stop = taps * (part + 1) / parts, lines = dy->n * dy->h;
    strip p = {.length = dy->w, .x_step = x->sw, .dy_step = dy->sw};
    for (int64_t line = 0; line < lines; line += p.rows) {
        for (p.rows = 0; p.rows < lines - line && p.rows * dy->w < STRIP; p.rows++) {
            const int64_t n = (line + p.rows) / dy->h, h = (line + p.rows) % dy->h;
            p.x[p.rows] = at(x, n, 0, h);
            p.dy[p.rows] = at(dy, n, 0, h);
        }
        for (int64_t g = 0; g < groups; g++) {
            const int64_t from = a->start[g * a->kernel], to = a->start[(g + 1) * a->kernel];
            strip_grad(a, &p, g, from > first ? from : first, to < stop ? to : stop);
        }
        if (a->dbias) strip_bias(a, &p, dy->c * part / parts, dy->c * (part + 1) / parts);
    }
}

/* Sums of 16 weights per tap, and of the bias. */
void eq_block_grad(const map *x, const map *dy, const int32_t *start, const int32_t *offset, int64_t kernel,
                   float *sums, float *dbias, int threads) {
    grad_work a = {*x, *dy, start, offset, kernel, sums, dbias};
    if (dy->h == 1 && dy->w == 1) { /* a row of images instead of rows of one position */
        a.x.w = a.dy.w = dy->n, a.x.n = a.dy.n = 1;
        a.x.sw = x->sn, a.dy.sw = dy->sn;
    }
    memset(sums, 0, start[dy->c / GROUP * kernel] * (int64_t)GROUP * sizeof *sums);
    if (dbias) memset(dbias, 0, dy->c * sizeof *dbias);
    eq_run(block_grad_job, &a, threads);
}
