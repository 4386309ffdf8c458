/* Runs the steps of a whole network for inference in one call. */
#include "norm_channels.h"

int eq_conv(const map *x, const map *y, const tap *taps, const int32_t *start, int64_t blocks, int64_t reach,
             const float *bias, int relu, int half, int threads);
void eq_flat_conv(const map *x, const map *y, const tap *taps, const int32_t *start, int64_t blocks, const float *bias,
                  int relu, int threads);

void eq_block_conv(const map *x, const map *y, const int32_t *start, const int32_t *offset, const float *weights,
                   int64_t kernel, int64_t reach, const float *bias, int relu, int half, int threads);
void eq_flat_block_conv(const map *x, const map *y, const int32_t *start, const int32_t *offset, const float *weights,
                        int64_t kernel, const float *bias, int relu, int threads);

enum { CONV, PLANE, POOL, COPY, BLOCKS };

typedef struct {
    map x, y, residual;          /* residual.data is NULL if there is none */
    int32_t kind, lanes;         /* lanes: 16 images side by side, or 1 */
    int32_t relu, pool;
    const tap *taps;
    const int32_t *start, *offset; /* offset and weights: BLOCKS */
    const float *weights;
    int64_t blocks, reach;       /* BLOCKS: positions in the kernel, and reach */
    const float *scale, *shift;  /* PLANE: per channel, NULL means 1 and 0. Convolutions: shift is the bias. */
    int32_t kernel[2], stride[2], padding[2], dilation[2]; /* POOL: rows and columns of windows */
    int32_t mean, count_padding; /* POOL: means instead of the largest numbers; padding counts in them as zeros */
    int32_t half;                /* whether maps are bf16; with 16 lanes only */
} step;

INLINE float larger_of(float a, float b) { return a > b || a != a ? a : b; }
/* The number of the even or odd image in a word; see `take`. */
INLINE float number(const float *p, const int odd, const int half) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    if (half) word = odd ? word & 0xffff0000u : word << 16;
    float found;
    memcpy(&found, &word, sizeof found);
    return found;
}

/* Scale, shift, residual, ReLU and 2x2 max-pool of a plane of one image. Vectors may read beyond the end of a row. */
INLINE void plane(const step *a, int64_t n, int64_t c, const int pool) {
    const vec scale = splat(a->scale ? a->scale[c] : 1), shift = splat(a->shift ? a->shift[c] : 0);
    for (int64_t h = 0; h < a->y.h; h++) {
        float *q = at(&a->y, n, c, h);
        const float *p = at(&a->x, n, c, pool ? 2 * h : h);
        const float *r = a->residual.data ? at(&a->residual, n, c, h) : NULL;
        for (int64_t w = 0; w < a->y.w; w += WORDS) {
            vec z = splat(0);
            for (int i = 0; i <= pool; i++) {
                const float *s = p + i * a->x.sh + (pool ? 2 * w : w);
                const vec u = scale * load(s) + shift;
                if (!pool) {
                    z = u;
                    continue;
                }
                const vec v = scale * load(s + WORDS) + shift, even = SHUFFLE(u, v, 0, 2, 4, 6, 8, 10, 12, 14);
                z = i ? larger(even, z) : even;
                z = larger(SHUFFLE(u, v, 1, 3, 5, 7, 9, 11, 13, 15), z);
            }
            if (r) z += load(r + w);
            if (a->relu) z = relu(z);
            store_some(q + w, z, a->y.w - w);
        }
    }
}

/* The same for 16 lanes. */
INLINE void lanes_plane(const step *a, int64_t n, int64_t c) {
    const norm_work work = {.y = a->x, .out = a->y, .residual = a->residual, .relu = a->relu, .pool = a->pool};
    const vec scale = splat(a->scale ? a->scale[c] : 1), shift = splat(a->shift ? a->shift[c] : 0);
    a->half ? apply(&work, n, c, scale, shift, 1, 0) : apply(&work, n, c, scale, shift, 0, 0);
}

