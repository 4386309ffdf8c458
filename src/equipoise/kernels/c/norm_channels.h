#ifndef EQUIPOISE_NORM_CHANNELS_H
#define EQUIPOISE_NORM_CHANNELS_H
/* BatchNorm, residual addition, ReLU and 2x2 max-pool of one channel. norm.c includes this for vectors of 32 bytes,
 * norm_bf16.c for 64. */
#include "kernels.h"

enum { IDENTITY, FIXED, BATCH }; /* no normalisation, by running statistics, by statistics of the batch */

typedef struct {
    map y, out;            /* before and after; pooling halves height and width of out */
    map residual;          /* added before ReLU; data is NULL if there is none */
    int64_t images;        /* in the batch; the last block may be filled only in part */
    int32_t norm, relu, pool, half;
    float eps, momentum;   /* momentum: weight of this batch in the running statistics */
    const float *gamma, *beta;
    float *running_mean, *running_var;
    float *mean, *inv;     /* mean and 1 / standard deviation per channel, kept for backward */
    map dy, dresidual, dout; /* backward only */
    float *dgamma, *dbeta;
} norm_work;

/* 1 in lanes that hold an image of the batch, by vector of words and by even or odd image. */
INLINE void real_lanes(const norm_work *a, int64_t n, vec lanes[PARTS][2], const int half) {
    for (int j = 0; j < PARTS; j++)
        for (int e = 0; e <= half; e++) {
            float real[WORDS];
            for (int i = 0; i < WORDS; i++) real[i] = ((n * LANES + j * WORDS + i) << half) + e < a->images;
            lanes[j][e] = load(real);
        }
}

/* Mean and variance of a channel, from sums shifted by its first value to avoid cancellation. */
INLINE void statistics(const norm_work *a, int64_t c, double *mean, double *var, const int half) {
    const float *origin = a->y.data + c * a->y.sc;
    const float shift = half ? take(origin, 0, 1)[0] : *origin;
    const vec s = splat(shift);
    double first = 0, second = 0;
    for (int64_t n = 0; n < a->y.n; n++) {
        vec lanes[PARTS][2], one = splat(0), two = splat(0);
        real_lanes(a, n, lanes, half);
        for (int64_t h = 0; h < a->y.h; h++) {
            const float *p = at(&a->y, n, c, h);
            for (int64_t i = 0; i < a->y.w * LANES; i += LANES) {
                for (int j = 0; j < (half ? PARTS : 1); j++) { /* pairs: all words, or even and odd images of some */
                    const float *q = p + i + j * WORDS, *r = half ? q : q + WORDS;
                    const vec u = (take(q, 0, half) - s) * lanes[j][0];
                    const vec v = (take(r, 1, half) - s) * (half ? lanes[j][1] : lanes[PARTS - 1][0]);
                    one += u + v;
                    two += u * u + v * v;
                }
            }
        }
        first += sum(one);
        second += sum(two);
    }
    const double count = (double)a->images * a->y.h * a->y.w;
    *mean = shift + first / count;
    *var = second / count - first / count * (first / count);
    if (*var < 0) *var = 0;
}

/* Scale and shift of a channel: z = scale * y + shift, before residual, ReLU and pool. */
INLINE void prepare(const norm_work *a, int64_t c, float *scale, float *shift, const int half) {
    *scale = 1, *shift = 0;
    if (a->norm == IDENTITY) return;
    if (a->norm == BATCH) {
        double mean, var;
        statistics(a, c, &mean, &var, half);
        a->mean[c] = mean;
        a->inv[c] = 1 / sqrt(var + a->eps);
        const double count = (double)a->images * a->y.h * a->y.w;
        if (a->running_mean) {
            a->running_mean[c] += a->momentum * (mean - a->running_mean[c]);
            a->running_var[c] += a->momentum * (var * count / (count - 1) - a->running_var[c]);
        }
    } else {
        a->mean[c] = a->running_mean[c];
        a->inv[c] = 1 / sqrtf(a->running_var[c] + a->eps);
    }
    *scale = (a->gamma ? a->gamma[c] : 1) * a->inv[c];
    *shift = (a->beta ? a->beta[c] : 0) - a->mean[c] * *scale;
}

