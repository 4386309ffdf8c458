/* Sparse linear layers on row-major vectors (tokens, channels): forward, input gradient, weight gradient.
 *
 * A chunk of up to CHUNK tokens is transposed into scratch that stays in the second-level cache. One weight then
 * multiplies whole vectors of tokens there, and the result is transposed back. Offsets of taps are source channel
 * times CHUNK. Tokens beyond the last one are zeros in scratch.
 */
#include "kernels.h"

#define CHUNK 64 /* tokens; as in library.py */
#define VECS (CHUNK / 8)

/* Part of the tokens, in vectors of 8. */
typedef struct {
    int64_t first, count, vecs;
} chunk;

/* Tokens of each chunk: fewer than CHUNK if there would be fewer chunks than threads. */
static int64_t chunk_width(int64_t tokens, int threads) {
    const int64_t share = (tokens + threads - 1) / threads, width = (share + 7) / 8 * 8;
    return width < CHUNK ? width : CHUNK;
}

static chunk chunk_at(int64_t i, int64_t width, int64_t tokens) {
    const int64_t left = tokens - i * width, count = left < width ? left : width;
    return (chunk){i * width, count, (count + 7) / 8};
}

static void gather(const float *rows, int64_t channels, chunk c, float *scratch) {
    eq_transpose(rows + c.first * channels, channels, scratch, CHUNK, c.count, channels);
    for (int64_t j = 0; j < channels && c.count % 8; j++)
        for (int64_t i = c.count; i < c.vecs * 8; i++) scratch[j * CHUNK + i] = 0;
}

#define FOR_EACH_WIDTH(CASE) CASE(8) CASE(7) CASE(6) CASE(5) CASE(4) CASE(3) CASE(2) CASE(1)

/* ---- forward, and input gradient on the transposed pattern ---- */

typedef struct {
    const tap *taps;
    const int32_t *start; /* blocks x rows + 1 */
    int64_t blocks, rows;
    const float *bias;
} product;

typedef struct {
    const float *x;
    float *y;
    int64_t tokens, in, width;
    product product;
    float *scratch; /* in + out channels of a chunk, for each thread */
} linear_work;

INLINE void linear_rows(const product *a, const float *x, float *y, int64_t block, const int T) {
    const int32_t *start = a->start + block * a->rows;
    for (int64_t row = 0; row < a->rows; row++, y += CHUNK) {
        const tap *k = a->taps + start[row], *stop = a->taps + start[row + 1];
        if (k == stop && block) continue;
        vec acc[VECS];
        const vec bias = splat(a->bias ? a->bias[row] : 0);
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) acc[i] = block ? load(y + 8 * i) : bias;
        for (; k < stop; k++) {
            const vec w = splat(k->weight);
            const float *source = x + k->offset;
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) acc[i] += w * load(source + 8 * i);
        }
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) store(y + 8 * i, acc[i]);
    }
}

CLONES static void linear_chunk(const product *a, const float *x, float *y, int64_t vecs) {
#define CASE(T) \
    case T: linear_rows(a, x, y, b, T); break;
    for (int64_t b = 0; b < a->blocks; b++) switch (vecs) { FOR_EACH_WIDTH(CASE) }
#undef CASE
}

/* Multiplies a chunk and transposes the result back. */
static void linear_out(const product *a, const float *x, float *scratch, float *y, chunk c) {
    linear_chunk(a, x, scratch, c.vecs);
    eq_transpose(scratch, CHUNK, y + c.first * a->rows, a->rows, a->rows, c.count);
}

static void linear_job(const void *work, int part, int parts) {
    const linear_work *a = work;
    const int64_t chunks = (a->tokens + a->width - 1) / a->width;
    float *x = a->scratch + part * (a->in + a->product.rows) * CHUNK;
    for (int64_t i = chunks * part / parts; i < chunks * (part + 1) / parts; i++) {
        const chunk c = chunk_at(i, a->width, a->tokens);
        gather(a->x, a->in, c, x);
        linear_out(&a->product, x, x + a->in * CHUNK, a->y, c);
    }
}

