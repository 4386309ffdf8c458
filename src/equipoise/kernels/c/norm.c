/* BatchNorm, residual addition, ReLU and 2x2 max-pool in one pass, forward and backward. */
#include "norm_channels.h"

CLONES static void norm_channel(const norm_work *a, int64_t c) {
    a->half ? norm_channel_of(a, c, 1) : norm_channel_of(a, c, 0);
}

static void norm_job(const void *work, int part, int parts) {
    const norm_work *a = work;
    void (*run)(const norm_work *, int64_t) = a->half && eq_level() == 2 ? eq_norm_channel_bf16 : norm_channel;
    for (int64_t c = a->y.c * part / parts; c < a->y.c * (part + 1) / parts; c++) run(a, c);
}

void eq_norm(const norm_work *a, int threads) { eq_run(norm_job, a, threads); }

CLONES static void norm_back_channel(const norm_work *a, int64_t c) {
    a->half ? norm_back_channel_of(a, c, 1) : norm_back_channel_of(a, c, 0);
}

static void norm_back_job(const void *work, int part, int parts) {
    const norm_work *a = work;
    void (*run)(const norm_work *, int64_t) = a->half && eq_level() == 2 ? eq_norm_back_channel_bf16 : norm_back_channel;
    for (int64_t c = a->y.c * part / parts; c < a->y.c * (part + 1) / parts; c++) run(a, c);
}

void eq_norm_grad(const norm_work *a, int threads) { eq_run(norm_back_job, a, threads); }

