// Runs of tiny models that are stopped, killed and gone on with, for the tests that drive the program.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "test/program.h"

namespace kinoe {

namespace fs = std::filesystem;
using Json = nlohmann::json;

inline constexpr int kUsage = 2, kCheckpoint = 4, kStopped = 75;

class ResumeProgramTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    if (IsSkipped()) return;
    // What is durable is the matter of checkpoint_faults_test; here a disk's fsyncs would take minutes.
    if (::access("/dev/shm", W_OK) == 0) {
      fs::remove_all(directory);
      directory =
          "/dev/shm/kinoe_" + fs::path(directory).filename().string() + "_" + std::to_string(::getpid());
      fs::create_directories(directory);
    }
    write("llama.json", llama(true));
    write("untied.json", llama(false));
    write(
        "gpt2.json",
        R"({"model_type": "gpt2", "vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2})");
    // 52 sequences of 8 tokens: with 4 a step an epoch is 13 steps.
    std::vector<uint16_t> ids(52 * 8 + 1);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint16_t>(i * i * 31 % 300);
    write_shard("a.bin", ids, 20240520, 1);
  }
  static std::string llama(bool tied) {
    return std::string(
               R"({"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24,
      "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
      "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": )") +
           (tied ? "true}" : "false}");
  }

  static std::vector<std::string> start(const std::string& out, const std::string& model = "llama.json",
                                        const std::vector<std::string>& more = {}) {
    std::vector<std::string> all = more;
    for (const auto& [option, value] :
         std::vector<std::pair<std::string, std::string>>{{"--device", "cpu"},
                                                          {"--data", "a.bin"},
                                                          {"--model", model},
                                                          {"--out", out},
                                                          {"--seq-len", "8"},
                                                          {"--steps", "40"},
                                                          {"--global-batch", "4"},
                                                          {"--micro-batch", "3"},
                                                          {"--warmup-steps", "5"},
                                                          {"--lr", "0.01"},
                                                          {"--save-every", "10"}})
      if (std::find(more.begin(), more.end(), option) == more.end()) all.insert(all.end(), {option, value});
    return all;
  }
  static std::vector<std::string> go_on(const std::string& out, const std::vector<std::string>& more = {}) {
    std::vector<std::string> all = {"--resume", "auto", "--out", out};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  [[nodiscard]] Outcome run_on(int threads, const std::vector<std::string>& arguments) const {
    return run_shell("export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=" + std::to_string(threads) + "; " +
                     command(arguments));
  }
  /// Starts the program and leaves its process id in $pid; what follows runs in the test's directory.
  [[nodiscard]] std::string background(const std::vector<std::string>& arguments) const {
    const std::string text = command(arguments);
    const size_t program = text.find("&& ") + 3;
    return text.substr(0, program) + "{ exec " + text.substr(program) + " >/dev/null 2>&1 & pid=$!; }; ";
  }
  void expect_code(int code, const Outcome& got) const { ASSERT_EQ(got.code, code) << got.output; }

  /// Records of steps, in the order of the file.
  [[nodiscard]] std::vector<Json> steps_of(const std::string& run_directory) const {
    return records_with("loss", run_directory);
  }
  /// (step, loss) of evaluations, in the order of the file.
  [[nodiscard]] std::vector<std::pair<int64_t, double>> evaluations(const std::string& run_directory) const {
    std::vector<std::pair<int64_t, double>> losses;
    for (const Json& record : records_with("val_loss", run_directory))
      losses.emplace_back(record["step"], record["val_loss"]);
    return losses;
  }
  [[nodiscard]] std::vector<Json> records_with(const char* key, const std::string& run_directory) const {
    std::vector<Json> steps;
    const std::string text = read(run_directory + "/metrics.jsonl");
    for (size_t at = 0; at < text.size();) {
      const size_t end = text.find('\n', at);
      const Json record = Json::parse(text.substr(at, end - at), nullptr, false);
      EXPECT_TRUE(record.is_object()) << text.substr(at, end - at);
      if (record.is_object() && record.contains(key)) steps.push_back(record);
      at = end + 1;
    }
    return steps;
  }
  /// Steps first .. last, each once and in order, with the numbers of the other run.
  void expect_same(const std::string& run_directory, const std::vector<Json>& straight) const {
    const std::vector<Json> steps = steps_of(run_directory);
    ASSERT_EQ(steps.size(), straight.size()) << "records of steps in " << run_directory;
    for (size_t i = 0; i < steps.size(); ++i)
      for (const char* key :
           {"step", "samples", "tokens", "loss", "grad_norm", "lr", "weights_hash", "global_batch"})
        ASSERT_EQ(steps[i][key], straight[i][key])
            << key << " of step " << straight[i]["step"] << " in " << run_directory;
  }
  [[nodiscard]] std::vector<std::string> checkpoints(const std::string& run_directory) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(path(run_directory + "/checkpoints")))
      if (entry.is_directory()) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
  /// A step that a run does when it goes on.
  [[nodiscard]] std::string next_step(const std::string& run_directory) const {
    int64_t newest = 0;
    for (const std::string& name : checkpoints(run_directory))
      if (fs::path(name).extension().empty()) newest = std::stoll(name.substr(5));
    return std::to_string(newest + 1);
  }
  [[nodiscard]] Json state(const std::string& run_directory, const std::string& step) const {
    return Json::parse(read(run_directory + "/checkpoints/" + step + "/trainer/state.json"));
  }
  /// Stops a fresh run after 20 steps: checkpoints of 10 and 20.
  void make_half_a_run(const std::string& out) const {
    expect_code(kStopped, run(start(out, "llama.json", {"--stop-after", "20"})));
  }
  void flip(const std::string& name) const {
    std::string text = read(name);
    text[text.size() - 6] = static_cast<char>(text[text.size() - 6] ^ 0x20);
    write(name, text);
  }
};

}  // namespace kinoe