/* y[token][row] = bias[row] + sum of weight * x[token][source]. */
int eq_linear(const float *x, float *y, int64_t tokens, int64_t in, int64_t out, const tap *taps,
              const int32_t *start, int64_t blocks, const float *bias, int threads) {
    float *scratch = eq_scratch(threads * (in + out) * CHUNK * sizeof(float));
    if (!scratch) return 1;
    const int64_t width = chunk_width(tokens, threads);
    linear_work a = {x, y, tokens, in, width, {taps, start, blocks, out, bias}, scratch};
    if (tokens) eq_run(linear_job, &a, threads);
    free(scratch);
    return 0;
}

/* ---- weight gradient, for active weights only, and input gradient on the same chunks ---- */

typedef struct {
    const float *x, *dy;
    float *dx; /* NULL if not wanted */
    product back;
    int64_t tokens, in, out, width;
    const tap *taps;
    const int32_t *start;
    int64_t blocks, count;
    float *scratch; /* in + out channels of a chunk, for each thread */
    float *sums;    /* one for each tap and each output, for each thread */
} linear_grad_work;

/* The eight sums over the lanes of eight vectors. */
INLINE vec sum_each(vec v[8]) {
    transpose8(v);
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

INLINE vec dot(const float *x, const vec *g, const int T) {
    vec even = g[0] * load(x), odd = splat(0);
#pragma GCC unroll 8
    for (int i = 1; i < T; i++) {
        if (i % 2)
            odd += g[i] * load(x + 8 * i);
        else
            even += g[i] * load(x + 8 * i);
    }
    return even + odd;
}

INLINE void linear_grad_rows(const linear_grad_work *a, const float *x, const float *dy, float *sums,
                             float *dbias, int64_t block, const int T) {
    const int32_t *start = a->start + block * a->out;
    for (int64_t row = 0; row < a->out; row++, dy += CHUNK) {
        int64_t k = start[row];
        const int64_t stop = start[row + 1];
        if (k == stop && block) continue;
        vec g[VECS], v[8];
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) g[i] = load(dy + 8 * i);
        if (!block) {
            vec total = g[0];
#pragma GCC unroll 8
            for (int i = 1; i < T; i++) total += g[i];
            dbias[row] += sum(total);
        }
        for (; k + 8 <= stop; k += 8) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) v[i] = dot(x + a->taps[k + i].offset, g, T);
            store(sums + k, load(sums + k) + sum_each(v));
        }
        if (k < stop) {
            const int64_t left = stop - k;
            for (int i = 0; i < 8; i++) v[i] = i < left ? dot(x + a->taps[k + i].offset, g, T) : splat(0);
            const vec s = sum_each(v);
            for (int i = 0; i < left; i++) sums[k + i] += s[i];
        }
    }
}

CLONES static void linear_grad_chunk(const linear_grad_work *a, const float *x, const float *dy, float *sums,
                                     int64_t vecs) {
#define CASE(T) \
    case T: linear_grad_rows(a, x, dy, sums, sums + a->count, b, T); break;
    for (int64_t b = 0; b < a->blocks; b++) switch (vecs) { FOR_EACH_WIDTH(CASE) }
#undef CASE
}

static void linear_grad_job(const void *work, int part, int parts) {
    const linear_grad_work *a = work;
    const int64_t chunks = (a->tokens + a->width - 1) / a->width;
    float *x = a->scratch + part * (a->in + a->out) * CHUNK, *dy = x + a->in * CHUNK;
    float *sums = a->sums + part * (a->count + a->out);
    for (int64_t i = chunks * part / parts; i < chunks * (part + 1) / parts; i++) {
        const chunk c = chunk_at(i, a->width, a->tokens);
        gather(a->dy, a->out, c, dy);
        if (a->dx) linear_out(&a->back, dy, x, a->dx, c); /* before x needs the scratch */
        gather(a->x, a->in, c, x);
        linear_grad_chunk(a, x, dy, sums, c.vecs);
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
    const int64_t width = chunk_width(tokens, threads);
    const product back = {back_taps, back_start, back_blocks, in, NULL};
    linear_grad_work a = {x, dy, dx, back, tokens, in, out, width, taps, start, blocks, count, scratch, sums};
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
