// Damaged checkpoints: every kind of file flipped, cut, missing, left over or from another step; numbers that cannot be; texts that are
// nonsense under a right checksum. Always exit code 4 with the file, and the tensor where there is one; never a crash.
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "test/checkpoint_harness.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

ModelConfig one_layer() {
  ModelConfig config = small_llama(false);
  config.layers = 1;
  return config;
}

class CheckpointDamage : public testing::Test {
 protected:
  /// A checkpoint with every kind of file; weights in two shards.
  std::string save(const StoredModel& model, int64_t step, DType weights = DType::bf16) {
    const CheckpointPlan plan = model.plan(step, weights, 3000);
    begin_checkpoint(*files, run.path(), plan);
    CheckpointPart part(*files, run.path(), model.table, plan);
    const int64_t n = model.table.flat_size();
    part.write(weights == DType::f32 ? Section::weights : Section::masters, 0, n, model.masters.data());
    part.write(Section::m, 0, n, model.m.data());
    part.write(Section::v, 0, n, model.v.data());
    return publish_checkpoint(
        *files, run.path(), model.table, plan, part.finish(), model.state(step),
        {{"config.json", model_config_to_json(model.config, weights == DType::bf16 ? "bfloat16" : "float32")},
         {"generation_config.json", generation_config_json(model.config)},
         {"tokenizer.json", "{\"model\": {}}"},
         {"trainer/gemm.json", "{}"}});
  }
  static std::vector<std::string> files_of(const std::string& directory) {
    std::vector<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(directory))
      if (entry.is_regular_file()) names.push_back(fs::relative(entry.path(), directory).string());
    return names;
  }
  void expect_refused(const std::string& directory, const std::vector<std::string>& parts) {
    expect_error(ExitCode::checkpoint, parts, [&] { CheckpointReader(*files, directory).verify(); });
  }
  std::string get(const std::string& path) { return read_file(*files, path); }

  /// Replaces a small file and makes the manifest say so.
  void reseal(const std::string& directory, const std::string& name, const std::string& text) {
    put_file(directory + "/" + name, text);
    const std::string path = directory + "/trainer/manifest.json";
    CheckpointManifest manifest = checkpoint_manifest_from_json(get(path), path);
    for (FileRecord& file : manifest.files)
      if (file.name == name) {
        file.bytes = file.covered = static_cast<int64_t>(text.size());
        file.checksum = checksum(text.data(), text.size());
      }
    put_file(path, to_json(manifest));
  }
  /// A manifest's text with a right checksum, whatever it says.
  static std::string sealed(Json json) {
    json.erase("xxh3");
    std::string text = json.dump(1);
    text.resize(text.rfind("\n}"));
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx",
                  static_cast<unsigned long long>(checksum(text.data(), text.size())));
    return text + ",\n \"xxh3\": \"" + digits + "\"\n}\n";
  }

  std::unique_ptr<Files> files = std::make_unique<FaultyFiles>();
  FreshDirectory run;
};

TEST_F(CheckpointDamage, AFlippedByteInAnyFile) {
  const std::string directory = save(StoredModel(one_layer()), 5);
  const std::vector<std::string> names = files_of(directory);
  ASSERT_GE(names.size(), 14U);
  for (const std::string& name : names) {
    const std::string path = directory + "/" + name, whole = get(path);
    std::vector<size_t> places = {0, 7, 8, whole.size() / 4, whole.size() / 2, whole.size() - 1};
    for (const size_t at : places) {
      if (at >= whole.size()) continue;
      SCOPED_TRACE(cat(name, " byte ", at));
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ 0x10);
      put_file(path, flipped);
      uint64_t header = 0;
      if (name.ends_with(".safetensors")) std::memcpy(&header, whole.data(), 8);
      expect_refused(directory, {name, header > 0 && at >= header + 8 ? "tensor " : "damaged"});
    }
    put_file(path, whole);
  }
  CheckpointReader(*files, directory).verify();
}

