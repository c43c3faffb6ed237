// Hugging Face's config.json of the supported families, read strictly and written as transformers does.
//
// Every key is either read, or known not to change the function the model computes, or refused by name. Dropout is
// such a key: it acts in training only, and training here has none. GPT-2's files carry their default of 0.1 and are
// accepted; a Llama file with attention_dropout was edited by somebody who wants it and is refused.

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "kernels/common/check.h"
#include "kernels/common/untrusted.h"
#include "trainer/model_config.h"

namespace kinoe {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 16;  // 3 is needed; task_specific_params and the like may have more

/// Keys of transformers' PretrainedConfig that concern storage, training code, generation or other tasks.
const std::set<std::string>& harmless_keys() {
  static const std::set<std::string> kKeys = {
      // about the file
      "_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map", "_commit_hash",
      "name_or_path",
      // how transformers runs it
      "use_cache", "return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states",
      "output_scores", "torchscript", "use_bfloat16", "tf_legacy_loss", "gradient_checkpointing",
      "chunk_size_feed_forward", "pretraining_tp", "reorder_and_upcast_attn", "_attn_implementation",
      "attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "is_decoder", "n_ctx",
      // other heads than the language model's
      "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
      "summary_proj_to_labels", "summary_first_dropout", "num_labels", "id2label", "label2id", "problem_type",
      "finetuning_task", "task_specific_params",
      // tokens and generation
      "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id", "tokenizer_class", "prefix",
      "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
      "bad_words_ids", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
      "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
      "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
      "num_return_sequences", "exponential_decay_length_penalty", "remove_invalid_values"};
  return kKeys;
}

/// model_type to the class that computes logits.
const std::map<std::string, std::string>& architectures() {
  static const std::map<std::string, std::string> kClasses = {{"gpt2", "GPT2LMHeadModel"},
                                                              {"llama", "LlamaForCausalLM"},
                                                              {"mistral", "MistralForCausalLM"},
                                                              {"qwen2", "Qwen2ForCausalLM"},
                                                              {"qwen3", "Qwen3ForCausalLM"}};
  return kClasses;
}

/// One JSON object whose keys are taken one by one; what is left at the end is refused.
class Keys {
 public:
  Keys(const Json& object, std::string source) : object_(object), source_(std::move(source)) {
    if (!object.is_object())
      fail(ExitCode::usage, source_, ": expected a JSON object, got ", object.type_name());
  }

  /// The value, or nullptr where the key is missing or null.
  const Json* find(const std::string& key) {
    taken_.insert(key);
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  bool contains(const std::string& key) const { return object_.contains(key); }

  int64_t integer(const std::string& key) {
    const Json* value = find(key);
    if (!value) fail(ExitCode::usage, source_, ": the key '", key, "' is missing");
    return integer_of(key, *value);
  }
  int64_t integer(const std::string& key, int64_t otherwise) {
    const Json* value = find(key);
    return value ? integer_of(key, *value) : otherwise;
  }
  double real(const std::string& key, double otherwise) {
    const Json* value = find(key);
    if (!value) return otherwise;
    if (!value->is_number()) refuse(key, "a number");
    return value->get<double>();
  }
  bool boolean(const std::string& key, bool otherwise) {
    const Json* value = find(key);
    if (!value) return otherwise;
    if (!value->is_boolean()) refuse(key, "true or false");
    return value->get<bool>();
  }
  std::string text(const std::string& key, const std::string& otherwise) {
    const Json* value = find(key);
    if (!value) return otherwise;
    if (!value->is_string()) refuse(key, "a string");
    return value->get<std::string>();
  }
  /// Some models end in one of several tokens: the first is taken. transformers writes GPT-2's 50256 whatever the vocabulary: an id
  /// outside of it never occurs and is none.
  int64_t token(const std::string& key, int64_t vocab_size) {
    const Json* value = find(key);
    if (value && value->is_array() && !value->empty()) value = &value->front();
    const int64_t id = value ? integer_of(key, *value) : -1;
    return id < vocab_size ? id : -1;
  }

  /// `expected` says what is implemented.
  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const {
    fail(ExitCode::usage, source_, ": '", key, "' must be ", expected, ", got ",
         one_line(object_.at(key).dump(), 200));
  }

  void refuse_rest(const std::set<std::string>& harmless) const {
    for (const auto& [key, value] : object_.items())
      if (!taken_.contains(key) && !harmless.contains(key))
        fail(ExitCode::usage, source_, ": the key '", one_line(key, 200), "' (", one_line(value.dump(), 200),
             ") is not implemented; remove it only if the model does not need it");
  }

 private:
  int64_t integer_of(const std::string& key, const Json& value) const {
    // No size is near this bound; below it four times a size does not overflow.
    constexpr int64_t kLargest = int64_t{1} << 48;
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > kLargest) ||
        value.get<int64_t>() < -kLargest)
      refuse(key, "an integer below 2^48");
    return value.get<int64_t>();
  }

