// Every family's tensors laid out, one behind the other.
#include "trainer/parameters.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "kernels/common/rng.h"
#include "kernels/global_norm.h"

namespace kinoe {
namespace {

// Starts of tensors are multiples of 64 elements, so that 16-byte vectors and tensor-core GEMMs are aligned in any
// element type.
constexpr int64_t kTensorAlignment = 64;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

int64_t product(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

struct Part {
  std::string name;
  std::vector<int64_t> shape;
};

struct Initial {
  double std = 0;
  float value = 0;
};

/// Lays tensors one behind the other and remembers where they went.
class Layout {
 public:
  Layout(std::vector<Parameter>& parameters, std::vector<Bucket>& buckets)
      : parameters_(parameters), buckets_(buckets) {}

  void begin(std::string name) { buckets_.push_back({std::move(name), position_, 0}); }
  void end() {
    position_ = buckets_.back().offset + round_up(position_ - buckets_.back().offset, kChunk);
    buckets_.back().size = position_ - buckets_.back().offset;
  }

  /// A tensor of a bucket's view made of one or more consecutive file tensors. `memory_shape` may be larger than the
  /// parts together: the rest is padding (the vocabulary's).
  template <class Views>
  void add(std::vector<Placement<Views>>& placements, Tensor Views::*member,
           const std::vector<int64_t>& memory_shape, const std::vector<Part>& parts, Initial initial) {
    position_ = round_up(position_, kTensorAlignment);
    placements.push_back({member, position_ - buckets_.back().offset, memory_shape});
    int64_t offset = position_;
    for (const Part& part : parts) {
      Parameter p;
      p.name = part.name;
      p.shape = part.shape;
      p.init_std = initial.std;
      p.init_value = initial.value;
      p.decay = part.shape.size() > 1;
      p.bucket = static_cast<int>(buckets_.size()) - 1;
      p.offset = offset;
      p.size = product(part.shape);
      p.key = stable_key(part.name);
      offset += p.size;
      parameters_.push_back(std::move(p));
    }
    position_ += product(memory_shape);
    CHECK(offset <= position_, "parts of a tensor are larger than its memory");
  }

  [[nodiscard]] int64_t position() const { return position_; }

 private:
  std::vector<Parameter>& parameters_;
  std::vector<Bucket>& buckets_;
  int64_t position_ = 0;
};

/// The Hugging Face names of a family, in the order of its files.
struct Names {
  std::string token, position, layer, final_norm, head;
  std::string norm1, norm2, out, fc, proj;
};

Names names_of(const ModelConfig& config) {
  if (config.family == Family::gpt2)
    return {
        "transformer.wte", "transformer.wpe", "transformer.h.", "transformer.ln_f", "lm_head", "ln_1", "ln_2",
        "attn.c_proj",     "mlp.c_fc",        "mlp.c_proj"};
  return {"model.embed_tokens",
          "",
          "model.layers.",
          "model.norm",
          "lm_head",
          "input_layernorm",
          "post_attention_layernorm",
          "self_attn.o_proj",
          "",
          "mlp.down_proj"};
}

template <class Views>
Views views_of(const std::vector<Placement<Views>>& placements, const Tensor& bucket) {
  Views views;
  for (const Placement<Views>& p : placements) {
    Tensor t(static_cast<char*>(bucket.data) + static_cast<size_t>(p.offset) * size_of(bucket.dtype),
             bucket.dtype, {});
    for (const int64_t n : p.shape) t.dims[static_cast<size_t>(t.ndim++)] = n;
    views.*p.member = t;
  }
  return views;
}

}  // namespace

ParameterTable::ParameterTable(const ModelConfig& config) {
  const Names names = names_of(config);
  const bool gpt2 = config.conv1d_weights;
  const bool layernorm = config.norm == NormKind::layernorm;
  const int64_t c = config.hidden, f = config.ffn, d = config.head_dim;
  const int64_t q = config.heads * d, kv = config.kv_heads * d;
  const Initial normal{config.init_std, 0}, zeros{0, 0}, ones{0, 1};
  // Projections that end in the residual stream start smaller, so that its variance does not grow with depth
  // (Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.3).
  const Initial residual{config.init_std / std::sqrt(2.0 * static_cast<double>(config.layers)), 0};
  Layout layout(parameters_, buckets_);

  const auto matrix = [gpt2](int64_t out, int64_t in) {
    return gpt2 ? std::vector<int64_t>{in, out} : std::vector<int64_t>{out, in};
  };
  const auto norm = [&](auto& placements, auto weight, auto bias, const std::string& name) {
    layout.add(placements, weight, {c}, {{name + ".weight", {c}}}, ones);
    if (layernorm) layout.add(placements, bias, {c}, {{name + ".bias", {c}}}, zeros);
  };

  layout.begin("embedding");
  if (config.position == PositionKind::learned)
    layout.add(embedding_, &EmbeddingTensors::position, {config.max_positions, c},
               {{names.position + ".weight", {config.max_positions, c}}}, normal);
  // Last in its bucket, so that the padding of the vocabulary is at the tail.
  layout.add(embedding_, &EmbeddingTensors::token, {config.padded_vocab(), c},
             {{names.token + ".weight", {config.vocab_size, c}}}, normal);
  layout.end();

  for (int64_t l = 0; l < config.layers; ++l) {
    const std::string at = names.layer + std::to_string(l) + ".";
    std::vector<Placement<LayerTensors>> placed;  // the same for every layer
    layout.begin("layer " + std::to_string(l));
    norm(placed, &LayerTensors::norm1_weight, &LayerTensors::norm1_bias, at + names.norm1);

    if (gpt2) {
      layout.add(placed, &LayerTensors::qkv_weight, matrix(3 * c, c),
                 {{at + "attn.c_attn.weight", matrix(3 * c, c)}}, normal);
      layout.add(placed, &LayerTensors::qkv_bias, {3 * c}, {{at + "attn.c_attn.bias", {3 * c}}}, zeros);
    } else {
      const std::string a = at + "self_attn.";
      layout.add(
          placed, &LayerTensors::qkv_weight, {q + 2 * kv, c},
          {{a + "q_proj.weight", {q, c}}, {a + "k_proj.weight", {kv, c}}, {a + "v_proj.weight", {kv, c}}},
          normal);
      if (config.qkv_bias)
        layout.add(placed, &LayerTensors::qkv_bias, {q + 2 * kv},
                   {{a + "q_proj.bias", {q}}, {a + "k_proj.bias", {kv}}, {a + "v_proj.bias", {kv}}}, zeros);
    }
    layout.add(placed, &LayerTensors::out_weight, matrix(c, q), {{at + names.out + ".weight", matrix(c, q)}},
               residual);
    if (config.output_bias)
      layout.add(placed, &LayerTensors::out_bias, {c}, {{at + names.out + ".bias", {c}}}, zeros);
    if (config.qk_norm) {
      layout.add(placed, &LayerTensors::q_norm_weight, {d}, {{at + "self_attn.q_norm.weight", {d}}}, ones);
      layout.add(placed, &LayerTensors::k_norm_weight, {d}, {{at + "self_attn.k_norm.weight", {d}}}, ones);
    }

    norm(placed, &LayerTensors::norm2_weight, &LayerTensors::norm2_bias, at + names.norm2);
    if (config.mlp == MlpKind::swiglu) {
      const std::string m = at + "mlp.";
      layout.add(placed, &LayerTensors::fc_weight, {2 * f, c},
                 {{m + "gate_proj.weight", {f, c}}, {m + "up_proj.weight", {f, c}}}, normal);
      if (config.mlp_bias)
        layout.add(placed, &LayerTensors::fc_bias, {2 * f},
                   {{m + "gate_proj.bias", {f}}, {m + "up_proj.bias", {f}}}, zeros);
    } else {
      layout.add(placed, &LayerTensors::fc_weight, matrix(f, c), {{at + names.fc + ".weight", matrix(f, c)}},
                 normal);
      if (config.mlp_bias)
        layout.add(placed, &LayerTensors::fc_bias, {f}, {{at + names.fc + ".bias", {f}}}, zeros);
    }
    layout.add(placed, &LayerTensors::proj_weight, matrix(c, f),
               {{at + names.proj + ".weight", matrix(c, f)}}, residual);
    if (config.mlp_bias)
      layout.add(placed, &LayerTensors::proj_bias, {c}, {{at + names.proj + ".bias", {c}}}, zeros);
    layout.end();
    layer_ = std::move(placed);
  }

  layout.begin("head");
  norm(head_, &HeadTensors::norm_weight, &HeadTensors::norm_bias, names.final_norm);
  if (!config.tied)
    layout.add(head_, &HeadTensors::lm_head, {config.padded_vocab(), c},
               {{names.head + ".weight", {config.vocab_size, c}}}, normal);
  layout.end();
  flat_size_ = layout.position();
}

Tensor ParameterTable::bucket(const Tensor& flat, int index) const {
  const Bucket& b = buckets_[static_cast<size_t>(index)];
  return flat.slice(b.offset, b.size);
}

EmbeddingTensors ParameterTable::embedding(const Tensor& bucket) const {
  return views_of(embedding_, bucket);
}
LayerTensors ParameterTable::layer(const Tensor& bucket) const { return views_of(layer_, bucket); }
HeadTensors ParameterTable::head(const Tensor& bucket) const { return views_of(head_, bucket); }

std::vector<AdamWSegment> ParameterTable::segments(const std::vector<HeldRange>& held,
                                                   float weight_decay) const {
  std::vector<AdamWSegment> result;
  for (const HeldRange& range : held)
    for (const Parameter& p : parameters_) {
      const int64_t first = std::max(p.offset, range.begin), last = std::min(p.offset + p.size, range.end);
      if (first >= last) continue;
      AdamWSegment s;
      s.begin = range.local + first - range.begin;
      s.end = range.local + last - range.begin;
      s.tensor_key = p.key;
      s.first_index = first - p.offset;
      s.weight_decay = p.decay ? weight_decay : 0.0F;
      result.push_back(s);
    }
  return result;
}

ShardLayout::ShardLayout(const ParameterTable& table, int rank, int ranks, bool sharded)
    : rank_(rank),
      ranks_(ranks),
      sharded_(sharded),
      flat_size_(table.flat_size()),
      whole_size_(table.flat_size()) {
  CHECK(ranks >= 1 && rank >= 0 && rank < ranks, "rank ", rank, " of ", ranks);
  int64_t local = 0;
  for (const Bucket& bucket : table.buckets()) {
    const int64_t chunks = bucket.size / kChunk, share = (chunks + ranks - 1) / ranks;
    const int64_t first = std::min(chunks, rank * share), last = std::min(chunks, first + share);
    const int64_t begin = bucket.offset + first * kChunk, end = bucket.offset + last * kChunk;
    if (begin < end) owned_.push_back({begin, end, sharded ? local : begin});
    shares_.push_back({local, share * kChunk});
    bucket_chunks_.push_back(chunks);
    local += share * kChunk;
    if (sharded) whole_size_ = std::max(whole_size_, bucket.offset + ranks * share * kChunk);
  }
  size_ = sharded ? local : flat_size_;
  held_ = sharded ? owned_ : std::vector<HeldRange>{{0, flat_size_, 0}};
}

std::vector<int64_t> ShardLayout::gathered_chunks() const {
  std::vector<int64_t> places;
  places.reserve(static_cast<size_t>(flat_size_ / kChunk));
  const int64_t per_rank = size_ / kChunk;
  for (size_t b = 0; b < shares_.size(); ++b) {
    const int64_t share = shares_[b].size / kChunk;
    for (int64_t chunk = 0; chunk < bucket_chunks_[b]; ++chunk)
      places.push_back(chunk / share * per_rank + shares_[b].local / kChunk + chunk % share);
  }
  return places;
}

void initial_values(const Parameter& parameter, uint64_t seed, int64_t begin, int64_t count, float* out) {
  if (parameter.init_std == 0) {
    std::fill_n(out, count, parameter.init_value);
    return;
  }
  // Four normals per Philox block: element i is number i mod 4 of block i / 4.
  const auto scale = static_cast<float>(parameter.init_std);
  for (int64_t i = begin; i < begin + count;) {
    const Philox4 r = philox(seed, parameter.key, static_cast<uint64_t>(i / 4));
    const auto first = normal_pair(r.v[0], r.v[1]);
    const auto second = normal_pair(r.v[2], r.v[3]);
    const float z[4] = {first[0], first[1], second[0], second[1]};
    for (int64_t j = i % 4; j < 4 && i < begin + count; ++j, ++i) out[i - begin] = z[j] * scale;
  }
}

void initialize(const ParameterTable& table, uint64_t seed, int64_t begin, int64_t end, float* out) {
  CHECK(begin % kChunk == 0 && end % kChunk == 0 && begin >= 0 && begin <= end && end <= table.flat_size(),
        "chunks of the flat range asked for: [", begin, ", ", end, ") of ", table.flat_size());
  const std::vector<Parameter>& parameters = table.parameters();
#pragma omp parallel for schedule(dynamic)
  for (int64_t from = begin; from < end; from += kChunk) {
    float* chunk = out + (from - begin);
    std::fill_n(chunk, kChunk, 0.0F);
    auto p = std::partition_point(parameters.begin(), parameters.end(),
                                  [from](const Parameter& q) { return q.offset + q.size <= from; });
    for (; p != parameters.end() && p->offset < from + kChunk; ++p) {
      const int64_t first = std::max(from, p->offset), last = std::min(from + kChunk, p->offset + p->size);
      initial_values(*p, seed, first - p->offset, last - first, chunk + (first - from));
    }
  }
}

void initialize(const ParameterTable& table, uint64_t seed, float* flat) {
  initialize(table, seed, 0, table.flat_size(), flat);
}

}  // namespace kinoe
