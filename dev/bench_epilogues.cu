// Would the epilogues of cuBLASLt be faster than this project's own kernels after the product? GELU with the bias of the
// layer before it, its derivative, and bias gradients, at the shapes of two GPT-2 models, each beside product and kernels.
//
//   make build/cuda/bench_epilogues && build/cuda/bench_epilogues
//
// Both sides pick the fastest of 24 algorithms with a cold L2 and are then timed as in dev/bench/measure.h. "differs" is the
// relative L2 distance between the two results, "repeats" says whether two runs gave the same bits: an epilogue that fails
// either is no alternative, however fast. A bias gradient is asked for in fp32, and in bf16 where the library refuses.
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <string>

#include "dev/bench/measure.h"
#include "dev/bench/reference.h"
#include "kernels/activation.h"
#include "kernels/common/cuda_util.cuh"
#include "kernels/matmul.h"

namespace kinoe::bench {
namespace {

constexpr size_t kWorkspaceBytes = size_t{64} << 20;
constexpr int kCandidates = 24;
constexpr Span kCompared{0, 64};

#define CHECK_BLAS(call)                                                     \
  if (const cublasStatus_t status = (call); status != CUBLAS_STATUS_SUCCESS) \
  call_failed(ExitCode::gpu, "cuBLASLt", #call, cublasLtGetStatusName(status), __FILE__, __LINE__)

/// Column-major: D[m, n] = op(A)[m, k] op(B)[k, n], with an epilogue. No padding: leading dimensions are the rows.
struct Product {
  int64_t m, n, k;
  Tensor a, b, d;
  bool transpose_a = false, transpose_b = false;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  Tensor aux = {};   // [m, n]: what GELU was given
  Tensor bias = {};  // the bias, or its gradient
};

cudaDataType_t data_type(DType type) { return type == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

/// The library's descriptors of one product, and its fastest algorithm.
class Plan {
 public:
  Plan(const Context& ctx, cublasLtHandle_t handle, const Memory& workspace, const Product& p)
      : ctx_(ctx), handle_(handle), workspace_(workspace.data()), p_(p) {
    CHECK_BLAS(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
    if (p.bias) {
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(p.bias.dtype));
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias.data);
    }
    if (p.aux) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux.data);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.m);
    }
    layout(layouts_[0], p.a.dtype, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k);
    layout(layouts_[1], p.b.dtype, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n);
    layout(layouts_[2], p.d.dtype, p.m, p.n);
  }
  ~Plan() {
    cublasLtMatmulDescDestroy(operation_);
    for (cublasLtMatrixLayout_t l : layouts_) cublasLtMatrixLayoutDestroy(l);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  /// False where the library has no algorithm for this epilogue.
  bool choose(Timer& timer) {
    cublasLtMatmulPreference_t preference = nullptr;
    CHECK_BLAS(cublasLtMatmulPreferenceCreate(&preference));
    CHECK_BLAS(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &kWorkspaceBytes, sizeof(kWorkspaceBytes)));
    std::array<cublasLtMatmulHeuristicResult_t, kCandidates> found{};
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_, operation_, layouts_[0], layouts_[1], layouts_[2],
                                       layouts_[2], preference, kCandidates, found.data(), &count);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS) return false;
    double best = 0;
    for (int i = 0; i < count; ++i) {
      const cublasLtMatmulAlgo_t algorithm = found[static_cast<size_t>(i)].algo;
      if (launch(algorithm) != CUBLAS_STATUS_SUCCESS) continue;
      const double us = timer.median_us([&] { launch(algorithm); });
      if (best == 0 || us < best) {
        best = us;
        algorithm_ = algorithm;
      }
    }
    return best > 0;
  }
  void run() const { CHECK_BLAS(launch(algorithm_)); }

 private:
  template <class V>
  void set(cublasLtMatmulDescAttributes_t attribute, const V& value) {
    CHECK_BLAS(cublasLtMatmulDescSetAttribute(operation_, attribute, &value, sizeof(value)));
  }
  static void layout(cublasLtMatrixLayout_t& out, DType type, int64_t rows, int64_t columns) {
    CHECK_BLAS(cublasLtMatrixLayoutCreate(&out, data_type(type), static_cast<uint64_t>(rows),
                                          static_cast<uint64_t>(columns), rows));
  }
  cublasStatus_t launch(const cublasLtMatmulAlgo_t& algorithm) const {
    const float alpha = 1.0F, beta = 0.0F;
    return cublasLtMatmul(handle_, operation_, &alpha, p_.a.data, layouts_[0], p_.b.data, layouts_[1], &beta,
                          p_.d.data, layouts_[2], p_.d.data, layouts_[2], &algorithm, workspace_,
                          kWorkspaceBytes, cuda::stream_of(ctx_));
  }

  Context ctx_;
  cublasLtHandle_t handle_;
  void* workspace_;
  Product p_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  std::array<cublasLtMatrixLayout_t, 3> layouts_{};
  cublasLtMatmulAlgo_t algorithm_{};
};

