// The backward kernels, compiled for each head size.
#include "kernels/attention_backward.cuh"

#include "kernels/attention_variants.h"

namespace kinoe::cuda {

namespace {

template <int kHeadDim>
void run_backward(const Context& ctx, const AttentionBackward& args) {
  run_attention_dq<QueryChoice<kHeadDim>>(ctx, args);
  run_attention_dk_dv<KeyChoice<kHeadDim>>(ctx, args);
}

}  // namespace

void attention_backward_mma(const Context& ctx, const AttentionBackward& args) {
  switch (args.out.columns() / args.heads) {
    case 64: return run_backward<64>(ctx, args);
    case 80: return run_backward<80>(ctx, args);
    case 96: return run_backward<96>(ctx, args);
    case 128: return run_backward<128>(ctx, args);
    default: CHECK(false, "head size ", args.out.columns() / args.heads, " has no bf16 attention kernel");
  }
}

}  // namespace kinoe::cuda
