// Attention on the GPU against the CPU in fp64: the tensor-core kernels in bf16, the plain ones in fp32.
//
// In bf16 the probabilities and dS are rounded on their way through the tensor cores, as in every flash attention; what
// that costs is stated per tensor as a relative L2 distance from the exact result for the same, already rounded inputs.
// Where the exact gradient is all but zero (a document of one token) there is nothing to be relative to, so a floor is
// added per element.
#include "kernels/attention.h"

#include <map>

#include "test/gpu_harness.h"

namespace kinoe::optest {
namespace {

const Context kCpu;

enum class Documents {
  none,
  single,
  any,
  tiles
};  // tiles: borders at the edges of tiles, and one beside them

struct Bounds {
  std::vector<int32_t> start, end;
};

Bounds bounds_of(Documents kind, int64_t batch, int64_t length, Random& random) {
  Bounds bounds;
  if (kind == Documents::none) return bounds;
  const std::vector<int64_t> edges = {64, 1, 63, 128, 32, 96, 1, 127, 192, 65};
  for (int64_t b = 0; b < batch; ++b) {
    const std::vector<int32_t> lengths =
        random.integers(length, 1, static_cast<int32_t>(std::max<int64_t>(2, length / 2)));
    for (int64_t begin = 0, i = 0; begin < length; ++i) {
      const int64_t n = kind == Documents::single ? 1
                        : kind == Documents::any  ? lengths[static_cast<size_t>(i)]
                                                  : edges[static_cast<size_t>(i + b) % edges.size()];
      const int64_t end = std::min(length, begin + n);
      bounds.start.insert(bounds.start.end(), static_cast<size_t>(end - begin), static_cast<int32_t>(begin));
      bounds.end.insert(bounds.end.end(), static_cast<size_t>(end - begin), static_cast<int32_t>(end));
      begin = end;
    }
  }
  return bounds;
}

struct Results {
  TensorOn out, lse, d_qkv;
  [[nodiscard]] Outputs outputs() const { return {{"out", out}, {"lse", lse}, {"d_qkv", d_qkv}}; }
};

struct Problem {
  Problem(const AttentionCase& c, Documents documents, DType type, Random& random)
      : shape(c),
        columns((c.heads + 2 * c.kv_heads) * c.head_dim),
        scale(static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_dim)))),
        qkv(random.normal(c.batch * c.length * columns, 1, type)),
        d_out(random.normal(c.batch * c.length * c.heads * c.head_dim, 1, type)),
        bounds(bounds_of(documents, c.batch, c.length, random)) {}

  [[nodiscard]] Results run(const Context& ctx, DType type) const {
    const AttentionCase& c = shape;
    const std::vector<int64_t> wide = {c.batch, c.length, columns},
                               narrow = {c.batch, c.length, c.heads * c.head_dim};
    const TensorOn packed(ctx, type, wide, qkv), d_result(ctx, type, narrow, d_out);
    TensorOn start, end;
    if (!bounds.start.empty()) {
      start = TensorOn::of(ctx, {c.batch, c.length}, bounds.start);
      end = TensorOn::of(ctx, {c.batch, c.length}, bounds.end);
    }
    Results r{TensorOn(ctx, type, narrow), TensorOn(ctx, accumulator_of(type), {c.batch, c.heads, c.length}),
              TensorOn(ctx, type, wide)};
    attention_forward(ctx, {r.out, r.lse, packed, start, c.heads, c.kv_heads, scale});
    const TensorOn scratch =
        TensorOn::scratch(ctx, attention_backward_scratch_bytes(ctx.backend, type, c.batch, c.length, c.heads,
                                                                c.kv_heads, c.head_dim));
    attention_backward(
        ctx, {r.d_qkv, d_result, r.out, r.lse, packed, start, end, c.heads, c.kv_heads, scale, scratch});
    packed.expect_unchanged("qkv");
    d_result.expect_unchanged("d_out");
    if (start) start.expect_unchanged("doc_start");
    if (end) end.expect_unchanged("doc_end");
    for (const Output& o : r.outputs()) o.tensor.expect_written(o.name);
    return r;
  }

  AttentionCase shape;
  int64_t columns;
  float scale;
  Values qkv, d_out;
  Bounds bounds;
};

