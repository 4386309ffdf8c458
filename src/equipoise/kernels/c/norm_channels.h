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

/* Whether every lane of a block holds an image of the batch. */
INLINE int is_full(const norm_work *a, int64_t n, const int half) { return ((n + 1) * LANES) << half <= a->images; }

/* 1 in lanes that hold an image of the batch, by vector of words and by even or odd image. */
INLINE void real_lanes(const norm_work *a, int64_t n, vec lanes[PARTS][2], const int half) {
    for (int j = 0; j < PARTS; j++)
        for (int e = 0; e <= half; e++) {
            float real[WORDS];
            for (int i = 0; i < WORDS; i++) real[i] = ((n * LANES + j * WORDS + i) << half) + e < a->images;
            lanes[j][e] = load(real);
        }
}

typedef struct {
    vec one[2], two[2]; /* sums of values and of squares: two chains each, to hide the latency */
} moments;

/* Adds a vector of values, or of values less `shift` in the lanes of images. */
INLINE void add_moments(moments *m, int chain, const float *p, vec shift, vec lanes[PARTS][2], const int half) {
    for (int j = 0; j < (half ? PARTS : 1); j++) { /* pairs: all words, or even and odd images of some */
        const float *q = p + j * WORDS, *r = half ? q : q + WORDS;
        const vec u = (take(q, 0, half) - shift) * lanes[j][0];
        const vec v = (take(r, 1, half) - shift) * (half ? lanes[j][1] : lanes[PARTS - 1][0]);
        m->one[chain] += u + v;
        m->two[chain] += u * u + v * v;
    }
}

#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
/* The same without shift, by dot products of bf16 pairs. */
INLINE void add_dots(moments *m, int chain, const float *p) {
    const __m512bh pairs = (__m512bh)load(p), ones = (__m512bh)((words){0} + 0x3f803f80u);
    m->one[chain] = (vec)_mm512_dpbf16_ps((__m512)m->one[chain], pairs, ones);
    m->two[chain] = (vec)_mm512_dpbf16_ps((__m512)m->two[chain], pairs, pairs);
}
#else
INLINE void add_dots(moments *m, int chain, const float *p) {}
#endif

/* Sums of a channel. With `dots` all blocks but the last one may be added by dot products. */
INLINE void sum_moments(const norm_work *a, int64_t c, vec shift, const int dots, double *first, double *second,
                        const int half) {
    *first = *second = 0;
    for (int64_t n = 0; n < a->y.n; n++) {
        moments m = {0};
        vec lanes[PARTS][2];
        real_lanes(a, n, lanes, half);
        for (int64_t h = 0; h < a->y.h; h++) {
            const float *p = at(&a->y, n, c, h), *end = p + a->y.w * LANES;
            for (; p + LANES < end; p += 2 * LANES)
                for (int i = 0; i < 2; i++)
                    dots ? add_dots(&m, i, p + i * LANES) : add_moments(&m, i, p + i * LANES, shift, lanes, half);
            if (p < end) dots ? add_dots(&m, 0, p) : add_moments(&m, 0, p, shift, lanes, half);
        }
        *first += sum(m.one[0] + m.one[1]);
        *second += sum(m.two[0] + m.two[1]);
    }
}

#define STEEP 100 /* square of the mean, in variances, above which unshifted sums cancel too much */

/* Mean and variance of a channel, from sums shifted by its first value to avoid cancellation. Dot products of bf16
 * numbers cannot be shifted; they are tried first, and kept if the mean is small. */
