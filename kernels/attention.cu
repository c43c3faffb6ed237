// Attention on the GPU: checks, and the choice between the implementations of attention_variants.h.
#include "kernels/attention.h"

#include "kernels/attention_variants.h"
#include "kernels/common/arguments.h"
#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {

namespace {

/// What all variants need besides what the contract states.
template <class Args>
void check_for_gpu(const char* operation, const Args& args) {
  check(args);
  CHECK(args.scale > 0, operation, ": the scale must be positive, is ", args.scale);
  CHECK(args.qkv.ndim == 3 && args.qkv.rows() > 0, operation, ": qkv must be [B, T, (H + 2 Hkv) * D], is ",
        args.qkv.shape());
  const int64_t head_dim = args.out.columns() / args.heads;
  // 32-bit arithmetic inside a head: positions, and the bytes of one tile's rows.
  CHECK(args.qkv.dim(1) < int64_t{1} << 30 && args.qkv.columns() < int64_t{1} << 22, operation, ": ",
        args.qkv.shape(), " exceeds 2^30 positions or 2^22 columns");
  if (args.qkv.dtype == DType::bf16) {
    if (head_dim != 64 && head_dim != 80 && head_dim != 96 && head_dim != 128)
      fail(ExitCode::usage,
           "attention in bf16 on the GPU handles heads of 64, 80, 96 or 128, this model's have ", head_dim,
           ": use --dtype fp32 or --device cpu");
    CHECK(aligned_to(16, args.qkv.data, args.out.data), operation,
          ": tensors must begin at multiples of 16 bytes");
  } else {
    CHECK(args.qkv.dtype == DType::f32, operation, " on the GPU computes in bf16 or fp32, given ",
          name_of(args.qkv.dtype));
    if (head_dim > kAttentionFp32MaxHeadDim)
      fail(ExitCode::usage, "attention in fp32 on the GPU handles heads of up to ", kAttentionFp32MaxHeadDim,
           ", this model's have ", head_dim, ": use --device cpu");
  }
}

}  // namespace

void attention_forward(const Context& ctx, const AttentionForward& args) {
  check_for_gpu("attention_forward", args);
  if (args.qkv.dtype == DType::bf16)
    attention_forward_mma(ctx, args);
  else
    attention_forward_fp32(ctx, args);
}

void attention_backward(const Context& ctx, const AttentionBackward& args) {
  const char* operation = "attention_backward";
  check_for_gpu(operation, args);
  require_scratch({operation, "scratch", args.scratch},
                  attention_backward_scratch_bytes(args.qkv.dim(0), args.qkv.dim(1), args.heads,
                                                   args.kv_heads, args.out.columns() / args.heads));
  if (args.qkv.dtype == DType::bf16) {
    CHECK(aligned_to(16, args.d_qkv.data, args.d_out.data, args.scratch.data), operation,
          ": tensors must begin at multiples of 16 bytes");
    attention_backward_mma(ctx, args);
  } else {
    attention_backward_fp32(ctx, args);
  }
}

}  // namespace kinoe::cuda