/// Columns [first, first + count) of every row.
Values slice(const Values& rows, int64_t columns, int64_t first, int64_t count) {
  Values part;
  for (size_t row = 0; row < rows.size(); row += static_cast<size_t>(columns))
    part.insert(part.end(), rows.begin() + static_cast<std::ptrdiff_t>(row) + first,
                rows.begin() + static_cast<std::ptrdiff_t>(row) + first + count);
  return part;
}

/// The worst relative L2 distance of each tensor over all that was compared; prints them at its end.
class Distances {
 public:
  explicit Distances(DType type) : type_(type) {}
  ~Distances() {
    std::printf("             attention %s, worst relative L2:", name_of(type_));
    for (const auto& [name, distance] : worst_) std::printf("  %s %.2e", name.c_str(), distance);
    std::printf("\n");
  }
  Distances(const Distances&) = delete;
  Distances& operator=(const Distances&) = delete;

  void expect(const Problem& p, const Results& actual, const Results& exact) {
    const bool rounded = type_ == DType::bf16;
    const int64_t d = p.shape.head_dim, q = p.shape.heads * d, kv = p.shape.kv_heads * d;
    expect("out", actual.out.values(), exact.out.values(), rounded ? 3e-3 : 1e-5, 1e-6);
    expect("lse", actual.lse.values(), exact.lse.values(), 1e-6, 1e-6);
    const Values a = actual.d_qkv.values(), e = exact.d_qkv.values();
    const double gradient = rounded ? 6e-3 : 1e-5, floor = rounded ? 1e-5 : 2e-6;
    expect("dq", slice(a, p.columns, 0, q), slice(e, p.columns, 0, q), gradient, floor);
    expect("dk", slice(a, p.columns, q, kv), slice(e, p.columns, q, kv), gradient, floor);
    expect("dv", slice(a, p.columns, q + kv, kv), slice(e, p.columns, q + kv, kv), rounded ? 4e-3 : 1e-5,
           floor);
  }

 private:
  void expect(const char* name, const Values& actual, const Values& exact, double limit, double floor) {
    const Errors errors = compare(actual, exact);
    double square = 0;
    for (const double x : exact) square += x * x;
    const double norm = std::sqrt(square), size = std::sqrt(static_cast<double>(exact.size()));
    EXPECT_EQ(errors.non_finite_mismatches, 0) << name << ": " << describe(errors, actual, exact);
    EXPECT_LE(errors.relative_l2 * (norm > 0 ? norm : 1), limit * norm + floor * size)
        << name << ": " << describe(errors, actual, exact);
    if (norm > 1e-2 * size) worst_[name] = std::max(worst_[name], errors.relative_l2);
  }

  DType type_;
  std::map<std::string, double> worst_;
};

const char* word_for(Documents kind) {
  switch (kind) {
    case Documents::none: return "";
    case Documents::single: return " documents of one token";
    case Documents::any: return " documents";
    case Documents::tiles: return " documents at the edges of tiles";
  }
  return "";
}

