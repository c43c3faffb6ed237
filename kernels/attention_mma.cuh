// The instructions portable flash attention is made of (sm_80 and later), one function each.
//
// All of them are warp-wide except the copies. Fragments of mma.m16n8k16, for lane l of a warp with
// g = l / 4 and t = l % 4 (PTX ISA, "Matrix fragments for mma.m16n8k16"); a pair of bf16 fills one register:
//   A [16 x 16]: a0 = (g, 2t..2t+1)   a1 = (g+8, 2t..)   a2 = (g, 2t+8..)   a3 = (g+8, 2t+8..)
//   B [16 x 8]:  b0 = (2t..2t+1, g)   b1 = (2t+8.., g)
//   C [16 x 8]:  c0, c1 = (g, 2t), (g, 2t+1)   c2, c3 = (g+8, 2t), (g+8, 2t+1)
// Two neighbouring C tiles, rounded to bf16, are therefore one A tile: probabilities never leave their registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kinoe::cuda {

/// Address in the shared window, as the instructions below take it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// threadIdx.x, read anew: what is computed from it need not stay in a register from one use to the next.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

/// The warp's number in its block, read anew likewise.
__device__ __forceinline__ int warp_index() { return thread_index() / 32; }

/// `value`, of which the compiler knows nothing: what is computed from it is computed here, not kept from before a loop.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// 16 bytes from global to shared memory without passing through registers; zeros where not `present`.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool present) {
  const int bytes = present ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

/// Closes the group of copies this thread has issued since the last call.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending of this thread's newest groups are under way. Others see the data after a barrier.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Four 8x8 matrices of 16-bit elements; lane 8m + r names the address of row r of matrix m. Register m of lane l is
/// the pair (row l/4, columns 2(l%4)..) of matrix m: an A tile, or B tiles whose rows lie along n.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// The same, each matrix transposed: register m of lane l is (rows 2(l%4).., column l/4), B tiles whose rows lie
/// along k.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// c += a . b: bf16 products, fp32 sums.
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace kinoe::cuda