TEST_F(CheckpointDamage, ShortLongMissingOrExtraFiles) {
  const std::string directory = save(StoredModel(one_layer()), 5);
  for (const std::string& name : files_of(directory)) {
    SCOPED_TRACE(name);
    const std::string path = directory + "/" + name, whole = get(path);
    for (const size_t kept : {whole.size() - 2, whole.size() / 2, size_t{0}}) {
      put_file(path, whole.substr(0, kept));
      expect_refused(directory, {name});
    }
    put_file(path, whole + "x");
    expect_refused(directory, {name});
    fs::remove(path);
    expect_refused(directory, {name, "missing"});
    fs::create_directory(path);
    expect_refused(directory, {name, "missing"});
    fs::remove(path);
    put_file(path, whole);
  }
  for (const char* name : {"trainer/optimizer-m-00009-of-00009.safetensors", "trainer/x", "model.safetensors",
                           "adapter.safetensors", "other.safetensors.index.json"}) {
    put_file(directory + "/" + name, "x");
    expect_refused(directory, {name, "not known"});
    fs::remove(directory + "/" + name);
  }
  put_file(directory + "/README.md", "a user's note");  // what nobody would read as a part of the model
  CheckpointReader(*files, directory).verify();
}

TEST_F(CheckpointDamage, AFileOfAnotherStepOrOfAnotherRun) {
  const std::string directory = save(StoredModel(one_layer(), 1), 5);
  const std::string other = save(StoredModel(one_layer(), 50), 6);
  for (const std::string& name : files_of(directory)) {
    const std::string path = directory + "/" + name, whole = get(path), theirs = get(other + "/" + name);
    if (whole == theirs) continue;  // config.json and the like
    SCOPED_TRACE(name);
    put_file(path, theirs);
    expect_refused(directory, {name == "trainer/manifest.json" ? ": checksum of its first" : name});
    put_file(path, whole);
  }
  // The same step of a run with other numbers: headers are the same, the chunks' checksums are not.
  for (const std::string& name : files_of(directory))
    put_file(run / fs::path(name).filename(), get(directory + "/" + name));
  const std::string again = save(StoredModel(one_layer(), 50), 5);
  std::string weights;
  for (const std::string& name : files_of(again))
    if (name.starts_with("model-00001-of-")) weights = name;
  ASSERT_TRUE(fs::exists(run / weights)) << "the model was to have several files";
  put_file(again + "/" + weights, get(run / weights));
  expect_refused(again, {weights, "tensor ", "checksum"});
}

TEST_F(CheckpointDamage, NumbersThatCannotBe) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  struct Bad {
    std::vector<float> StoredModel::*flat;
    float value;
    const char* file;
  };
  for (const DType weights : {DType::bf16, DType::f32})
    for (const Bad& bad :
         {Bad{&StoredModel::masters, nan, "master"}, Bad{&StoredModel::masters, inf, "master"},
          Bad{&StoredModel::masters, -inf, "master"}, Bad{&StoredModel::m, nan, "optimizer-m"},
          Bad{&StoredModel::m, -inf, "optimizer-m"}, Bad{&StoredModel::v, nan, "optimizer-v"},
          Bad{&StoredModel::v, -1e-30F, "optimizer-v"}}) {
      StoredModel model(one_layer());
      const Parameter& p = model.table.parameters()[3];
      (model.*bad.flat)[static_cast<size_t>(p.offset + 5)] = bad.value;
      const bool in_weights = bad.flat == &StoredModel::masters && weights == DType::f32;
      expect_refused(save(model, 5, weights),
                     {in_weights ? "model-0" : bad.file, "tensor " + p.name, "element 5"});
    }
}

