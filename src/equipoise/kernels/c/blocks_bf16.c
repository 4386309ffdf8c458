/* Kernels of blocks in bf16 maps by the instructions of AVX512-BF16, see conv_bf16.c. */
#define VECTOR_BYTES 64
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(EQ_NO_CLONES)
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#endif
#if defined(__AVX512BF16__)
#include "block_tiles.h"

const block_kernels eq_blocks_bf16 = WIDE_KERNELS;
#else
#undef VECTOR_BYTES
#include "block_tiles.h"

const block_kernels eq_blocks_bf16 = {NULL};
#endif
