// The one table of parameters: names, shapes, initialisation, decay, and where each tensor lies in memory.
//
// Everything that handles parameters reads this table and nothing else: sizes, initialisation, the optimizer, sharding,
// checkpoints. All parameters lie in one flat range, cut into buckets (the embedding, each layer, the head), each a
// whole number of chunks; weights, gradients, masters and moments are flat ranges of this same layout in other
// types. Tensors that one GEMM reads as one (q, k, v; gate, up) lie in consecutive rows, without a gap.
#pragma once

#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/common/tensor.h"
#include "trainer/model_config.h"

namespace kinoe {

/// One tensor of the Hugging Face files.
struct Parameter {
  std::string name;            // Hugging Face's
  std::vector<int64_t> shape;  // as in the files, without padding
  double init_std = 0;         // normal with this deviation; when 0 every element is init_value
  float init_value = 0;
  bool decay = false;  // matrices decay; norms and biases do not
  int bucket = 0;
  int64_t offset = 0;  // of its first element in the flat range
  int64_t size = 0;
  uint64_t key = 0;  // stable_key(name)
};

struct Bucket {
  std::string name;
  int64_t offset = 0;
  int64_t size = 0;  // a multiple of kChunk
};

/// Views of one bucket, in the shapes the operations want. Absent tensors: the family has none.
struct EmbeddingTensors {
  Tensor position;  // [max_positions, C]
  Tensor token;     // [padded vocabulary, C]
};
struct LayerTensors {
  Tensor norm1_weight, norm1_bias;  // [C]
  Tensor qkv_weight;                // [(H + 2 Hkv) D, C], or [C, 3 C] for GPT-2
  Tensor qkv_bias;                  // [(H + 2 Hkv) D]
  Tensor out_weight;                // [C, H D]
  Tensor out_bias;                  // [C]
  Tensor q_norm_weight;             // [D] of each query head, Qwen3
  Tensor k_norm_weight;             // [D]
  Tensor norm2_weight, norm2_bias;  // [C]
  Tensor fc_weight;                 // [F, C], [2 F, C] (gate, up) with SwiGLU, or [C, F] for GPT-2
  Tensor fc_bias;                   // [F]
  Tensor proj_weight;               // [C, F], or [F, C] for GPT-2
  Tensor proj_bias;                 // [C]
};
struct HeadTensors {
  Tensor norm_weight, norm_bias;  // [C]
  Tensor lm_head;                 // [padded vocabulary, C]; absent when tied
};

/// Where a member of a bucket's view lies, relative to the bucket.
template <class Views>
struct Placement {
  Tensor Views::*member;
  int64_t offset;
  std::vector<int64_t> shape;
};

/// Elements [begin, end) of the flat range, whole chunks, and where they begin in a rank's own memory.
struct HeldRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t local = 0;  // of element `begin`

  bool operator==(const HeldRange&) const = default;
};

class ParameterTable {
 public:
  explicit ParameterTable(const ModelConfig& config);

  [[nodiscard]] const std::vector<Parameter>& parameters() const { return parameters_; }
  [[nodiscard]] const std::vector<Bucket>& buckets() const { return buckets_; }
  /// Elements of the flat range, padding included.
  [[nodiscard]] int64_t flat_size() const { return flat_size_; }

  [[nodiscard]] static int embedding_bucket() { return 0; }
  [[nodiscard]] static int layer_bucket(int64_t layer) { return static_cast<int>(layer) + 1; }
  [[nodiscard]] int head_bucket() const { return static_cast<int>(buckets_.size()) - 1; }

  /// The part of a flat tensor that is bucket `index`.
  [[nodiscard]] Tensor bucket(const Tensor& flat, int index) const;

  /// `bucket` is one bucket's flat memory in any type.
  [[nodiscard]] EmbeddingTensors embedding(const Tensor& bucket) const;
  [[nodiscard]] LayerTensors layer(const Tensor& bucket) const;
  [[nodiscard]] HeadTensors head(const Tensor& bucket) const;

  /// The optimizer's view of memory that holds `held`, which is in order.
  [[nodiscard]] std::vector<AdamWSegment> segments(const std::vector<HeldRange>& held,
                                                   float weight_decay) const;

 private:
  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  int64_t flat_size_ = 0;
  std::vector<Placement<EmbeddingTensors>> embedding_;
  std::vector<Placement<LayerTensors>> layer_;
  std::vector<Placement<HeadTensors>> head_;
};

/// How a flat range is divided between ranks: of each bucket's n chunks rank r owns the ceil(n / ranks) consecutive ones from
/// r * ceil(n / ranks) on, of the last ranks fewer or none. Works for any number of ranks, also more than chunks.
///
/// Memory that is sharded holds a rank's shares bucket after bucket. Every rank's has the same size, because collectives
/// need it: a share that reaches beyond the end of its bucket keeps its room, and what lies there means nothing.
class ShardLayout {
 public:
  /// `sharded` false: every rank's memory holds the whole flat range, and owning only decides who writes what.
  ShardLayout(const ParameterTable& table, int rank, int ranks, bool sharded);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int ranks() const { return ranks_; }
  [[nodiscard]] bool sharded() const { return sharded_; }
  /// Elements of this rank's memory, a multiple of kChunk.
  [[nodiscard]] int64_t size() const { return size_; }
  /// Elements of a buffer for the whole flat range: the shares of a sharded bucket together may reach beyond the last bucket.
  [[nodiscard]] int64_t whole_size() const { return whole_size_; }

  /// What this rank's memory holds: everything, or what it owns.
  [[nodiscard]] const std::vector<HeldRange>& held() const { return held_; }
  /// What this rank owns, and writes into a checkpoint. Empty shares are left out.
  [[nodiscard]] const std::vector<HeldRange>& owned() const { return owned_; }

  /// Room of a bucket's share in sharded memory: every rank's has the same.
  struct Share {
    int64_t local = 0;
    int64_t size = 0;
  };
  [[nodiscard]] Share share(int bucket) const { return shares_[static_cast<size_t>(bucket)]; }

  /// With numbers per chunk of sharded memory gathered from all ranks, in order of rank: where that of chunk i of the flat range is.
  [[nodiscard]] std::vector<int64_t> gathered_chunks() const;

 private:
  int rank_;
  int ranks_;
  bool sharded_;
  int64_t flat_size_ = 0;
  int64_t size_ = 0;
  int64_t whole_size_ = 0;
  std::vector<HeldRange> held_, owned_;
  std::vector<Share> shares_;
  std::vector<int64_t> bucket_chunks_;
};

/// Initial values of elements [begin, begin + count) of a parameter: a pure function of (seed, name, index).
void initial_values(const Parameter& parameter, uint64_t seed, int64_t begin, int64_t count, float* out);

/// Elements [begin, end) of the flat range, multiples of kChunk, to host memory: initial values, zeros in the padding.
void initialize(const ParameterTable& table, uint64_t seed, int64_t begin, int64_t end, float* out);
/// All of it.
void initialize(const ParameterTable& table, uint64_t seed, float* flat);

}  // namespace kinoe
