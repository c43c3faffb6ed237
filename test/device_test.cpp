// kernels/common: devices, owned memory, copies, events, the arena, tensors, bf16 rounding, counter-based numbers.
#include "kernels/common/device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/common/arena.h"
#include "kernels/common/rng.h"

namespace kinoe {
namespace {

static_assert(!std::is_copy_constructible_v<Memory> && std::is_nothrow_move_constructible_v<Memory>);
static_assert(!std::is_copy_constructible_v<Event> && std::is_nothrow_move_constructible_v<Event>);

/// Runs `action` and returns the Error it must throw.
template <class Action>
Error error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no Error was thrown";
  return {ExitCode::finished, ""};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Device, CpuDescribesItself) {
  const auto device = Device::cpu();
  EXPECT_EQ(device->context().backend, Backend::cpu);
  EXPECT_EQ(device->context().stream, nullptr);
  const DeviceInfo info = device->info();
  EXPECT_FALSE(info.name.empty());
  EXPECT_EQ(info.compute_capability, 0);
  EXPECT_GE(info.multiprocessors, 1);
  EXPECT_GT(info.memory_bytes, size_t{64} << 20);
  EXPECT_GT(info.free_bytes, size_t{1} << 20);
  EXPECT_LE(info.free_bytes, info.memory_bytes);
  EXPECT_EQ(info.driver, "");
  EXPECT_EQ(info.uuid, "");
}

#if !KINOE_WITH_CUDA
TEST(Device, BuildWithoutCudaHasNoGpuAndSaysSo) {
  EXPECT_EQ(gpu_count(), 0);
  for (const Error& error :
       {error_of([] { Device::gpu(0); }), error_of([] { gpu_info(0); }),
        error_of([] { Memory::on(Backend::cuda, 16); }), error_of([] { Memory::pinned(Backend::cuda, 16); }),
        error_of([] { Event event(Backend::cuda); })}) {
    EXPECT_EQ(error.code, ExitCode::usage);
    EXPECT_TRUE(contains(error.what(), "this build has no CUDA")) << error.what();
  }
}
#endif

TEST(Memory, IsAlignedWritableAndKnowsItsSize) {
  for (const size_t bytes : {size_t{1}, size_t{255}, size_t{257}, size_t{70'001}, (size_t{16} << 20) + 3}) {
    for (const auto make : {&Memory::on, &Memory::pinned}) {
      const Memory memory = make(Backend::cpu, bytes);
      ASSERT_NE(memory.data(), nullptr);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 256, 0U);
      EXPECT_EQ(memory.bytes(), bytes);
      std::memset(memory.data(), 0xA5, bytes);
      EXPECT_EQ(static_cast<unsigned char*>(memory.data())[bytes - 1], 0xA5);
    }
  }
}

TEST(Memory, OfNoBytesIsEmpty) {
  EXPECT_EQ(Memory().data(), nullptr);
  const Memory none = Memory::on(Backend::cpu, 0);
  EXPECT_EQ(none.data(), nullptr);
  EXPECT_EQ(none.bytes(), 0U);
}

TEST(Memory, MovesAndLeavesNothingBehind) {
  Memory a = Memory::on(Backend::cpu, 100);
  void* const address = a.data();
  Memory b = std::move(a);
  EXPECT_EQ(b.data(), address);
  EXPECT_EQ(b.bytes(), 100U);
  EXPECT_EQ(a.data(),
            nullptr);  // NOLINT(bugprone-use-after-move): that a moved-from Memory is empty is promised
  EXPECT_EQ(a.bytes(), 0U);
  Memory c = Memory::on(Backend::cpu, 5);
  c = std::move(b);
  EXPECT_EQ(c.data(), address);
  EXPECT_EQ(b.data(), nullptr);  // NOLINT(bugprone-use-after-move)
  Memory& same = c;
  c = std::move(same);
  EXPECT_EQ(c.data(), address);
  EXPECT_EQ(c.bytes(), 100U);
}

TEST(Memory, MoreThanThereIsFailsWithBothNumbers) {
  const size_t too_much = std::numeric_limits<size_t>::max() - 1000;
  const Error error = error_of([&] { Memory::on(Backend::cpu, too_much); });
  EXPECT_EQ(error.code, ExitCode::usage);
  EXPECT_TRUE(contains(error.what(), std::to_string(too_much))) << error.what();
  EXPECT_TRUE(contains(error.what(), " free")) << error.what();
}

TEST(Copies, MoveExactlyTheBytesAskedFor) {
  const Context ctx = Device::cpu()->context();
  std::vector<unsigned char> source(1001);
  std::iota(source.begin(), source.end(), static_cast<unsigned char>(7));
  const Memory first = Memory::on(Backend::cpu, 1001), second = Memory::on(Backend::cpu, 1001);
  std::memset(first.data(), 0xEE, 1001);
  std::memset(second.data(), 0xEE, 1001);
  upload(ctx, first.data(), source.data(), 1000);
  copy(ctx, second.data(), first.data(), 1000);
  std::vector<unsigned char> target(1001, 0xDD);
  download(ctx, target.data(), second.data(), 1000);
  synchronize(ctx);
  EXPECT_TRUE(std::equal(source.begin(), source.begin() + 1000, target.begin()));
  EXPECT_EQ(target[1000], 0xDD);
  EXPECT_EQ(static_cast<unsigned char*>(first.data())[1000], 0xEE);
  EXPECT_EQ(static_cast<unsigned char*>(second.data())[1000], 0xEE);

  fill_zero(ctx, first.data(), 999);
  const auto* bytes = static_cast<unsigned char*>(first.data());
  EXPECT_TRUE(std::all_of(bytes, bytes + 999, [](unsigned char b) { return b == 0; }));
  EXPECT_EQ(bytes[999], source[999]);
}

TEST(Copies, OfNoBytesTakeNullPointers) {
  const Context ctx;
  // What this must not do only the sanitizers can see.
  EXPECT_NO_THROW({
    upload(ctx, nullptr, nullptr, 0);
    download(ctx, nullptr, nullptr, 0);
    copy(ctx, nullptr, nullptr, 0);
    fill_zero(ctx, nullptr, 0);
  });
}

TEST(Event, MeasuresTheTimeBetweenTwoPoints) {
  const Context ctx;
  Event start(Backend::cpu), end(Backend::cpu);
  start.record(ctx);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  end.record(ctx);
  end.wait();
  EXPECT_GE(end.ms_since(start), 20.0);
  EXPECT_LT(end.ms_since(start), 20'000.0);
  EXPECT_LE(start.ms_since(end), -20.0);
  const Event moved = std::move(end);
  EXPECT_GE(moved.ms_since(start), 20.0);
}

TEST(Event, BelongsToOneBackend) {
  Event event(Backend::cpu);
  Context other;
  other.backend = Backend::cuda;
  EXPECT_EQ(error_of([&] { event.record(other); }).code, ExitCode::internal);
}

struct Planned {
  Tensor weights, masters, acts;
  explicit Planned(Arena& arena)
      : weights(arena.take("weights", DType::bf16, {3, 5})),
        masters(arena.take("optimizer", DType::f32, {1000})),
        acts(arena.take("weights", DType::f64, {2, 2, 2, 2})) {}
};

TEST(Arena, MeasuresThenHandsOutTheSamePlan) {
  Arena measure;
  const Planned plan(measure);
  EXPECT_FALSE(plan.weights);
  EXPECT_EQ(plan.weights.shape(), "[3, 5]");
  EXPECT_EQ(measure.used(), 256U + 4096U + 256U);
  ASSERT_EQ(measure.groups().size(), 2U);
  EXPECT_EQ(measure.groups()[0].name, "weights");
  EXPECT_EQ(measure.groups()[0].bytes, 512U);
  EXPECT_EQ(measure.groups()[1].name, "optimizer");
  EXPECT_EQ(measure.groups()[1].bytes, 4096U);

  const Memory memory = Memory::on(Backend::cpu, measure.used());
  Arena arena(memory.data());
  const Planned real(arena);
  char* const base = static_cast<char*>(memory.data());
  EXPECT_EQ(real.weights.data, base);
  EXPECT_EQ(real.masters.data, base + 256);
  EXPECT_EQ(real.acts.data, base + 256 + 4096);
  EXPECT_EQ(arena.used(), measure.used());
  for (const Tensor& tensor : {real.weights, real.masters, real.acts})
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data) % Arena::kAlignment, 0U);
}

TEST(Tensor, ShapesSizesAndViews) {
  std::vector<float> memory(2 * 3 * 4);
  const Tensor t(memory.data(), DType::f32, {2, 3, 4});
  EXPECT_TRUE(t);
  EXPECT_FALSE(Tensor{});
  EXPECT_EQ(t.size(), 24);
  EXPECT_EQ(t.bytes(), 96U);
  EXPECT_EQ(t.columns(), 4);
  EXPECT_EQ(t.rows(), 6);
  EXPECT_EQ(t.dim(-3), 2);
  EXPECT_EQ(t.as<float>(), memory.data());
  EXPECT_EQ(t.view({6, 4}).shape(), "[6, 4]");
  EXPECT_EQ(t.view({6, 4}).slice(5, 1).data, memory.data() + 20);
  const Tensor tail = t.slice(1, 1);
  EXPECT_EQ(tail.data, memory.data() + 12);
  EXPECT_EQ(tail.shape(), "[1, 3, 4]");
  EXPECT_EQ(t.slice(2, 0).size(), 0);
  EXPECT_EQ(Tensor(nullptr, DType::f32, {3, 0}).rows(), 0);
  EXPECT_EQ(Tensor(nullptr, DType::bf16, {int64_t{1} << 20, int64_t{1} << 16}).bytes(), size_t{1} << 37);
}

TEST(Tensor, MisuseIsAnInternalErrorThatNamesTheShapes) {
  std::vector<float> memory(6);
  const Tensor t(memory.data(), DType::f32, {2, 3});
  const Error as = error_of([&] { (void)t.as<bf16>(); });
  EXPECT_EQ(as.code, ExitCode::internal);
  EXPECT_TRUE(contains(as.what(), "fp32") && contains(as.what(), "bf16")) << as.what();
  const Error view = error_of([&] { (void)t.view({7}); });
  EXPECT_EQ(view.code, ExitCode::internal);
  EXPECT_TRUE(contains(view.what(), "[7]")) << view.what();
  EXPECT_EQ(error_of([&] { (void)t.slice(1, 2); }).code, ExitCode::internal);
  EXPECT_EQ(error_of([&] { (void)t.slice(-1, 1); }).code, ExitCode::internal);
  EXPECT_EQ(error_of([&] { Tensor(memory.data(), DType::f32, {1, 1, 1, 1, 6}); }).code, ExitCode::internal);
}

/// The oracle of to_bf16, by arithmetic instead of by bits: a finite float lies between two neighbours of the bf16
/// grid; the nearer one is taken, of two equally near ones that with an even last bit. Spacing: 2^(e-7) for
/// values in [2^e, 2^(e+1)), 2^-133 below 2^-126. A result of 2^128 or more is infinity.
uint16_t bf16_by_arithmetic(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isinf(value)) return sign | 0x7f80;
  const double magnitude = std::fabs(static_cast<double>(value));
  int exponent = magnitude == 0 ? -126 : std::max(std::ilogb(magnitude), -126);
  const double steps = std::ldexp(magnitude, 7 - exponent);  // exact: 24 significant bits
  double whole = std::floor(steps);
  const double rest = steps - whole;
  if (rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2.0) != 0)) whole += 1;
  // `whole` in [128, 256] for normal numbers, below 128 for subnormal ones; 256 is the next power of two.
  const int field = exponent + 127;  // the biased exponent of [2^exponent, 2^(exponent+1))
  const int bits = whole < 128 ? static_cast<int>(whole) : field * 128 + static_cast<int>(whole) - 128;
  return static_cast<uint16_t>(sign | (bits >= 0x7f80 ? 0x7f80 : bits));
}

