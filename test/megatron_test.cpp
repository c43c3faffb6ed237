// Megatron data sets: pairs written here from the documented layout, by code that shares nothing with the reader.
#include "dataloader/megatron.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>

#include "dataloader/dataset.h"
#include "dataloader/loader.h"
#include "test/faulty_files.h"

namespace kinoe {
namespace {

/// Appends a value's bytes, lowest first.
template <class T>
void put(std::string& bytes, T value) {
  for (size_t i = 0; i < sizeof(T); ++i)
    bytes += static_cast<char>(static_cast<uint64_t>(static_cast<int64_t>(value)) >> (8 * i));
}

/// What an index says; the members may lie.
struct Index {
  std::string magic = std::string("MMIDIDX\0\0", 9);
  uint64_t version = 1;
  uint8_t type = 4;
  std::vector<int32_t> sizes;
  std::vector<int64_t> pointers;
  std::vector<int64_t> documents;
  int64_t claimed_sequences = -1;
  int64_t claimed_documents = -1;

  [[nodiscard]] std::string bytes() const {
    std::string out = magic;
    put(out, version);
    put(out, type);
    put(out, claimed_sequences < 0 ? static_cast<uint64_t>(sizes.size())
                                   : static_cast<uint64_t>(claimed_sequences));
    put(out, claimed_documents < 0 ? static_cast<uint64_t>(documents.size())
                                   : static_cast<uint64_t>(claimed_documents));
    for (const int32_t size : sizes) put(out, size);
    for (const int64_t pointer : pointers) put(out, pointer);
    for (const int64_t document : documents) put(out, document);
    return out;
  }
};

/// Sequences of 3, 1, 0 and 4 tokens back to back, in three documents, one of them empty.
Index small_index(int64_t width, uint8_t type) {
  Index index;
  index.type = type;
  index.sizes = {3, 1, 0, 4};
  index.pointers = {0, 3 * width, 4 * width, 4 * width};
  index.documents = {0, 2, 3, 4};
  return index;
}

class Megatron : public testing::Test {
 protected:
  [[nodiscard]] std::string pair(const std::string& name, const std::string& bin,
                                 const std::string& idx) const {
    put_file(directory / (name + ".bin"), bin);
    put_file(directory / (name + ".idx"), idx);
    return directory / (name + ".bin");
  }
  template <class Word>
  [[nodiscard]] std::string pair_of(const std::string& name, const std::vector<Word>& tokens,
                                    uint8_t type) const {
    std::string bin;
    for (const Word token : tokens) put(bin, token);
    return pair(name, bin, small_index(sizeof(Word), type).bytes());
  }
  static std::vector<int32_t> all_of(const Shard& shard) {
    std::vector<int32_t> ids(static_cast<size_t>(shard.tokens()));
    shard.read(0, shard.tokens(), ids.data());
    return ids;
  }
  template <class Word>
  void expect_read(uint8_t type, TokenFormat format, const std::vector<Word>& tokens,
                   const std::vector<int32_t>& ids) const {
    const Shard shard = Shard::open(pair_of("t" + std::to_string(type), tokens, type));
    EXPECT_EQ(shard.format(), format) << name_of(shard.format());
    ASSERT_EQ(shard.tokens(), 8);
    EXPECT_EQ(all_of(shard), ids) << name_of(format);
    int32_t middle[3];
    shard.read(2, 3, middle);  // over two borders of sequences
    EXPECT_EQ(std::vector<int32_t>(middle, middle + 3),
              std::vector<int32_t>(ids.begin() + 2, ids.begin() + 5));
    EXPECT_TRUE(shard.warnings().empty());
    ASSERT_NE(shard.index(), nullptr);
    EXPECT_EQ(shard.index()->sequences(), 4);
    EXPECT_EQ(shard.index()->documents(), 3);
  }

