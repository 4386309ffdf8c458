/* Fused normalisation of bf16 maps in vectors of 64 bytes, with the instructions of AVX512-BF16. */
#define VECTOR_BYTES 64
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(EQ_NO_CLONES)
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#endif
#if defined(__AVX512BF16__)
#include "norm_channels.h"

void eq_norm_channel_bf16(const norm_work *a, int64_t c) { norm_channel_of(a, c, 1); }
void eq_norm_back_channel_bf16(const norm_work *a, int64_t c) { norm_back_channel_of(a, c, 1); }
#else
#undef VECTOR_BYTES
#include "norm_channels.h"

void eq_norm_channel_bf16(const norm_work *a, int64_t c) {}
void eq_norm_back_channel_bf16(const norm_work *a, int64_t c) {}
#endif