TEST_F(CheckpointDamage, AWeightThatIsNotItsMasterRounded) {
  const StoredModel model(one_layer());
  const CheckpointPlan plan = model.plan(5, DType::bf16);
  const int64_t n = model.table.flat_size();
  const Parameter& p = model.table.parameters()[2];
  begin_checkpoint(*files, run.path(), plan);
  CheckpointPart part(*files, run.path(), model.table, plan);
  part.write(Section::masters, 0, n, model.masters.data());
  part.write(Section::m, 0, n, model.m.data());
  part.write(Section::v, 0, n, model.v.data());
  std::vector<bf16> weights(static_cast<size_t>(n));
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = to_bf16(model.masters[i]);
  weights[static_cast<size_t>(p.offset + 7)].bits ^= 1;  // one unit in the last place
  part.write(Section::weights, 0, n, weights.data());
  const std::string directory = publish_checkpoint(*files, run.path(), model.table, plan, part.finish(),
                                                   model.state(5), model.small_files(DType::bf16));
  expect_refused(directory, {"model.safetensors", "tensor " + p.name, "element 7", "not its master"});
}

TEST_F(CheckpointDamage, WeightsThatAreNotThoseOfTheStateRecord) {
  const StoredModel model(one_layer());
  for (const DType weights : {DType::bf16, DType::f32}) {
    const std::string directory = save(model, 5, weights);
    Json state = Json::parse(get(directory + "/trainer/state.json"));
    state["weights_hash"] = "0123456789abcdef";
    reseal(directory, "trainer/state.json", state.dump(1));
    expect_refused(directory, {"state.json", "hash"});
  }
}

TEST_F(CheckpointDamage, NewerFormatVersions) {
  const std::string directory = save(StoredModel(one_layer()), 5);
  const std::string path = directory + "/trainer/manifest.json", whole = get(path);
  Json state = Json::parse(get(directory + "/trainer/state.json"));
  state["format_version"] = kCheckpointVersion + 1;
  reseal(directory, "trainer/state.json", state.dump(1));
  expect_refused(directory, {"state.json", "version 2", "newer"});
  Json manifest = Json::parse(whole);
  manifest["format_version"] = kCheckpointVersion + 1;
  put_file(path, sealed(manifest));
  expect_refused(directory, {"manifest.json", "version 2", "newer"});
  manifest["format_version"] = 0;
  put_file(path, sealed(manifest));
  expect_refused(directory, {"manifest.json", "version 0"});
  state["step"] = 6;
  state["format_version"] = 1;
  put_file(path, whole);
  reseal(directory, "trainer/state.json", state.dump(1));
  expect_refused(directory, {"step 6", "step 5"});
}

/// Pointers to all values of a document; of objects and arrays with more than `most` members to the first alone.
void collect(const Json& json, size_t most, const Json::json_pointer& at,
             std::vector<Json::json_pointer>& found) {
  if (!json.is_structured()) return;
  const bool long_one = json.size() > most;
  for (const auto& [key, value] : json.items()) {
    const Json::json_pointer here = json.is_array() ? at / static_cast<size_t>(std::stoul(key)) : at / key;
    found.push_back(here);
    collect(value, most, here, found);
    if (long_one) return;
  }
}

const std::vector<Json>& absurd_values() {
  static const std::vector<Json> values = {nullptr,
                                           -1,
                                           0,
                                           int64_t{1} << 40,
                                           std::numeric_limits<int64_t>::max(),
                                           std::numeric_limits<uint64_t>::max(),
                                           1e308,
                                           "",
                                           "../../etc/passwd",
                                           std::string(64, 'f'),
                                           Json::object(),
                                           Json::array({-1, int64_t{1} << 62, int64_t{1} << 62})};
  return values;
}

/// Changes every value of the document in every way; `check` says of each text whether it was refused, and how.
template <class Check>
void fuzz(const Json& document, size_t most, const Check& check) {
  std::vector<Json::json_pointer> pointers;
  collect(document, most, Json::json_pointer(), pointers);
  for (const Json::json_pointer& pointer : pointers) {
    Json removed = document;
    Json& parent = removed[pointer.parent_pointer()];
    if (parent.is_array())
      parent.erase(std::stoul(pointer.back()));
    else
      parent.erase(pointer.back());
    check(removed, pointer.to_string(), true);
    for (const Json& value : absurd_values()) {
      Json changed = document;
      if (changed[pointer] == value) continue;
      changed[pointer] = value;
      check(changed, pointer.to_string(), false);
    }
  }
}