  const Json& object_;
  std::string source_;
  std::set<std::string> taken_;
};

void read_gpt2(Keys& keys, ModelConfig& c) {
  c.family = Family::gpt2;
  c.layers = keys.integer("n_layer");
  c.hidden = keys.integer("n_embd");
  c.heads = c.kv_heads = keys.integer("n_head");
  c.head_dim = c.heads > 0 ? c.hidden / c.heads : 0;
  c.ffn = keys.integer("n_inner", 4 * c.hidden);
  c.max_positions = keys.integer("n_positions");
  c.norm = NormKind::layernorm;
  c.position = PositionKind::learned;
  c.mlp = MlpKind::gelu_tanh;
  c.norm_eps = keys.real("layer_norm_epsilon", 1e-5);
  c.qkv_bias = c.output_bias = c.mlp_bias = c.conv1d_weights = true;
  c.tied = keys.boolean("tie_word_embeddings", true);
  const std::string activation = keys.text("activation_function", "gelu_new");
  if (activation != "gelu_new" && activation != "gelu_pytorch_tanh")
    keys.refuse("activation_function", "gelu_new or gelu_pytorch_tanh");
  if (!keys.boolean("scale_attn_weights", true)) keys.refuse("scale_attn_weights", "true");
  if (keys.boolean("scale_attn_by_inverse_layer_idx", false))
    keys.refuse("scale_attn_by_inverse_layer_idx", "false");
  for (const char* dropout : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) keys.real(dropout, 0.0);
}

/// rope_scaling of transformers 4, or rope_parameters of transformers 5, which also holds rope_theta.
void read_rope(Keys& keys, const std::string& source, ModelConfig& c) {
  c.rope_theta = keys.real("rope_theta", 10000.0);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Json* object = keys.find(key);
    if (!object) continue;
    Keys rope(*object, source + ": " + key);
    const std::string old_type = rope.text("type", "default");
    const std::string type = rope.text("rope_type", old_type);
    c.rope_theta = rope.real("rope_theta", c.rope_theta);
    if (type == "llama3") {
      c.rope_factor = rope.real("factor", 1.0);
      c.rope_low_freq_factor = rope.real("low_freq_factor", 1.0);
      c.rope_high_freq_factor = rope.real("high_freq_factor", 4.0);
      c.rope_original_positions = rope.integer("original_max_position_embeddings");
    } else if (type != "default") {
      rope.refuse(rope.contains("rope_type") ? "rope_type" : "type", "default or llama3");
    }
    rope.refuse_rest({});
    if (c.rope_factor == 1.0) {  // no stretching has one form only
      c.rope_low_freq_factor = ModelConfig{}.rope_low_freq_factor;
      c.rope_high_freq_factor = ModelConfig{}.rope_high_freq_factor;
      c.rope_original_positions = ModelConfig{}.rope_original_positions;
    }
  }
}

/// Attention over a window of the last positions is not implemented. Each class has its own default: Mistral's is a window of
/// 4096, Qwen's keys say a size and, apart from it, whether it is used.
void refuse_windows(Keys& keys, const std::string& source, const std::string& type) {
  const bool with_switch = type == "qwen2" || type == "qwen3";
  if (with_switch) {
    if (keys.boolean("use_sliding_window", false)) keys.refuse("use_sliding_window", "false");
    keys.integer("max_window_layers", 0);
  } else if (type == "mistral" && !keys.contains("sliding_window")) {
    fail(ExitCode::usage, source,
         ": the key 'sliding_window' is missing, which means 4096 for Mistral; attention windows are not "
         "implemented, 'sliding_window': null says that there is none");
  }
  if (keys.integer("sliding_window", 0) != 0 && !with_switch) keys.refuse("sliding_window", "null");
  if (const Json* layers = keys.find("layer_types"))
    for (const Json& layer : *layers)
      if (layer != "full_attention") keys.refuse("layer_types", "full_attention in every layer");
}

