/* Kernels of blocks in vectors of 64 bytes. Compiled for machines that have them, whatever the flags are. */
#define VECTOR_BYTES 64
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(EQ_NO_CLONES)
#pragma GCC target("arch=x86-64-v4")
#endif
#if defined(__AVX512VL__)
#include "block_tiles.h"

const block_kernels eq_blocks_wide = WIDE_KERNELS;
#else
#undef VECTOR_BYTES
#include "block_tiles.h"

const block_kernels eq_blocks_wide = {NULL};
#endif
