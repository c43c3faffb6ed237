// Token files: what opens, what is refused and with which words.
#include "dataloader/shard.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "dataloader/data_spec.h"
#include "dataloader/file_kind.h"
#include "kernels/common/check.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;

class ShardTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = testing::TempDir() + "kinoe_shard_" +
           testing::UnitTest::GetInstance()->current_test_info()->name() + "_" + std::to_string(::getpid());
    fs::remove_all(dir_);
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string write(const std::string& name, const std::string& bytes) const {
    const std::string path = dir_ + "/" + name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  template <class Word>
  static std::string llmc(int32_t magic, int32_t version, const std::vector<Word>& tokens,
                          int64_t count = -1) {
    std::vector<int32_t> header(256);
    header[0] = magic;
    header[1] = version;
    header[2] = static_cast<int32_t>(count < 0 ? static_cast<int64_t>(tokens.size()) : count);
    std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
    return bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Word));
  }
  static std::string shard16(const std::vector<uint16_t>& tokens, int64_t count = -1) {
    return llmc(kLlmcMagicUint16, kLlmcVersionUint16, tokens, count);
  }
  static std::string shard32(const std::vector<uint32_t>& tokens, int64_t count = -1) {
    return llmc(kLlmcMagicUint32, kLlmcVersionUint32, tokens, count);
  }

  static std::string error_of(const std::function<void()>& action, ExitCode code = ExitCode::data) {
    try {
      action();
    } catch (const Error& error) {
      EXPECT_EQ(static_cast<int>(error.code), static_cast<int>(code)) << error.what();
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << "one line: " << error.what();
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return "";
  }
  std::string refusal(const std::string& name, const std::string& bytes) const {
    const std::string path = write(name, bytes);
    const std::string message = error_of([&] { Shard::open(path); });
    EXPECT_NE(message.find(path), std::string::npos) << message;
    return message;
  }

  std::string dir_;
};

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << (message)

TEST_F(ShardTest, ReadsUint16) {
  const Shard shard = Shard::open(write("a.bin", shard16({0, 1, 50256, 65535, 7})));
  EXPECT_EQ(shard.format(), TokenFormat::llmc_uint16);
  EXPECT_EQ(shard.tokens(), 5);
  EXPECT_EQ(shard.file_bytes(), 1034);
  int32_t ids[4];
  shard.read(1, 4, ids);
  EXPECT_EQ(ids[0], 1);
  EXPECT_EQ(ids[1], 50256);
  EXPECT_EQ(ids[2], 65535);
  EXPECT_EQ(ids[3], 7);
  shard.will_need(1, 4);
}

// As modded-nanogpt's data/fineweb.py writes one: llm.c's header and magic, a whole shard in one write.
TEST_F(ShardTest, ReadsModdedNanogptShards) {
  std::string bytes(1024, '\0');
  const int32_t tokens = 100'000;
  const int32_t header[3] = {20240520, 1, tokens};
  std::memcpy(bytes.data(), header, sizeof(header));
  for (int32_t i = 0; i < tokens; ++i) {
    const int32_t id = i % 1000 == 0 ? 50256 : i % 50257;
    bytes += static_cast<char>(id & 0xFF);
    bytes += static_cast<char>(id >> 8);
  }
  const Shard shard = Shard::open(write("fineweb_train_000001.bin", bytes));
  EXPECT_EQ(shard.format(), TokenFormat::llmc_uint16);
  ASSERT_EQ(shard.tokens(), tokens);
  EXPECT_EQ(shard.scan(50257, 1 << 26), "");
  std::vector<int32_t> ids(static_cast<size_t>(tokens));
  shard.read(0, tokens, ids.data());
  for (int32_t i = 0; i < tokens; ++i)
    ASSERT_EQ(ids[static_cast<size_t>(i)], i % 1000 == 0 ? 50256 : i % 50257) << i;
}

TEST_F(ShardTest, ReadsUint32) {
  const Shard shard = Shard::open(write("a.bin", shard32({128255, 3, 65536})));
  EXPECT_EQ(shard.format(), TokenFormat::llmc_uint32);
  int32_t ids[3];
  shard.read(0, 3, ids);
  EXPECT_EQ(ids[0], 128255);
  EXPECT_EQ(ids[1], 3);
  EXPECT_EQ(ids[2], 65536);
}

TEST_F(ShardTest, MagicDecidesWhateverTheName) {
  EXPECT_EQ(detect_format(write("tokens.txt", shard16({1, 2}))), TokenFormat::llmc_uint16);
  EXPECT_EQ(detect_format(write("tokens", shard32({1, 2}))), TokenFormat::llmc_uint32);
  EXPECT_EQ(detect_format(write("a.md", "plain text\n")), TokenFormat::text);
}