TEST(Bf16, RoundsToNearestEvenEverywhere) {
  // Around every bf16 value: the value itself, the midpoints to its neighbours, and the floats next to those.
  for (uint32_t high = 0; high <= 0xffff; ++high)
    for (const uint32_t low : {0x0000U, 0x0001U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      const auto value = std::bit_cast<float>(high << 16 | low);
      ASSERT_EQ(to_bf16(value).bits, bf16_by_arithmetic(value))
          << std::hex << "float bits " << (high << 16 | low);
    }
  for (uint32_t n = 0; n < 200'000; ++n) {
    const auto value = std::bit_cast<float>(philox(1, 2, n).v[0]);
    ASSERT_EQ(to_bf16(value).bits, bf16_by_arithmetic(value)) << value;
  }
}

TEST(Bf16, KnownBits) {
  EXPECT_EQ(to_bf16(1.0F).bits, 0x3f80);
  EXPECT_EQ(to_bf16(-2.0F).bits, 0xc000);
  EXPECT_EQ(to_bf16(0.0F).bits, 0x0000);
  EXPECT_EQ(to_bf16(-0.0F).bits, 0x8000);
  EXPECT_EQ(to_bf16(1.00390625F).bits, 0x3f80);  // 1 + 2^-8: a tie, down to the even 1
  EXPECT_EQ(to_bf16(1.01171875F).bits, 0x3f82);  // 1 + 3 * 2^-8: a tie, up to the even 1 + 2^-6
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::infinity()).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-std::numeric_limits<float>::infinity()).bits, 0xff80);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::quiet_NaN()).bits, 0x7fff);
  EXPECT_EQ(to_bf16(-std::numeric_limits<float>::quiet_NaN()).bits, 0x7fff);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x7f800001U)).bits, 0x7fff);  // a NaN in the lower half only
}

