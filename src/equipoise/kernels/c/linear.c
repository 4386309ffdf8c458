/* Sparse linear layers on row-major vectors (tokens, channels): forward, input gradient, weight gradient.
 *
 * A chunk of up to CHUNK tokens is transposed into scratch that stays in the second-level cache. One weight then
 * multiplies whole vectors of tokens there, and the result is transposed back. Offsets of taps are source channel
 * times CHUNK. Tokens beyond the last one are zeros in scratch.
 */
#include "linear_tiles.h"

#define LINE 16 /* floats in a cache line */

NARROW_CLONES static void narrow_product(const product *a, const float *x, float *y, int64_t row, int64_t end,
                                         int64_t vecs) {
    any_product(a, x, y, row, end, vecs);
}

NARROW_CLONES static void narrow_grad(const weight_grad *a, const float *x, const float *dy, int64_t vecs) {
    any_grad(a, x, dy, vecs);
}

static const linear_kernels narrow = {WORDS, narrow_product, narrow_grad};

/* How tokens are divided into chunks. */
typedef struct {
    const linear_kernels *run;
    int64_t tokens, width, chunks;
} division;

/* Part of the tokens, in vectors. */
typedef struct {
    int64_t first, count, vecs;
} chunk;

static int64_t parts_of(int64_t total, int64_t size) { return (total + size - 1) / size; }

/* Chunks have fewer than CHUNK tokens if there would be fewer chunks than threads. */
static division divide(int64_t tokens, int threads) {
    const linear_kernels *run = eq_level() ? &eq_linear_wide : &narrow;
    const int64_t share = parts_of(parts_of(tokens, threads), run->width) * run->width;
    const int64_t width = share < CHUNK ? share : CHUNK;
    return (division){run, tokens, width, width ? parts_of(tokens, width) : 0};
}

static chunk chunk_at(const division *d, int64_t i) {
    const int64_t left = d->tokens - i * d->width, count = left < d->width ? left : d->width;
    return (chunk){i * d->width, count, parts_of(count, d->run->width)};
}

static void gather(const division *d, const float *rows, int64_t channels, chunk c, float *scratch) {
    const int64_t end = c.vecs * d->run->width;
    eq_transpose(rows + c.first * channels, channels, scratch, CHUNK, c.count, channels);
    for (int64_t j = 0; j < channels && c.count < end; j++)
        for (int64_t i = c.count; i < end; i++) scratch[j * CHUNK + i] = 0;
}

/* Rows that are multiplied and transposed back at a time: those of a cache line of y, while they are in the first-level
 * cache, or all of them if they wait for other blocks of x. */
static int64_t rows_at_once(const product *a) { return a->blocks > 1 ? a->rows : LINE; }

/* Multiplies a chunk. `found` has room for these rows. */
static void multiply(const division *d, const product *a, const float *x, float *found, float *y, chunk c) {
    const int64_t step = rows_at_once(a);
    for (int64_t row = 0; row < a->rows; row += step) {
        const int64_t end = row + step < a->rows ? row + step : a->rows;
        d->run->product(a, x, found, row, end, c.vecs);
        eq_transpose(found, CHUNK, y + c.first * a->rows + row, a->rows, end - row, c.count);
    }
}

/* ---- forward, and input gradient on the transposed pattern ---- */

typedef struct {
    division d;
    const float *x;
    float *y;
    int64_t in;
    product product;
    float *scratch; /* input of a chunk and rows at once, for each thread */
} linear_work;

static int64_t room_of(const linear_work *a) { return (a->in + rows_at_once(&a->product)) * CHUNK; }

static void linear_job(const void *work, int part, int parts) {
    const linear_work *a = work;
    float *x = a->scratch + part * room_of(a), *found = x + a->in * CHUNK;
    for (int64_t i = a->d.chunks * part / parts; i < a->d.chunks * (part + 1) / parts; i++) {
        const chunk c = chunk_at(&a->d, i);
        gather(&a->d, a->x, a->in, c, x);
        multiply(&a->d, &a->product, x, found, a->y, c);
    }
}

/* y[token][row] = bias[row] + sum of weight * x[token][source]. */
int eq_linear(const float *x, float *y, int64_t tokens, int64_t in, int64_t out, const tap *taps,
              const int32_t *start, int64_t blocks, const float *bias, int threads) {
    linear_work a = {divide(tokens, threads), x, y, in, {taps, start, blocks, out, bias}, NULL};
    a.scratch = eq_scratch(threads * room_of(&a) * sizeof(float));
    if (!a.scratch) return 1;
    if (tokens) eq_run(linear_job, &a, threads);
    free(a.scratch);
    return 0;
}

/* ---- weight gradient, and input gradient on the same chunks ---- */

typedef struct {
    division d;
    const float *x, *dy;
    float *dx; /* NULL if not wanted */
    product back;
    weight_grad grad;
    int64_t count;  /* of taps */
    float *scratch; /* input and gradient of a chunk, for each thread */
    float *sums;    /* one for each tap and each output, for each thread */
} linear_grad_work;

static void linear_grad_job(const void *work, int part, int parts) {
    const linear_grad_work *a = work;
    const int64_t in = a->back.rows, out = a->grad.rows;
    float *x = a->scratch + part * (in + out) * CHUNK, *dy = x + in * CHUNK;
    weight_grad grad = a->grad;
    grad.sums = a->sums + part * (a->count + out);
    grad.dbias = grad.sums + a->count;
    for (int64_t i = a->d.chunks * part / parts; i < a->d.chunks * (part + 1) / parts; i++) {
        const chunk c = chunk_at(&a->d, i);
        gather(&a->d, a->dy, out, c, dy);
        if (a->dx) multiply(&a->d, &a->back, dy, x, a->dx, c); /* before x needs the scratch */
        gather(&a->d, a->x, in, c, x);
        a->d.run->grad(&grad, x, dy, c.vecs);
    }
}

/* Gradients of the active weights, `order` being the index of each tap among them, and of the bias and of x if wanted;
 * dx needs the taps of the transposed pattern. */
int eq_linear_grad(const float *x, const float *dy, int64_t tokens, int64_t in, int64_t out, const tap *taps,
                   const int32_t *start, const int32_t *order, int64_t blocks, float *dvalues, float *dbias,
                   const tap *back_taps, const int32_t *back_start, int64_t back_blocks, float *dx, int threads) {
    const int64_t count = start[blocks * out], each = count + out;
    float *scratch = eq_scratch(threads * (in + out) * CHUNK * sizeof(float));
    float *sums = eq_scratch(threads * each * sizeof(float));
    if (!scratch || !sums) {
        free(scratch);
        free(sums);
        return 1;
    }
    memset(sums, 0, threads * each * sizeof(float)); /* all of it: there may be fewer threads */
    const product back = {back_taps, back_start, back_blocks, in, NULL};
    const weight_grad grad = {taps, start, blocks, out, NULL, NULL};
    linear_grad_work a = {divide(tokens, threads), x, dy, dx, back, grad, count, scratch, sums};
    if (tokens) eq_run(linear_grad_job, &a, threads);
    for (int64_t k = 0; k < each; k++) {
        float s = sums[k];
        for (int p = 1; p < threads; p++) s += sums[p * each + k];
        if (k < count)
            dvalues[order[k]] = s;
        else if (dbias)
            dbias[k - count] = s;
    }
    free(scratch);
    free(sums);
    return 0;
}
