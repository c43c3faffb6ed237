// The forward kernel, compiled for each head size.
#include "kernels/attention_forward.cuh"

#include "kernels/attention_variants.h"

namespace kinoe::cuda {

void attention_forward_mma(const Context& ctx, const AttentionForward& args) {
  switch (args.out.columns() / args.heads) {
    case 64: return run_attention_forward<ForwardChoice<64>>(ctx, args);
    case 80: return run_attention_forward<ForwardChoice<80>>(ctx, args);
    case 96: return run_attention_forward<ForwardChoice<96>>(ctx, args);
    case 128: return run_attention_forward<ForwardChoice<128>>(ctx, args);
    default: CHECK(false, "head size ", args.out.columns() / args.heads, " has no bf16 attention kernel");
  }
}

}  // namespace kinoe::cuda