INLINE void apply(const norm_work *a, int64_t n, int64_t c, vec scale, vec shift, const int half, const int past) {
    const int step = a->pool ? 2 * LANES : LANES;
    for (int64_t h = 0; h < a->out.h; h++) {
        const float *p = at(&a->y, n, c, a->pool ? 2 * h : h), *below = p + a->y.sh;
        const float *r = a->residual.data ? at(&a->residual, n, c, h) : NULL;
        float *q = at(&a->out, n, c, h);
        for (int64_t i = 0; i < a->out.w; i++) {
            for (int j = 0; j < LANES; j += WORDS) {
                const float *s = p + i * step + j, *t = below + i * step + j;
                vec z[2];
                for (int e = 0; e <= half; e++) {
                    z[e] = scale * take(s, e, half) + shift;
                    if (a->pool) {
                        z[e] = larger(z[e], scale * take(s + LANES, e, half) + shift);
                        const vec left = scale * take(t, e, half) + shift;
                        z[e] = larger(z[e], larger(left, scale * take(t + LANES, e, half) + shift));
                    }
                    if (r) z[e] += take(r + i * LANES + j, e, half);
                    if (a->relu) z[e] = relu(z[e]);
                }
                put(q + i * LANES + j, z, half, past);
            }
        }
    }
}

INLINE void norm_channel_of(const norm_work *a, int64_t c, const int half) {
    float scale, shift;
    prepare(a, c, &scale, &shift, half);
    const int past = streams(&a->out);
    for (int64_t n = a->y.n - 1; n >= 0; n--) /* the last maps are still in cache */
        past ? apply(a, n, c, splat(scale), splat(shift), half, 1)
             : apply(a, n, c, splat(scale), splat(shift), half, 0);
}

/* A vector of one position, or of a 2x2 window: values y and the gradient that reaches each of them. */
typedef struct {
    vec y[4], g[4];
} window;

INLINE window look(const norm_work *a, const float *y, const float *g, const float *r, vec scale, vec shift,
                   const int cells, const int e, const int half) {
    const int64_t cell[4] = {0, LANES, a->y.sh, a->y.sh + LANES};
    window v;
    vec z[4];
    for (int i = 0; i < cells; i++) {
        v.y[i] = take(y + cell[i], e, half);
        z[i] = scale * v.y[i] + shift;
    }
    vec top = z[0], got = take(g, e, half);
    for (int i = 1; i < cells; i++) top = larger(z[i], top);
    vec after = top;
    if (r) after += take(r, e, half);
    if (a->relu) got = where(after > splat(0), got);
    bits open = top == top;
    for (int i = 0; i < cells; i++) { /* the first of equal values gets the gradient, as in torch */
        const bits mine = open & (z[i] == top);
        v.g[i] = where(mine, got);
        open &= ~mine;
    }
    return v;
}

typedef struct {
    vec scale, shift, mean, by_g, by_y, constant, lanes[PARTS][2];
    vec sum_g[PARTS][2], sum_gy[PARTS][2]; /* bf16: by vector of words and by image, four chains; float: all in the first */
} channel_state;

/* One plane: sums in the first pass, dy in the second (`write`). */
INLINE void back_plane(const norm_work *a, int64_t n, int64_t c, channel_state *k, int write, const int cells,
                       const int half, const int past) {
    const int64_t target[4] = {0, LANES, a->dy.sh, a->dy.sh + LANES};
    const int64_t side = cells == 4 ? 2 : 1;
    for (int64_t h = 0; h < a->dout.h; h++) {
        const float *y = at(&a->y, n, c, h * side), *g = at(&a->dout, n, c, h);
        const float *r = a->residual.data ? at(&a->residual, n, c, h) : NULL;
        float *dy = write ? at(&a->dy, n, c, h * side) : NULL;
        float *dr = write && a->dresidual.data ? at(&a->dresidual, n, c, h) : NULL;
        for (int64_t i = 0; i < a->dout.w * LANES; i += LANES) {
            for (int part = 0; part < PARTS; part++) {
                const int64_t o = i + part * WORDS, yo = i * side + part * WORDS;
                vec d[4][2], got[2];
                for (int e = 0; e <= half; e++) {
                    const window v = look(a, y + yo, g + o, r ? r + o : NULL, k->scale, k->shift, cells, e, half);
                    for (int j = 0; j < cells; j++) {
                        const vec centred = v.y[j] - k->mean;
                        if (write) {
                            d[j][e] = k->by_g * v.g[j] + k->by_y * centred + k->constant;
                            d[j][e] = d[j][e] * k->lanes[part][e];
                        } else {
                            k->sum_g[part & half][e] += v.g[j];
                            k->sum_gy[part & half][e] += v.g[j] * centred;
                        }
                    }
                    got[e] = v.g[0];
                }
                for (int j = 0; write && j < cells; j++) put(dy + yo + target[j], d[j], half, past);
                if (dr) put(dr + o, got, half, 0);
            }
        }
    }
}

