// The tables of options, and one builder for each kind of value: count, real number, word, text, paths, flag.
#include "trainer/config_options.h"

#include <charconv>
#include <cmath>
#include <limits>

#include "trainer/config_toml.h"

namespace kinoe {
namespace {

using Strings = std::vector<std::string>;

// ---- Builders, by kind of value ------------------------------------------------------------------------------------

template <class T>
const T& stored(const T& field) {
  return field;
}
template <class T>
const T& stored(const std::optional<T>& field) {
  return *field;
}
template <class T>
bool is_set(const T&) {
  return true;
}
template <class T>
bool is_set(const std::optional<T>& field) {
  return field.has_value();
}

template <class C, class Field>
Option<C> count(std::string name, std::string group, Field C::*field, int64_t lowest, std::string help) {
  return {std::move(name),
          std::move(group),
          "N",
          std::move(help),
          Arity::one,
          [field, lowest](C& c, const Strings& v, const std::string& what) {
            c.*field = parse_count(v[0], what, lowest);
          },
          [field](const C& c) { return is_set(c.*field) ? std::to_string(stored(c.*field)) : ""; }};
}

template <class C, class Field>
Option<C> seconds(std::string name, std::string group, Field C::*field, std::string help) {
  Option<C> option = count(std::move(name), std::move(group), field, 1, std::move(help));
  option.metavar = "SECONDS";
  option.read = [field](C& c, const Strings& v, const std::string& what) {
    c.*field = parse_count(v[0], what, 1, "seconds");
  };
  return option;
}

/// Allowed values of a real number, tested as the float that the kernels will see: 1 - 1e-12 is 1 there.
struct Range {
  const char* text;
  bool (*contains)(float);
};
constexpr Range kPositive = {"a finite number above 0",
                             [](float x) { return x >= std::numeric_limits<float>::min(); }};
constexpr Range kNotNegative = {"a finite number, 0 or more", [](float x) { return x >= 0; }};
constexpr Range kFraction = {"a fraction in [0, 1]", [](float x) { return x >= 0 && x <= 1; }};
constexpr Range kBeta = {"a number in [0, 1)", [](float x) { return x >= 0 && x < 1; }};
constexpr Range kProbability = {"a number in (0, 1]", [](float x) { return x > 0 && x <= 1; }};

template <class C, class Field>
Option<C> real(std::string name, std::string group, Field C::*field, Range range, std::string help) {
  return {std::move(name),
          std::move(group),
          "X",
          std::move(help),
          Arity::one,
          [field, range](C& c, const Strings& v, const std::string& what) {
            double x = 0;
            const char* end = v[0].data() + v[0].size();
            const auto [stop, problem] = std::from_chars(v[0].data(), end, x);
            if (problem != std::errc() || stop != end || !std::isfinite(static_cast<float>(x)) ||
                !range.contains(static_cast<float>(x)))
              fail(ExitCode::usage, what, ": expected ", range.text, ", got '", v[0], "'");
            c.*field = x;
          },
          [field](const C& c) { return is_set(c.*field) ? toml_float(stored(c.*field)) : ""; }};
}

/// A word out of a list. `from` turns its index into the field's value, `to` back.
template <class C, class Field, class From, class To>
Option<C> choice(std::string name, std::string group, Field C::*field, const Strings& words, From from, To to,
                 std::string help) {
  std::string metavar;
  for (const std::string& word : words) metavar += (metavar.empty() ? "" : "|") + word;
  return {std::move(name),
          std::move(group),
          metavar,
          std::move(help),
          Arity::one,
          [field, words, from, metavar](C& c, const Strings& v, const std::string& what) {
            for (size_t i = 0; i < words.size(); ++i)
              if (words[i] == v[0]) {
                c.*field = from(i, v[0]);
                return;
              }
            fail(ExitCode::usage, what, ": expected ", metavar, ", got '", v[0], "'");
          },
          [field, to](const C& c) { return is_set(c.*field) ? toml_string(to(stored(c.*field))) : ""; }};
}

template <class C>
Option<C> word(std::string name, std::string group, std::string C::*field, const Strings& words,
               std::string help) {
  return choice(
      std::move(name), std::move(group), field, words, [](size_t, const std::string& text) { return text; },
      [](const std::string& text) { return text; }, std::move(help));
}

template <class C, class Field>
Option<C> number_type(std::string name, std::string group, Field C::*field, const Strings& words,
                      std::string help) {
  return choice(
      std::move(name), std::move(group), field, words,
      [](size_t, const std::string& text) { return text == "bf16" ? DType::bf16 : DType::f32; },
      [](DType type) { return name_of(type); }, std::move(help));
}

template <class C>
Option<C> device(std::string group, DeviceChoice C::*field) {
  return choice(
      "device", std::move(group), field, {"auto", "cpu", "cuda"},
      [](size_t i, const std::string&) { return static_cast<DeviceChoice>(i); },
      [](DeviceChoice value) { return name_of(value); },
      "where to compute; auto: the GPU if there is one, else the CPU");
}

template <class C>
Option<C> text(std::string name, std::string group, std::string metavar, std::string C::*field,
               std::string help) {
  return {std::move(name),
          std::move(group),
          std::move(metavar),
          std::move(help),
          Arity::one,
          [field](C& c, const Strings& v, const std::string& what) {
            if (v[0].empty()) fail(ExitCode::usage, what, ": expected a value, got an empty text");
            c.*field = v[0];
          },
          [field](const C& c) { return (c.*field).empty() ? "" : toml_string(c.*field); }};
}

template <class C>
Option<C> texts(std::string name, std::string group, Strings C::*field, std::string metavar,
                std::string help) {
  return {std::move(name),
          std::move(group),
          std::move(metavar),
          std::move(help),
          Arity::many,
          [field](C& c, const Strings& v, const std::string& what) {
            if (v.empty()) fail(ExitCode::usage, what, ": expected at least one value, got an empty list");
            for (const std::string& path : v)
              if (path.empty()) fail(ExitCode::usage, what, ": expected a value, got an empty text");
            c.*field = v;
          },
          [field](const C& c) {
            std::string list;
            for (const std::string& path : c.*field) list += (list.empty() ? "" : ", ") + toml_string(path);
            return list.empty() ? "" : "[" + list + "]";
          }};
}

template <class C>
Option<C> paths(std::string name, std::string group, Strings C::*field, std::string help) {
  return texts(std::move(name), std::move(group), field, "PATH", std::move(help));
}

template <class C>
Option<C> flag(std::string name, std::string group, bool C::*field, std::string help) {
  return {std::move(name),
          std::move(group),
          "",
          std::move(help),
          Arity::flag,
          [field](C& c, const Strings& v, const std::string& what) {
            if (v[0] != "true" && v[0] != "false")
              fail(ExitCode::usage, what, ": expected true or false, got '", v[0], "'");
            c.*field = v[0] == "true";
          },
          [field](const C& c) { return c.*field ? "true" : ""; }};
}

template <class C, class Other>
Option<C> instead_of(Option<C> option, const std::string& other, Other C::*field) {
  option.excludes = other;
  option.clear_other = [field](C& c) { c.*field = {}; };
  return option;
}

}  // namespace

// ---- The tables ----------------------------------------------------------------------------------------------------

std::vector<Option<RunConfig>> run_options() {
  using C = RunConfig;
  const std::string model = "Model", dir = "Run directory", length = "Length and batch", opt = "Optimizer",
                    eval = "Evaluation", hardware = "Hardware and numbers", ranks = "Ranks",
                    reports = "Reports";
  return {
      paths("data", "Data", &C::data,
            "training data: files or quoted globs, PATH or PATH:WEIGHT for a mixture; llm.c shards (.bin), "
            "Megatron data sets (NAME of NAME.bin and NAME.idx), or UTF-8 text, which is trained on byte by "
            "byte (default: stories made by this program)"),
      paths("val-data", "Data", &C::val_data,
            "validation data, files or quoted globs (default: none; the stories have their own)"),
      flag("document-mask", "Data", &C::document_mask,
           "attention stops where documents end: behind the end-of-text token (of the data's manifest.json, "
           "else "
           "the model's eos_token_id) and at the bounds of a Megatron index. Every target still counts in "
           "the loss, and positions go on counting through the sequence"),
      text("model", model, "PRESET|HF_DIR|FILE", &C::model,
           "a preset, a Hugging Face directory or a config.json: the shape; weights start random (default: "
           "tiny for the stories, small for text). Presets: tiny, small, small-llama, gpt2-124m, gpt2-355m, "
           "gpt2-774m, gpt2-1558m, llama3-1b, llama3-3b, llama3-8b, qwen2.5-0.5b, "
           "qwen2.5-1.5b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, mistral-7b-v0.3"),
      text("init-from", model, "HF_DIR|RUN|FILE", &C::init_from,
           "start from these weights instead of random ones: a Hugging Face directory of a supported family, "
           "a "
           "run (its last checkpoint), a checkpoint, or a model file of llm.c; --model defaults to theirs"),
      text("tokenizer", model, "DIR", &C::tokenizer,
           "directory with the tokenizer's files, copied into every checkpoint (default: those beside the "
           "weights of --init-from)"),
      text("out", dir, "DIR", &C::out,
           "run directory; must be new or empty unless --resume is given (default: a new runs/<time>)"),
      count("save-every", dir, &C::save_every, 0,
            "steps between checkpoints; 0: only at the end (default: a tenth of the run)"),
      flag("no-checkpoints", dir, &C::no_checkpoints,
           "write none, not even at the end: for measuring, and where the disk cannot hold one"),
      count("keep", dir, &C::keep, 0, "keep the N newest checkpoints only; 0: all"),
      count("keep-every", dir, &C::keep_every, 0,
            "with --keep: keep those of every N-th step as well; 0: none"),
      text("resume", dir, "never|auto|must|latest-valid|PATH", &C::resume,
           "go on from a checkpoint; auto: from the newest in --out if there is one; must: else stop; "
           "latest-valid: the newest that is not damaged; or from a run directory or checkpoint. "
           "Options not given keep their recorded values"),
      texts("override", dir, &C::override_, "NAME",
            "with --resume: options whose new value may replace the recorded one, such as lr or data"),
      count("stop-after", dir, &C::stop_after, 1,
            "save and stop after this step, exit code 75; the schedule still aims at the end of the run"),
      word("data-start", dir, &C::data_start, {"fresh", "continue"},
           "with --init-from a checkpoint of this program: begin the data's order anew, or where the "
           "checkpoint's run had come to"),
      instead_of(count("steps", length, &C::steps, 1,
                       "optimizer steps (default: 1000; 3600 below 300 k parameters)"),
                 "tokens", &C::tokens),
      instead_of(
          count("tokens", length, &C::tokens, 1, "instead of --steps: tokens, rounded up to whole steps"),
          "steps", &C::steps),
      count("global-batch", length, &C::global_batch, 1,
            "sequences per step (default: 512 tokens' worth below 300 k parameters, 4096 below 10 M, 524288 "
            "below 1 B, 1048576 below 5 B, then 2097152)"),
      count("micro-batch", length, &C::micro_batch, 1,
            "sequences per forward pass; need not divide the global batch (default: 16384 tokens' "
            "worth on a GPU; on a CPU 4096, from 10 M parameters 1024)"),
      count("seq-len", length, &C::seq_len, 1,
            "tokens per sequence (default: the model's positions, at most 1024)"),
      count("seed", length, &C::seed, 0, "of initial weights and data order"),
      real("lr", opt, &C::lr, kPositive,
           "peak learning rate (default by parameters: 6e-3 below 300 k, 2e-3 below 10 M, 6e-4 below 200 M, "
           "3e-4 below 500 M, 2.5e-4 below 1 B, 2e-4 below 2 B, 1.6e-4 below 5 B, then 1.2e-4)"),
      word("schedule", opt, &C::schedule, {"cosine", "linear", "wsd", "constant"},
           "after the warm-up; wsd: constant, then linear decay over the last 20 % of the run"),
      instead_of(count("warmup-tokens", opt, &C::warmup_tokens, 0,
                       "tokens of linear warm-up (default: 5 % of the run, at most 375M)"),
                 "warmup-steps", &C::warmup_steps),
      instead_of(count("warmup-steps", opt, &C::warmup_steps, 0, "instead of --warmup-tokens: in steps"),
                 "warmup-tokens", &C::warmup_tokens),
      real("min-lr-frac", opt, &C::min_lr_frac, kFraction, "last learning rate as a fraction of the peak"),
      real("weight-decay", opt, &C::weight_decay, kNotNegative, "AdamW's decay, of matrices only"),
      real("beta1", opt, &C::beta1, kBeta, "AdamW's decay of the mean gradient"),
      real("beta2", opt, &C::beta2, kBeta, "AdamW's decay of the mean squared gradient"),
      real("eps", opt, &C::eps, kPositive, "AdamW's term against division by zero"),
      real("grad-clip", opt, &C::grad_clip, kNotNegative,
           "largest gradient norm; larger ones are scaled down; 0: off"),
      number_type("adam-state", opt, &C::adam_state, {"fp32", "bf16"},
                  "type of AdamW's moments; bf16 on a GPU only"),
      count("eval-every", eval, &C::eval_every, 0,
            "steps between validations; 0: only after the last step (default: a tenth of the run where there "
            "is "
            "validation data)"),
      count("eval-batches", eval, &C::eval_batches, 0,
            "micro-batches per validation; 0: all of the data, as the stories' last one always is"),
      count("sample-every", eval, &C::sample_every, 0,
            "steps between printed samples; 0: never (default: a tenth of the run, for byte models)"),
      device(hardware, &C::device),
      number_type("dtype", hardware, &C::dtype, {"bf16", "fp32"},
                  "type of weights and activations (default: bf16 on a GPU; a CPU computes in fp32)"),
      word("recompute", hardware, &C::recompute, {"none", "light", "block"},
           "activations computed again in the backward pass to save memory: none; light: outputs of norms "
           "and of the activation; block: all within a layer; same results"),
      word("determinism", hardware, &C::determinism, {"run", "topology"},
           "run: the same bits for the same number of ranks; topology: for any number of them, at the price "
           "of gradients "
           "summed in 64-bit integers (8 bytes per parameter instead of 4)"),
      choice(
          "zero", ranks, &C::zero, {"0", "1"},
          [](size_t i, const std::string&) { return static_cast<int64_t>(i); },
          [](int64_t stage) { return std::to_string(stage); },
          "ZeRO stage: 0: every rank holds everything; 1: masters and AdamW's moments are divided between "
          "ranks"),
      count("expect-ranks", ranks, &C::expect_ranks, 1,
            "stop unless so many ranks have been started (default: as many as the launcher says)"),
      seconds("launch-timeout", ranks, &C::launch_timeout, "time within which every rank must have arrived"),
      seconds("hang-timeout", ranks, &C::hang_timeout,
              "time without progress after which a rank counts as hung, ten median steps if that is longer; "
              "without any sign of life half of it"),
      word("log-format", reports, &C::log_format, {"line", "megatron", "json"},
           "of the console; metrics.jsonl in the run directory always has everything"),
      flag("gemm-trace", reports, &C::gemm_trace,
           "after the first step, list each matrix product's shape, time and rate (GPU)"),
      flag("dry-run", reports, &C::dry_run,
           "check the options and data, print the table of the run, and stop"),
  };
}

std::vector<Option<SampleConfig>> sample_options() {
  using C = SampleConfig;
  const std::string what = "What to write", hardware = "Hardware and numbers";
  return {
      text("", "", "DIR", &C::directory, "a run directory (its last checkpoint) or a checkpoint"),
      instead_of(text("prompt", what, "TEXT", &C::prompt, "text to go on from"), "prompt-ids",
                 &C::prompt_ids),
      instead_of(text("prompt-ids", what, "ID,ID,...", &C::prompt_ids,
                      "instead of --prompt: token ids to go on from; prints ids, for any vocabulary"),
                 "prompt", &C::prompt),
      count("max-tokens", what, &C::max_tokens, 1, "tokens to write"),
      real("temperature", what, &C::temperature, kNotNegative,
           "1: the model's own probabilities, less: safer; 0: always the most probable token"),
      count("top-k", what, &C::top_k, 0, "draw from the N most probable tokens; 0: from all"),
      real("top-p", what, &C::top_p, kProbability, "draw from the most probable tokens that sum to X"),
      count("seed", what, &C::seed, 0, "of the random draws"),
      device(hardware, &C::device),
      number_type("dtype", hardware, &C::dtype, {"bf16", "fp32"},
                  "of the computation (default: bf16 on a GPU, fp32 on a CPU)"),
  };
}

std::vector<Option<EvalConfig>> eval_options() {
  using C = EvalConfig;
  const std::string what = "What to evaluate on", hardware = "Hardware and numbers";
  return {
      text("", "", "DIR", &C::directory, "a run directory (its last checkpoint) or a checkpoint"),
      paths("val-data", what, &C::val_data,
            "files or quoted globs (default: the run's own validation data, else what it was trained on)"),
      flag("document-mask", what, &C::document_mask, "attention stops where documents end, as in training"),
      count("seq-len", what, &C::seq_len, 1,
            "tokens per sequence (default: the model's positions, at most 1024)"),
      count("micro-batch", what, &C::micro_batch, 1,
            "sequences per forward pass (default: 16384 tokens' worth on a GPU; on a CPU 4096, "
            "from 10 M parameters 1024)"),
      count("eval-batches", what, &C::eval_batches, 0, "micro-batches; 0: all of the data"),
      device(hardware, &C::device),
      number_type("dtype", hardware, &C::dtype, {"bf16", "fp32"},
                  "of the computation (default: bf16 on a GPU, fp32 on a CPU)"),
  };
}

std::vector<Option<InspectConfig>> inspect_options() {
  using C = InspectConfig;
  const std::string what = "What to look at";
  return {
      text(
          "", "", "PATH", &C::path,
          "data (a file, a Megatron name or a quoted glob), a Hugging Face directory, a checkpoint or a run"),
      text("", "", "PATH2", &C::second, "of two checkpoints or two runs: what differs first"),
      flag("full", what, &C::full,
           "read and check everything: all tokens, the hashes of the data's manifest.json, every element of "
           "the weights, every checksum of a checkpoint"),
      count("offset", what, &C::offset, 0, "show the tokens (of text the text) from token N on"),
      count("vocab", what, &C::vocab, 1,
            "size of the vocabulary: ids must be below it (default: the manifest's)"),
  };
}

}  // namespace kinoe