class Bench {
 public:
  explicit Bench(const Context& ctx)
      : work_(ctx), timer_(ctx, 15), coarse_(ctx, 3), workspace_(Memory::on(ctx.backend, kWorkspaceBytes)) {
    CHECK_BLAS(cublasLtCreate(&handle_));
    std::printf("%-38s %9s %9s %7s %9s %8s\n", "us, cold L2", "kernels", "epilogue", "gain", "differs",
                "repeats");
  }
  ~Bench() { cublasLtDestroy(handle_); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  /// The two layers of a GPT-2 MLP over n tokens, C wide: weights are stored [inputs, outputs].
  void mlp(const char* model, int64_t n, int64_t c) {
    Workspace& w = work_;
    const Context& ctx = w.context();
    const auto type = DType::bf16;
    const auto in_out = WeightLayout::in_out;
    const int64_t f = 4 * c;
    const Tensor x = w.random(type, {n, c}), up = w.random(type, {c, f}, normal(0.02)),
                 bias = w.random(type, {f}, normal(0.02)), down = w.random(type, {f, c}, normal(0.02)),
                 d_out = w.random(type, {n, c}, kGradients);
    const Tensor before = w.output(type, {n, f}), after = w.output(type, {n, f});
    const auto forward = [&] {
      matmul_forward(ctx, {.y = before, .x = x, .weight = up, .bias = bias, .layout = in_out});
      gelu_forward(ctx, {.out = after, .x = before});
    };
    const Tensor fused_before = w.output(type, {n, f}), fused_after = w.output(type, {n, f});
    row(cat(model, " up, bias, GELU"), forward,
        {.m = f,
         .n = n,
         .k = c,
         .a = up,
         .b = x,
         .d = fused_after,
         .epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
         .aux = fused_before,
         .bias = bias},
        {}, {{after, fused_after}, {before, fused_before}});

    const Tensor d_bias = w.output(DType::f32, {f}), d_up = w.output(DType::f32, {c, f});
    const Tensor scratch = w.scratch(matmul_wgrad_scratch_bytes(ctx.backend, n, f, true));
    const Tensor d_before = w.output(type, {n, f});
    const auto gradient = [&](bool with_wgrad) {
      matmul_dgrad(ctx, {.dx = after, .dy = d_out, .weight = down, .layout = in_out});
      gelu_backward(ctx, {.dx = d_before, .d_out = after, .x = before});
      if (with_wgrad) wgrad(d_up, d_bias, d_before, x, scratch);
    };
    gradient(false);
    Product dgrad = {.m = f,
                     .n = n,
                     .k = c,
                     .a = down,
                     .b = d_out,
                     .d = fused_after,
                     .transpose_a = true,
                     .epilogue = CUBLASLT_EPILOGUE_DGELU,
                     .aux = before};
    row(cat(model, " down dgrad, dGELU"), [&] { gradient(false); }, dgrad, {}, {{d_before, fused_after}});

    // With the bias gradient in either product's epilogue, the weight gradient's product counts on both sides.
    const Tensor fused_bias = w.output(DType::f32, {f}), fused_up = w.output(DType::f32, {c, f});
    dgrad.epilogue = CUBLASLT_EPILOGUE_DGELU_BGRAD;
    dgrad.bias = fused_bias;
    row(
        cat(model, " down dgrad, dGELU, d_bias, up wgrad"), [&] { gradient(true); }, dgrad,
        [&] { wgrad(fused_up, {}, fused_after, x, scratch); },
        {{d_before, fused_after}, {flat(d_bias), flat(fused_bias)}});
    weight_gradient(cat(model, " up wgrad, d_bias"), n, f, c);
    weight_gradient(cat(model, " down wgrad, d_bias"), n, c, f);
    weight_gradient(cat(model, " qkv wgrad, d_bias"), n, 3 * c, c);
    weight_gradient(cat(model, " proj wgrad, d_bias"), n, c, c);
    w.clear();
  }

 private:
  void wgrad(const Tensor& d_weight, const Tensor& d_bias, const Tensor& dy, const Tensor& x,
             const Tensor& scratch) {
    matmul_wgrad(work_.context(), {.d_weight = d_weight,
                                   .d_bias = d_bias,
                                   .dy = dy,
                                   .x = x,
                                   .layout = WeightLayout::in_out,
                                   .scratch = scratch});
  }
  static Tensor flat(const Tensor& t) { return t.view({64, t.size() / 64}); }

  void weight_gradient(const std::string& name, int64_t n, int64_t o, int64_t c) {
    Workspace& w = work_;
    const Tensor dy = w.random(DType::bf16, {n, o}, kGradients), x = w.random(DType::bf16, {n, c});
    const Tensor d_weight = w.output(DType::f32, {c, o}), d_bias = w.output(DType::f32, {o}),
                 fused_weight = w.output(DType::f32, {c, o}), fused_bias = w.output(DType::f32, {o});
    const Tensor scratch = w.scratch(matmul_wgrad_scratch_bytes(w.context().backend, n, o, true));
    row(name, [&] { wgrad(d_weight, d_bias, dy, x, scratch); },
        {.m = o,
         .n = c,
         .k = n,
         .a = dy,
         .b = x,
         .d = fused_weight,
         .transpose_b = true,
         .epilogue = CUBLASLT_EPILOGUE_BGRADA,
         .bias = fused_bias},
        {}, {{d_weight, fused_weight}, {flat(d_bias), flat(fused_bias)}});
  }

  struct Pair {
    Tensor ours, fused;
  };
  using Pairs = std::initializer_list<Pair>;

  /// `rest` is what remains to be done after the product with its epilogue.
  void row(const std::string& name, const std::function<void()>& kernels, const Product& product,
           const std::function<void()>& rest, Pairs results) {
    kernels();
    const double ours = timer_.median_us(kernels);
    Product chosen = product;
    auto plan = std::make_unique<Plan>(work_.context(), handle_, workspace_, chosen);
    bool found = plan->choose(coarse_);
    if (!found && chosen.bias && chosen.bias.dtype == DType::f32) {
      chosen.bias.dtype = DType::bf16;
      plan = std::make_unique<Plan>(work_.context(), handle_, workspace_, chosen);
      found = plan->choose(coarse_);
    }
    if (!found) {
      std::printf("%-38s %9.1f  the library has no algorithm for it\n", name.c_str(), ours);
      return;
    }
    const auto fused = [&] {
      plan->run();
      if (rest) rest();
    };
    fused();
    const double theirs = timer_.median_us(fused);
    double differs = 0, repeats = 0;
    for (const Pair& pair : results) {
      Tensor result = pair.fused;
      if (result.data == chosen.bias.data) result.dtype = chosen.bias.dtype;
      const Part first = Part::of(work_, result, kCompared);
      differs = worst({differs, first.error_against(Part::of(work_, pair.ours, kCompared))});
      fused();
      repeats = worst({repeats, Part::of(work_, result, kCompared).error_against(first)});
    }
    std::printf("%-38s %9.1f %9.1f %5.1f %% %9.1e %8s\n", name.c_str(), ours, theirs,
                100 * (ours / theirs - 1), differs, repeats == 0 ? "yes" : "NO");
    std::fflush(stdout);
  }

  Workspace work_;
  Timer timer_, coarse_;
  Memory workspace_;
  cublasLtHandle_t handle_ = nullptr;
};

}  // namespace
}  // namespace kinoe::bench

int main() {
  try {
    const auto device = kinoe::Device::gpu(0);
    kinoe::bench::Bench bench(device->context());
    bench.mlp("124M", 65536, 768);
    bench.mlp("1558M", 16384, 1600);
    return 0;
  } catch (const kinoe::Error& error) {
    std::fprintf(stderr, "bench_epilogues: error: %s\n", error.what());
    return static_cast<int>(error.code);
  }
}
