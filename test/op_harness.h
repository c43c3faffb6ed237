// What every test of an operation shares: data, error metrics, finite differences; guarded memory is in op_tensor.h.
//
// The CPU backend is the oracle of the GPU, so its own tests must not trust it: buffers are surrounded by guard words,
// outputs start as NaN, and the rule about NaN and Inf comes before any error metric (a metric computed from a NaN
// compares as false and hides what it should show).
//
// Host data is std::vector<double>, made exactly representable in the type under test, so that two backends start
// from the same numbers. How a test of an operation usually goes:
//
//   Random random;
//   TensorOn x(ctx, DType::bf16, {rows, columns}, random.normal(rows * columns, 1.0, DType::bf16));
//   TensorOn out(ctx, DType::bf16, {rows, columns});                       // poisoned
//   gelu_forward(ctx, {.out = out, .x = x});
//   out.expect_written("out");  x.expect_unchanged("x");                   // guards are checked by destructors too
//   expect_close("gelu", out.values(), reference, tolerance_for(DType::bf16));
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/common/rng.h"
#include "test/op_tensor.h"

namespace kinoe::optest {

// ---- Data ---------------------------------------------------------------------------------------------------------

/// Random host data; every call takes a fresh stream. KINOE_TEST_SEED=N runs the tests on other numbers.
class Random {
 public:
  explicit Random(uint64_t seed = default_seed()) : seed_(seed) {}

  static uint64_t default_seed() {
    const char* text = std::getenv("KINOE_TEST_SEED");
    return text ? std::strtoull(text, nullptr, 10) : 20261129;
  }

  /// Nearly normal with deviation `scale` (a sum of eight uniforms: cheap, bounded by 4.9), exactly representable in
  /// `type`.
  Values normal(int64_t n, double scale = 1.0, DType type = DType::f32) {
    ++stream_;
    Values values(static_cast<size_t>(n));
    for (size_t i = 0; i < values.size(); ++i) {
      uint32_t sum = 0;
      for (const uint32_t word : philox(seed_, stream_, i).v) sum += (word & 0xffffU) + (word >> 16);
      const double centred = static_cast<double>(sum) - 8 * 32767.5;
      values[i] = representable(scale * centred / (std::sqrt(8.0 / 12) * 65536), type);
    }
    return values;
  }

  Values uniform(int64_t n, double low, double high, DType type = DType::f32) {
    ++stream_;
    Values values(static_cast<size_t>(n));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = representable(
          low + (high - low) * static_cast<double>(uniform01(philox(seed_, stream_, i).v[0])), type);
    return values;
  }

  /// Normal, with one value in about 256 a hundred times as large, as real activations have them.
  Values outliers(int64_t n, double scale = 1.0, DType type = DType::f32) {
    Values values = normal(n, scale, type);
    for (size_t i = 0; i < values.size(); ++i)
      if (philox(seed_, stream_, i).v[2] % 256 == 0) values[i] = representable(100 * values[i], type);
    return values;
  }

  /// Integers in [low, high).
  std::vector<int32_t> integers(int64_t n, int32_t low, int32_t high) {
    ++stream_;
    std::vector<int32_t> values(static_cast<size_t>(n));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] =
          low + static_cast<int32_t>(philox(seed_, stream_, i).v[0] % static_cast<uint32_t>(high - low));
    return values;
  }

 private:
  uint64_t seed_;
  uint64_t stream_ = 0;
};

// ---- Comparison ---------------------------------------------------------------------------------------------------

/// Passes when |actual - expected| <= abs + rel |expected| everywhere, and ||actual - expected|| <= l2 ||expected||.
struct Tolerance {
  double abs = 0;
  double rel = 0;
  double l2 = std::numeric_limits<double>::infinity();
};

/// For one operation whose result is stored in `type` and which accumulates in fp32 or better; state another one at the
/// operation where this does not fit.
inline Tolerance tolerance_for(DType type) {
  if (type == DType::bf16) return {0x1p-8, 0x1p-7, 0x1p-8};
  if (type == DType::f64) return {1e-12, 1e-12, 1e-13};
  return {1e-5, 1e-5, 1e-6};
}

