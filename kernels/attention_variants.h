// The implementations behind cuda::attention_forward and cuda::attention_backward, for attention.cu to choose from.
#pragma once

#include "kernels/attention.h"

namespace kinoe::cuda {

/// Portable flash attention on the tensor cores (mma.sync, sm_80 and later): bf16, head sizes 64, 80, 96 and 128.
void attention_forward_mma(const Context& ctx, const AttentionForward& args);
void attention_backward_mma(const Context& ctx, const AttentionBackward& args);

/// Plain fp32, no tensor cores, for `--dtype fp32`: any head size up to 256.
inline constexpr int64_t kAttentionFp32MaxHeadDim = 256;
void attention_forward_fp32(const Context& ctx, const AttentionForward& args);
void attention_backward_fp32(const Context& ctx, const AttentionBackward& args);

}  // namespace kinoe::cuda
