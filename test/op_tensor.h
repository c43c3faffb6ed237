// Tensors of tests: guarded memory on a backend, and host data in and out of it.
//
// Buffers are surrounded by guard words, outputs start as NaN, and an input knows whether it is still what it was.
// Host data is std::vector<double>; see test/op_harness.h for how a test uses these.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/common/device.h"

namespace kinoe::optest {

using Values = std::vector<double>;

// ---- Guarded memory -----------------------------------------------------------------------------------------------

/// A quiet NaN read as bf16, fp32 or fp64, in steps of two bytes; as an integer it is far out of any range.
inline constexpr uint16_t kPoison = 0x7ffb;
/// Also a NaN, of the other sign: reading past an end shows in the result, writing there shows here.
inline constexpr uint16_t kGuard = 0xfffd;

/// Memory of a backend with a guard of 256 bytes in front and behind; the middle is poisoned.
class GuardedBuffer {
 public:
  static constexpr size_t kGuardBytes = 256;

  GuardedBuffer(const Context& ctx, size_t bytes)
      : ctx_(ctx), bytes_(bytes), memory_(Memory::on(ctx.backend, bytes + 2 * kGuardBytes)) {
    CHECK(bytes % 2 == 0, "elements are at least two bytes, here ", bytes, " bytes in all");
    std::vector<uint16_t> words(memory_bytes() / 2, kGuard);
    const auto middle = words.begin() + static_cast<std::ptrdiff_t>(kGuardBytes / 2);
    std::fill(middle, middle + static_cast<std::ptrdiff_t>(bytes / 2), kPoison);
    upload(ctx_, memory_.data(), words.data(), memory_bytes());
    synchronize(ctx_);
  }
  ~GuardedBuffer() { expect_guards("a buffer at its end of life"); }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  [[nodiscard]] void* data() const { return static_cast<char*>(memory_.data()) + kGuardBytes; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

  void write(const void* host, size_t bytes) {
    CHECK(bytes == bytes_, "buffer of ", bytes_, " bytes, given ", bytes);
    upload(ctx_, data(), host, bytes);
    synchronize(ctx_);
  }
  void read(void* host) const {
    download(ctx_, host, data(), bytes_);
    synchronize(ctx_);
  }

  /// True when nothing was written outside. Adds a test failure otherwise.
  bool expect_guards(const std::string& name) const {
    constexpr size_t kWords = kGuardBytes / 2;
    std::vector<uint16_t> words(2 * kWords);
    download(ctx_, words.data(), memory_.data(), kGuardBytes);
    download(ctx_, words.data() + kWords, static_cast<char*>(data()) + bytes_, kGuardBytes);
    synchronize(ctx_);
    for (size_t i = 0; i < words.size(); ++i) {
      if (words[i] == kGuard) continue;
      ADD_FAILURE() << name << " (" << bytes_ << " bytes): written "
                    << (i < kWords ? cat(kGuardBytes - 2 * i, " bytes before its begin")
                                   : cat(2 * (i - kWords), " bytes after its end"));
      return false;
    }
    return true;
  }

 private:
  [[nodiscard]] size_t memory_bytes() const { return bytes_ + 2 * kGuardBytes; }

  Context ctx_;
  size_t bytes_ = 0;
  Memory memory_;
};

// ---- Tensors from and to host data --------------------------------------------------------------------------------

/// The nearest value that `type` can hold.
inline double representable(double value, DType type) {
  if (type == DType::bf16) return static_cast<double>(to_float(to_bf16(static_cast<float>(value))));
  if (type == DType::f32) return static_cast<double>(static_cast<float>(value));
  return value;
}

/// Elements of `type` as bytes.
inline std::vector<char> pack(const Values& values, DType type) {
  std::vector<char> bytes(values.size() * size_of(type));
  const auto put = [&](auto convert) {
    for (size_t i = 0; i < values.size(); ++i) {
      const auto element = convert(values[i]);
      std::memcpy(bytes.data() + i * sizeof(element), &element, sizeof(element));
    }
  };
  switch (type) {
    case DType::f32: put([](double v) { return static_cast<float>(v); }); break;
    case DType::bf16: put([](double v) { return to_bf16(static_cast<float>(v)); }); break;
    case DType::f64: put([](double v) { return v; }); break;
    case DType::i32: put([](double v) { return static_cast<int32_t>(v); }); break;
    case DType::i64: put([](double v) { return static_cast<int64_t>(v); }); break;
    case DType::u64: put([](double v) { return static_cast<uint64_t>(v); }); break;
  }
  return bytes;
}

inline Values unpack(const std::vector<char>& bytes, DType type) {
  Values values(bytes.size() / size_of(type));
  const auto get = [&](auto element) {
    for (size_t i = 0; i < values.size(); ++i) {
      std::memcpy(&element, bytes.data() + i * sizeof(element), sizeof(element));
      if constexpr (std::is_same_v<decltype(element), bf16>)
        values[i] = static_cast<double>(to_float(element));
      else
        values[i] = static_cast<double>(element);
    }
  };
  switch (type) {
    case DType::f32: get(float{}); break;
    case DType::bf16: get(bf16{}); break;
    case DType::f64: get(double{}); break;
    case DType::i32: get(int32_t{}); break;
    case DType::i64: get(int64_t{}); break;
    case DType::u64: get(uint64_t{}); break;
  }
  return values;
}

/// A tensor in guarded memory of a backend. Copies are handles of the same memory; a default one is absent.
class TensorOn {
 public:
  TensorOn() = default;