/// Llama and the families that share its decoder.
void read_llama(Keys& keys, const std::string& source, const std::string& type, ModelConfig& c) {
  c.family = type == "qwen2" ? Family::qwen2 : type == "qwen3" ? Family::qwen3 : Family::llama;
  c.layers = keys.integer("num_hidden_layers");
  c.hidden = keys.integer("hidden_size");
  c.heads = keys.integer("num_attention_heads");
  // Only Llama's default is the number of heads; elsewhere it is a number that no small model means.
  c.kv_heads =
      type == "llama" ? keys.integer("num_key_value_heads", c.heads) : keys.integer("num_key_value_heads");
  if (!keys.find("head_dim") && c.heads > 0 && c.hidden % c.heads != 0)
    fail(ExitCode::usage, source, ": hidden_size ", c.hidden, " is not a multiple of num_attention_heads ",
         c.heads, "; give head_dim");
  const int64_t split = c.heads > 0 ? c.hidden / c.heads : 0;
  c.head_dim = type == "qwen3" ? keys.integer("head_dim") : keys.integer("head_dim", split);
  c.ffn = keys.integer("intermediate_size");
  c.max_positions = keys.integer("max_position_embeddings");
  c.norm = NormKind::rmsnorm;
  c.position = PositionKind::rope;
  c.mlp = MlpKind::swiglu;
  c.norm_eps = keys.real("rms_norm_eps", 1e-6);
  const bool attention_bias = keys.boolean("attention_bias", false);
  c.mlp_bias = keys.boolean("mlp_bias", false);
  if (attention_bias && type != "llama" && type != "qwen3") keys.refuse("attention_bias", "false");
  if (c.mlp_bias && type != "llama") keys.refuse("mlp_bias", "false");
  c.qkv_bias = attention_bias || type == "qwen2";
  c.output_bias = attention_bias;
  c.qk_norm = type == "qwen3";
  c.tied = keys.boolean("tie_word_embeddings", false);
  read_rope(keys, source, c);
  refuse_windows(keys, source, type);
  if (keys.text("hidden_act", "silu") != "silu") keys.refuse("hidden_act", "silu");
  if (keys.real("attention_dropout", 0.0) != 0.0) keys.refuse("attention_dropout", "0");
  if (keys.real("partial_rotary_factor", 1.0) != 1.0) keys.refuse("partial_rotary_factor", "1");
  if (keys.boolean("use_mrope", false)) keys.refuse("use_mrope", "false");
}

/// Keys any family may carry, of which only one value is implemented.
void read_common(Keys& keys, ModelConfig& c) {
  c.vocab_size = keys.integer("vocab_size");
  c.init_std = keys.real("initializer_range", 0.02);
  c.bos_token = keys.token("bos_token_id", c.vocab_size);
  c.eos_token = keys.token("eos_token_id", c.vocab_size);
  for (const char* key : {"add_cross_attention", "is_encoder_decoder", "tie_encoder_decoder"})
    if (keys.boolean(key, false)) keys.refuse(key, "false");
  if (keys.find("cross_attention_hidden_size")) keys.refuse("cross_attention_hidden_size", "null");
  if (const Json* heads = keys.find("pruned_heads"); heads && !heads->empty())
    keys.refuse("pruned_heads", "empty");
}

}  // namespace