struct Errors {
  int64_t non_finite_mismatches = 0;  // NaN or Inf on one side only, or Inf of the other sign
  double max_abs = 0;                 // over the pairs that are finite on both sides
  double max_rel = 0;                 // |a - e| / |e|, where e is not 0
  double relative_l2 = 0;             // ||a - e|| / ||e||; ||a|| when e is all 0
  int64_t worst = -1;  // where |a - e| is largest; where the first mismatch is, if there is one
};

inline Errors compare(const Values& actual, const Values& expected) {
  CHECK(actual.size() == expected.size(), "comparing ", actual.size(), " values with ", expected.size());
  Errors errors;
  double squares = 0, reference = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i], e = expected[i];
    if (!std::isfinite(a) || !std::isfinite(e)) {
      const bool same = (std::isnan(a) && std::isnan(e)) || a == e;
      if (!same && errors.non_finite_mismatches++ == 0) errors.worst = static_cast<int64_t>(i);
      continue;
    }
    const double difference = std::abs(a - e);
    if (errors.non_finite_mismatches == 0 && (errors.worst < 0 || difference > errors.max_abs))
      errors.worst = static_cast<int64_t>(i);
    errors.max_abs = std::max(errors.max_abs, difference);
    if (e != 0) errors.max_rel = std::max(errors.max_rel, difference / std::abs(e));
    squares += difference * difference;
    reference += e * e;
  }
  errors.relative_l2 = std::sqrt(squares) / (reference > 0 ? std::sqrt(reference) : 1.0);
  return errors;
}

inline std::string describe(const Errors& e, const Values& actual, const Values& expected) {
  std::string text = cat("max abs ", e.max_abs, ", max rel ", e.max_rel, ", relative L2 ", e.relative_l2,
                         ", NaN/Inf mismatches ", e.non_finite_mismatches);
  if (e.worst >= 0) {
    const auto i = static_cast<size_t>(e.worst);
    std::ostringstream at;
    at.precision(17);
    at << "; at " << i << ": " << actual[i] << ", expected " << expected[i];
    text += at.str();
  }
  return text;
}

inline Errors expect_close(const std::string& name, const Values& actual, const Values& expected,
                           Tolerance tolerance) {
  if (actual.size() != expected.size()) {
    ADD_FAILURE() << name << ": " << actual.size() << " values, expected " << expected.size();
    return {};
  }
  const Errors errors = compare(actual, expected);
  if (errors.non_finite_mismatches > 0) {
    ADD_FAILURE() << name << ": NaN or Inf where the reference has none, or the reverse: "
                  << describe(errors, actual, expected);
    return errors;
  }
  int64_t beyond = 0;
  size_t first = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(expected[i])) continue;
    if (!(std::abs(actual[i] - expected[i]) <= tolerance.abs + tolerance.rel * std::abs(expected[i])) &&
        beyond++ == 0)
      first = i;
  }
  if (beyond > 0 || !(errors.relative_l2 <= tolerance.l2))
    ADD_FAILURE() << name << ": " << beyond << " of " << actual.size() << " values beyond abs "
                  << tolerance.abs << " + rel " << tolerance.rel
                  << (beyond > 0 ? cat(" (first at ", first, ")") : std::string()) << ", L2 limit "
                  << tolerance.l2 << ": " << describe(errors, actual, expected);
  return errors;
}

/// Bit for bit, NaNs included.
inline void expect_same_bits(const std::string& name, const TensorOn& actual, const TensorOn& expected) {
  const std::vector<char> a = actual.bytes(), e = expected.bytes();
  ASSERT_EQ(a.size(), e.size()) << name;
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i] != e[i]) {
      const size_t element = i / size_of(actual.dtype());
      ADD_FAILURE() << name << ": bits differ first at element " << element << ": "
                    << actual.values()[element] << " and " << expected.values()[element];
      return;
    }
}

