// See workspace.h.
#include "dev/bench/workspace.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kernels/common/rng.h"

namespace kinoe::bench {
namespace {

constexpr size_t kStagingBytes = size_t{32} << 20;
constexpr size_t kPoisonBytes = size_t{4} << 20;
constexpr uint16_t kPoison = 0x7ffb;  // a NaN read as bf16, fp32 or fp64, in steps of two bytes
constexpr uint64_t kSeed = 20261130;

/// Primes: rows of no width repeat before the period does.
constexpr int64_t kGpuPeriod = (int64_t{1} << 22) - 3;
constexpr int64_t kCpuPeriod = (int64_t{1} << 20) - 3;
constexpr int64_t kPhaseStep = 1299709;

void draw(std::vector<float>& values, Distribution d, uint64_t stream) {
  const auto n = static_cast<int64_t>(values.size());
#pragma omp parallel for
  for (int64_t i = 0; i < n; i += 4) {
    const Philox4 words = philox(kSeed, stream, static_cast<uint64_t>(i));
    std::array<float, 4> drawn{};
    for (size_t k = 0; k < 4; k += 2) {
      const std::array<float, 2> pair =
          d.uniform ? std::array<float, 2>{uniform01(words.v[k]), uniform01(words.v[k + 1])}
                    : normal_pair(words.v[k], words.v[k + 1]);
      drawn[k] = pair[0];
      drawn[k + 1] = pair[1];
    }
    for (int64_t k = i; k < std::min(i + 4, n); ++k) {
      const auto x = static_cast<double>(drawn[static_cast<size_t>(k - i)]);
      values[static_cast<size_t>(k)] = static_cast<float>(d.uniform ? d.a + (d.b - d.a) * x : d.a + d.b * x);
    }
  }
}

/// Every bit pattern whose exponent is all ones is an Inf or a NaN.
template <class Word>
bool all_finite(const char* data, int64_t n, Word exponent) {
  int64_t bad = 0;
#pragma omp parallel for reduction(+ : bad)
  for (int64_t i = 0; i < n; ++i) {
    Word word;
    std::memcpy(&word, data + static_cast<size_t>(i) * sizeof(word), sizeof(word));
    bad += (word & exponent) == exponent;
  }
  return bad == 0;
}

}  // namespace

Workspace::Workspace(const Context& ctx)
    : ctx_(ctx),
      period_(ctx.backend == Backend::cuda ? kGpuPeriod : kCpuPeriod),
      staging_(Memory::pinned(ctx.backend, kStagingBytes)),
      poison_(Memory::on(ctx.backend, kPoisonBytes)) {
  const std::vector<uint16_t> words(kPoisonBytes / sizeof(kPoison), kPoison);
  upload(ctx_, poison_.data(), words.data(), kPoisonBytes);
  synchronize(ctx_);
}

Tensor Workspace::take(DType type, Shape shape) {
  Tensor tensor(nullptr, type, shape);
  CHECK(tensor.size() > 0, "a tensor of a benchmark must not be empty, here ", tensor.shape());
  tensors_.push_back(Memory::on(ctx_.backend, tensor.bytes()));
  tensor.data = tensors_.back().data();
  return tensor;
}

const Memory& Workspace::numbers(DType type, Distribution distribution) {
  Memory& memory = numbers_[{type, distribution}];
  if (memory.bytes() > 0) return memory;
  CHECK(type == DType::f32 || type == DType::bf16, "random numbers of type ", name_of(type));
  std::vector<float> values(static_cast<size_t>(period_));
  draw(values, distribution, ++stream_);
  memory = Memory::on(ctx_.backend, values.size() * size_of(type));
  if (type == DType::f32) {
    upload(ctx_, memory.data(), values.data(), memory.bytes());
    synchronize(ctx_);
  } else {
    std::vector<bf16> narrow(values.size());
    std::transform(values.begin(), values.end(), narrow.begin(), to_bf16);
    upload(ctx_, memory.data(), narrow.data(), memory.bytes());
    synchronize(ctx_);
  }
  return memory;
}

void Workspace::tile(const Tensor& tensor, const Memory& pattern, size_t phase) {
  size_t done = 0;
  while (done < tensor.bytes()) {
    const size_t n = std::min(pattern.bytes() - phase, tensor.bytes() - done);
    copy(ctx_, static_cast<char*>(tensor.data) + done, static_cast<const char*>(pattern.data()) + phase, n);
    done += n;
    phase = 0;
  }
}

Tensor Workspace::random(DType type, Shape shape, Distribution distribution) {
  const Tensor tensor = take(type, shape);
  fills_[tensor.data] = {distribution, phase_};
  phase_ = (phase_ + kPhaseStep) % period_;
  refill(tensor);
  return tensor;
}

void Workspace::refill(const Tensor& tensor) {
  const Fill& fill = fills_.at(tensor.data);
  tile(tensor, numbers(tensor.dtype, fill.distribution),
       static_cast<size_t>(fill.phase) * size_of(tensor.dtype));
}

Tensor Workspace::zeros(DType type, Shape shape) {
  const Tensor tensor = take(type, shape);
  fill_zero(ctx_, tensor.data, tensor.bytes());
  return tensor;
}

Tensor Workspace::ids(Shape shape, int64_t vocabulary) {
  const Tensor like(nullptr, DType::i32, shape);
  std::vector<int32_t> ids(static_cast<size_t>(like.size()));
  ++stream_;
  // With u uniform, V^u has the density 1 / (x ln V).
  const double log_vocabulary = std::log(static_cast<double>(vocabulary));
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto u = static_cast<double>(uniform01(philox(kSeed, stream_, i).v[0]));
    ids[i] = static_cast<int32_t>(
        std::min(static_cast<int64_t>(std::exp(u * log_vocabulary)) - 1, vocabulary - 1));
  }
  return from_host(DType::i32, shape, ids.data());
}