TEST(AttentionGpu, Bf16IsAsCloseToTheCpuAsItsRoundings) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  std::vector<std::pair<AttentionCase, Documents>> cases;
  struct Heads {
    int64_t batch, heads, kv_heads;
  };
  const Heads heads[] = {{1, 2, 2}, {3, 4, 1}, {2, 8, 1}};  // ratios 1, 4, 8
  const Documents kinds[] = {Documents::none, Documents::any, Documents::tiles, Documents::single};
  size_t i = 0;
  for (const int64_t d : {64, 80, 96, 128})
    for (const int64_t t : {1, 2, 7, 63, 64, 65, 127, 128, 129, 200, 1000, 1024}) {
      const Heads h = t < 1000 ? heads[i % 3] : heads[0];
      for (const Documents kind : {Documents::none, kinds[1 + i % 3]})
        cases.push_back({{kCompare, h.batch, t, h.heads, h.kv_heads, d, kind != Documents::none}, kind});
      ++i;
    }
  for (const Documents kind : kinds)
    for (const int64_t d : {64, 128}) {
      cases.push_back({{kCompare, 1, 200, 32, 8, d, true}, kind});
      cases.push_back({{kCompare, 1, 450, 2, 1, d, true}, kind});
    }
  cases.push_back(
      {{kCompare, 2, 192, 25, 25, 64, false}, Documents::none});  // GPT-2 1558M: an odd number of heads
  Distances distances(DType::bf16);
  for (const auto& [c, kind] : cases) {
    SCOPED_TRACE(cat(c.label(), word_for(kind)));
    const Problem p(c, kind, DType::bf16, random);
    distances.expect(p, p.run(device->context(), DType::bf16), p.run(kCpu, DType::f64));
  }
}

TEST(AttentionGpu, Fp32EqualsTheCpu) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  std::vector<AttentionCase> cases = cases_for(attention_cases(), kCompare);
  for (const int64_t d : {33, 129, 200, 256}) cases.push_back({kCompare, 2, 70, 4, 2, d, d % 2 == 0});
  Distances distances(DType::f32);
  for (const AttentionCase& c : cases) {
    SCOPED_TRACE(c.label());
    const Problem p(c, c.documents ? Documents::any : Documents::none, DType::f32, random);
    distances.expect(p, p.run(device->context(), DType::f32), p.run(kCpu, DType::f64));
  }
}

/// Scores that rise from tile to tile, whichever way the tiles are visited, up to several hundred: every tile raises the
/// reference of the running softmax, and what came before is scaled down to nothing or the reverse.
TEST(AttentionGpu, ScoresThatRiseAndFallAlongTheSequence) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const DType type : {DType::bf16, DType::f32}) {
    Distances distances(type);
    for (const double slope : {-0.5, -0.02, 0.02, 0.5})
      for (const int64_t d : {64, 128}) {
        SCOPED_TRACE(cat("slope ", slope, ", D = ", d));
        Problem p({kCompare, 1, 640, 1, 1, d, false}, Documents::none, type, random);
        // One column of q is 1 and of k slope * position / scale: it adds slope * position to every score.
        for (int64_t t = 0; t < p.shape.length; ++t) {
          p.qkv[static_cast<size_t>(t * p.columns)] = 1;
          p.qkv[static_cast<size_t>(t * p.columns + d)] =
              representable(slope * static_cast<double>(t) / static_cast<double>(p.scale), type);
        }
        const Results actual = p.run(device->context(), type), exact = p.run(kCpu, DType::f64);
        // Scores of hundreds in fp32 are good to 1e-5, and so are the probabilities made of them.
        expect_close("out", actual.out.values(), exact.out.values(),
                     type == DType::bf16 ? Tolerance{2e-2, 2e-2, 4e-3} : Tolerance{2e-3, 2e-3, 2e-4});
        expect_close("lse", actual.lse.values(), exact.lse.values(), {1e-4, 1e-5});
        // Not the first column of dq: there the rounding of dS, whose sum is 0, is weighted with keys of thousands.
        const Values a = actual.d_qkv.values(), e = exact.d_qkv.values();
        expect_close("d_qkv", slice(a, p.columns, 1, p.columns - 1), slice(e, p.columns, 1, p.columns - 1),
                     {INFINITY, 0, type == DType::bf16 ? 1e-2 : 1e-3});
      }
  }
}