  FreshDirectory directory;
};

TEST_F(Megatron, EveryIntegerType) {
  expect_read<uint8_t>(1, TokenFormat::megatron_uint8, {0, 1, 127, 128, 255, 5, 6, 7},
                       {0, 1, 127, 128, 255, 5, 6, 7});
  expect_read<int8_t>(2, TokenFormat::megatron_int8, {0, 1, 127, 3, 4, 5, 6, 7}, {0, 1, 127, 3, 4, 5, 6, 7});
  expect_read<int16_t>(3, TokenFormat::megatron_int16, {0, 32767, 256, 3, 4, 5, 6, 7},
                       {0, 32767, 256, 3, 4, 5, 6, 7});
  expect_read<int32_t>(4, TokenFormat::megatron_int32, {0, 2147483647, 65536, 3, 4, 5, 6, 7},
                       {0, 2147483647, 65536, 3, 4, 5, 6, 7});
  expect_read<int64_t>(5, TokenFormat::megatron_int64, {0, 2147483647, 65536, 3, 4, 5, 6, 7},
                       {0, 2147483647, 65536, 3, 4, 5, 6, 7});
  expect_read<uint16_t>(8, TokenFormat::megatron_uint16, {0, 65535, 50256, 3, 4, 5, 6, 7},
                        {0, 65535, 50256, 3, 4, 5, 6, 7});
}

TEST_F(Megatron, IdsOutOfRangeAreFoundInEveryType) {
  const auto refused = [&](const std::string& bin, const std::string& id, int64_t vocab) {
    const Shard shard = Shard::open(bin);
    expect_error(ExitCode::data, {bin, "token id " + id + " at token 6", cat(vocab, " ids")},
                 [&] { (void)shard.scan(vocab, 1 << 20); });
    const auto bad = shard.find_bad_token(0, 8, vocab);
    ASSERT_TRUE(bad.has_value());
    EXPECT_EQ(bad->position, 6);
    EXPECT_FALSE(shard.find_bad_token(0, 6, vocab).has_value());
    EXPECT_FALSE(shard.find_bad_token(7, 1, vocab).has_value());
  };
  refused(pair_of<uint8_t>("u8", {0, 1, 2, 3, 4, 5, 200, 7}, 1), "200", 200);
  refused(pair_of<int8_t>("i8", {0, 1, 2, 3, 4, 5, -1, 7}, 2), "-1", 100);
  refused(pair_of<int16_t>("i16", {0, 1, 2, 3, 4, 5, -2, 7}, 3), "-2", 30000);
  refused(pair_of<int32_t>("i32", {0, 1, 2, 3, 4, 5, -3, 7}, 4), "-3", 70000);
  refused(pair_of<int64_t>("i64", {0, 1, 2, 3, 4, 5, -4, 7}, 5), "-4", 70000);
  // The low 32 bits are a good id.
  refused(pair_of<int64_t>("big", {0, 1, 2, 3, 4, 5, (int64_t{1} << 32) + 5, 7}, 5), "4294967301", 70000);
  int32_t id = 0;
  Shard::open(directory / "big.bin").read(6, 1, &id);
  EXPECT_LT(id, 0) << "an id of 33 bits must not become a small one";
  refused(pair_of<uint16_t>("u16", {0, 1, 2, 3, 4, 5, 50257, 7}, 8), "50257", 50257);
  expect_error(ExitCode::data, {"Megatron int16", "32768", "too small for a vocabulary of 50257"},
               [&] { (void)Shard::open(directory / "i16.bin").scan(50257, 1 << 20); });
}

TEST_F(Megatron, GapsBetweenSequencesAreSkipped) {
  // Bytes 0 to 3 and 10 to 15 belong to nobody; empty sequences point into the second gap and to its end.
  Index index;
  index.type = 8;
  index.sizes = {3, 0, 0, 2, 1};
  index.pointers = {4, 12, 16, 16, 20};
  index.documents = {0, 1, 2, 3, 5};
  std::string bin(4, '\x7F');
  for (const uint16_t token : std::vector<uint16_t>{11, 12, 13}) put(bin, token);
  bin += std::string(6, '\x7F');
  for (const uint16_t token : std::vector<uint16_t>{14, 15, 16}) put(bin, token);
  bin += "tail";
  const Shard shard = Shard::open(pair("gaps", bin, index.bytes()));
  EXPECT_EQ(all_of(shard), (std::vector<int32_t>{11, 12, 13, 14, 15, 16}));
  shard.will_need(1, 5);
  EXPECT_EQ(shard.find_bad_token(0, 6, 15)->position, 4);
  ASSERT_EQ(shard.warnings().size(), 1U);
  EXPECT_NE(shard.warnings()[0].find("has 26 bytes, its index uses 22"), std::string::npos)
      << shard.warnings()[0];
  std::vector<int64_t> starts;
  shard.index()->each_document_start(0, 6, [&](int64_t start) { starts.push_back(start); });
  EXPECT_EQ(starts, (std::vector<int64_t>{0, 3, 3, 3}));
}

TEST_F(Megatron, DocumentsOfAWindow) {
  const Shard shard = Shard::open(pair_of<uint16_t>("a", {0, 1, 2, 3, 4, 5, 6, 7}, 8));
  const auto starts = [&](int64_t first, int64_t end) {
    std::vector<int64_t> result;
    shard.index()->each_document_start(first, end, [&](int64_t start) { result.push_back(start); });
    return result;
  };
  EXPECT_EQ(starts(0, 8), (std::vector<int64_t>{0, 4, 4}));
  EXPECT_EQ(starts(1, 5), (std::vector<int64_t>{4, 4}));
  EXPECT_EQ(starts(4, 5), (std::vector<int64_t>{4, 4}));
  EXPECT_EQ(starts(5, 8), std::vector<int64_t>{});
  EXPECT_EQ(starts(1, 4), std::vector<int64_t>{});
}

TEST_F(Megatron, EveryFaultOfTheIndex) {
  const std::string bin(16, '\1');
  const auto refused = [&](const Index& index, const std::vector<std::string>& parts) {
    const std::string path = pair("bad", bin, index.bytes());
    std::vector<std::string> all = parts;
    all.push_back(path.substr(0, path.size() - 4));
    expect_error(ExitCode::data, all, [&] { Shard::open(path); });
  };
  const Index good = small_index(2, 8);
  (void)Shard::open(pair("good", bin, good.bytes()));
  const auto with = [&](const std::function<void(Index&)>& change) {
    Index index = good;
    change(index);
    return index;
  };
  refused(with([](Index& i) { i.magic[0] = 'X'; }), {"no Megatron index", "MMIDIDX"});
  refused(with([](Index& i) { i.magic = std::string("TNTIDX\0\0\0", 9); }), {"TNTIDX", "not memory-mapped"});
  refused(with([](Index& i) { i.version = 2; }), {"version 2", "expected 1"});
  refused(with([](Index& i) { i.version = uint64_t{1} << 56; }), {"byte-swapped"});
  refused(with([](Index& i) { i.type = 6; }), {"floating-point", "float64"});
  refused(with([](Index& i) { i.type = 7; }), {"floating-point", "float32"});
  for (const int type : {0, 9, 255})
    refused(with([&](Index& i) { i.type = static_cast<uint8_t>(type); }),
            {cat("token type ", type), "8 uint16"});
  refused(with([](Index& i) { i.claimed_sequences = 5; }),
          {"should have 34 + 5 x 12 + 4 x 8", "cut off", "found 114"});
  refused(with([](Index& i) { i.claimed_sequences = 3; }), {"3 sequences", "trailing"});
  refused(with([](Index& i) { i.claimed_documents = 5; }), {"5 document bounds", "cut off"});
  refused(with([](Index& i) { i.claimed_documents = 3; }), {"3 document bounds", "trailing"});
  refused(with([](Index& i) { i.claimed_sequences = INT64_MAX; }),
          {"9223372036854775807 sequences", "cut off"});
  // Counts whose bytes wrap around to what is there.
  refused(with([](Index& i) { i.claimed_sequences = (int64_t{1} << 62) + 4; }), {"cut off"});
  refused(with([](Index& i) { i.claimed_documents = (int64_t{1} << 61) + 4; }), {"cut off"});
  refused(with([](Index& i) { i.claimed_sequences = 0; }), {"0 sequences", "at least 1"});
  refused(with([](Index& i) { i.claimed_documents = 1; }), {"1 document bounds"});
  refused(with([](Index& i) { i.sizes[1] = -1; }), {"sequence 1 has -1 tokens"});
  refused(with([](Index& i) { i.sizes[3] = 5; }),
          {"has 16 bytes, but sequence 3", "5 tokens of 2 bytes from byte 8"});
  refused(with([](Index& i) { i.pointers[3] = 10; }), {"sequence 3", "from byte 10"});
  refused(with([](Index& i) { i.pointers[3] = INT64_MAX; }), {"from byte 9223372036854775807"});
  refused(with([](Index& i) { i.pointers[1] = 4; }), {"sequence 1 begins at byte 4", "expected 6 or later"});
  refused(with([](Index& i) { i.pointers[0] = -2; }), {"sequence 0 begins at byte -2", "expected 0"});
  refused(with([](Index& i) { i.documents[0] = 1; }), {"document bound 0 is sequence 1, expected 0"});
  refused(with([](Index& i) { i.documents[3] = 3; }), {"document bound 3 is sequence 3, expected 4"});
  refused(with([](Index& i) { i.documents[2] = 1; }),
          {"document bound 2 is sequence 1, expected one from 2 to 4"});
  refused(with([](Index& i) { i.documents[1] = 5; }), {"document bound 1 is sequence 5"});
  refused(with([](Index& i) {
            i.sizes = {0, 0};
            i.pointers = {0, 0};
            i.documents = {0, 2};
          }),
          {"2 sequences and no token"});

  const auto raw = [&](const std::string& idx, const std::vector<std::string>& parts) {
    const std::string path = pair("raw", bin, idx);
    expect_error(ExitCode::data, parts, [&] { Shard::open(path); });
  };
  raw(good.bytes() + std::string(4, '\0'), {"multimodal", "raw.idx"});
  raw(good.bytes() + "x", {"trailing"});
  raw(good.bytes().substr(0, 33), {"shorter than the header", "34", "33"});
  raw("", {"shorter than the header", "0"});
  for (size_t length = 34; length < good.bytes().size(); ++length)
    raw(good.bytes().substr(0, length), {"raw.idx", "cut off"});
  // The .bin cut off, and empty.
  for (const size_t length : std::vector<size_t>{15, 8, 1}) {
    const std::string path = pair("short", bin.substr(0, length), good.bytes());
    expect_error(ExitCode::data, {path, cat("has ", length, " bytes"), "cut off"},
                 [&] { Shard::open(path); });
  }
  expect_error(ExitCode::data, {"is empty"}, [&] { Shard::open(pair("empty", "", good.bytes())); });
}

TEST_F(Megatron, NamedByWhatBothFilesHaveInCommon) {
  const std::string bin = pair_of<uint16_t>("a", {0, 1, 2, 3, 4, 5, 6, 7}, 8), name = directory / "a";
  const std::string other = pair_of<uint16_t>("b", {0, 1, 2, 3, 4, 5, 6, 7}, 8);
  const auto files = [](const std::string& argument) {
    return expand_data(std::vector<std::string>{argument}).at(0).files;
  };
  EXPECT_EQ(files(name), std::vector<std::string>{bin});
  EXPECT_EQ(files(name + ".bin"), std::vector<std::string>{bin});
  EXPECT_EQ(files(name + ".idx"), std::vector<std::string>{bin});
  EXPECT_EQ(files(directory / "*"), (std::vector<std::string>{bin, other}));
  EXPECT_EQ(files(directory / "?.idx"), (std::vector<std::string>{bin, other}));
  std::filesystem::create_directory(name);
  EXPECT_EQ(files(name), std::vector<std::string>{bin}) << "a directory may bear the same name";

  const auto weighted = expand_data(std::vector<std::string>{name + ":0.7", (directory / "b*") + ":0.3"});
  ASSERT_EQ(weighted.size(), 2U);
  EXPECT_EQ(weighted[0].files, std::vector<std::string>{bin});
  EXPECT_EQ(weighted[0].weight, 0.7);
  EXPECT_EQ(weighted[1].files, std::vector<std::string>{other});
  expect_error(ExitCode::usage, {"no number"}, [&] { parse_data_argument(name + ":half"); });
  expect_error(ExitCode::usage, {"given twice"}, [&] { expand_data(std::vector<std::string>{name, bin}); });
  expect_error(ExitCode::usage, {"also trained on"}, [&] {
    check_validation_apart(expand_data(std::vector<std::string>{name}),
                           expand_data(std::vector<std::string>{bin}));
  });

  put_file(directory / "only.idx", small_index(2, 8).bytes());
  expect_error(ExitCode::data, {"only.idx", "only.bin", "copy"}, [&] { files(directory / "only"); });
  expect_error(ExitCode::data, {"only.idx", "only.bin", "copy"}, [&] { files(directory / "only.idx"); });
  put_file(directory / "alone.bin", std::string(16, '\1'));
  expect_error(ExitCode::data, {"alone.bin", "without its .idx"},
               [&] { Shard::open(files(directory / "alone.bin").at(0)); });
}

TEST_F(Megatron, AKnownMagicWinsOverAnIndexBesideIt) {
  std::string bin;
  for (const int32_t word : {20240520, 1, 4}) put(bin, word);
  bin.resize(1024);
  for (const uint16_t token : std::vector<uint16_t>{5, 6, 7, 8}) put(bin, token);
  const Shard shard = Shard::open(pair("llmc", bin, small_index(2, 8).bytes()));
  EXPECT_EQ(shard.format(), TokenFormat::llmc_uint16);
  EXPECT_EQ(all_of(shard), (std::vector<int32_t>{5, 6, 7, 8}));
}

TEST_F(Megatron, ADatasetReadsAcrossSequences) {
  // 7 documents of unequal length, the tokens 100, 101, ...
  Index index;
  index.type = 8;
  std::string bin;
  uint16_t token = 100;
  for (const int32_t size : {13, 1, 40, 7, 19, 2, 19}) {
    index.pointers.push_back(static_cast<int64_t>(bin.size()));
    index.sizes.push_back(size);
    for (int32_t i = 0; i < size; ++i) put(bin, token), ++token;
  }
  index.documents.resize(8);
  std::iota(index.documents.begin(), index.documents.end(), 0);
  (void)pair("a", bin, index.bytes());
  DatasetOptions options;
  options.seq_len = 10;
  options.vocab_size = 1000;
  options.shuffle = false;
  const Dataset data = Dataset::open(expand_data(std::vector<std::string>{directory / "a"}), options);
  ASSERT_EQ(data.samples(), 10);
  EXPECT_FALSE(data.byte_tokens());
  EXPECT_EQ(data.state().sources[0].files[0].format, "Megatron uint16");
  std::vector<int32_t> sample(11);
  for (int64_t s = 0; s < 10; ++s) {
    data.read(s, sample.data());
    for (int32_t t = 0; t <= 10; ++t) ASSERT_EQ(sample[static_cast<size_t>(t)], 100 + 10 * s + t);
  }
}

// A .bin of 9 GiB, sparse, its sequences far apart; right values before and after 4 and 8 GiB and at the very end.
TEST_F(Megatron, NineGibibytes) {
  const int64_t bytes = int64_t{9} << 30, width = 2;
  const int32_t chunk = 1 << 30;  // tokens a sequence: 2 GiB
  Index index;
  index.type = 8;
  for (int64_t at = 0; at < bytes; at += chunk * width) {
    index.pointers.push_back(at);
    index.sizes.push_back(static_cast<int32_t>(std::min<int64_t>(chunk, (bytes - at) / width)));
  }
  index.documents = {0, 1, 5};
  const std::string path = pair("huge", "", index.bytes());
  if (::truncate(path.c_str(), bytes) != 0) GTEST_SKIP() << "the file system refuses a sparse file of 9 GiB";
  const auto at = [&](int64_t position, uint16_t value) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(position * width);
    file.write(reinterpret_cast<const char*>(&value), 2);
  };
  const int64_t tokens = bytes / width;
  const std::vector<int64_t> places = {0, (int64_t{1} << 31) - 1, int64_t{1} << 31, int64_t{1} << 32,
                                       tokens - 1};
  for (size_t i = 0; i < places.size(); ++i) at(places[i], static_cast<uint16_t>(101 + i));
  const Shard shard = Shard::open(path);
  ASSERT_EQ(shard.tokens(), tokens);
  for (size_t i = 0; i < places.size(); ++i) {
    int32_t id = 0;
    shard.read(places[i], 1, &id);
    EXPECT_EQ(id, 101 + static_cast<int32_t>(i)) << places[i];
  }
  EXPECT_EQ(shard.find_bad_token(tokens - 10, 10, 105)->position, tokens - 1);
  shard.will_need(tokens - 10, 10);
}

}  // namespace
}  // namespace kinoe
