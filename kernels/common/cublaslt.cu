// See cublaslt.h. A plan holds what the library wants for one shape; plans are found by a text key, which is also the
// name of the shape in files.
#include "kernels/common/cublaslt.h"

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <vector>

#include "kernels/common/cuda_util.cuh"

namespace kinoe {
namespace {

constexpr int kCandidates = 24;
constexpr int kTimings = 3;                        // of each candidate; the median counts
constexpr size_t kFlushBytes = size_t{128} << 20;  // more than any L2 of today

void check_blas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status != CUBLAS_STATUS_SUCCESS)
    call_failed(ExitCode::gpu, "cuBLASLt", call, cublasLtGetStatusName(status), file, line);
}
#define CHECK_BLAS(call) check_blas(call, #call, __FILE__, __LINE__)
cudaDataType_t data_type(DType type) {
  CHECK(type == DType::f32 || type == DType::bf16, "a GPU product of ", name_of(type));
  return type == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

/// Everything the choice of an algorithm may depend on.
std::string key_of(const Gemm& g) {
  return cat(g.m, "x", g.n, "x", g.k, " ", g.transpose_a ? "T" : "N", g.transpose_b ? "T" : "N", " ld ",
             g.lda, ",", g.ldb, ",", g.ldd, " ", name_of(g.a.dtype), ",", name_of(g.b.dtype), "->",
             name_of(g.d.dtype), g.accumulate ? " accumulate" : "", g.bias ? " bias" : "",
             g.gelu_input ? " dgelu" : "");
}

std::string to_hex(const cublasLtMatmulAlgo_t& algorithm) {
  std::string text;
  char word[17];
  for (const uint64_t part : algorithm.data) {
    std::snprintf(word, sizeof(word), "%016llx", static_cast<unsigned long long>(part));
    text += word;
  }
  return text;
}

bool from_hex(const std::string& text, cublasLtMatmulAlgo_t& algorithm) {
  constexpr size_t kWords = sizeof(algorithm.data) / sizeof(algorithm.data[0]);
  if (text.size() != kWords * 16 || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    return false;
  for (size_t i = 0; i < kWords; ++i) algorithm.data[i] = std::stoull(text.substr(i * 16, 16), nullptr, 16);
  return true;
}

struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  bool chosen = false;
  cublasStatus_t refusal = CUBLAS_STATUS_SUCCESS;  // why there is no algorithm
  double us = 0, tflops = 0;

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
    for (cublasLtMatrixLayout_t layout : {a, b, d})
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
  }

  void describe(const Gemm& g) {
    // fp32 products are exact fp32: CUBLAS_COMPUTE_32F never takes TF32.
    CHECK_BLAS(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t op_a = g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_b = g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    CHECK_BLAS(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof(op_a)));
    CHECK_BLAS(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof(op_b)));
    if (g.bias) {
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
      const cudaDataType_t bias_type = data_type(g.bias.dtype);
      CHECK_BLAS(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                                sizeof(epilogue)));
      CHECK_BLAS(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type,
                                                sizeof(bias_type)));
    }
    if (g.gelu_input) {
      CHECK(!g.bias && !g.accumulate, "one epilogue at a time: ", key_of(g));
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DGELU;
      CHECK_BLAS(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                                sizeof(epilogue)));
      CHECK_BLAS(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &g.ldd,
                                                sizeof(g.ldd)));
      point_to_gelu_input(g);
    }
    const auto layout = [](cublasLtMatrixLayout_t& out, DType type, int64_t rows, int64_t columns,
                           int64_t ld) {
      CHECK_BLAS(cublasLtMatrixLayoutCreate(&out, data_type(type), static_cast<uint64_t>(rows),
                                            static_cast<uint64_t>(columns), ld));
    };
    layout(a, g.a.dtype, g.transpose_a ? g.k : g.m, g.transpose_a ? g.m : g.k, g.lda);
    layout(b, g.b.dtype, g.transpose_b ? g.n : g.k, g.transpose_b ? g.k : g.n, g.ldb);
    layout(d, g.d.dtype, g.m, g.n, g.ldd);
  }

  void point_to_gelu_input(const Gemm& g) const {
    CHECK_BLAS(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                              &g.gelu_input.data, sizeof(g.gelu_input.data)));
  }
};