TEST(AttentionGpu, SameBitsEveryRun) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const DType type : {DType::bf16, DType::f32})
    for (const int64_t d : {64, 80, 96, 128}) {
      const Problem p({kCompare, 2, 777, 8, 2, d, true}, Documents::any, type, random);
      expect_repeats(
          cat(name_of(type), " D = ", d), [&] { return p.run(device->context(), type).outputs(); }, 4);
    }
}

/// A document that begins at the edge of a tile is computed as a sequence of its own would be, to the last bit.
TEST(AttentionGpu, DocumentsAreSequencesOfTheirOwn) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const DType type : {DType::bf16, DType::f32})
    for (const int64_t d : {64, 80, 96, 128}) {
      constexpr int64_t kDocuments = 4, kLength = 128;
      const Problem apart({kCompare, kDocuments, kLength, 4, 2, d, false}, Documents::none, type, random);
      Problem together = apart;
      together.shape.batch = 1;
      together.shape.length = kDocuments * kLength;
      for (int32_t t = 0; t < kDocuments * kLength; ++t) {
        together.bounds.start.push_back(t / static_cast<int32_t>(kLength) * static_cast<int32_t>(kLength));
        together.bounds.end.push_back(together.bounds.start.back() + static_cast<int32_t>(kLength));
      }
      const Results a = apart.run(device->context(), type), b = together.run(device->context(), type);
      expect_same_bits(cat(name_of(type), " D = ", d, " out"), b.out, a.out);
      expect_same_bits(cat(name_of(type), " D = ", d, " d_qkv"), b.d_qkv, a.d_qkv);
    }
}

TEST(AttentionGpu, NanReachesAllThatSeeIt) {
  KINOE_GPU_OR_SKIP(device);
  Random random;
  for (const DType type : {DType::bf16, DType::f32})
    for (const int64_t part : {0, 1, 2}) {  // in q, k, v
      constexpr int64_t kAt = 70, kLength = 200, kHeadDim = 64;
      Problem p({kCompare, 1, kLength, 1, 1, kHeadDim, false}, Documents::none, type, random);
      p.qkv[static_cast<size_t>(kAt * p.columns + part * kHeadDim + 5)] = std::nan("");
      const Values out = p.run(device->context(), type).out.values();
      for (int64_t t = kAt; t < (part == 0 ? kAt + 1 : kLength); ++t)
        EXPECT_TRUE(std::isnan(out[static_cast<size_t>(t * kHeadDim + 5)]))
            << name_of(type) << " " << part << " " << t;
      for (int64_t t = 0; t < 64; ++t)  // in the tile before
        EXPECT_TRUE(std::isfinite(out[static_cast<size_t>(t * kHeadDim + 5)]))
            << name_of(type) << " " << part << " " << t;
    }
}

/// Rows of a large problem that repeats a small one, bit for bit; `row_of` gives the small one's row.
template <class RowOf>
void expect_rows(const Problem& p, const Results& small, const BigTensor& out, const BigTensor& d_qkv,
                 int64_t rows, const RowOf& row_of) {
  const int64_t narrow = p.shape.heads * p.shape.head_dim;
  const Values small_out = small.out.values(), small_d_qkv = small.d_qkv.values();
  for (const auto& [name, tensor, expected, columns] :
       {std::tuple{"out", &out, &small_out, narrow}, std::tuple{"d_qkv", &d_qkv, &small_d_qkv, p.columns}})
    for (const int64_t row : telling_rows(rows, p.columns)) {
      const auto from = expected->begin() + row_of(row) * columns;
      expect_close(cat(name, " of token ", row), tensor->values(row * columns, columns),
                   Values(from, from + columns), {0, 0, 0});
    }
}

