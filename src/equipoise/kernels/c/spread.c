/* The dense weight of the active values of a layer, and the active entries of a dense gradient.
 *
 * Indices are those of a weight in its usual order. Its memory may be in channels_last order instead: each row, the
 * weights of one output, then holds all channels of the first tap, those of the second, and so on. */
#include "kernels.h"

#define FEW 16384 /* elements for which threads would cost more than they save */
#define AT_ONCE 4096 /* elements of a row if the order is the usual one and rows do not matter */

typedef struct {
    int64_t count, size, row; /* indices, elements of the weight, elements of a row */
    int taps;                 /* of a row in channels_last order; 1 in the usual order */
    const int32_t *index;     /* ascending, below size */
    const float *from;
    float *to;
    int gathers; /* whether active entries are read from a dense tensor instead of written to one */
    int wrong;   /* set by any thread that finds indices out of order */
} spread_work;

/* Number of indices below `end`; the first `k` are, and those from `last` on are not. */
static int64_t below(const int32_t *index, int64_t k, int64_t last, int64_t end) {
    while (k < last) {
        const int64_t middle = k + (last - k) / 2;
        if (index[middle] < end) k = middle + 1;
        else last = middle;
    }
    return k;
}

/* Whether indices ascend and lie in [first, end). */
static int ascends(const int32_t *index, int64_t count, int64_t first, int64_t end) {
    if (!count) return 1;
    int wrong = index[0] < first || index[count - 1] >= end;
    for (int64_t k = 1; k < count; k++) wrong |= index[k] <= index[k - 1];
    return !wrong;
}

/* One row that begins at the element `first`, with `count` indices. `taps` is known when this is compiled: a division by
 * a variable would take longer than everything else. The zeros are in the first-level cache when values are written. */
static inline __attribute__((always_inline)) void spread_row(
    const spread_work *a, int64_t k, int64_t count, int64_t first, int64_t row, uint32_t taps) {
    const uint32_t channels = row / taps;
    const int32_t *index = a->index + k;
    if (!a->gathers) memset(a->to + first, 0, row * sizeof *a->to);
    for (int64_t j = 0; j < count; j++) {
        const uint32_t i = index[j] - first, channel = i / taps, place = (i - channel * taps) * channels + channel;
        if (a->gathers) a->to[k + j] = a->from[first + place];
        else a->to[first + place] = a->from[k + j];
    }
}

/* The rows of one part. Nothing is read or written by an index that was not checked. */
CLONES static void spread_part(spread_work *a, int64_t first, int64_t last) {
    int64_t k = first ? below(a->index, 0, a->count, first) : 0;
    const int64_t end = last < a->size ? below(a->index, 0, a->count, last) : a->count;
    for (int64_t next; first < last && k <= end; first += a->row) {
        const int64_t row = a->size - first < a->row ? a->size - first : a->row;
        const int64_t most = a->count - k < row ? a->count : k + row;
        next = below(a->index, k, most, first + row);
        if (!ascends(a->index + k, next - k, first, first + row)) break;
        if (a->taps == 1) spread_row(a, k, next - k, first, row, 1);
        else if (a->taps == 9) spread_row(a, k, next - k, first, row, 9);
        else spread_row(a, k, next - k, first, row, a->taps);
        k = next;
    }
    if (first < last || k != end) __atomic_store_n(&a->wrong, 1, __ATOMIC_RELAXED);
}

static void spread_job(const void *work, int part, int parts) {
    spread_work *a = (spread_work *)work;
    const int64_t rows = (a->size + a->row - 1) / a->row;
    const int64_t first = rows * part / parts * a->row, last = rows * (part + 1) / parts * a->row;
    if (first < last) spread_part(a, first, last);
}

static int run(spread_work *a, int threads) {
    if (a->taps == 1) a->row = AT_ONCE;
    if (a->size) eq_run(spread_job, a, a->size < FEW ? 1 : threads);
    return a->wrong || (!a->size && a->count);
}

/* dense[index[k]] = values[k], and zero elsewhere; returns whether an index is out of order or not below `size`. With
 * more than one tap, `dense` is in channels_last order and `row` divides `size`. */
int eq_spread(int64_t count, const int32_t *index, const float *values, int64_t size, float *dense, int64_t row,
              int taps, int threads) {
    spread_work a = {count, size, row, taps, index, values, dense, 0, 0};
    return run(&a, threads);
}

/* values[k] = dense[index[k]]; returns the same. */
int eq_gather(int64_t count, const int32_t *index, float *values, int64_t size, const float *dense, int64_t row,
              int taps, int threads) {
    spread_work a = {count, size, row, taps, index, dense, values, 1, 0};
    return run(&a, threads);
}
