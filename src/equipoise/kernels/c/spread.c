/* The dense weight of the active values of a layer, and the active entries of a dense gradient. */
#include "kernels.h"

#define FEW 16384 /* elements for which threads would cost more than they save */
#define AT_ONCE 1024

typedef struct {
    int64_t count, size;
    const int32_t *index; /* ascending, below size */
    const float *from;
    float *to;
    int wrong; /* set by any thread that finds another index */
} spread_work;

/* Whether indices ascend and lie in [first, end). */
static int ascends(const int32_t *index, int64_t count, int64_t first, int64_t end) {
    int wrong = index[0] < first || index[count - 1] >= end;
    for (int64_t k = 1; k < count; k++) wrong |= index[k] <= index[k - 1];
    return !wrong;
}

/* Each part writes from behind the last index of the part before it, a few indices at a time: the zeros are then still
 * in the first-level cache when the values are written. Nothing is written that was not checked. */
CLONES static void spread_part(spread_work *a, int64_t k, int64_t last, int64_t next) {
    for (int64_t count; k < last; k += count) {
        count = last - k < AT_ONCE ? last - k : AT_ONCE;
        if (!ascends(a->index + k, count, next, a->size)) {
            __atomic_store_n(&a->wrong, 1, __ATOMIC_RELAXED);
            return;
        }
        const int64_t end = (int64_t)a->index[k + count - 1] + 1;
        memset(a->to + next, 0, (end - next) * sizeof *a->to);
        for (int64_t j = k; j < k + count; j++) a->to[a->index[j]] = a->from[j];
        next = end;
    }
    if (last == a->count) memset(a->to + next, 0, (a->size - next) * sizeof *a->to);
}

static void spread_job(const void *work, int part, int parts) {
    spread_work *a = (spread_work *)work;
    const int64_t first = a->count * part / parts, last = a->count * (part + 1) / parts;
    const int64_t next = first ? (int64_t)a->index[first - 1] + 1 : 0;
    if (first < last || !a->count) spread_part(a, first, last, next < 0 ? 0 : next);
}

CLONES static void gather_part(spread_work *a, int64_t k, int64_t last) {
    int wrong = 0;
    for (; k < last; k++) {
        const int64_t i = a->index[k];
        const int inside = i >= 0 && i < a->size;
        wrong |= !inside;
        a->to[k] = a->from[inside ? i : 0];
    }
    if (wrong) __atomic_store_n(&a->wrong, 1, __ATOMIC_RELAXED);
}

static void gather_job(const void *work, int part, int parts) {
    spread_work *a = (spread_work *)work;
    gather_part(a, a->count * part / parts, a->count * (part + 1) / parts);
}

static int run(job work, spread_work *a, int threads) {
    if (a->size) eq_run(work, a, a->size < FEW ? 1 : threads);
    return a->wrong || (!a->size && a->count);
}

/* dense[index[k]] = values[k], and zero elsewhere; returns whether an index is out of order or not below `size`. */
int eq_spread(int64_t count, const int32_t *index, const float *values, int64_t size, float *dense, int threads) {
    spread_work a = {count, size, index, values, dense, 0};
    return run(spread_job, &a, threads);
}

/* values[k] = dense[index[k]]; returns whether an index is not below `size`. */
int eq_gather(int64_t count, const int32_t *index, const float *dense, int64_t size, float *values, int threads) {
    spread_work a = {count, size, index, dense, values, 0};
    return run(gather_job, &a, threads);
}