/// More than 2^31 elements in qkv: as many sequences, and as one sequence of many documents.
TEST(AttentionGpu, MoreThanTwoToThe31Elements) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  for (const bool one_sequence : {false, true}) {
    SCOPED_TRACE(one_sequence ? "one sequence" : "many sequences");
    const Problem p({kCompare, 1, 1024, 32, 8, 128, false}, Documents::none, DType::bf16, random);
    const int64_t copies = 342, rows = copies * p.shape.length, narrow = p.shape.heads * p.shape.head_dim;
    const int64_t batch = one_sequence ? 1 : copies, length = rows / batch;
    ASSERT_GT(rows * p.columns, int64_t{1} << 31);
    if (!enough_memory(*device,
                       static_cast<size_t>(rows * (2 * p.columns + 2 * narrow) * 2 + rows * 32 * 12)))
      GTEST_SKIP() << "too little memory";
    const Results small = p.run(gpu, DType::bf16);
    const BigTensor qkv(gpu, DType::bf16, {batch, length, p.columns}, p.qkv);
    const BigTensor d_out(gpu, DType::bf16, {batch, length, narrow}, p.d_out);
    const BigTensor out(gpu, DType::bf16, {batch, length, narrow}),
        d_qkv(gpu, DType::bf16, {batch, length, p.columns});
    const BigTensor lse(gpu, DType::f32, {batch, p.shape.heads, length});
    const BigTensor scratch(
        gpu, DType::i32,
        {static_cast<int64_t>(attention_backward_scratch_bytes(
             gpu.backend, DType::bf16, batch, length, p.shape.heads, p.shape.kv_heads, p.shape.head_dim)) /
         4});
    TensorOn start, end;
    if (one_sequence) {
      std::vector<int32_t> starts, ends;
      for (int64_t t = 0; t < rows; ++t) {
        starts.push_back(static_cast<int32_t>(t / p.shape.length * p.shape.length));
        ends.push_back(starts.back() + static_cast<int32_t>(p.shape.length));
      }
      start = TensorOn::of(gpu, {batch, length}, starts);
      end = TensorOn::of(gpu, {batch, length}, ends);
    }
    attention_forward(gpu, {out, lse, qkv, start, p.shape.heads, p.shape.kv_heads, p.scale});
    attention_backward(
        gpu, {d_qkv, d_out, out, lse, qkv, start, end, p.shape.heads, p.shape.kv_heads, p.scale, scratch});
    expect_rows(p, small, out, d_qkv, rows, [&](int64_t row) { return row % p.shape.length; });
  }
}

TEST(AttentionGpu, RefusesWhatItCannotDo) {
  KINOE_GPU_OR_SKIP(device);
  const Context gpu = device->context();
  Random random;
  const auto code_of = [](const auto& run) {
    try {
      run();
    } catch (const Error& error) {
      return error.code;
    }
    return ExitCode::finished;
  };
  const Problem odd({kCompare, 1, 5, 1, 1, 72, false}, Documents::none, DType::bf16, random);
  EXPECT_EQ(code_of([&] { static_cast<void>(odd.run(gpu, DType::bf16)); }), ExitCode::usage);
  const Problem wide({kCompare, 1, 5, 1, 1, 264, false}, Documents::none, DType::f32, random);
  EXPECT_EQ(code_of([&] { static_cast<void>(wide.run(gpu, DType::f32)); }), ExitCode::usage);
  Problem flat({kCompare, 1, 5, 1, 1, 64, false}, Documents::none, DType::bf16, random);
  flat.scale = 0;
  EXPECT_EQ(code_of([&] { static_cast<void>(flat.run(gpu, DType::bf16)); }), ExitCode::internal);

  const ShiftedTensor qkv(gpu, DType::bf16, {1, 5, 192}, 1, random.normal(5 * 192, 1, DType::bf16));
  const TensorOn out(gpu, DType::bf16, {1, 5, 64}), lse(gpu, DType::f32, {1, 1, 5});
  EXPECT_EQ(code_of([&] { attention_forward(gpu, {out, lse, qkv, {}, 1, 1, 0.125F}); }), ExitCode::internal);
}

}  // namespace
}  // namespace kinoe::optest
