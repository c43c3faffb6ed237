// Logits of a checkpoint as this program computes them, for dev/check_hf.py to compare with transformers'.
//
//   hf_logits CHECKPOINT TOKENS LOGITS      TOKENS: raw int32, one sequence; LOGITS: raw fp32 [tokens, vocabulary], written
#include <cstdio>
#include <fstream>
#include <vector>

#include "trainer/forward.h"
#include "trainer/import.h"
#include "trainer/one_rank.h"
#include "trainer/optimizer.h"

namespace kinoe {
namespace {

/// Asked for by the hooks' type, never used.
class NoGradients : public GradientHooks {
 public:
  GradientTarget begin(int) override { fail(ExitCode::internal, "gradients asked for in inference"); }
  void ready(int) override {}
};

void run(const std::string& checkpoint, const std::string& tokens_path, const std::string& logits_path) {
  std::ifstream in(tokens_path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  const auto length = static_cast<int64_t>(bytes.size() / sizeof(int32_t));
  if (length == 0) fail(ExitCode::usage, "no tokens in '", tokens_path, "'");

  const Context ctx;
  const auto files = posix_files();
  Model model(load_model_config(checkpoint), Backend::cpu, DType::f32);
  const WorkShape shape{
      .batch = 1, .length = length, .recompute = Recompute::none, .training = false, .head_rows = length};
  ParameterMemory parameters;
  Activations acts;
  const auto take = [&](Arena& arena) {
    take_constants(arena, model);
    parameters = take_parameters(arena, model, nullptr);
    acts = take_activations(arena, model, shape);
  };
  Arena planned;
  take(planned);
  const Memory memory = Memory::on(Backend::cpu, planned.used());
  Arena arena(memory.data());
  take(arena);
  std::vector<float> flat(static_cast<size_t>(model.table.flat_size()));
  read_weights(*files, checkpoint, model.table, flat.data());
  set_parameters(ctx, parameters, flat.data());
  upload_constants(ctx, model);
  upload(ctx, acts.batch.tokens.data, bytes.data(), acts.batch.tokens.bytes());
  begin_step(ctx, acts);

  OneRankWeights weights(model.table, parameters.weights);
  NoGradients gradients;
  forward(ctx, model, acts, {weights, gradients});
  std::vector<int64_t> rows;
  for (int64_t t = 0; t < length; ++t) rows.push_back(t);
  const Tensor logits = head_logits(ctx, model, acts, {weights, gradients}, rows);
  std::ofstream out(logits_path, std::ios::binary);
  for (int64_t t = 0; t < length; ++t)
    out.write(reinterpret_cast<const char*>(logits.as<float>() + t * logits.columns()),
              static_cast<std::streamsize>(static_cast<size_t>(model.config.vocab_size) * sizeof(float)));
  if (!out.flush()) fail(ExitCode::usage, "'", logits_path, "' was not written");
}

}  // namespace
}  // namespace kinoe

int main(int argc, char** argv) {
  try {
    if (argc != 4) kinoe::fail(kinoe::ExitCode::usage, "usage: hf_logits CHECKPOINT TOKENS LOGITS");
    kinoe::run(argv[1], argv[2], argv[3]);
    return 0;
  } catch (const kinoe::Error& error) {
    std::fprintf(stderr, "hf_logits: %s\n", error.what());
    return static_cast<int>(error.code);
  }
}