TEST_F(CheckpointDamage, AbsurdStatesAreRefusedOrHarmless) {
  const std::string source = "state.json";
  TrainingState state = StoredModel(one_layer()).state(5);
  state.changes = {{3, "lr", "0.1", "0.001"}};
  const Json document = Json::parse(to_json(state));
  int refused = 0;
  fuzz(document, 100, [&](const Json& json, const std::string& where, bool removed) {
    try {
      const TrainingState read = training_state_from_json(json.dump(1), source);
      // Sums and products of what is accepted cannot overflow.
      for (const int64_t n : {read.step, read.samples, read.tokens, read.first_sample, read.schedule_tokens})
        EXPECT_LE(n, int64_t{1} << 60) << where;
      const bool free =
          where.starts_with("/settings/") || where == "/changes/0" || where.starts_with("/data");
      EXPECT_TRUE(!removed || free) << "without " << where << " it was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ExitCode::checkpoint) << error.what();
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      ++refused;
    } catch (const std::exception& error) {
      ADD_FAILURE() << where << ": " << error.what() << "\n" << json.dump().substr(0, 300);
    }
  });
  EXPECT_GT(refused, 200);
  const std::string deep =
      "{\"format_version\": " + std::string(200'000, '[') + std::string(200'000, ']') + "}";
  for (const std::string& text : {std::string(), std::string("{"), std::string("[]"), std::string("1"),
                                  std::string("null"), deep, std::string("{\"format_version\": {}}")})
    expect_error(ExitCode::checkpoint, {source}, [&] { training_state_from_json(text, source); });
}

TEST_F(CheckpointDamage, AbsurdManifestsAreRefused) {
  const std::string directory = save(StoredModel(one_layer()), 5, DType::bf16);
  const std::string path = directory + "/trainer/manifest.json";
  const Json document = Json::parse(get(path));
  int refused = 0;
  fuzz(document, 8, [&](const Json& json, const std::string& where, bool) {
    put_file(path, sealed(json));
    try {
      CheckpointReader(*files, directory).verify();
      EXPECT_EQ(where, "/xxh3");  // which is made anew
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ExitCode::checkpoint) << error.what();
      ++refused;
    } catch (const std::exception& error) {
      ADD_FAILURE() << where << ": " << error.what();
    }
  });
  EXPECT_GT(refused, 200);
}

TEST_F(CheckpointDamage, ChunksThatDoNotFitTheirTensorOrTheOtherCopy) {
  // A manifest with right checksums whose chunks are cut elsewhere in masters than in weights.
  const StoredModel model(one_layer());
  const std::string directory = save(model, 5);
  const std::string path = directory + "/trainer/manifest.json";
  const CheckpointManifest whole = checkpoint_manifest_from_json(get(path), path);
  for (const Section section : {Section::weights, Section::masters}) {
    CheckpointManifest manifest = whole;
    TensorRecord& tensor = manifest.sections[static_cast<size_t>(section)][1];
    const std::string data = get(directory + "/" + manifest.files[tensor.file].name);
    const size_t element = size_of(tensor.type);
    tensor.chunks.first = tensor.chunks.size / 2;
    tensor.checksums.clear();
    for (int64_t c = 0; c < tensor.chunks.count(); ++c)
      tensor.checksums.push_back(
          checksum(data.data() + tensor.offset + tensor.chunks.begin(c) * static_cast<int64_t>(element),
                   static_cast<size_t>(tensor.chunks.end(c) - tensor.chunks.begin(c)) * element));
    put_file(path, to_json(manifest));
    expect_refused(directory, {"chunk", tensor.name});
  }
}

}  // namespace
}  // namespace kinoe