/// Calls run() with 1, 2, 3 and 5 threads; the bytes it returns must not depend on their number. Only sizes above
/// kParallelWork elements say something.
inline void expect_independent_of_threads(const std::string& name,
                                          const std::function<std::vector<char>()>& run) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  const std::vector<char> one = run();
  for (const int threads : {2, 3, 5}) {
    omp_set_num_threads(threads);
    EXPECT_TRUE(run() == one) << name << ": other bits with " << threads << " threads";
  }
  omp_set_num_threads(before);
}

/// The bytes of several tensors, one after the other.
inline std::vector<char> bytes_of(const std::vector<TensorOn>& tensors) {
  std::vector<char> all;
  for (const TensorOn& t : tensors) {
    const std::vector<char> bytes = t.bytes();
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

/// `run` must fail as a bug of the program whose message contains `words`.
inline void expect_rejected(const std::string& words, const std::function<void()>& run) {
  try {
    run();
    ADD_FAILURE() << "accepted; expected a message about: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ExitCode::internal) << error.what();
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

// ---- Gradients ----------------------------------------------------------------------------------------------------

/// The outputs of an operation as a function of one of its inputs, all else fixed.
using Forward = std::function<Values(const Values& input)>;

/// Compares `gradient` (of sum_i out_i d_out_i with respect to the input, from the backward operation in fp64) with
/// central differences of fourth order. Outputs are subtracted before they are summed, which keeps about ten digits.
/// Where the input has more than `at_most` elements, a fixed pseudo-random choice of them is checked.
inline void expect_gradient(const std::string& name, const Forward& forward, const Values& input,
                            const Values& d_out, const Values& gradient, int64_t at_most = 400,
                            double tolerance = 1e-8) {
  ASSERT_EQ(gradient.size(), input.size()) << name;
  const double h = 1e-3;
  const size_t n = input.size(), count = std::min(n, static_cast<size_t>(at_most));
  Values expected, actual;
  Values x = input;
  for (size_t k = 0; k < count; ++k) {
    const size_t i = count == n ? k : static_cast<size_t>(mix64(k + 1) % n);
    const auto moved = [&](double by) {
      x[i] = input[i] + by;
      Values out = forward(x);
      x[i] = input[i];
      CHECK(out.size() == d_out.size(), out.size(), " outputs, ", d_out.size(), " weights");
      return out;
    };
    const Values p1 = moved(h), m1 = moved(-h), p2 = moved(2 * h), m2 = moved(-2 * h);
    double sum = 0;
    for (size_t j = 0; j < d_out.size(); ++j) sum += d_out[j] * (8 * (p1[j] - m1[j]) - (p2[j] - m2[j]));
    expected.push_back(sum / (12 * h));
    actual.push_back(gradient[i]);
  }
  expect_close(name + ": gradient against finite differences", actual, expected,
               {tolerance, tolerance, tolerance});
}

// ---- The GPU ------------------------------------------------------------------------------------------------------

/// GPU 0, or nothing with the reason in `why`.
inline std::unique_ptr<Device> usable_gpu(std::string* why) {
  if (gpu_count() == 0) {
    *why = KINOE_WITH_CUDA != 0 ? "no GPU on this machine" : "built without CUDA";
    return nullptr;
  }
  const DeviceInfo info = gpu_info(0);
  if (info.compute_capability < 80) {
    *why = cat(info.name, " has compute capability ", info.compute_capability, ", bf16 needs 80");
    return nullptr;
  }
  return Device::gpu(0);
}

}  // namespace kinoe::optest

/// Declares `std::unique_ptr<kinoe::Device> device` for GPU 0, or skips the test with a word. Use it in the test's body.
#define KINOE_GPU_OR_SKIP(device)                                                             \
  std::string kinoe_no_gpu;                                                                   \
  const std::unique_ptr<::kinoe::Device> device = ::kinoe::optest::usable_gpu(&kinoe_no_gpu); \
  if (!device) GTEST_SKIP() << kinoe_no_gpu