/// An array, since nvcc 13.0 fails on a vector of this nameless C struct.
struct Candidates {
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> found;
  int count = 0;
  [[nodiscard]] const cublasLtMatmulHeuristicResult_t* begin() const { return found.data(); }
  [[nodiscard]] const cublasLtMatmulHeuristicResult_t* end() const { return found.data() + count; }
};

struct Workspace {
  explicit Workspace(size_t size) : bytes(size) { CUDA_CHECK(cudaMalloc(&data, size)); }
  ~Workspace() { cudaFree(data); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data = nullptr;
  size_t bytes;
};

}  // namespace

struct BlasLt::State {
  State(void* s, std::function<void()> when_most)
      : stream(static_cast<cudaStream_t>(s)), workspace(kWorkspaceBytes), at_most(std::move(when_most)) {
    CHECK_BLAS(cublasLtCreate(&handle));
  }
  ~State() { cublasLtDestroy(handle); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  cublasStatus_t launch(const Plan& plan, const Gemm& g, void* d, const cublasLtMatmulAlgo_t& algorithm) {
    if (g.bias)
      CHECK_BLAS(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                &g.bias.data, sizeof(g.bias.data)));
    if (g.gelu_input) plan.point_to_gelu_input(g);
    const float alpha = 1.0F, beta = g.accumulate ? 1.0F : 0.0F;
    return cublasLtMatmul(handle, plan.operation, &alpha, g.a.data, plan.a, g.b.data, plan.b, &beta, d,
                          plan.d, d, plan.d, &algorithm, workspace.data, workspace.bytes, stream);
  }

  /// None where the library refuses: then plan.refusal says why.
  Candidates candidates(Plan& plan) {
    cublasLtMatmulPreference_t preference = nullptr;
    CHECK_BLAS(cublasLtMatmulPreferenceCreate(&preference));
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    CHECK_BLAS(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &workspace.bytes, sizeof(workspace.bytes)));
    CHECK_BLAS(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                    &reductions, sizeof(reductions)));
    Candidates result;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, plan.operation, plan.a, plan.b, plan.d, plan.d, preference,
                                       kCandidates, result.found.data(), &result.count);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS) result.count = 0;
    if (result.count == 0)
      plan.refusal = status == CUBLAS_STATUS_SUCCESS ? CUBLAS_STATUS_NOT_SUPPORTED : status;
    return result;
  }

  /// Sets plan.algorithm, or plan.refusal.
  void choose(Plan& plan, const Gemm& g) {
    const Candidates found = candidates(plan);
    if (found.count == 0) return;
    plan.algorithm = found.begin()->algo;
    plan.chosen = true;

    // An accumulating product is measured into a copy. Without memory for one the library's own order stands.
    void* d = g.d.data;
    void* copy = nullptr;
    if (g.accumulate) {
      if (cudaMalloc(&copy, g.d.bytes()) != cudaSuccess) {
        cudaGetLastError();
        return;
      }
      CUDA_CHECK(cudaMemcpyAsync(copy, g.d.data, g.d.bytes(), cudaMemcpyDeviceToDevice, stream));
      d = copy;
    }
    void* flush = nullptr;
    if (cudaMalloc(&flush, kFlushBytes) != cudaSuccess) {
      cudaGetLastError();
      flush = nullptr;
    }
    if (at_most) at_most();
    cudaEvent_t begin = nullptr, end = nullptr;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    float best = 0;
    for (const cublasLtMatmulHeuristicResult_t& candidate : found) {
      if (candidate.state != CUBLAS_STATUS_SUCCESS) continue;
      std::vector<float> times;
      for (int i = 0; i <= kTimings; ++i) {  // the first one loads the kernel
        if (flush != nullptr) CUDA_CHECK(cudaMemsetAsync(flush, i, kFlushBytes, stream));
        CUDA_CHECK(cudaEventRecord(begin, stream));
        if (launch(plan, g, d, candidate.algo) != CUBLAS_STATUS_SUCCESS) break;
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i > 0) times.push_back(ms);
      }
      if (times.size() < kTimings) continue;
      std::sort(times.begin(), times.end());
      const float median = times[times.size() / 2];
      if (best == 0 || median < best) {
        best = median;
        plan.algorithm = candidate.algo;
      }
    }
    plan.us = static_cast<double>(best) * 1e3;
    plan.tflops = best == 0 ? 0
                            : 2e-9 * static_cast<double>(g.m) * static_cast<double>(g.n) *
                                  static_cast<double>(g.k) / static_cast<double>(best);
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    CUDA_CHECK(cudaFree(flush));
    CUDA_CHECK(cudaFree(copy));
    if (best == 0 && g.gelu_input) {  // offered, but none of them runs
      plan.chosen = false;
      plan.refusal = CUBLAS_STATUS_NOT_SUPPORTED;
    }
  }

  cublasLtHandle_t handle = nullptr;
  cudaStream_t stream;
  Workspace workspace;
  std::function<void()> at_most;
  std::map<std::string, Plan> plans;
  std::map<std::string, GemmChoice> pinned;  // not used yet
};

