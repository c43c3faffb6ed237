// One function per reader: bytes in, an Error of the right class or nothing out.
#include "test/fuzz/readers.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dataloader/manifest.h"
#include "dataloader/megatron.h"
#include "dataloader/shard.h"
#include "kernels/common/check.h"
#include "trainer/config.h"
#include "trainer/files.h"
#include "trainer/model_config.h"
#include "trainer/safetensors.h"

namespace kinoe::fuzz {
namespace {

/// Runs a reader, lets only its own class of error pass, and looks at the message: one line, not endless.
template <class Work>
void expect_class(ExitCode code, Work work) {
  try {
    work();
  } catch (const Error& error) {
    CHECK(error.code == code, "an error of class ", static_cast<int>(error.code), " instead of ",
          static_cast<int>(code), ": ", error.what());
    const std::string_view message = error.what();
    CHECK(message.find('\n') == std::string_view::npos, "a message of several lines: ", message);
    CHECK(message.size() < 2000, "a message of ", message.size(), " bytes");
  }
}

// ---- token files -----------------------------------------------------------------------------------------------

/// A directory of files that are rewritten for each input.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kinoe-fuzz.XXXXXX").string();
    CHECK(::mkdtemp(pattern.data()) != nullptr, "no temporary directory ", pattern);
    path_ = pattern;
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  /// Writes a file and returns its path.
  [[nodiscard]] std::string put(const std::string& name, std::string_view bytes) const {
    std::string path = path_ + "/" + name;
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const bool written =
        fd >= 0 && ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size());
    CHECK(written && ::close(fd) == 0, "cannot write ", path);
    return path;
  }

 private:
  std::string path_;
};

void use_shard(const std::string& path) {
  expect_class(ExitCode::data, [&] {
    Shard shard = Shard::open(path);
    CHECK(shard.tokens() > 0, "a shard of ", shard.tokens(), " tokens");
    const int64_t looked = std::min<int64_t>(shard.tokens(), 4096);
    std::vector<int32_t> ids(static_cast<size_t>(looked)), start(ids), end(ids);
    for (const int64_t first : {shard.tokens() - looked, int64_t{0}}) {
      shard.will_need(first, looked);
      shard.read(first, looked, ids.data());
      if (shard.index() == nullptr) shard.set_end_token(ids[0]);
      shard.find_documents(first, looked, ids.data(), start.data(), end.data());
      for (size_t t = 0; t < ids.size(); ++t)
        CHECK(start[t] >= 0 && start[t] <= static_cast<int32_t>(t) && end[t] > static_cast<int32_t>(t) &&
                  end[t] <= looked,
              "token ", t, " of a document [", start[t], ", ", end[t], ")");
    }
    CHECK(!shard.fingerprint().empty(), "no fingerprint");
    for (const int64_t vocab : {int64_t{256}, int64_t{50257}, int64_t{128256}}) {
      if (const auto bad = shard.find_bad_token(0, shard.tokens(), vocab))
        CHECK((bad->id < 0 || bad->id >= vocab) && bad->position < shard.tokens(), "token ", bad->id,
              " is below ", vocab);
      expect_class(ExitCode::data, [&] { static_cast<void>(shard.scan(vocab, 1024)); });
    }
  });
}

/// Under both kinds of name, since the name decides what an error says.
void read_shard(std::string_view bytes) {
  static const ScratchDirectory directory;
  use_shard(directory.put("data.bin", bytes));
  use_shard(directory.put("data.txt", bytes));
}

/// The bytes as NAME.idx beside 64 bytes of tokens.
void read_megatron(std::string_view bytes) {
  static const ScratchDirectory directory;
  static const std::string bin = directory.put("data.bin", std::string(64, '\1'));
  static_cast<void>(directory.put("data.idx", bytes));
  use_shard(bin);
}

void read_data_manifest(std::string_view bytes) {
  static const ScratchDirectory directory;
  const std::string path = directory.put("manifest.json", bytes);
  expect_class(ExitCode::data, [&] { static_cast<void>(read_manifest(path)); });
}

// ---- safetensors -----------------------------------------------------------------------------------------------

/// Files in memory. Only what a reader calls is there.
class MemoryFiles final : public Files {
 public:
  void put(const std::string& path, std::string_view bytes) { files_[path] = bytes; }

