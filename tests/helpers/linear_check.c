/* Checks the sparse linear kernels against loops in double, on the machine it was compiled for. */
#include "kernels.h"
#include <stdio.h>

enum { TOKENS = 83, IN = 37, OUT = 29, CHUNK = 64 };

int eq_pattern(int64_t, const int32_t *, const int64_t *, const int32_t *, int32_t *, int32_t *, int32_t *, int32_t *);
void eq_offsets(int64_t, const int32_t *, const int32_t *, int64_t, const int64_t *, tap *);
void eq_weights(int64_t, const int32_t *, const float *, tap *);
int eq_linear(const float *, float *, int64_t, int64_t, int64_t, const tap *, const int32_t *, int64_t, const float *, int);
int eq_linear_grad(const float *, const float *, int64_t, int64_t, int64_t, const tap *, const int32_t *,
                   const int32_t *, int64_t, float *, float *, const tap *, const int32_t *, int64_t, float *, int);

static uint32_t state = 1;
static float number(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1 << 23) - 1;
}

int main(void) {
    static float x[TOKENS * IN], dy[TOKENS * OUT], y[TOKENS * OUT], bias[OUT], values[IN * OUT];
    static float dvalues[IN * OUT], dbias[OUT];
    static int32_t flat[IN * OUT], start[OUT + 1], order[IN * OUT], source[IN * OUT], which[IN * OUT];
    static tap taps[IN * OUT];
    const int32_t phase = 0;
    const int64_t tap_offset = 0, geometry[8] = {IN, OUT, 1, 0, IN, 1, OUT, 1};
    int64_t count = 0;
    double worst = 0;
    for (int i = 0; i < TOKENS * IN; i++) x[i] = number();
    for (int i = 0; i < TOKENS * OUT; i++) dy[i] = number();
    for (int i = 0; i < OUT; i++) bias[i] = number();
    for (int i = 0; i < IN * OUT; i++)
        if (number() > 0.4f) {
            values[count] = number();
            flat[count++] = i;
        }
    if (eq_pattern(count, flat, geometry, &phase, start, order, source, which)) return 1;
    eq_offsets(count, source, which, CHUNK, &tap_offset, taps);
    eq_weights(count, order, values, taps);
    if (eq_linear(x, y, TOKENS, IN, OUT, taps, start, 1, bias, 2)) return 1;
    if (eq_linear_grad(x, dy, TOKENS, IN, OUT, taps, start, order, 1, dvalues, dbias, NULL, NULL, 0, NULL, 2)) return 1;
    for (int t = 0; t < TOKENS; t++)
        for (int o = 0; o < OUT; o++) {
            double wanted = bias[o];
            for (int64_t k = 0; k < count; k++)
                if (flat[k] / IN == o) wanted += (double)values[k] * x[t * IN + flat[k] % IN];
            worst = fmax(worst, fabs(wanted - y[t * OUT + o]));
        }
    for (int64_t k = 0; k < count; k++) {
        double wanted = 0;
        for (int t = 0; t < TOKENS; t++) wanted += (double)dy[t * OUT + flat[k] / IN] * x[t * IN + flat[k] % IN];
        worst = fmax(worst, fabs(wanted - dvalues[k]));
    }
    printf("%lld weights, largest error %g\n", (long long)count, worst);
    return !(count > 100 && worst < 1e-4);
}