TEST_F(ShardTest, ReadsTextAsBytes) {
  const Shard shard = Shard::open(write("a.txt", "K\xC3\xB6ln \xE2\x82\xAC \xF0\x9F\x98\x80\n"));
  EXPECT_EQ(shard.format(), TokenFormat::text);
  EXPECT_EQ(shard.tokens(), 15);
  EXPECT_TRUE(shard.warnings().empty());
  int32_t ids[3];
  shard.read(0, 3, ids);
  EXPECT_EQ(ids[0], 'K');
  EXPECT_EQ(ids[1], 0xC3);
  EXPECT_EQ(ids[2], 0xB6);
}

TEST_F(ShardTest, InvalidUtf8IsCounted) {
  const Shard shard = Shard::open(write("latin1.txt",
                                        "stra\xDF"
                                        "e und B\xFC"
                                        "cher, fast ohne Fehler\n"));
  ASSERT_EQ(shard.warnings().size(), 1U);
  EXPECT_SAYS(shard.warnings()[0], "has 2 bytes that are no UTF-8");
  EXPECT_SAYS(shard.warnings()[0], "offset 4");
  // Overlong, surrogate, above U+10FFFF, and cut off at the end of the file: all invalid.
  for (const char* bytes : {"x\xC0\xAFy", "x\xED\xA0\x80y", "x\xF4\x90\x80\x80y", "xyz\xE2\x82"})
    EXPECT_EQ(Shard::open(write("bad.txt", bytes)).warnings().size(), 1U) << bytes;
}

TEST_F(ShardTest, TextWithNulIsRefused) {
  EXPECT_SAYS(refusal("a.txt", std::string("abc\0def", 7)), "NUL");
  EXPECT_SAYS(refusal("b.txt", std::string(5000, 'x') + std::string(1, '\0') + "y"),
              "NUL byte at offset 5000");
  EXPECT_SAYS(refusal("c.txt", std::string("\xFF\xFEH\0i\0", 6)), "UTF-16");
  EXPECT_SAYS(refusal("d.txt", std::string("H\0e\0l\0l\0o\0", 10)), "UTF-16");
}

TEST_F(ShardTest, ShorterThanItsHeaderSays) {  // row 1
  const std::string message = refusal("cut.bin", shard16({1, 2, 3}, 5));
  EXPECT_SAYS(message, "1034");
  EXPECT_SAYS(message, "1030");
  EXPECT_SAYS(message, "cut off");
  EXPECT_SAYS(refusal("header.bin", shard16({}).substr(0, 400)), "400 bytes");
}

TEST_F(ShardTest, TrailingBytes) {  // row 2
  EXPECT_SAYS(refusal("long.bin", shard16({1, 2, 3}) + "x"), "trailing");
  EXPECT_SAYS(refusal("long.bin", shard32({1, 2, 3, 4}, 3)), "trailing");
}

TEST_F(ShardTest, WrongMagicVersionOrByteOrder) {  // row 3
  EXPECT_SAYS(refusal("v.bin", llmc<uint16_t>(kLlmcMagicUint16, 7, {1, 2})), "version 7; expected version 1");
  EXPECT_SAYS(refusal("v.bin", llmc<uint32_t>(kLlmcMagicUint32, 1, {1, 2})), "version 1; expected version 7");
  const auto big_endian = [](int32_t magic) {
    return static_cast<int32_t>(__builtin_bswap32(static_cast<uint32_t>(magic)));
  };
  EXPECT_SAYS(refusal("b.bin", llmc<uint16_t>(big_endian(kLlmcMagicUint16), 0x01000000, {1})), "byte order");
  EXPECT_SAYS(refusal("b.bin", llmc<uint32_t>(big_endian(kLlmcMagicUint32), 0x07000000, {1})), "byte order");
  EXPECT_SAYS(refusal("a.npy", std::string("\x93NUMPY\x01\x00 and so on", 18)), ".npy");
  EXPECT_SAYS(refusal("a.bin", std::string("\x93NUMPY\x01\x00 and so on", 18)), ".npy");
  EXPECT_SAYS(refusal("a.txt", std::string("\x1F\x8B\x08\x00\x00", 5)), "gzip");
  EXPECT_SAYS(refusal("a.bin", std::string("\x1F\x8B\x08\x00\x00", 5)), "gzip");
  EXPECT_SAYS(refusal("a.bin", "Once upon a time there was a misnamed file.\n"), "text");
  EXPECT_SAYS(refusal("a.idx", std::string("MMIDIDX\0\0\x01", 10)), "index");
  const std::string raw("\x12\x00\x34\x00\x56\x01\x78\x02\x9A\x03", 10);
  EXPECT_SAYS(refusal("raw.bin", raw), "Megatron .bin without its .idx");
  write("raw.idx", "something else, long enough to be an index of Megatron");
  const std::string message = error_of([&] { Shard::open(write("raw.bin", raw)); });
  EXPECT_SAYS(message, "raw.idx' is no Megatron index");
}

