/* Convolution whose active weights form blocks of 16 outputs x 1 input: one offset for 16 weights.
 *
 * The 16 outputs of a group have the same taps. A tap is an offset into the source map with 16 weights. A vector of
 * inputs, once loaded, serves several outputs, so that arithmetic and not loading sets the pace.
 */
#include "block_tiles.h"

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

/* ---- kernels in vectors of 32 bytes, and the choice among all ---- */

CLONES static void block_tile(const block_work *a, const float *const x[], float *const y[], int count,
                              int64_t group) {
#define CASE(P)                                                \
    case P:                                                    \
        if (a->stream)                                         \
            block_rows(a, x, y, NULL, 0, group, 4, P, 2, 0, 1); \
        else                                                   \
            block_rows(a, x, y, NULL, 0, group, 4, P, 2, 0, 0); \
        break;
    switch (count) { CASE(3) CASE(2) CASE(1) }
#undef CASE
}

NARROW_CLONES static void half_block_tile(const block_work *a, const float *const x[], float *const y[], int count,
                                          int64_t group) {
    half_tile(a, x, y, group);
}

CLONES static void block_back(const back_work *a, float *dx, const float *const from[], const float *ahead,
                              float *sums) {
    if (eq_accumulators() > 8)
        back_position(a, dx, from, ahead, sums, EIGHT, 0);
    else
        back_position(a, dx, from, ahead, sums, EIGHT / 2, 0);
}

NARROW_CLONES static void half_block_back(const back_work *a, float *dx, const float *const from[],
                                          const float *ahead, float *sums) {
    back_position(a, dx, from, ahead, sums, EIGHT / 2, 1);
}

CLONES static void block_grad(const block_grad_work *a, const strip *p, int64_t group, int64_t first, int64_t stop) {
    any_grad(a, p, group, first, stop, eq_accumulators() > 8, 0);
}

NARROW_CLONES static void half_block_grad(const block_grad_work *a, const strip *p, int64_t group, int64_t first,
                                          int64_t stop) {
    any_grad(a, p, group, first, stop, 0, 1);
}

CLONES static void block_bias(const block_grad_work *a, const strip *p, int64_t row, int64_t end) {
    any_bias(a, p, row, end, a->half);
}

static block_kernels kernels(int half) {
    const int level = eq_level();
    if (half && level) return level == 2 ? eq_blocks_bf16 : eq_blocks_wide;
    if (half) return (block_kernels){half_block_tile, half_block_back, half_block_grad, block_bias};
    return (block_kernels){block_tile, block_back, block_grad, block_bias};
}

/* ---- forward ---- */

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
    const block_kernels run = kernels(a->half);
    const float *x[2][MAX_WIDTH];
    float *y[2][MAX_WIDTH];
    int count = set_positions(a, first, x[0], y[0]);
    for (int64_t i = first; i < stop; i++) {
        const int now = (i - first) % 2;
        const int then = i + 1 < stop ? set_positions(a, i + 1, x[!now], y[!now]) : 0;
        for (int64_t g = group; g < end; g++) {
            fetch(a, x[!now], then, a->x->c * (g - group) / (end - group), a->x->c * (g - group + 1) / (end - group));
            run.tile(a, x[now], y[now], count, g);
        }
        count = then;
    }
}

/* As eq_conv. `start` has the first tap of each group and position in the kernel. */
void eq_block_conv(const map *x, const map *y, const int32_t *start, const int32_t *offset, const float *weights,
                   int64_t kernel, int64_t reach, const float *bias, int relu, int half, int threads) {
    const int64_t width = !half && eq_accumulators() > 8 ? 3 : 1;
    block_work a = {x, y, start, offset, weights, bias, kernel, width, reach, relu, half, streams(y)};
    eq_run(block_job, &a, threads);
}

/* ---- forward of few images: vectors run over the positions of a plane, see flat.c ---- */

