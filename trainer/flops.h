// Model FLOPs and the peaks they are compared with.
//
// MFU counts what the mathematics asks for: forward once, backward twice that, never recomputation. Two conventions
// are in use and differ by up to 12 %: causal attention counted half (what is computed) or in full (PaLM, appendix B).
#pragma once

#include <optional>
#include <string>

#include "kernels/common/dtype.h"
#include "trainer/model_config.h"

namespace kinoe {

struct TokenFlops {
  double causal = 0;  // per trained token, causal attention halved
  double full = 0;    // attention in full
};

/// Forward and backward of one token in sequences of `length`: products of activations with weights (the head once, the
/// embedding never) and attention.
TokenFlops training_flops(const ModelConfig& m, int64_t length);

struct Peak {
  double flops = 0;    // per second, dense
  std::string source;  // what is being divided by, for the reader
};

/// By the name the driver gives; absent when that very model is not in the table: the figure is then "unknown".
std::optional<Peak> peak_flops(const std::string& gpu_name, DType compute);

}  // namespace kinoe
