/* Threads, division of work, registers and scratch memory. */
#include "kernels.h"

#if defined(_OPENMP)
#include <omp.h>
#include <pthread.h>
/* Weak: without an OpenMP runtime in the process they are NULL, and everything runs in the calling thread. */
extern int omp_get_num_threads(void) __attribute__((weak));
#if defined(__ELF__) && defined(__GNUC__) && !defined(__clang__)
__asm__(".weak GOMP_parallel\n.weak omp_get_thread_num"); /* GCC has them built in, and ignores the attribute */
#endif
#endif

/* A forked child inherits torch's OpenMP pool without its threads and must not wait for them. */
static int forked = 0;

int eq_abi(void) { return EQ_ABI; }

#if defined(_OPENMP)
static void in_child(void) { forked = 1; }
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }
#endif

void eq_run(job work, const void *arguments, int threads) {
    if (threads <= 1 || forked) {
        work(arguments, 0, 1);
        return;
    }
#if defined(_OPENMP)
    if (omp_get_num_threads) {
#pragma omp parallel num_threads(threads)
        work(arguments, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    work(arguments, 0, 1);
}

void *eq_scratch(size_t bytes) {
    return aligned_alloc(64, (bytes + 127) / 64 * 64);
}

int eq_level(void) {
#if defined(__AVX512BF16__)
    return 2;
#elif defined(__AVX512VL__)
    return 1;
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(EQ_NO_CLONES)
    if (!__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bw")) return 0;
    return __builtin_cpu_supports("avx512bf16") ? 2 : 1;
#else
    return 0;
#endif
}

int eq_accumulators(void) {
#if defined(EQ_ACCUMULATORS)
    return EQ_ACCUMULATORS; /* to test the code for other machines */
#elif defined(__x86_64__) && defined(__GNUC__)
    return __builtin_cpu_supports("avx512vl") ? 16 : 8; /* of 32 or 16 vector registers */
#else
    return 8;
#endif
}

/* First row of part number `part` if rows are split into parts with about equal numbers of taps. */
int64_t eq_split_rows(const int32_t *start, int64_t blocks, int64_t rows, int part, int parts) {
    if (part <= 0) return 0;
    if (part >= parts) return rows;
    const int64_t row_cost = 4; /* in taps, for a store and a loop */
    int64_t total = start[blocks * rows] - start[0] + rows * row_cost, seen = 0, row = 0;
    for (; row < rows && seen * parts < total * part; row++) {
        for (int64_t b = 0; b < blocks; b++) seen += start[b * rows + row + 1] - start[b * rows + row];
        seen += row_cost;
    }
    return row;
}
