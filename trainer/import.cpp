// Names, types and layouts of others on their way into the flat range.
#include "trainer/import.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <unordered_set>
#include <vector>

#include "trainer/safetensors.h"

namespace kinoe {
namespace {

constexpr size_t kListed = 8;  // names in one message

bool can_be_read(FileDType type) {
  return type == FileDType::f32 || type == FileDType::bf16 || type == FileDType::f16;
}

/// `from` holds elements of `type`; to fp32, exactly.
void widen(FileDType type, const std::vector<char>& from, float* to, size_t count) {
  CHECK(can_be_read(type), "weights of type ", name_of(type));
  if (type == FileDType::f32) {
    std::memcpy(to, from.data(), count * sizeof(float));
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, from.data() + i * sizeof(bits), sizeof(bits));
    to[i] = type == FileDType::bf16 ? to_float(bf16{bits}) : half_to_float(bits);
  }
}

void require_finite(const float* values, size_t count, const std::string& name, const std::string& source) {
  if (!std::all_of(values, values + count, [](float x) { return std::isfinite(x); }))
    fail(ExitCode::checkpoint, "tensor ", name, " in '", source,
         "' holds NaN or infinity; use an earlier checkpoint");
}

std::string listed(const std::string& what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = cat("; ", names.size(), " ", what, ": ");
  for (size_t i = 0; i < std::min(names.size(), kListed); ++i) text += (i ? ", " : "") + names[i];
  return names.size() > kListed ? text + ", ..." : text;
}

// ------------------------------------------------------------------------------------- Hugging Face directories

constexpr std::array<const char*, 2> kPrefixes = {"transformer.", "model."};

/// Files written from the model without its head (GPT-2's on the hub are) lack the first part of the names.
std::string without_prefix(const std::string& name) {
  for (const std::string prefix : kPrefixes)
    if (name.starts_with(prefix)) return name.substr(prefix.size());
  return name;
}

const TensorPlace* find_parameter(const SafetensorsReader& reader, const Parameter& p) {
  const TensorPlace* place = reader.find(p.name);
  return place != nullptr ? place : reader.find(without_prefix(p.name));
}

/// Constants that older versions of transformers stored with the weights: GPT-2's causal mask, RoPE's frequencies.
bool is_known_constant(const std::string& name) {
  const bool of_gpt2_layer = without_prefix(name).starts_with("h.");
  return (of_gpt2_layer && (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"))) ||
         name.ends_with(".rotary_emb.inv_freq");
}

/// Calls use(first element, count, bytes) for consecutive blocks of a tensor.
template <class Use>
void for_blocks(const SafetensorsReader& reader, const TensorPlace& tensor, const Use& use) {
  const size_t element = size_of(tensor.info.dtype), step = kWriteBlock / element;
  const size_t total = static_cast<size_t>(tensor.bytes) / element;
  std::vector<char> block;
  for (size_t first = 0; first < total; first += step) {
    const size_t count = std::min(step, total - first);
    block.resize(count * element);
    reader.read(tensor, first * element, block.data(), block.size());
    use(first, count, block);
  }
}

/// A tied head may be stored as well; it must then be what it is tied to.
void require_same_head(const SafetensorsReader& reader, const TensorPlace& head, const TensorPlace& embedding,
                       const std::string& source) {
  bool same = head.info.dtype == embedding.info.dtype && head.info.shape == embedding.info.shape;
  std::vector<char> other;
  if (same)
    for_blocks(reader, head, [&](size_t first, size_t, const std::vector<char>& block) {
      other.resize(block.size());
      reader.read(embedding, first * size_of(embedding.info.dtype), other.data(), other.size());
      same = same && block == other;
    });
  if (!same)
    fail(ExitCode::checkpoint, "'", source, "' holds ", head.info.name, " unequal to ", embedding.info.name,
         ", but its config.json ties them; set tie_word_embeddings to false there if the head is its own");
}

void read_directory(Files& files, const std::string& source, const ParameterTable& table, float* flat) {
  const SafetensorsReader reader(files, source);
  std::vector<std::string> missing, extra, different, types;
  std::unordered_set<const TensorPlace*> taken;
  for (const Parameter& p : table.parameters()) {
    const TensorPlace* tensor = find_parameter(reader, p);
    if (tensor == nullptr) {
      missing.push_back(p.name);
      continue;
    }
    taken.insert(tensor);
    if (tensor->info.shape != p.shape)
      different.push_back(
          cat(p.name, " ", shape_text(tensor->info.shape), " instead of ", shape_text(p.shape)));
    if (!can_be_read(tensor->info.dtype)) types.push_back(cat(p.name, " ", name_of(tensor->info.dtype)));
  }
  const auto is_parameter = [&](const char* name) {
    return std::any_of(table.parameters().begin(), table.parameters().end(),
                       [&](const Parameter& p) { return p.name == name; });
  };
  const TensorPlace* tied_head = is_parameter("lm_head.weight") ? nullptr : reader.find("lm_head.weight");
  for (const TensorPlace& tensor : reader.tensors())
    if (!taken.contains(&tensor) && &tensor != tied_head && !is_known_constant(tensor.info.name))
      extra.push_back(tensor.info.name);
  if (!missing.empty() || !extra.empty() || !different.empty() || !types.empty())
    fail(ExitCode::checkpoint, "the weights in '", source, "' do not fit its config.json",
         listed("missing", missing), listed("not known to the model", extra),
         listed("of another shape", different), listed("not F32, BF16 or F16", types));

  for (const Parameter& p : table.parameters()) {
    const TensorPlace& tensor = *find_parameter(reader, p);
    for_blocks(reader, tensor, [&](size_t first, size_t count, const std::vector<char>& block) {
      float* to = flat + p.offset + first;
      widen(tensor.info.dtype, block, to, count);
      require_finite(to, count, p.name, source);
    });
    const bool token_table = p.name == "transformer.wte.weight" || p.name == "model.embed_tokens.weight";
    if (tied_head != nullptr && token_table) require_same_head(reader, *tied_head, tensor, source);
  }
}

// ------------------------------------------------------------------------------------------ llm.c's model files
//
// 256 little-endian int32, then all tensors back to back in fp32 (version 3) or bf16 (version 5): one kind of tensor after the
// other, all layers of it together. Matrices are [out, in] where Hugging Face's GPT-2 has [in, out]; the token table has
// padded_vocab_size rows. (karpathy/llm.c, train_gpt2.py, write_model)

constexpr int32_t kLlmcMagic = 20240326;
constexpr size_t kLlmcHeaderBytes = 256 * sizeof(int32_t);

struct LlmcHeader {
  int32_t magic, version, positions, vocab, layers, heads, channels, padded_vocab;
};

LlmcHeader read_llmc_header(const File& file) {
  LlmcHeader h{};
  if (file.size() < kLlmcHeaderBytes)
    fail(ExitCode::checkpoint, file.path(), ": ", file.size(), " bytes, a model file of llm.c begins with ",
         kLlmcHeaderBytes, ": it is truncated");
  file.read_at(0, &h, sizeof(h));
  if (h.version != 3 && h.version != 5)
    fail(ExitCode::checkpoint, file.path(), ": a model file of llm.c of version ", h.version,
         "; versions 3 (fp32) and 5 (bf16) can be read: write it again with a newer llm.c");
  return h;
}

ModelConfig llmc_config(const File& file, const LlmcHeader& h) {
  ModelConfig c = load_model_config("gpt2-124m");
  c.vocab_size = h.vocab;
  c.layers = h.layers;
  c.hidden = h.channels;
  c.heads = c.kv_heads = h.heads;
  c.head_dim = h.heads > 0 ? h.channels / h.heads : 0;
  c.ffn = int64_t{4} * h.channels;
  c.max_positions = h.positions;
  if (c.vocab_size <= c.eos_token) c.bos_token = c.eos_token = -1;
  try {
    validate(c);
  } catch (const Error& error) {
    fail(ExitCode::checkpoint, file.path(), ": its header describes no model: ", error.what());
  }
  if (h.padded_vocab < h.vocab)
    fail(ExitCode::checkpoint, file.path(), ": its header has ", h.padded_vocab,
         " padded rows for a vocabulary of ", h.vocab);
  return c;
}

/// Kinds of tensors in the order of the file. `layered`: one of every layer, the name follows "transformer.h.N.".
struct LlmcKind {
  const char* name;
  bool layered;
};
constexpr std::array<LlmcKind, 16> kLlmcOrder = {{{"transformer.wte.weight", false},
                                                  {"transformer.wpe.weight", false},
                                                  {"ln_1.weight", true},
                                                  {"ln_1.bias", true},
                                                  {"attn.c_attn.weight", true},
                                                  {"attn.c_attn.bias", true},
                                                  {"attn.c_proj.weight", true},
                                                  {"attn.c_proj.bias", true},
                                                  {"ln_2.weight", true},
                                                  {"ln_2.bias", true},
                                                  {"mlp.c_fc.weight", true},
                                                  {"mlp.c_fc.bias", true},
                                                  {"mlp.c_proj.weight", true},
                                                  {"mlp.c_proj.bias", true},
                                                  {"transformer.ln_f.weight", false},
                                                  {"transformer.ln_f.bias", false}}};

void read_llmc(Files& files, const std::string& source, const ParameterTable& table, float* flat) {
  const std::unique_ptr<File> file = files.open_read(source);
  const LlmcHeader header = read_llmc_header(*file);
  const FileDType type = header.version == 5 ? FileDType::bf16 : FileDType::f32;
  const size_t element = size_of(type);

  // The tensors in the order of the file; the token table has more rows there than here.
  std::vector<const Parameter*> order;
  for (const LlmcKind& kind : kLlmcOrder)
    for (int64_t l = 0; l < (kind.layered ? header.layers : 1); ++l) {
      const std::string name = kind.layered ? cat("transformer.h.", l, ".", kind.name) : kind.name;
      const auto p = std::find_if(table.parameters().begin(), table.parameters().end(),
                                  [&](const Parameter& q) { return q.name == name; });
      CHECK(p != table.parameters().end(), source, " holds ", name, ", the model does not");
      order.push_back(&*p);
    }
  CHECK(order.size() == table.parameters().size(), source, " has fewer tensors than the model");
  const auto padding = static_cast<uint64_t>(header.padded_vocab - header.vocab) *
                       static_cast<uint64_t>(header.channels) * element;
  uint64_t expected = kLlmcHeaderBytes + padding;
  for (const Parameter* p : order) expected += static_cast<uint64_t>(p->size) * element;
  if (file->size() != expected)
    fail(ExitCode::checkpoint, source, ": ", file->size(), " bytes, its header says ", expected,
         file->size() < expected ? ": it is truncated" : ": there is more than the model in it");

  uint64_t at = kLlmcHeaderBytes;
  std::vector<char> bytes;
  std::vector<float> values;
  for (const Parameter* p : order) {
    const auto count = static_cast<size_t>(p->size);
    bytes.resize(count * element);
    values.resize(count);
    file->read_at(at, bytes.data(), bytes.size());
    widen(type, bytes, values.data(), count);
    require_finite(values.data(), count, p->name, source);
    float* to = flat + p->offset;
    const bool layer_matrix = p->shape.size() == 2 && p->name.starts_with("transformer.h.");
    if (layer_matrix) {
      const auto in = static_cast<size_t>(p->shape[0]), out = static_cast<size_t>(p->shape[1]);
      for (size_t o = 0; o < out; ++o)
        for (size_t i = 0; i < in; ++i) to[i * out + o] = values[o * in + i];
    } else {
      std::copy(values.begin(), values.end(), to);
    }
    at += bytes.size() + (p == order.front() ? padding : 0);
  }
}

}  // namespace

bool is_llmc_model(Files& files, const std::string& path) {
  if (files.kind(path) != Files::Kind::file) return false;
  const std::unique_ptr<File> file = files.open_read(path);
  int32_t magic = 0;
  if (file->size() < sizeof(magic)) return false;
  file->read_at(0, &magic, sizeof(magic));
  return magic == kLlmcMagic;
}

ModelConfig source_config(Files& files, const std::string& source) {
  if (!is_llmc_model(files, source)) return load_model_config(join_path(source, "config.json"));
  const std::unique_ptr<File> file = files.open_read(source);
  return llmc_config(*file, read_llmc_header(*file));
}

void read_weights(Files& files, const std::string& source, const ParameterTable& table, float* flat) {
  std::fill_n(flat, table.flat_size(), 0.0F);
  if (is_llmc_model(files, source))
    read_llmc(files, source, table, flat);
  else
    read_directory(files, source, table, flat);
}

}  // namespace kinoe
