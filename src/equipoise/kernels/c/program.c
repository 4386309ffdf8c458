/* Runs the steps of a whole network for inference in one call. */
#include "kernels.h"

int eq_conv(const map *x, const map *y, const tap *taps, const int32_t *start, int64_t blocks, int64_t reach,
             const float *bias, int relu, int half, int threads);
void eq_flat_conv(const map *x, const map *y, const tap *taps, const int32_t *start, const float *bias, int relu,
                  int threads);

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
} step;

INLINE float larger_of(float a, float b) { return a > b || a != a ? a : b; }

/* Scale, shift, residual, ReLU and 2x2 max-pool. */
INLINE void plane(const step *a, int64_t n, int64_t c, const int lanes, const int pool) {
    const float scale = a->scale ? a->scale[c] : 1, shift = a->shift ? a->shift[c] : 0;
    const float low = a->relu ? 0 : -INFINITY;
    for (int64_t h = 0; h < a->y.h; h++) {
        float *q = at(&a->y, n, c, h);
        const float *p = at(&a->x, n, c, pool ? 2 * h : h), *below = p + a->x.sh;
        const float *r = a->residual.data ? at(&a->residual, n, c, h) : NULL;
        for (int64_t w = 0; w < a->y.w; w++)
            for (int l = 0; l < lanes; l++) {
                const int64_t i = w * lanes + l, j = 2 * w * lanes + l;
                float z = scale * p[pool ? j : i] + shift;
                if (pool) {
                    z = larger_of(scale * p[j + lanes] + shift, z);
                    z = larger_of(scale * below[j] + shift, z);
                    z = larger_of(scale * below[j + lanes] + shift, z);
                }
                if (r) z += r[i];
                q[i] = z < low ? low : z;
            }
    }
}

/* The largest number or the mean of each window. */
INLINE void windows(const step *a, int64_t n, int64_t c, const int lanes) {
    const int taps = a->kernel[0] * a->kernel[1];
    for (int64_t h = 0; h < a->y.h; h++)
        for (int64_t w = 0; w < a->y.w; w++) {
            float total[LANES] = {0}, most[LANES] = {0};
            int seen = 0;
            for (int t = 0; t < taps; t++) {
                const int64_t i = h * a->stride[0] + t / a->kernel[1] * a->dilation[0] - a->padding[0];
                const int64_t j = w * a->stride[1] + t % a->kernel[1] * a->dilation[1] - a->padding[1];
                if (i < 0 || i >= a->x.h || j < 0 || j >= a->x.w) continue;
                const float *p = at(&a->x, n, c, i) + j * lanes;
                for (int l = 0; l < lanes; l++) {
                    total[l] += p[l];
                    most[l] = seen ? larger_of(p[l], most[l]) : p[l];
                }
                seen++;
            }
            float *q = at(&a->y, n, c, h) + w * lanes;
            for (int l = 0; l < lanes; l++) q[l] = a->mean ? total[l] / (a->count_padding ? taps : seen) : most[l];
        }
}

INLINE void copy(const step *a, int64_t n, int64_t c, const int lanes) {
    for (int64_t h = 0; h < a->y.h; h++)
        for (int64_t w = 0; w < a->y.w; w++)
            for (int l = 0; l < lanes; l++)
                at(&a->y, n, c, h)[w * a->y.sw + l] = at(&a->x, n, c, h)[w * a->x.sw + l];
}

INLINE void by_kind(const step *a, int64_t n, int64_t c, const int lanes) {
    if (a->kind == PLANE && a->pool)
        plane(a, n, c, lanes, 1);
    else if (a->kind == PLANE)
        plane(a, n, c, lanes, 0);
    else if (a->kind == POOL)
        windows(a, n, c, lanes);
    else
        copy(a, n, c, lanes);
}

CLONES static void one_plane(const step *a, int64_t n, int64_t c) {
    a->lanes == 1 ? by_kind(a, n, c, 1) : by_kind(a, n, c, LANES);
}

static void planes_job(const void *work, int part, int parts) {
    const step *a = work;
    const int64_t planes = a->y.n * a->y.c;
    for (int64_t i = planes * part / parts; i < planes * (part + 1) / parts; i++)
        one_plane(a, i / a->y.c, i % a->y.c);
}

void eq_program(const step *steps, int64_t count, int threads) {
    for (const step *a = steps; a < steps + count; a++) {
        const int64_t work = a->x.n * a->x.c * a->x.h * a->x.w * a->lanes;
        if (a->kind == BLOCKS && a->lanes == 1)
            eq_flat_block_conv(&a->x, &a->y, a->start, a->offset, a->weights, a->blocks, a->shift, a->relu, threads);
        else if (a->kind == BLOCKS)
            eq_block_conv(&a->x, &a->y, a->start, a->offset, a->weights, a->blocks, a->reach, a->shift, a->relu, 0,
                          threads);
        else if (a->kind != CONV)
            eq_run(planes_job, a, work < 20000 ? 1 : threads); /* waking threads takes one or two microseconds */
        else if (a->lanes == 1)
            eq_flat_conv(&a->x, &a->y, a->taps, a->start, a->shift, a->relu, threads);
        else
            eq_conv(&a->x, &a->y, a->taps, a->start, a->blocks, a->reach, a->shift, a->relu, 0, threads);
    }
}