INLINE void statistics(const norm_work *a, int64_t c, double *mean, double *var, const int half) {
    const double count = (double)a->images * a->y.h * a->y.w;
    double first, second;
    if (half && VECTOR_BYTES == 64 && is_full(a, a->y.n - 1, half)) {
        sum_moments(a, c, splat(0), 1, &first, &second, half);
        *mean = first / count;
        *var = second / count - *mean * *mean;
        if (*mean * *mean < STEEP * *var) return;
    }
    const float *origin = a->y.data + c * a->y.sc;
    const float shift = half ? take(origin, 0, 1)[0] : *origin;
    sum_moments(a, c, splat(shift), 0, &first, &second, half);
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

/* The largest of four vectors; NaN if one is NaN. */
INLINE vec largest(vec a, vec b, vec c, vec d) {
    const flags nan = unordered(a, b) | unordered(c, d);
    const vec left = pick(above(a, b), a, b), right = pick(above(c, d), c, d);
    return pick(nan, splat(NAN), pick(above(left, right), left, right));
}

INLINE void apply_to_plane(const norm_work *a, int64_t n, int64_t c, vec scale, vec shift, const int pool,
                           const int half, const int past) {
    const int step = pool ? 2 * LANES : LANES;
    for (int64_t h = 0; h < a->out.h; h++) {
        const float *p = at(&a->y, n, c, pool ? 2 * h : h), *below = p + a->y.sh;
        const float *r = a->residual.data ? at(&a->residual, n, c, h) : NULL;
        float *q = at(&a->out, n, c, h);
        for (int64_t i = 0; i < a->out.w; i++) {
            for (int j = 0; j < LANES; j += WORDS) {
                const float *s = p + i * step + j, *t = below + i * step + j;
                vec z[2];
                for (int e = 0; e <= half; e++) {
                    z[e] = scale * take(s, e, half) + shift;
                    if (pool)
                        z[e] = largest(z[e], scale * take(s + LANES, e, half) + shift,
                                       scale * take(t, e, half) + shift,
                                       scale * take(t + LANES, e, half) + shift);
                    if (r) z[e] += take(r + i * LANES + j, e, half);
                    if (a->relu) z[e] = relu(z[e]);
                }
                put(q + i * LANES + j, z, half, past);
            }
        }
    }
}

INLINE void apply(const norm_work *a, int64_t n, int64_t c, vec scale, vec shift, const int half, const int past) {
    a->pool ? apply_to_plane(a, n, c, scale, shift, 1, half, past)
            : apply_to_plane(a, n, c, scale, shift, 0, half, past);
}

INLINE void norm_channel_of(const norm_work *a, int64_t c, const int half) {
    float scale, shift;
    prepare(a, c, &scale, &shift, half);
    const int past = streams(&a->out);
    for (int64_t n = a->y.n - 1; n >= 0; n--) /* the last maps are still in cache */
        past ? apply(a, n, c, splat(scale), splat(shift), half, 1)
             : apply(a, n, c, splat(scale), splat(shift), half, 0);
}

/* A vector of one position, or of a 2x2 window: values y, the one that was the largest, and the gradient it gets. */
typedef struct {
    vec y[4], top, got;
    flags won[4]; /* the first of equal values wins, as in torch */
} window;

INLINE window look(const norm_work *a, const float *y, const float *g, const float *r, vec scale, vec shift,
                   const int cells, const int e, const int half) {
    const int64_t cell[4] = {0, LANES, a->y.sh, a->y.sh + LANES};
    window v;
    v.top = v.y[0] = take(y, e, half);
    vec best = scale * v.y[0] + shift;
    for (int i = 1; i < cells; i++) {
        v.y[i] = take(y + cell[i], e, half);
        const vec z = scale * v.y[i] + shift;
        v.won[i] = above(z, best);
        v.top = pick(v.won[i], v.y[i], v.top);
        best = pick(v.won[i], z, best);
    }
    if (cells == 4) {
        v.won[2] &= ~v.won[3];
        v.won[0] = v.won[2] | v.won[3];
        v.won[1] &= ~v.won[0];
        v.won[0] = ~(v.won[0] | v.won[1]);
    }
    if (r) best += take(r, e, half);
    v.got = take(g, e, half);
    if (a->relu) v.got = only(above(best, splat(0)), v.got);
    return v;
}

typedef struct {
    vec scale, shift, mean, by_g, by_y, constant, lanes[PARTS][2];
    vec sum_g[PARTS][2], sum_gy[PARTS][2]; /* bf16: by vector of words and by image, four chains; float: all in the first */
} channel_state;

/* One plane: sums in the first pass, dy in the second (`write`). */
INLINE void back_plane(const norm_work *a, int64_t n, int64_t c, channel_state *k, const int write, const int cells,
                       const int half, const int past) {
    const int masked = !is_full(a, n, half);
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
                    got[e] = v.got;
                    if (!write) {
                        k->sum_g[part & half][e] += v.got;
                        k->sum_gy[part & half][e] += v.got * (v.top - k->mean);
                        continue;
                    }
                    for (int j = 0; j < cells; j++) {
                        const vec rest = k->by_y * (v.y[j] - k->mean) + k->constant;
                        d[j][e] = k->by_g * (cells == 4 ? only(v.won[j], v.got) : v.got) + rest;
                        if (masked) d[j][e] *= k->lanes[part][e];
                    }
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
