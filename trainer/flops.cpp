// Model FLOPs from the operations' own cost functions, and the table of peaks.
#include "trainer/flops.h"

#include <array>
#include <string_view>

#include "kernels/attention.h"
#include "kernels/matmul.h"

namespace kinoe {

TokenFlops training_flops(const ModelConfig& m, int64_t length) {
  const int64_t fc = m.mlp == MlpKind::swiglu ? 2 * m.ffn : m.ffn;
  const auto product = [](int64_t o, int64_t c) { return matmul_cost(1, o, c, 1).flops; };
  const double layer = product(m.qkv_rows(), m.hidden) + product(m.hidden, m.heads * m.head_dim) +
                       product(fc, m.hidden) + product(m.hidden, m.ffn);
  const double linear = static_cast<double>(m.layers) * layer + product(m.vocab_size, m.hidden);
  const auto t = static_cast<double>(length);
  const double causal = static_cast<double>(m.layers) *
                        attention_forward_cost(1, length, m.heads, m.kv_heads, m.head_dim, 1).flops / t;
  const double full = causal * 2.0 * t / (t + 1.0);  // T^2 pairs instead of T (T + 1) / 2
  return {3.0 * (linear + causal), 3.0 * (linear + full)};
}

namespace {

struct GpuPeak {
  std::string_view model;  // as the driver's name has it
  double bf16;             // dense, fp32 accumulation
  double fp32;             // outside the matrix units
  std::string_view source;
};

// Dense rates at boost clock from NVIDIA's data sheets and architecture white papers (TFLOP/s).
constexpr std::array<GpuPeak, 14> kPeaks{{
    {"H200 NVL", 835.5, 60.0, "H200 data sheet, NVL"},
    {"H200", 989.4, 66.9, "H200 data sheet, SXM"},
    {"GH200", 989.4, 66.9, "GH200 data sheet"},
    {"H100 NVL", 835.5, 60.0, "H100 data sheet, NVL"},
    {"H100 PCIe", 756.4, 51.2, "H100 white paper, PCIe"},
    {"H100", 989.4, 66.9, "H100 white paper, SXM5"},
    {"H800", 989.4, 66.9, "H100 white paper, SXM5"},
    {"A100", 311.9, 19.5, "A100 white paper"},
    {"A800", 311.9, 19.5, "A100 white paper"},
    {"L40S", 362.1, 91.6, "L40S data sheet"},
    {"A40", 149.7, 37.4, "A40 data sheet"},
    {"A10G", 70.0, 35.0, "A10G as in AWS G5"},
    {"RTX 4090", 165.2, 82.6, "Ada white paper"},
    {"RTX 3090", 71.2, 35.6, "Ampere GA102 white paper"},
}};

/// Whether a driver's name is that of a model: "NVIDIA " or "NVIDIA GeForce ", the model, and then nothing, a form factor
/// ("-SXM4-80GB") or a memory size (" 80GB HBM3"). Any other word behind it is another model with other rates ("RTX 4090
/// Laptop GPU", "RTX 3090 Ti"), and a slice of a GPU (MIG) has no peak of its own.
bool is_model(std::string_view name, std::string_view model) {
  const size_t at = name.find(model);
  if (at == std::string_view::npos || (at > 0 && name[at - 1] != ' ') ||
      name.find(" MIG ") != std::string_view::npos)
    return false;
  const std::string_view rest = name.substr(at + model.size());
  return rest.empty() || rest[0] == '-' ||
         (rest.size() > 1 && rest[0] == ' ' && rest[1] >= '0' && rest[1] <= '9');
}

}  // namespace

std::optional<Peak> peak_flops(const std::string& gpu_name, DType compute) {
  for (const GpuPeak& gpu : kPeaks) {
    if (!is_model(gpu_name, gpu.model)) continue;
    const double tera = compute == DType::bf16 ? gpu.bf16 : gpu.fp32;
    return Peak{tera * 1e12, cat(tera, " TFLOP/s dense ", name_of(compute), " (", gpu.source, ")")};
  }
  return std::nullopt;
}

}  // namespace kinoe