CLONES static void flat_tile(const block_work *a, const float *const x[], float *const y[], const bits keep[],
                             int64_t left, int count, int64_t group) {
#define CASE(P) \
    case P: block_rows(a, x, y, keep, left, group, 4, P, 1, 0, 0); break;
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
        acc[t & 1][1] += v * load(w + EIGHT);
    }
    for (int j = 0; j < GROUP; j++) {
        const int64_t row = group * GROUP + j;
        const float found = acc[0][j / EIGHT][j % EIGHT] + acc[1][j / EIGHT][j % EIGHT] + (a->bias ? a->bias[row] : 0);
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
    block_work a = {x, y, start, offset, weights, bias, kernel, width, 0, relu, 0, 0};
    eq_run(flat_block_job, &a, threads);
}

/* ---- input gradient ---- */

/* The output at which position k of the kernel reads row i and column j of the input, NULL if there is none. */
static const float *output_at(const back_work *a, int64_t n, int64_t i, int64_t j, int64_t k) {
    const int64_t h = i - a->reach[2 * k], w = j - a->reach[2 * k + 1];
    if (h < 0 || w < 0 || h % a->stride[0] || w % a->stride[1]) return NULL;
    if (h / a->stride[0] >= a->dy->h || w / a->stride[1] >= a->dy->w) return NULL;
    return at(a->dy, n, 0, h / a->stride[0]) + w / a->stride[1] * a->dy->sw;
}

static void back_job(const void *work, int part, int parts) {
    const back_work *a = work;
    const map *dx = a->dx;
    const block_kernels run = kernels(a->half);
    const int64_t positions = dx->n * dx->h * dx->w;
    const float **from = a->from + part * a->kernel;
    float *sums = a->sums + part * dx->c * 2 * LANES;
    for (int64_t p = positions * part / parts; p < positions * (part + 1) / parts; p++) {
        const int64_t n = p / dx->w / dx->h, i = p / dx->w % dx->h, j = p % dx->w;
        for (int64_t k = 0; k < a->kernel; k++) from[k] = output_at(a, n, i, j, k);
        run.back(a, at(dx, n, 0, i) + j * dx->sw, from, output_at(a, n, i, j + a->stride[1], 0), sums);
    }
}

/* `source` is the input channel of each tap, `reach` the rows and columns from the first input that a position reads
 * to that of each position in the kernel. */
int eq_block_input_grad(const map *dy, const map *dx, const int32_t *start, const int32_t *source,
                        const float *weights, int64_t kernel, const int64_t *reach, const int64_t *stride, int half,
                        int threads) {
    const int64_t parts = threads > 1 ? threads : 1, room = parts * dx->c * 2 * LANES * sizeof(float);
    char *scratch = eq_scratch(room + parts * kernel * sizeof(float *));
    if (!scratch) return 1;
    int64_t columns = 1;
    while (columns < kernel && reach[2 * columns] == reach[0]) columns++;
    back_work a = {dy, dx, start, source, weights, reach, kernel, columns, {stride[0], stride[1]},
                   (float *)scratch, (const float **)(scratch + room), half, streams(dx)};
    eq_run(back_job, &a, threads);
    free(scratch);
    return 0;
}

/* ---- weight gradient ---- */

/* A thread has an equal share of all taps. */
static void block_grad_job(const void *work, int part, int parts) {
    const block_grad_work *a = work;
    const map *x = &a->x, *dy = &a->dy;
    const block_kernels run = kernels(a->half);
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
            run.grad(a, &p, g, from > first ? from : first, to < stop ? to : stop);
        }
        if (a->dbias) run.bias(a, &p, dy->c * part / parts, dy->c * (part + 1) / parts);
    }
}

/* Sums of 16 weights per tap, and of the bias. */
void eq_block_grad(const map *x, const map *dy, const int32_t *start, const int32_t *offset, int64_t kernel,
                   float *sums, float *dbias, int half, int threads) {
    block_grad_work a = {*x, *dy, start, offset, kernel, sums, dbias, half};
    if (dy->h == 1 && dy->w == 1) { /* a row of images instead of rows of one position */
        a.x.w = a.dy.w = dy->n, a.x.n = a.dy.n = 1;
        a.x.sw = x->sn, a.dy.sw = dy->sn;
    }
    memset(sums, 0, start[dy->c / GROUP * kernel] * (int64_t)GROUP * sizeof *sums);
    if (dbias) memset(dbias, 0, dy->c * sizeof *dbias);
    eq_run(block_grad_job, &a, threads);
}