/* Rows and columns that a 2x2 pool of an odd map leaves out: they get a gradient through the statistics only. */
INLINE void back_rest(const norm_work *a, int64_t n, int64_t c, const channel_state *k, const int half) {
    for (int64_t h = 0; h < a->y.h; h++) {
        const float *y = at(&a->y, n, c, h);
        float *dy = at(&a->dy, n, c, h);
        for (int64_t w = h < 2 * a->dout.h ? 2 * a->dout.w : 0; w < a->y.w; w++)
            for (int part = 0; part < PARTS; part++) {
                const int64_t o = w * LANES + part * WORDS;
                vec d[2];
                for (int e = 0; e <= half; e++)
                    d[e] = (k->by_y * (take(y + o, e, half) - k->mean) + k->constant) * k->lanes[part][e];
                put(dy + o, d, half, 0);
            }
    }
}

/* One or four cells per output, past the caches or not. */
INLINE void back_any_plane(const norm_work *a, int64_t n, int64_t c, channel_state *k, const int write, const int half,
                           int past) {
    if (write && past)
        a->pool ? back_plane(a, n, c, k, 1, 4, half, 1) : back_plane(a, n, c, k, 1, 1, half, 1);
    else
        a->pool ? back_plane(a, n, c, k, write, 4, half, 0) : back_plane(a, n, c, k, write, 1, half, 0);
}

INLINE void norm_back_channel_of(const norm_work *a, int64_t c, const int half) {
    const float mean = a->norm ? a->mean[c] : 0, inv = a->norm ? a->inv[c] : 1;
    const float scale = a->norm && a->gamma ? a->gamma[c] * inv : inv;
    const float shift = a->norm ? (a->beta ? a->beta[c] : 0) - mean * scale : 0;
    channel_state k = {.scale = splat(scale), .shift = splat(shift), .mean = splat(mean), .by_g = splat(scale)};
    double sum_g = 0, sum_gy = 0;
    if (a->norm) {
        for (int64_t n = 0; n < a->y.n; n++) {
            memset(k.sum_g, 0, sizeof k.sum_g), memset(k.sum_gy, 0, sizeof k.sum_gy);
            back_any_plane(a, n, c, &k, 0, half, 0);
            vec total_g = k.sum_g[0][0] + k.sum_g[0][1], total_gy = k.sum_gy[0][0] + k.sum_gy[0][1];
            for (int j = 1; j < PARTS; j++) {
                total_g += k.sum_g[j][0] + k.sum_g[j][1];
                total_gy += k.sum_gy[j][0] + k.sum_gy[j][1];
            }
            sum_g += sum(total_g);
            sum_gy += sum(total_gy);
        }
        if (a->dbeta) a->dbeta[c] = sum_g;
        if (a->dgamma) a->dgamma[c] = sum_gy * inv;
    }
    if (a->norm == BATCH) {
        const double count = (double)a->images * a->y.h * a->y.w;
        k.constant = splat(-scale * sum_g / count);
        k.by_y = splat(-scale * inv * inv * sum_gy / count);
    }
    const int past = streams(&a->dy);
    for (int64_t n = a->y.n - 1; n >= 0; n--) {
        real_lanes(a, n, k.lanes, half);
        back_any_plane(a, n, c, &k, 1, half, past);
        if (a->pool) back_rest(a, n, c, &k, half);
    }
}

void eq_norm_channel_bf16(const norm_work *a, int64_t c);
void eq_norm_back_channel_bf16(const norm_work *a, int64_t c);

#endif