Tensor Workspace::from_host(DType type, Shape shape, const void* data) {
  const Tensor tensor = take(type, shape);
  upload(ctx_, tensor.data, data, tensor.bytes());
  synchronize(ctx_);
  return tensor;
}

Tensor Workspace::scratch(size_t bytes) {
  return bytes == 0 ? Tensor{} : take(DType::i32, {static_cast<int64_t>((bytes + 3) / 4)});
}

Tensor Workspace::output(DType type, Shape shape) {
  const Tensor tensor = take(type, shape);
  tile(tensor, poison_, 0);
  return watched(tensor);
}

Tensor Workspace::watched(const Tensor& tensor) {
  outputs_.push_back(tensor);
  return tensor;
}

bool Workspace::has_output_of(DType type) const {
  return std::any_of(outputs_.begin(), outputs_.end(), [&](const Tensor& t) { return t.dtype == type; });
}

bool Workspace::outputs_are_finite() {
  bool finite = true;
  for (const Tensor& tensor : outputs_) {
    const DType type = tensor.dtype;
    read_rows(tensor.view({tensor.size(), 1}), {0, tensor.size()},
              [&](const char* data, int64_t, int64_t count) {
                switch (type) {
                  case DType::bf16: finite = finite && all_finite<uint16_t>(data, count, 0x7f80); break;
                  case DType::f32: finite = finite && all_finite<uint32_t>(data, count, 0x7f800000); break;
                  case DType::f64:
                    finite = finite && all_finite<uint64_t>(data, count, 0x7ff0000000000000);
                    break;
                  default: CHECK(false, "an output of type ", name_of(type), " is always finite");
                }
              });
  }
  return finite;
}

void Workspace::read_rows(const Tensor& tensor, Span rows, const UseRows& use) {
  const size_t row_bytes = static_cast<size_t>(tensor.columns()) * size_of(tensor.dtype);
  CHECK(rows.begin >= 0 && rows.begin + rows.count <= tensor.rows(), "rows [", rows.begin, ", +", rows.count,
        ") of ", tensor.shape());
  CHECK(row_bytes <= kStagingBytes, "a row of ", row_bytes, " bytes; view the tensor with shorter ones");
  const auto block = static_cast<int64_t>(kStagingBytes / row_bytes);
  for (int64_t first = 0; first < rows.count; first += block) {
    const int64_t count = std::min(block, rows.count - first);
    const char* from =
        static_cast<const char*>(tensor.data) + static_cast<size_t>(rows.begin + first) * row_bytes;
    download(ctx_, staging_.data(), from, static_cast<size_t>(count) * row_bytes);
    synchronize(ctx_);
    use(static_cast<const char*>(staging_.data()), first, count);
  }
}

size_t Workspace::bytes() const {
  size_t sum = 0;
  for (const Memory& memory : tensors_) sum += memory.bytes();
  return sum;
}

void Workspace::clear() {
  synchronize(ctx_);
  tensors_.clear();
  outputs_.clear();
  fills_.clear();
}

}  // namespace kinoe::bench