TEST(Bf16, ReadsBackExactly) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const bf16 value{static_cast<uint16_t>(bits)};
    if (std::isnan(to_float(value)))
      ASSERT_EQ(bits & 0x7f80, 0x7f80U);
    else
      ASSERT_EQ(to_bf16(to_float(value)).bits, bits);
  }
}

TEST(DType, SizesAndNames) {
  for (const auto& [type, bytes, name] :
       {std::tuple{DType::f32, 4U, "fp32"}, std::tuple{DType::bf16, 2U, "bf16"},
        std::tuple{DType::f64, 8U, "fp64"}, std::tuple{DType::i32, 4U, "int32"},
        std::tuple{DType::i64, 8U, "int64"}, std::tuple{DType::u64, 8U, "uint64"}}) {
    EXPECT_EQ(size_of(type), bytes);
    EXPECT_STREQ(name_of(type), name);
  }
  EXPECT_EQ(dtype_of<float>, DType::f32);
  EXPECT_EQ(dtype_of<bf16>, DType::bf16);
  EXPECT_EQ(dtype_of<uint64_t>, DType::u64);
}

/// Known answers of Philox4x32-10 from the Random123 distribution (kat_vectors). Its counter words c0..c3 are our
/// index (c0 low, c1 high) and stream (c2 low, c3 high), its key words k0, k1 our seed.
TEST(Rng, PhiloxKnownAnswers) {
  const uint64_t ones = ~uint64_t{0};
  struct Case {
    uint64_t seed, stream, index;
    std::array<uint32_t, 4> expected;
  };
  for (const Case& c : {Case{0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                        Case{ones, ones, ones, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                        // counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0: digits of pi
                        Case{0x299f31d0a4093822,
                             0x0370734413198a2e,
                             0x85a308d3243f6a88,
                             {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}}) {
    const Philox4 got = philox(c.seed, c.stream, c.index);
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(got.v[i], c.expected[i]) << "word " << i;
  }
}

TEST(Rng, UniformNeverReachesItsEnds) {
  EXPECT_EQ(uniform01(0), 0x1p-24F);
  EXPECT_GT(uniform01(0), 0.0F);
  EXPECT_LT(uniform01(0xffffffff), 1.0F);
  double sum = 0;
  for (uint32_t n = 0; n < 100'000; ++n) sum += static_cast<double>(uniform01(philox(3, 0, n).v[1]));
  EXPECT_NEAR(sum / 100'000, 0.5, 5 * std::sqrt(1.0 / 12 / 100'000));
}

TEST(Rng, NormalsHaveTheRightMoments) {
  const int pairs = 100'000;
  double mean = 0, square = 0, fourth = 0, cross = 0;
  for (int n = 0; n < pairs; ++n) {
    const Philox4 r = philox(4, 0, static_cast<uint64_t>(n));
    const auto [a, b] = normal_pair(r.v[0], r.v[1]);
    for (const double x : {static_cast<double>(a), static_cast<double>(b)}) {
      mean += x;
      square += x * x;
      fourth += x * x * x * x;
    }
    cross += static_cast<double>(a) * static_cast<double>(b);
  }
  // Five standard errors; variances of x, x^2, x^4 and ab for a standard normal are 1, 2, 96 and 1.
  const double count = 2.0 * pairs;
  EXPECT_NEAR(mean / count, 0, 5 / std::sqrt(count));
  EXPECT_NEAR(square / count, 1, 5 * std::sqrt(2 / count));
  EXPECT_NEAR(fourth / count, 3, 5 * std::sqrt(96 / count));
  EXPECT_NEAR(cross / pairs, 0, 5 / std::sqrt(pairs));
  EXPECT_TRUE(std::isfinite(normal_pair(0, 0)[0]));
  EXPECT_TRUE(std::isfinite(normal_pair(0xffffffff, 0xffffffff)[0]));
}

TEST(Rng, Mix64IsABijectionOnWhatIsSeenAndAvalanches) {
  EXPECT_EQ(mix64(0), 0U);
  // splitmix64 from state 0 gives mix64(k * golden ratio): its published first outputs.
  EXPECT_EQ(mix64(0x9E3779B97F4A7C15ULL), 0xE220A8397B1DCDAFULL);
  EXPECT_EQ(mix64(2 * 0x9E3779B97F4A7C15ULL), 0x6E789E6AA1B965F4ULL);
  EXPECT_EQ(mix64(3 * 0x9E3779B97F4A7C15ULL), 0x06C45D188009454FULL);
  std::set<uint64_t> seen;
  int64_t flipped = 0;
  for (uint64_t x = 0; x < 2000; ++x) {
    seen.insert(mix64(x));
    flipped += std::popcount(mix64(x) ^ mix64(x ^ (uint64_t{1} << (x % 64))));
  }
  EXPECT_EQ(seen.size(), 2000U);
  EXPECT_NEAR(static_cast<double>(flipped) / 2000, 32, 5 * 4 / std::sqrt(2000.0));
}

TEST(Rng, StableKeyIsFnv1a) {
  EXPECT_EQ(stable_key(""), 0xcbf29ce484222325ULL);
  EXPECT_EQ(stable_key("a"), 0xaf63dc4c8601ec8cULL);
  EXPECT_EQ(stable_key("foobar"), 0x85944171f73967e8ULL);
}

}  // namespace
}  // namespace kinoe
