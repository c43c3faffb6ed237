// Runs the program as a user does and keeps what it printed.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace kinoe {

struct Outcome {
  int code = -1;       // exit code, or 128 + signal
  std::string output;  // standard output and error together
};

/// A shell word of any text.
inline std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? "'\\''" : std::string(1, c);
  return result + "'";
}

inline Outcome run_shell(const std::string& command) {
  Outcome outcome;
  FILE* pipe = popen(("( " + command + " ) 2>&1 </dev/null").c_str(), "r");
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> buffer{};
  while (const size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe))
    outcome.output.append(buffer.data(), n);
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

/// A test that drives the program (KINOE_BINARY) in a directory of its own.
class ProgramTest : public testing::Test {
 protected:
  void SetUp() override {
    const char* binary = std::getenv("KINOE_BINARY");
    if (binary == nullptr || !std::filesystem::exists(binary))
      GTEST_SKIP() << "KINOE_BINARY does not name the program; scripts/run_tests.sh sets it";
    binary_ = binary;
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    // With the process id: the same tests may run twice at once on a machine.
    directory = testing::TempDir() + "program_" + std::to_string(getpid()) + "_" + info->test_suite_name() +
                "_" + info->name();
    std::filesystem::remove_all(directory);
    std::filesystem::create_directories(directory);
  }
  void TearDown() override {
    if (!directory.empty()) std::filesystem::remove_all(directory);
  }

  /// The shell command of the program with these arguments, run in `directory`.
  [[nodiscard]] std::string command(const std::vector<std::string>& arguments) const {
    std::string text = "cd " + quoted(directory) + " && " + quoted(binary_);
    for (const std::string& argument : arguments) text += " " + quoted(argument);
    return text;
  }
  [[nodiscard]] Outcome run(const std::vector<std::string>& arguments) const {
    return run_shell(command(arguments));
  }

  /// Expects this exit code, exactly one line that begins with the program's error prefix and holds every one of `parts`.
  void expect_error(int code, const std::vector<std::string>& parts,
                    const std::vector<std::string>& arguments) const {
    const Outcome got = run(arguments);
    EXPECT_EQ(got.code, code) << got.output;
    const std::string prefix = "train_gpt: error: ";
    const size_t at = got.output.find(prefix);
    ASSERT_NE(at, std::string::npos) << got.output;
    const std::string line = got.output.substr(at, got.output.find('\n', at) - at);
    EXPECT_EQ(at + line.size() + 1, got.output.size()) << "more than one line:\n" << got.output;
    for (const std::string& part : parts)
      EXPECT_NE(line.find(part), std::string::npos) << "no '" << part << "' in: " << line;
  }

  [[nodiscard]] std::string path(const std::string& name) const { return directory + "/" + name; }
  void write(const std::string& name, const std::string& contents) const {
    std::ofstream(path(name), std::ios::binary) << contents;
  }
  [[nodiscard]] std::string read(const std::string& name) const {
    std::ifstream in(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  /// A token shard as llm.c writes it, its header as asked for.
  template <class Token>
  void write_shard(const std::string& name, const std::vector<Token>& tokens, int32_t magic, int32_t version,
                   int64_t claimed = -1) const {
    std::vector<int32_t> header(256, 0);
    header[0] = magic;
    header[1] = version;
    header[2] = static_cast<int32_t>(claimed < 0 ? static_cast<int64_t>(tokens.size()) : claimed);
    std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
    bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
    write(name, bytes);
  }

  std::string directory;

 private:
  std::string binary_;
};

}  // namespace kinoe