TEST_F(ShardTest, TokenWidth) {  // row 4
  const Shard narrow = Shard::open(write("n.bin", shard16({1, 2, 3})));
  EXPECT_SAYS(error_of([&] { (void)narrow.scan(128256, 1000); }),
              "llm.c uint16 tokens, ids below 65536, too small for a vocabulary of 128256");
  EXPECT_EQ(narrow.scan(65536, 1000), "");
  EXPECT_SAYS(error_of([&] { (void)narrow.scan(65537, 1000); }), "version 7 (uint32)");
  // uint16 tokens behind a uint32 header: the right size in bytes with the count halved, or the count of the uint16.
  const std::vector<uint32_t> pairs(100, 1234U | 4321U << 16);
  const Shard wide = Shard::open(write("w.bin", shard32(pairs)));
  EXPECT_SAYS(error_of([&] { (void)wide.scan(50257, 1000); }), "pairs of uint16");
  EXPECT_SAYS(refusal("w.bin", llmc<uint16_t>(kLlmcMagicUint32, kLlmcVersionUint32, {1, 2, 3})),
              "exactly the size of 16-bit");
  // And the other way round.
  EXPECT_SAYS(refusal("w.bin", llmc<uint32_t>(kLlmcMagicUint16, kLlmcVersionUint16, {1, 2, 3})),
              "exactly the size of 32-bit");
  std::vector<uint16_t> halves;
  for (uint16_t i = 0; i < 200; ++i) halves.insert(halves.end(), {static_cast<uint16_t>(i + 1), uint16_t{0}});
  EXPECT_SAYS(Shard::open(write("h.bin", shard16(halves))).scan(50257, 1000),
              "32-bit tokens under a uint16 header");
}

TEST_F(ShardTest, TokenBeyondTheVocabulary) {  // row 5
  std::vector<uint16_t> tokens(10000, 5);
  tokens[7321] = 300;
  const Shard shard = Shard::open(write("a.bin", shard16(tokens)));
  EXPECT_EQ(shard.scan(301, 1 << 20), "");
  const std::string message = error_of([&] { (void)shard.scan(300, 1 << 20); });
  EXPECT_SAYS(message, "token id 300 at token 7321");
  // A small budget looks at both ends.
  EXPECT_EQ(shard.scan(300, 160), "");
  for (const size_t at : {size_t{0}, size_t{9999}}) {
    std::vector<uint32_t> ends(10000, 5);
    ends[at] = 0xFFFFFFFFU;
    const Shard damaged = Shard::open(write("b.bin", shard32(ends)));
    EXPECT_SAYS(error_of([&] { (void)damaged.scan(128256, 160); }),
                "token id 4294967295 at token " + std::to_string(at));
  }
  const auto bad = shard.find_bad_token(7000, 1000, 300);
  ASSERT_TRUE(bad.has_value());
  EXPECT_EQ(bad->position, 7321);
  EXPECT_EQ(bad->id, 300);
  EXPECT_FALSE(shard.find_bad_token(7322, 1000, 300).has_value());
}

TEST_F(ShardTest, EmptyMissingAndDirectory) {  // row 6
  EXPECT_SAYS(refusal("empty.bin", ""), "empty");
  EXPECT_SAYS(refusal("empty.txt", ""), "empty");
  EXPECT_SAYS(refusal("zero.bin", shard16({})), "0 tokens");
  EXPECT_SAYS(error_of([&] { expand_data(std::vector<std::string>{dir_ + "/none*.bin"}); }),
              "no file matches");
  EXPECT_SAYS(error_of([&] { expand_data(std::vector<std::string>{dir_ + "/none.bin"}); }), "No such file");
  EXPECT_SAYS(error_of([&] { expand_data(std::vector<std::string>{dir_}); }), "is a directory");
  EXPECT_SAYS(error_of([&] { Shard::open(dir_); }), "is a directory");
  EXPECT_SAYS(error_of([&] { expand_data(std::vector<std::string>{"/dev/null"}); }), "no regular file");
}

TEST_F(ShardTest,
       MoreThanTwoToThe31Tokens) {  // row 9: over 4 GiB and over 2^31 tokens, without the disk space
  const int64_t tokens = (int64_t{1} << 31) + 1000;
  const std::string path = write("huge.bin", shard16({11, 12, 13}, tokens));
  if (::truncate(path.c_str(), 1024 + 2 * tokens) != 0)
    GTEST_SKIP() << "the file system refuses a sparse file of 4 GiB";
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(1024 + 2 * (tokens - 2));
    const uint16_t last[2] = {21, 22};
    file.write(reinterpret_cast<const char*>(last), 4);
  }
  const Shard shard = Shard::open(path);
  ASSERT_EQ(shard.tokens(), tokens);
  int32_t ids[3];
  shard.read(0, 3, ids);
  EXPECT_EQ(ids[2], 13);
  shard.read(tokens - 3, 3, ids);
  EXPECT_EQ(ids[0], 0);
  EXPECT_EQ(ids[1], 21);
  EXPECT_EQ(ids[2], 22);
  EXPECT_SAYS(error_of([&] { (void)shard.scan(22, 1 << 20); }), "token id 22 at token 2147484647");
  shard.will_need(tokens - 3, 3);
}

