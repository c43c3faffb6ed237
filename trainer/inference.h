// Using a trained model: load its weights, sample text, evaluate. No optimizer state is involved.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dataloader/dataset.h"
#include "trainer/checkpoint_write.h"
#include "trainer/config.h"
#include "trainer/files.h"
#include "trainer/layer_hooks.h"
#include "trainer/model.h"
#include "trainer/optimizer.h"

namespace kinoe {

/// A model read from a directory, on a device of its own, weights only.
struct LoadedModel {
  std::unique_ptr<Device> device;
  std::unique_ptr<Model> model;
  Memory memory;
  ParameterMemory parameters;
  std::string directory;
};

/// The source of weights (trainer/import.h) that `path` means: a model file of llm.c is itself, a Hugging Face directory or
/// checkpoint too, of a run it is the newest checkpoint. Throws ExitCode::checkpoint if there is none.
std::string find_weights(Files& files, const std::string& path);

/// `path`: a run, a checkpoint, any Hugging Face directory of a supported family, or an llm.c model file. Throws ExitCode::checkpoint where there
/// is none or its files do not fit.
LoadedModel load_model(const std::string& path, DeviceChoice choice, std::optional<DType> dtype);

/// One text from a model of bytes, printable. With `stories` it ends where its story does. `memory` holds Sampler::bytes().
std::string sample_text(const Context& ctx, const Model& model, LayerHooks hooks, const Tensor& memory,
                        int64_t window, uint64_t seed, bool stories);

/// Data error where the data's manifest names another tokenizer than the tokenizer.json among `tokenizers`, which are of
/// `directory`. Where either is unknown there is nothing to compare.
void check_tokenizers(const Dataset& data, const std::vector<SmallFile>& tokenizers,
                      const std::string& directory);

/// `train_gpt sample` and `train_gpt eval`: print to standard output, return the exit code.
int sample(const SampleConfig& config);
int eval(EvalConfig config);

}  // namespace kinoe