/* The largest number or the mean of each window. */
INLINE void windows(const step *a, int64_t n, int64_t c, const int lanes, const int half) {
    const int taps = a->kernel[0] * a->kernel[1];
    for (int64_t h = 0; h < a->y.h; h++)
        for (int64_t w = 0; w < a->y.w; w++) {
            float found[2][LANES] = {{0}}; /* of even and odd images */
            int seen = 0;
            for (int t = 0; t < taps; t++) {
                const int64_t i = h * a->stride[0] + t / a->kernel[1] * a->dilation[0] - a->padding[0];
                const int64_t j = w * a->stride[1] + t % a->kernel[1] * a->dilation[1] - a->padding[1];
                if (i < 0 || i >= a->x.h || j < 0 || j >= a->x.w) continue;
                const float *p = at(&a->x, n, c, i) + j * lanes;
                for (int e = 0; e <= half; e++)
                    for (int l = 0; l < lanes; l++) {
                        const float v = number(p + l, e, half), before = found[e][l];
                        found[e][l] = a->mean ? before + v : seen ? larger_of(v, before) : v;
                    }
                seen++;
            }
            const int count = a->count_padding ? taps : seen;
            for (int e = 0; e <= half && a->mean; e++)
                for (int l = 0; l < lanes; l++) found[e][l] /= count;
            float *q = at(&a->y, n, c, h) + w * lanes;
            if (lanes == 1) *q = found[0][0];
            for (int l = 0; l + WORDS <= lanes; l += WORDS) {
                const vec v[2] = {load(found[0] + l), load(found[1] + l)};
                put(q + l, v, half, 0);
            }
        }
}

INLINE void copy(const step *a, int64_t n, int64_t c, const int lanes) {
    for (int64_t h = 0; h < a->y.h; h++)
        for (int64_t w = 0; w < a->y.w; w++)
            for (int l = 0; l < lanes; l++)
                at(&a->y, n, c, h)[w * a->y.sw + l] = at(&a->x, n, c, h)[w * a->x.sw + l];
}

CLONES static void one_plane(const step *a, int64_t n, int64_t c) {
    if (a->kind == PLANE && a->lanes > 1)
        lanes_plane(a, n, c);
    else if (a->kind == PLANE)
        a->pool ? plane(a, n, c, 1) : plane(a, n, c, 0);
    else if (a->kind == COPY)
        a->lanes > 1 ? copy(a, n, c, LANES) : copy(a, n, c, 1);
    else if (a->half)
        windows(a, n, c, LANES, 1);
    else
        a->lanes > 1 ? windows(a, n, c, LANES, 0) : windows(a, n, c, 1, 0);
}

static void planes_job(const void *work, int part, int parts) {
    const step *a = work;
    const int64_t planes = a->y.n * a->y.c;
    for (int64_t i = planes * part / parts; i < planes * (part + 1) / parts; i++)
        one_plane(a, i / a->y.c, i % a->y.c);
}

/* Returns whether it ran out of memory. */
int eq_program(const step *steps, int64_t count, int threads) {
    int failed = 0;
    for (const step *a = steps; a < steps + count; a++) {
        const int64_t work = a->x.n * a->x.c * a->x.h * a->x.w * a->lanes;
        if (a->kind == BLOCKS && a->lanes == 1)
            eq_flat_block_conv(&a->x, &a->y, a->start, a->offset, a->weights, a->blocks, a->shift, a->relu, threads);
        else if (a->kind == BLOCKS)
            eq_block_conv(&a->x, &a->y, a->start, a->offset, a->weights, a->blocks, a->reach, a->shift, a->relu,
                          a->half, threads);
        else if (a->kind != CONV)
            eq_run(planes_job, a, work < 20000 ? 1 : threads); /* waking threads takes one or two microseconds */
        else if (a->lanes == 1)
            eq_flat_conv(&a->x, &a->y, a->taps, a->start, a->blocks, a->shift, a->relu, threads);
        else
            failed |= eq_conv(&a->x, &a->y, a->taps, a->start, a->blocks, a->reach, a->shift, a->relu, a->half, threads);
    }
    return failed;
}
