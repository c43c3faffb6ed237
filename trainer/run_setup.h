// What a run is, decided before any memory is taken: configuration, model, data, and where it begins.
//
// A new run, one from given weights and one that goes on from a checkpoint differ here and in nothing after.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "dataloader/dataset.h"
#include "trainer/channel.h"
#include "trainer/checkpoint_state.h"
#include "trainer/checkpoint_write.h"
#include "trainer/config.h"
#include "trainer/model_config.h"
#include "trainer/resume.h"

namespace kinoe {

struct Data {
  std::optional<Dataset> training;
  std::optional<Dataset> validation;
};

struct RunSetup {
  RunConfig config;  // resolved
  ModelConfig model;
  Data data;
  ResumePoint from;
  std::string source;   // weights to start from, where --init-from leads; "": random, or a checkpoint's
  TrainingState state;  // after the last step done; of a new run before its first
  bool byte_tokens = false;
  std::vector<SmallFile> tokenizers;  // files that go into every checkpoint
  std::vector<std::string> warnings;  // sentences for the user
  std::vector<std::string> notes;
};

bool on_stories(const RunConfig& config);

/// Opens what the command names and checks that it fits together. Nothing is written. Every rank looks for itself, but for the
/// settings of a run that was begun and has no checkpoint yet (--resume auto), which rank 0 reads for all: it writes
/// them anew. Throws Error of the class of the fault.
RunSetup set_up_run(Files& files, const CommandLine& command, Channel& ranks);

/// The weights of setup.source in the flat range, fp32; of a checkpoint of this program its masters. With --data-start continue
/// setup.state begins where that checkpoint's run had come to.
std::vector<float> read_initial_weights(Files& files, RunSetup& setup, const ParameterTable& table,
                                        int threads);

}  // namespace kinoe