ModelConfig model_config_from_json(const std::string& text, const std::string& source) {
  if (nested_deeper(text, kMaxDepth))
    fail(ExitCode::usage, source, ": the JSON is nested deeper than ", kMaxDepth, " levels");
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::parse_error& error) {
    fail(ExitCode::usage, source, ": expected JSON; it breaks off at byte ", error.byte);
  } catch (const Json::exception&) {
    fail(ExitCode::usage, source, ": the JSON holds a number that is too large");
  }
  Keys keys(json, source);
  const std::string type = keys.text("model_type", "");
  const auto known = architectures().find(type);
  if (known == architectures().end()) {
    const char* expected = "gpt2, llama, mistral, qwen2 or qwen3";
    if (type.empty()) fail(ExitCode::usage, source, ": the key 'model_type' is missing; expected ", expected);
    keys.refuse("model_type", expected);
  }
  const std::string& architecture = known->second;
  if (const Json* names = keys.find("architectures"); names && *names != Json::array({architecture}))
    keys.refuse("architectures", cat("[\"", architecture, "\"]"));

  ModelConfig c;
  if (type == "gpt2") {
    read_gpt2(keys, c);
  } else {
    read_llama(keys, source, type, c);
  }
  read_common(keys, c);
  keys.refuse_rest(harmless_keys());
  try {
    validate(c);
  } catch (const Error& error) {
    fail(error.code, source, ": ", error.what());
  }
  return c;
}

std::string model_config_to_json(const ModelConfig& c, const std::string& torch_dtype) {
  CHECK(torch_dtype == "float32" || torch_dtype == "bfloat16", "torch_dtype ", torch_dtype);
  const auto token = [](int64_t id) { return id < 0 ? Json() : Json(id); };
  Json json = {{"vocab_size", c.vocab_size},
               {"initializer_range", c.init_std},
               {"tie_word_embeddings", c.tied},
               {"bos_token_id", token(c.bos_token)},
               {"eos_token_id", token(c.eos_token)},
               {"torch_dtype", torch_dtype},
               {"use_cache", true}};
  if (c.family == Family::gpt2) {
    json.update(Json{{"architectures", {"GPT2LMHeadModel"}},
                     {"model_type", "gpt2"},
                     {"n_layer", c.layers},
                     {"n_embd", c.hidden},
                     {"n_head", c.heads},
                     {"n_inner", c.ffn},
                     {"n_positions", c.max_positions},
                     {"n_ctx", c.max_positions},
                     {"layer_norm_epsilon", c.norm_eps},
                     {"activation_function", "gelu_new"},
                     {"scale_attn_weights", true},
                     {"resid_pdrop", 0.0},
                     {"embd_pdrop", 0.0},
                     {"attn_pdrop", 0.0}});
  } else {
    const std::string type = c.family == Family::qwen2   ? "qwen2"
                             : c.family == Family::qwen3 ? "qwen3"
                                                         : "llama";
    json.update(Json{{"architectures", {architectures().at(type)}},
                     {"model_type", type},
                     {"num_hidden_layers", c.layers},
                     {"hidden_size", c.hidden},
                     {"num_attention_heads", c.heads},
                     {"num_key_value_heads", c.kv_heads},
                     {"head_dim", c.head_dim},
                     {"intermediate_size", c.ffn},
                     {"max_position_embeddings", c.max_positions},
                     {"rms_norm_eps", c.norm_eps},
                     {"hidden_act", "silu"},
                     {"attention_dropout", 0.0},
                     {"rope_theta", c.rope_theta},
                     {"rope_scaling", Json()}});
    if (c.family != Family::qwen2) json["attention_bias"] = c.qkv_bias;
    if (c.family == Family::llama) {
      json["mlp_bias"] = c.mlp_bias;
    } else {
      json["use_sliding_window"] = false;
      json["sliding_window"] = Json();
      json["max_window_layers"] = c.layers;
    }
    if (c.rope_factor != 1.0)
      json["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", c.rope_factor},
                              {"low_freq_factor", c.rope_low_freq_factor},
                              {"high_freq_factor", c.rope_high_freq_factor},
                              {"original_max_position_embeddings", c.rope_original_positions}};
  }
  return json.dump(2) + "\n";
}

std::string generation_config_json(const ModelConfig& config) {
  nlohmann::ordered_json json = {{"_from_model_config", true}};
  if (config.bos_token >= 0) json["bos_token_id"] = config.bos_token;
  if (config.eos_token >= 0) json["eos_token_id"] = config.eos_token;
  return json.dump(2) + "\n";
}

}  // namespace kinoe
