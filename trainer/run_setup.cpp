// From a command to a run: options, model and data opened and checked against each other.
#include "trainer/run_setup.h"

#include <algorithm>
#include <cstdio>

#include "dataloader/stories.h"
#include "trainer/config_toml.h"
#include "trainer/import.h"
#include "trainer/inference.h"
#include "trainer/tables.h"

namespace kinoe {
namespace {

constexpr int64_t kLargestStories = int64_t{64} << 20;  // a longer run on the stories sees them again

/// Plain text and the stories have byte tokens: what the model writes can be printed.
bool byte_tokens(const std::vector<DataSource>& sources) {
  if (sources.empty()) return true;
  return detect_format(sources.front().files.front()) == TokenFormat::text;
}

Data open_data(const RunConfig& config, int64_t schedule_tokens, const std::vector<DataSource>& training,
               const std::vector<DataSource>& validation, const ModelConfig& model) {
  DatasetOptions options;
  options.seq_len = config.seq_len.value();
  options.vocab_size = model.vocab_size;
  options.seed = static_cast<uint64_t>(config.seed);
  options.min_samples = config.global_batch.value();
  options.document_mask = config.document_mask;
  options.end_token = model.eos_token;
  DatasetOptions held_out = options;
  held_out.min_samples = 1;
  held_out.shuffle = false;

  Data data;
  if (on_stories(config)) {
    if (config.tokens_per_step() > kLargestStories / 2)
      fail(ExitCode::usage, "a step of ", config.tokens_per_step(),
           " tokens: on the built-in stories at most ", kLargestStories / 2,
           " are possible; use a smaller --global-batch, or --data");
    const int64_t wanted = std::max(config.tokens_per_step() * 2, std::min(schedule_tokens, kLargestStories));
    data.training = Dataset::stories(StorySplit::training, wanted, options);
  } else {
    data.training = Dataset::open(training, options);
  }
  if (!validation.empty())
    data.validation = Dataset::open(validation, held_out);
  else if (on_stories(config))
    data.validation = Dataset::stories(StorySplit::validation, kValidationStoryBytes, held_out);
  return data;
}

std::vector<std::string> warnings_of(const Data& data, const RunConfig& config) {
  std::vector<std::string> warnings = data.training->warnings();
  if (data.validation)
    warnings.insert(warnings.end(), data.validation->warnings().begin(), data.validation->warnings().end());
  const std::vector<double> epochs =
      data.training->epochs(config.steps.value() * config.global_batch.value());
  for (size_t s = 0; s < epochs.size(); ++s)
    if (epochs[s] == 0)
      warnings.push_back(cat("nothing of '", data.training->state().sources[s].name,
                             "' is trained on in this run: its weight of ",
                             data.training->state().sources[s].weight, " is too small a share"));
  return warnings;
}

/// Of --tokenizer, else those that lie beside the weights the run starts or goes on from.
std::vector<SmallFile> tokenizer_files(Files& files, const std::string& wanted, const std::string& source,
                                       const ResumePoint& from) {
  const std::string beside = from.checkpoint ? from.checkpoint->directory() : source;
  if (wanted.empty()) return beside.empty() ? std::vector<SmallFile>{} : read_tokenizer_files(files, beside);
  std::vector<SmallFile> found = read_tokenizer_files(files, wanted);
  if (found.empty())
    fail(ExitCode::usage, "--tokenizer ", wanted,
         ": holds none of the files of a tokenizer, such as tokenizer.json");
  return found;
}

/// The model of the weights at `source`, where --init-from leads; --model, if given, must be the same.
ModelConfig model_of_weights(Files& files, const std::string& source, const RunConfig& config) {
  const ModelConfig theirs = source_config(files, source);
  if (config.model == config.init_from) return theirs;
  const std::string difference = describe_difference(load_model_config(config.model), theirs);
  if (!difference.empty())
    fail(ExitCode::checkpoint, "--model ", config.model, " (here) is not the model of --init-from ",
         config.init_from, " (there): ", difference, "; leave --model out to take theirs");
  return theirs;
}

/// Begins where the run of `checkpoint` had come to in the order of the same data.
void continue_data(const CheckpointReader& checkpoint, TrainingState& state) {
  const std::string all = joined(describe_change(checkpoint.state().data, state.data));
  if (!all.empty())
    fail(ExitCode::checkpoint, "--data-start continue: the training data is not that of ",
         checkpoint.directory(), ": ", all, "; leave --data-start out to begin this data anew");
  state.first_sample = checkpoint.state().first_sample + checkpoint.state().samples;
}

/// Throws ExitCode::usage for a config.toml that no run left behind like this. The program's defaults in place of what is
/// missing would be another run.
void check_recorded(const std::string& text, const std::string& path) {
  constexpr const char* kAdvice = "; put it right, or begin anew with another --out";
  try {
    run_config_from_toml(text, path);
  } catch (const Error& error) {
    fail(ExitCode::usage, error.what(), kAdvice);
  }
  const std::vector<TomlEntry> entries = parse_toml(text, path);
  // The last one of a file is among them.
  for (const char* name : {"model", "steps", "global-batch", "micro-batch", "seq-len", "lr", "log-format"})
    if (std::none_of(entries.begin(), entries.end(), [&](const TomlEntry& e) { return e.key == name; }))
      fail(ExitCode::usage, path, " is damaged: '", name, "', which every run records, is missing", kAdvice);
}

/// A run that was begun and has no checkpoint yet: its config.toml, as rank 0 reads it; "" where there is none.
std::string recorded_settings(Files& files, const RunConfig& command, const ResumePoint& from,
                              Channel& ranks) {
  const std::string path = join_path(from.run_directory, "config.toml");
  std::string text;
  if (ranks.rank() == 0 && command.resume == "auto" && !from.checkpoint &&
      files.kind(path) == Files::Kind::file)
    text = in_class(ExitCode::usage, [&] {
      const std::string found = read_file(files, path);
      check_recorded(found, path);
      return found;
    });
  return ranks.from_first("settings of the run", text);
}

/// What of a run's recorded settings this start changes: "lr: 0.02 instead of 0.01".
std::string changed(const std::vector<std::pair<std::string, std::string>>& recorded,
                    const RunConfig& config) {
  const auto now = settings_of(without_start_options(config));
  std::vector<std::string> rows;
  for (const auto* names : {&recorded, &now})
    for (const auto& [name, ignored] : *names) {
      const std::string from = setting(recorded, name), to = setting(now, name);
      const std::string row = cat(name, ": ", to, " instead of ", from);
      if (name != "out" && from != to && std::find(rows.begin(), rows.end(), row) == rows.end())
        rows.push_back(row);
    }
  return joined(rows);
}

}  // namespace

bool on_stories(const RunConfig& config) { return config.data.empty(); }

RunSetup set_up_run(Files& files, const CommandLine& command, Channel& ranks) {
  RunSetup setup;
  setup.from = find_resume_point(files, command.run);
  const std::string config_path = join_path(setup.from.run_directory, "config.toml");
  const std::string begun = recorded_settings(files, command.run, setup.from, ranks);
  std::vector<std::pair<std::string, std::string>> recorded;  // of a run without a checkpoint
  const CheckpointReader* checkpoint = setup.from.checkpoint.get();
  TrainingState& state = setup.state;
  RunConfig& config = setup.config;
  config = command.run;
  if (checkpoint != nullptr) {
    state = checkpoint->state();
    config = resumed_config(state.settings, join_path(checkpoint->directory(), "trainer/state.json"),
                            command.given);
  } else if (!begun.empty()) {
    recorded = settings_of(run_config_from_toml(begun, config_path));
    config = resumed_config(recorded, config_path, command.given);
  }
  config.out = setup.from.run_directory;

  // Model and data decide the defaults.
  const std::vector<DataSource> training_files = expand_data(config.data);
  const bool model_given = !command.run.model.empty();
  if (checkpoint == nullptr && !config.init_from.empty())
    setup.source = find_weights(files, config.init_from);
  if (config.model.empty() && !config.init_from.empty()) config.model = config.init_from;
  if (config.model.empty()) {
    if (!byte_tokens(training_files))
      fail(ExitCode::usage,
           "token shards need a model of their vocabulary: give --model, for instance gpt2-124m");
    config.model = on_stories(config) ? "tiny" : "small";
  }
  if (checkpoint != nullptr && !model_given)
    setup.model = checkpoint->model();
  else if (!setup.source.empty())
    setup.model = model_of_weights(files, setup.source, config);
  else
    setup.model = load_model_config(config.model);
  validate(setup.model);
  if (checkpoint != nullptr) checkpoint->check_model(setup.model, ParameterTable(setup.model));
  const std::vector<DataSource> validation_files = expand_data(config.val_data);
  check_validation_apart(training_files, validation_files);

  RunFacts facts;
  facts.parameters = setup.model.parameter_count();
  facts.max_positions = setup.model.max_positions;
  facts.byte_tokens = setup.byte_tokens = byte_tokens(training_files);
  facts.has_validation = on_stories(config) || !validation_files.empty();
  facts.gpus = find_gpus();
  facts.schedule_tokens = state.schedule_tokens;
  facts.ranks = ranks.ranks();
  setup.notes = setup.from.notes;
  for (const std::string& note : resolve(config, facts)) setup.notes.push_back(note);
  if (checkpoint != nullptr)
    reconcile(config, state, setup.notes);
  else
    state.schedule_tokens = config.total_tokens();
  if (checkpoint == nullptr && !begun.empty()) {
    const std::string changes = changed(recorded, config);
    setup.notes.push_back(cat("no checkpoint yet in ", config.out, ": begins at step 0 with the settings of ",
                              config_path, changes.empty() ? "" : ", but for ", changes));
  }

  setup.data = open_data(config, state.schedule_tokens, training_files, validation_files, setup.model);
  if (checkpoint != nullptr) {
    reconcile_data(config, state, setup.data.training->state(), setup.notes);
    reconcile_ranks(config, state, ranks.ranks(), setup.notes);
  } else {
    state.data = setup.data.training->state();
    state.ranks = ranks.ranks();
  }
  state.settings = settings_of(config);

  const std::string& wanted = checkpoint != nullptr ? command.run.tokenizer : config.tokenizer;
  setup.tokenizers = tokenizer_files(files, wanted, setup.source, setup.from);
  const std::string tokenizer_from = !wanted.empty()         ? wanted
                                     : checkpoint != nullptr ? checkpoint->directory()
                                                             : setup.source;
  check_tokenizers(*setup.data.training, setup.tokenizers, tokenizer_from);
  if (setup.data.validation) check_tokenizers(*setup.data.validation, setup.tokenizers, tokenizer_from);

  setup.warnings = warnings_of(setup.data, config);
  if (setup.data.validation && setup.data.validation->samples() < config.micro_batch.value())
    setup.notes.push_back(cat("validation data has ", counted(setup.data.validation->samples(), "sequence"),
                              ", fewer than one batch of ", grouped(config.micro_batch.value()),
                              ": all of it is evaluated"));
  return setup;
}

std::vector<float> read_initial_weights(Files& files, RunSetup& setup, const ParameterTable& table,
                                        int threads) {
  std::vector<float> flat(static_cast<size_t>(table.flat_size()));
  read_weights(files, setup.source, table, flat.data());  // lists all that does not fit, whatever wrote it
  const bool continued = setup.config.data_start == "continue";
  if (!continued && files.kind(join_path(setup.source, "trainer/manifest.json")) != Files::Kind::file)
    return flat;
  // A checkpoint of this program: the masters, which the weights are rounded from, each number checked.
  const CheckpointReader checkpoint(files, setup.source);
  checkpoint.check_tensors(table);
  checkpoint.read_all(Section::masters, table, threads, flat.data());
  if (continued) continue_data(checkpoint, setup.state);
  return flat;
}

}  // namespace kinoe