TEST(DataSpecTest, WeightAfterTheLastColon) {
  EXPECT_EQ(parse_data_argument("a.bin").path, "a.bin");
  EXPECT_EQ(parse_data_argument("a.bin").weight, 0);
  EXPECT_EQ(parse_data_argument("a.bin:0.25").path, "a.bin");
  EXPECT_EQ(parse_data_argument("a.bin:0.25").weight, 0.25);
  EXPECT_EQ(parse_data_argument("s3:x/a:b.bin:3e-1").path, "s3:x/a:b.bin");
  EXPECT_EQ(parse_data_argument("s3:x/a:b.bin").path, "s3:x/a:b.bin");
  EXPECT_EQ(parse_data_argument("dir/*.bin:2").path, "dir/*.bin");
}

TEST_F(ShardTest, WeightsThatAreNone) {  // row 13
  const std::string file = write("a.bin", shard16({1}));
  for (const char* weight : {"0", "-1", "nan", "inf", "-nan", "1e999", "1e-999", "0.0"})
    EXPECT_SAYS(error_of([&] { parse_data_argument(file + ":" + weight); }, ExitCode::usage),
                "finite number above zero")
        << weight;
  for (const char* weight : {"abc", "0.5x", "", "0,5"})
    EXPECT_SAYS(error_of([&] { parse_data_argument(file + ":" + weight); }, ExitCode::usage), "no number")
        << weight;
  EXPECT_SAYS(error_of([&] { parse_data_argument(dir_ + "/*.bin:half"); }, ExitCode::usage), "no number");
  const std::string other = write("b.bin", shard16({1}));
  EXPECT_SAYS(error_of(
                  [&] {
                    expand_data(std::vector<std::string>{file + ":1", other});
                  },
                  ExitCode::usage),
              "or none");
}

TEST_F(ShardTest, GlobsAreSortedAndSourcesFormed) {
  for (const char* name : {"c.bin", "a.bin", "b.bin", "x[1].bin"}) write(name, shard16({1}));
  const auto one = expand_data(std::vector<std::string>{dir_ + "/[abc].bin", dir_ + "/x[1].bin"});
  ASSERT_EQ(one.size(), 1U);
  ASSERT_EQ(one[0].files.size(), 4U);
  EXPECT_TRUE(one[0].files[0].ends_with("/a.bin") && one[0].files[2].ends_with("/c.bin"));
  EXPECT_TRUE(one[0].files[3].ends_with("/x[1].bin"));
  const auto two = expand_data(std::vector<std::string>{dir_ + "/[ab].bin:3", dir_ + "/c.bin:1"});
  ASSERT_EQ(two.size(), 2U);
  EXPECT_EQ(two[0].weight, 3);
  EXPECT_EQ(two[0].files.size(), 2U);
  EXPECT_EQ(two[1].files.size(), 1U);
}

TEST_F(ShardTest, DuplicatesAndValidationInTraining) {  // row 12
  const std::string a = write("a.bin", shard16({1})), b = write("b.bin", shard16({1}));
  fs::create_symlink(a, dir_ + "/link.bin");
  const auto list = [](std::vector<std::string> arguments) { return arguments; };
  EXPECT_SAYS(error_of([&] { expand_data(list({a, b, a})); }, ExitCode::usage), "given twice");
  EXPECT_SAYS(error_of(
                  [&] {
                    expand_data(list({a + ":1", b + ":1", a + ":2"}));
                  },
                  ExitCode::usage),
              "given twice");
  EXPECT_SAYS(error_of([&] { expand_data(list({a, dir_ + "/link.bin"})); }, ExitCode::usage), "same file");
  EXPECT_SAYS(error_of(
                  [&] {
                    expand_data(list({a, dir_ + "/../" + fs::path(dir_).filename().string() + "/a.bin"}));
                  },
                  ExitCode::usage),
              "same file");
  const auto train = expand_data(list({a, b}));
  EXPECT_SAYS(error_of([&] { check_validation_apart(train, expand_data(list({dir_ + "/link.bin"}))); },
                       ExitCode::usage),
              "also trained on");
  check_validation_apart(train, expand_data(list({write("v.bin", shard16({1}))})));
}

}  // namespace
}  // namespace kinoe