BlasLt::BlasLt(void* stream, std::function<void()> at_most)
    : state_(std::make_unique<State>(stream, std::move(at_most))) {}
BlasLt::~BlasLt() = default;

void BlasLt::run(const Gemm& g) {
  if (try_run(g)) return;
  const std::string key = key_of(g);
  fail(ExitCode::gpu, "cuBLASLt has no algorithm for the product ", key, " (",
       cublasLtGetStatusName(state_->plans[key].refusal),
       "); widths that are multiples of 8 always have one");
}

bool BlasLt::try_run(const Gemm& g) {
  if (g.m == 0 || g.n == 0) return true;
  State& s = *state_;
  const std::string key = key_of(g);
  Plan& plan = s.plans[key];
  if (plan.operation == nullptr) {
    plan.describe(g);
    if (const auto known = s.pinned.find(key); known != s.pinned.end()) {
      plan.chosen = from_hex(known->second.algorithm, plan.algorithm);
      plan.us = known->second.us;
      plan.tflops = known->second.tflops;
      // A choice of another library version may be refused; it is then measured again.
      cublasLtMatmulHeuristicResult_t result{};
      plan.chosen = plan.chosen &&
                    cublasLtMatmulAlgoCheck(s.handle, plan.operation, plan.a, plan.b, plan.d, plan.d,
                                            &plan.algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
                    result.workspaceSize <= s.workspace.bytes;
    }
  }
  if (!plan.chosen && plan.refusal == CUBLAS_STATUS_SUCCESS) s.choose(plan, g);
  if (!plan.chosen) return false;
  CHECK_BLAS(s.launch(plan, g, g.d.data, plan.algorithm));
  return true;
}

std::vector<GemmChoice> BlasLt::choices() const {
  std::vector<GemmChoice> result;
  for (const auto& [key, plan] : state_->plans)
    if (plan.chosen) result.push_back(GemmChoice{key, to_hex(plan.algorithm), plan.us, plan.tflops});
  return result;
}

void BlasLt::pin(const std::vector<GemmChoice>& choices) {
  for (const GemmChoice& choice : choices) state_->pinned[choice.shape] = choice;
}

std::string BlasLt::version() { return cat("cublasLt ", cublasLtGetVersion()); }

}  // namespace kinoe
