// Several ranks as processes: the test binary starts itself, each copy runs one scenario of test/launch_program_test.cpp.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/common/check.h"
#include "trainer/launch_socket.h"

namespace kinoe {

/// A process of a team, ended with the object.
class RankProcess {
 public:
  using Variables = std::map<std::string, std::string>;

  /// Runs a command (a program and its arguments) for a scenario, with these variables besides the present ones;
  /// standard error goes to `log`.
  RankProcess(std::vector<std::string> command, const std::string& scenario, const Variables& variables,
              std::string log)
      : log_(std::move(log)) {
    std::filesystem::remove(log_);
    std::vector<std::string> texts;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text = *entry;
      const std::string name = text.substr(0, text.find('='));
      // Neither a launcher around the tests nor the sharding of tests means the inner process.
      bool keep = !variables.contains(name);
      for (const char* prefix :
           {"OMPI_", "PMI", "SLURM_", "GTEST_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_"})
        keep = keep && !name.starts_with(prefix);
      if (keep) texts.push_back(text);
    }
    for (const auto& [name, value] : variables) texts.push_back(name + "=" + value);
    texts.push_back("KINOE_SCENARIO=" + scenario);
    std::vector<char*> environment;
    for (std::string& text : texts) environment.push_back(text.data());
    environment.push_back(nullptr);
    std::vector<char*> arguments;
    for (std::string& word : command) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const int errors = open(log_.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);
      dup2(errors, STDERR_FILENO);
      execve(arguments[0], arguments.data(), environment.data());
      _exit(127);
    }
    close(errors);
  }
  RankProcess(RankProcess&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)),
        status_(other.status_),
        ended_(other.ended_),
        log_(std::move(other.log_)) {}
  ~RankProcess() {
    if (pid_ <= 0 || ended_) return;
    send(SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  void send(int signal) const { kill(pid_, signal); }
  [[nodiscard]] int pid() const { return pid_; }

  /// The exit code (128 + signal); -1 when it has not ended in time.
  int wait(double seconds) {
    for (const Clock::time_point deadline = in_seconds(seconds);;) {
      if (has_ended()) return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
      if (seconds_until(deadline) <= 0) return -1;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  [[nodiscard]] std::string said() const {
    std::ifstream in(log_);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  /// Waits until it has said this.
  [[nodiscard]] bool says(const std::string& text, double seconds) {
    for (const Clock::time_point deadline = in_seconds(seconds); seconds_until(deadline) > 0;) {
      if (said().find(text) != std::string::npos) return true;
      if (has_ended()) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return said().find(text) != std::string::npos;
  }

 private:
  bool has_ended() {
    if (!ended_) ended_ = waitpid(pid_, &status_, WNOHANG) == pid_;
    return ended_;
  }

  pid_t pid_ = -1;
  int status_ = 0;
  bool ended_ = false;
  std::string log_;
};

/// The command of one rank: this program, running the scenario.
inline std::vector<std::string> scenario_command() {
  return {std::filesystem::read_symlink("/proc/self/exe"), "--gtest_filter=LaunchScenario.DISABLED_OfARank",
          "--gtest_also_run_disabled_tests"};
}

/// A port that nobody uses now.
inline int free_port() { return port_of(listen_on(0)); }

/// `text` is one line, the program's error, and holds every part.
inline void expect_one_error(const std::string& text, const std::vector<std::string>& parts) {
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_TRUE(text.starts_with("train_gpt: error: ")) << text;
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

/// Tests with several processes on this machine.
class LaunchProgram : public testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    const Socket listener = listen_on(0);
    if (!connect_to("127.0.0.1", port_of(listener), in_seconds(2), reason).is_open())
      GTEST_SKIP() << "no loopback here: " << reason;
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = testing::TempDir() + "launch_" + std::to_string(getpid()) + "_" + info->name();
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
    port_ = free_port();
  }
  void TearDown() override {
    ranks_.clear();
    if (!directory_.empty()) std::filesystem::remove_all(directory_);
  }

  RankProcess& start(const std::string& scenario, int rank, int ranks,
                     RankProcess::Variables variables = {}) {
    for (const auto& [name, value] : RankProcess::Variables{{"RANK", std::to_string(rank)},
                                                            {"WORLD_SIZE", std::to_string(ranks)},
                                                            {"MASTER_ADDR", "127.0.0.1"},
                                                            {"MASTER_PORT", std::to_string(port_)}})
      variables.try_emplace(name, value);
    ranks_.emplace_back(scenario_command(), scenario, variables,
                        directory_ + "/" + std::to_string(ranks_.size()));
    return ranks_.back();
  }
  void start_all(const std::string& scenario, int ranks, const RankProcess::Variables& variables = {}) {
    for (int rank = 0; rank < ranks; ++rank) start(scenario, rank, ranks, variables);
  }
  /// What all processes have said.
  [[nodiscard]] std::string said() const {
    std::string text;
    for (const RankProcess& rank : ranks_) text += rank.said();
    return text;
  }
  /// All have ended with `code` within the time, except those killed.
  void expect_codes(int code, double seconds, int except = -1) {
    const Clock::time_point deadline = in_seconds(seconds);
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (static_cast<int>(i) == except) continue;
      EXPECT_EQ(ranks_[i].wait(seconds_until(deadline)), code) << "process " << i << ":\n" << said();
    }
  }
  void expect_one_line(const std::vector<std::string>& parts) const { expect_one_error(said(), parts); }

  int port_ = 0;
  std::string directory_;
  std::vector<RankProcess> ranks_;
};

}  // namespace kinoe
