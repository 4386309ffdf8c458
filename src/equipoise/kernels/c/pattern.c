/* Builds the taps of a convolution from the indices of its active weights. */
#include "kernels.h"

/* Sorts active weights, given as ascending flat indices into (out, in / groups, taps), by phase, block of
 * source channels and destination channel; the sort is stable. A forward pass reads input channels and writes
 * output channels, a transposed pass the reverse. Phases split the taps of a strided transposed pass. */
int eq_pattern(int64_t count, const int32_t *flat, const int64_t *geometry, const int32_t *phase,
               int32_t *start, int32_t *order, int32_t *source, int32_t *which) {
    const uint32_t in_group = geometry[0], out_group = geometry[1], taps = geometry[2];
    const int64_t transposed = geometry[3], block = geometry[4], blocks = geometry[5], rows = geometry[6];
    const int64_t buckets = geometry[7] * blocks * rows;
    int32_t *bucket = eq_scratch(2 * count * sizeof *bucket), *from = bucket + count;
    if (!bucket) return 1;
    memset(start, 0, (buckets + 1) * sizeof *start);
    for (int64_t k = 0; k < count; k++) {
        const uint32_t i = flat[k], t = i % taps, out = i / taps / in_group;
        const uint32_t in = i / taps % in_group + out / out_group * in_group;
        const uint32_t src = transposed ? out : in, dst = transposed ? in : out;
        from[k] = src;
        bucket[k] = (phase[t] * blocks + src / block) * rows + dst;
        start[bucket[k] + 1]++;
    }
    for (int64_t b = 0; b < buckets; b++) start[b + 1] += start[b];
    for (int64_t k = 0; k < count; k++) {
        const int32_t to = start[bucket[k]]++;
        order[to] = k;
        source[to] = from[k];
        which[to] = (uint32_t)flat[k] % taps;
    }
    memmove(start + 1, start, buckets * sizeof *start);
    start[0] = 0;
    free(bucket);
    return 0;
}

/* Sets the offset of each tap: source channel times channel step, plus the offset in the kernel. */
void eq_offsets(int64_t count, const int32_t *source, const int32_t *which, int64_t channel,
                const int64_t *tap_offset, tap *taps) {
    for (int64_t k = 0; k < count; k++) taps[k].offset = (int32_t)(source[k] * channel + tap_offset[which[k]]);
}

void eq_weights(int64_t count, const int32_t *order, const float *values, tap *taps) {
    for (int64_t k = 0; k < count; k++) taps[k].weight = values[order[k]];
}