  std::unique_ptr<File> open_read(const std::string& path) override {
    const auto found = files_.find(path);
    if (found == files_.end()) throw FileError("open", path, ENOENT);
    return std::make_unique<MemoryFile>(path, found->second);
  }
  Kind kind(const std::string& path) override { return files_.contains(path) ? Kind::file : Kind::absent; }
  std::unique_ptr<File> create(const std::string& path) override { refuse(path); }
  std::unique_ptr<File> open_write(const std::string& path) override { refuse(path); }
  void rename(const std::string& from, const std::string& /*to*/) override { refuse(from); }
  void exchange(const std::string& a, const std::string& /*b*/) override { refuse(a); }
  void sync_directory(const std::string& path) override { refuse(path); }
  bool make_directory(const std::string& path) override { refuse(path); }
  void remove(const std::string& path) override { refuse(path); }
  std::vector<std::string> list(const std::string& path) override { refuse(path); }
  uint64_t free_bytes(const std::string& path) override { refuse(path); }

 private:
  [[noreturn]] static void refuse(const std::string& path) {
    fail(ExitCode::internal, "a reader did more than read ", path);
  }

  class MemoryFile final : public File {
   public:
    MemoryFile(const std::string& path, std::string_view bytes) : File(path), bytes_(bytes) {}
    void read_at(uint64_t offset, void* data, size_t bytes) const override {
      CHECK(offset <= bytes_.size() && bytes <= bytes_.size() - offset, "bytes [", offset, ", +", bytes,
            ") of a file of ", bytes_.size());
      if (bytes > 0) std::memcpy(data, bytes_.data() + offset, bytes);
    }
    [[nodiscard]] uint64_t size() const override { return bytes_.size(); }
    void write_at(uint64_t /*offset*/, const void* /*data*/, size_t /*bytes*/) override { refuse(path()); }
    void resize(uint64_t /*bytes*/) override { refuse(path()); }
    void sync() override { refuse(path()); }
    void close() override {}

   private:
    std::string_view bytes_;
  };

  std::map<std::string, std::string_view> files_;
};

/// A file of one tensor of four bytes.
std::string small_file(const std::string& name) {
  std::string header = "{\"" + name + R"(":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  while (header.size() % 8 != 0) header += ' ';
  return std::string(1, static_cast<char>(header.size())) + std::string(7, '\0') + header + "abcd";
}

void use_safetensors(MemoryFiles& files, const std::string& path) {
  expect_class(ExitCode::checkpoint, [&] {
    const SafetensorsReader reader(files, path);
    for (const TensorPlace& tensor : reader.tensors()) {
      CHECK(reader.find(tensor.info.name) == &tensor, "a tensor that is not found");
      std::vector<char> bytes(tensor.bytes);
      reader.read(tensor, 0, bytes.data(), bytes.size());
    }
  });
}

/// The bytes as a file of tensors, and as the index of two such files.
void read_safetensors(std::string_view bytes) {
  static const std::string a = small_file("a"), b = small_file("b");
  MemoryFiles files;
  files.put("m/model.safetensors", bytes);
  files.put("m/model.safetensors.index.json", bytes);
  files.put("m/model-00001-of-00002.safetensors", a);
  files.put("m/model-00002-of-00002.safetensors", b);
  use_safetensors(files, "m/model.safetensors");
  use_safetensors(files, "m/model.safetensors.index.json");
}

// ---- configurations --------------------------------------------------------------------------------------------

void read_config_json(std::string_view bytes) {
  expect_class(ExitCode::usage, [&] {
    const ModelConfig config = model_config_from_json(std::string(bytes), "config.json");
    CHECK(config.parameter_count() > 0, "a model of ", config.parameter_count(), " parameters");
    const ModelConfig again = model_config_from_json(model_config_to_json(config, "float32"), "again");
    CHECK(again == config,
          "config.json does not survive being written: ", describe_difference(config, again));
  });
}

void read_config_toml(std::string_view bytes) {
  expect_class(ExitCode::usage, [&] {
    const RunConfig config = run_config_from_toml(std::string(bytes), "config.toml");
    CHECK(run_config_from_toml(to_toml(config), "again") == config,
          "a configuration does not survive being written:\n", to_toml(config));
  });
}

}  // namespace

std::span<const Reader> readers() {
  static constexpr std::array kReaders = {
      Reader{"shard", read_shard},
      Reader{"megatron", read_megatron},
      Reader{"manifest", read_data_manifest},
      Reader{"safetensors", read_safetensors},
      Reader{"config_json", read_config_json},
      Reader{"config_toml", read_config_toml},
  };
  return kReaders;
}

}  // namespace kinoe::fuzz