  /// Poisoned: an output.
  TensorOn(const Context& ctx, DType dtype, const std::vector<int64_t>& shape) {
    tensor_.dtype = dtype;
    CHECK(shape.size() <= 4, "a tensor has at most 4 dimensions, here ", shape.size());
    for (const int64_t n : shape) tensor_.dims[static_cast<size_t>(tensor_.ndim++)] = n;
    buffer_ = std::make_shared<GuardedBuffer>(ctx, tensor_.bytes());
    tensor_.data = buffer_->data();
  }

  /// `values` converted to `dtype`.
  TensorOn(const Context& ctx, DType dtype, const std::vector<int64_t>& shape, const Values& values)
      : TensorOn(ctx, dtype, shape) {
    set(values);
  }

  /// All elements equal.
  static TensorOn full(const Context& ctx, DType dtype, const std::vector<int64_t>& shape, double value) {
    TensorOn t(ctx, dtype, shape);
    t.set(Values(static_cast<size_t>(t.tensor_.size()), value));
    return t;
  }

  /// The bits of `elements` (int32 tokens, int64 and uint64 beyond 2^53, bf16).
  template <class T>
  static TensorOn of(const Context& ctx, const std::vector<int64_t>& shape, const std::vector<T>& elements) {
    TensorOn t(ctx, dtype_of<T>, shape);
    t.set_bytes(elements.data(), elements.size() * sizeof(T));
    return t;
  }

  /// Structures (StepState, AdamWSegment) as the int32 tensors in which operations take them.
  template <class S>
  static TensorOn structs(const Context& ctx, const std::vector<S>& elements) {
    static_assert(sizeof(S) % 4 == 0);
    TensorOn t(ctx, DType::i32, {static_cast<int64_t>(elements.size() * sizeof(S) / 4)});
    t.set_bytes(elements.data(), elements.size() * sizeof(S));
    return t;
  }

  /// Scratch of a size in bytes, as int32; absent for 0.
  static TensorOn scratch(const Context& ctx, size_t bytes) {
    return bytes == 0 ? TensorOn() : TensorOn(ctx, DType::i32, {static_cast<int64_t>((bytes + 3) / 4)});
  }

  operator Tensor() const { return tensor_; }  // NOLINT(google-explicit-constructor): arguments read as data
  [[nodiscard]] Tensor tensor() const { return tensor_; }
  explicit operator bool() const { return static_cast<bool>(tensor_); }
  [[nodiscard]] DType dtype() const { return tensor_.dtype; }

  void set(const Values& values) {
    CHECK(values.size() == static_cast<size_t>(tensor_.size()), values.size(), " values for ",
          tensor_.shape());
    const std::vector<char> bytes = pack(values, tensor_.dtype);
    set_bytes(bytes.data(), bytes.size());
  }

  [[nodiscard]] Values values() const { return unpack(bytes(), tensor_.dtype); }

  [[nodiscard]] std::vector<char> bytes() const {
    std::vector<char> bytes(buffer_ ? buffer_->bytes() : 0);
    if (buffer_) buffer_->read(bytes.data());
    return bytes;
  }

  /// The content as elements of T, bit for bit: raw<StepState>(), raw<uint64_t>().
  template <class T>
  [[nodiscard]] std::vector<T> raw() const {
    const std::vector<char> from = bytes();
    CHECK(from.size() % sizeof(T) == 0, from.size(), " bytes as elements of ", sizeof(T));
    std::vector<T> to(from.size() / sizeof(T));
    if (!from.empty()) std::memcpy(static_cast<void*>(to.data()), from.data(), from.size());
    return to;
  }

  /// Per element: still the poison it was born with.
  [[nodiscard]] std::vector<bool> poisoned() const {
    const std::vector<uint16_t> words = raw<uint16_t>();
    const size_t per = size_of(tensor_.dtype) / 2;
    std::vector<bool> result(words.size() / per);
    for (size_t i = 0; i < result.size(); ++i)
      result[i] = std::all_of(words.begin() + static_cast<std::ptrdiff_t>(i * per),
                              words.begin() + static_cast<std::ptrdiff_t>((i + 1) * per),
                              [](uint16_t word) { return word == kPoison; });
    return result;
  }

  /// Every element was written and nothing outside.
  void expect_written(const std::string& name) const {
    buffer_->expect_guards(name);
    const std::vector<bool> poison = poisoned();
    const auto count = std::count(poison.begin(), poison.end(), true);
    if (count == 0) return;
    const auto first = std::find(poison.begin(), poison.end(), true) - poison.begin();
    ADD_FAILURE() << name << " " << tensor_.shape() << ": " << count
                  << " elements never written, the first is " << first;
  }

  /// The bits are those last set: an input stayed an input.
  void expect_unchanged(const std::string& name) const {
    buffer_->expect_guards(name);
    const std::vector<char> now = bytes();
    for (size_t i = 0; i < now.size(); ++i)
      if (now[i] != original_[i]) {
        ADD_FAILURE() << name << " " << tensor_.shape() << ": element " << i / size_of(tensor_.dtype)
                      << " was changed";
        return;
      }
  }

 private:
  void set_bytes(const void* data, size_t bytes) {
    CHECK(bytes == tensor_.bytes(), bytes, " bytes for ", tensor_.shape());
    original_.assign(static_cast<const char*>(data), static_cast<const char*>(data) + bytes);
    if (bytes > 0) buffer_->write(data, bytes);
  }

  Tensor tensor_;
  std::shared_ptr<GuardedBuffer> buffer_;
  std::vector<char> original_;
};

}  // namespace kinoe::optest
