// What is recorded about the data, how it is compared, and manifests (FAULTS.md rows 10, 11, 15).
#include "dataloader/data_state.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "dataloader/dataset.h"
#include "dataloader/fingerprint.h"
#include "dataloader/manifest.h"
#include "test/faulty_files.h"

namespace kinoe {
namespace {

DataState two_sources() {
  DataState state;
  state.seed = 0xFFFFFFFFFFFFFFFFULL;
  state.seq_len = 1024;
  state.document_mask = true;
  state.tokenizer = "00112233445566778899aabbccddeeff";
  state.sources = {
      {"a*.bin",
       0.7,
       300,
       12,
       {{"a1.bin", "llm.c uint16", 1224, 100, 4, "f1"}, {"a \"2\".bin", "llm.c uint16", 1424, 200, 8, "f2"}}},
      {"b",
       0.3,
       int64_t{1} << 40,
       5,
       {{"b.bin", "Megatron int32", int64_t{1} << 42, int64_t{1} << 40, 5, "f3"}}}};
  return state;
}

TEST(DataState, JsonReadsBackToTheSame) {
  EXPECT_EQ(data_state_from_json(to_json(two_sources()), "state"), two_sources());
  DataState odd = two_sources();
  odd.sources[0].weight = 1.0 / 3;
  odd.sources[0].files[0].samples = 0;
  odd.shuffled = false;
  odd.tokenizer = "";
  EXPECT_EQ(data_state_from_json(to_json(odd), "state"), odd);
}

TEST(DataState, ReadingIsStrict) {
  const std::string good = to_json(two_sources());
  const auto refused = [&](const std::string& from, const std::string& to,
                           const std::vector<std::string>& parts) {
    std::string text = good;
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    std::vector<std::string> all = parts;
    all.emplace_back("state.json");
    expect_error(ExitCode::checkpoint, all, [&] { data_state_from_json(text, "state.json"); });
  };
  refused("\"seed\"", "\"sead\"", {"seed", "missing"});
  refused("\"seq_len\": 1024", "\"seq_len\": 1024, \"more\": 1", {"'more'", "not known"});
  refused("1024", "-1", {"seq_len", "0 or more", "-1"});
  refused("1024", "1024.0", {"seq_len", "integer"});
  refused("1024", "9223372036854775808", {"seq_len", "below 2^63"});
  refused("\"shuffled\": true", "\"shuffled\": 1", {"shuffled", "true or false"});
  refused("\"weight\": 0.7", "\"weight\": 0", {"sources[0]: weight", "above 0"});
  refused("\"weight\": 0.7", "\"weight\": 1e999", {"state.json"});
  refused("\"f2\"", "2", {"sources[0]: files[1]: fingerprint", "a string"});
  refused("\"bytes\": 1424,", "", {"files[1]", "bytes", "missing"});
  for (size_t length = 0; length < good.size(); length += 7)
    expect_error(ExitCode::checkpoint, {"state.json"},
                 [&] { data_state_from_json(good.substr(0, length), "state.json"); });
  expect_error(ExitCode::checkpoint, {"object"}, [] { data_state_from_json("[]", "state.json"); });
  expect_error(ExitCode::checkpoint, {"sources", "not empty"}, [] {
    data_state_from_json(
        R"({"seed":1,"seq_len":2,"shuffled":true,"document_mask":false,"tokenizer":"","sources":[]})",
        "state.json");
  });
}

TEST(DataState, DescribesWhatChanged) {
  const DataState before = two_sources();
  EXPECT_TRUE(describe_change(before, before).empty());
  const auto change_of = [&](const auto& edit) {
    DataState now = before;
    edit(now);
    const auto lines = describe_change(before, now);
    EXPECT_EQ(lines.size(), 1U) << testing::PrintToString(lines);
    return lines.empty() ? std::string() : lines[0];
  };
  EXPECT_EQ(change_of([](DataState& d) { d.sources[0].files[1].bytes = 7; }),
            "a \"2\".bin: bytes: 1424 in the checkpoint, 7 here");
  EXPECT_EQ(change_of([](DataState& d) { d.sources[1].files[0].fingerprint = "other"; }),
            "b.bin: contents (fingerprint): f3 in the checkpoint, other here");
  EXPECT_EQ(change_of([](DataState& d) { d.sources[1].files[0].tokens = 3; }),
            "b.bin: tokens: 1099511627776 in the checkpoint, 3 here");
  EXPECT_EQ(change_of([](DataState& d) { d.sources[1].files[0].format = "text"; }),
            "b.bin: format: Megatron int32 in the checkpoint, text here");
  EXPECT_EQ(change_of([](DataState& d) { d.seq_len = 512; }),
            "tokens of a sample (--seq-len): 1024 in the checkpoint, 512 here");
  EXPECT_EQ(change_of([](DataState& d) { d.seed = 3; }),
            "seed of the data order: 18446744073709551615 in the checkpoint, 3 here");
  EXPECT_EQ(change_of([](DataState& d) { d.document_mask = false; }),
            "--document-mask: on in the checkpoint, off here");
  EXPECT_EQ(change_of([](DataState& d) { d.shuffled = false; }), "shuffling: on in the checkpoint, off here");
  EXPECT_NE(change_of([](DataState& d) { d.tokenizer = "x"; }).find("tokenizer"), std::string::npos);
  EXPECT_EQ(change_of([](DataState& d) { d.sources.pop_back(); }), "sources: 2 in the checkpoint, 1 here");
  EXPECT_EQ(change_of([](DataState& d) { d.sources[0].files.pop_back(); }),
            "files of a*.bin: 2 in the checkpoint, 1 here");
  EXPECT_NE(change_of([](DataState& d) {
              std::swap(d.sources[0].files[0], d.sources[0].files[1]);
              d.sources[0].files[0].bytes = 1224;
              d.sources[0].files[0].tokens = 100;
              d.sources[0].files[1] = two_sources().sources[0].files[1];
            }).find("a \"2\".bin (was a1.bin): contents"),
            std::string::npos);
  DataState weighted = before;
  weighted.sources[0].weight = 0.6;
  EXPECT_EQ(describe_change(before, weighted, "on node1", "on node2"),
            std::vector<std::string>{"weight of a*.bin: 0.7 on node1, 0.6 on node2"});
  // The same data elsewhere: nothing changed.
  DataState moved = before;
  for (SourceState& source : moved.sources) {
    source.name = "/mnt/" + source.name;
    for (FileState& file : source.files) file.path = "/mnt/" + file.path;
  }
  EXPECT_TRUE(describe_change(before, moved).empty());
}

TEST(DataState, TokenizersAreCompared) {  // row 15
  DataState data = two_sources();
  check_tokenizer(data, data.tokenizer, "run");
  check_tokenizer(data, "", "run");
  expect_error(ExitCode::data, {"run/step", data.tokenizer, "ffff", "manifest.json"},
               [&] { check_tokenizer(data, "ffff", "run/step"); });
  data.tokenizer = "";
  check_tokenizer(data, "ffff", "run");
}

// ---- Fingerprints ----------------------------------------------------------------------------------------------------

std::string hash_of(const std::string& bytes) {
  ContentHash hash;
  hash.add(bytes.data(), static_cast<int64_t>(bytes.size()));
  return hash.hex();
}

std::string fingerprint_of(const std::string& bytes) {
  ContentHash hash;
  add_fingerprint(hash, reinterpret_cast<const unsigned char*>(bytes.data()),
                  static_cast<int64_t>(bytes.size()));
  return hash.hex();
}

std::string pattern(size_t bytes) {
  std::string text(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>((i * 2654435761U) >> 13);
  return text;
}

TEST(Fingerprint, HashIsXxh3Canonical) {
  // What `printf '' | xxhsum -H2` and `printf abc | xxhsum -H2` print.
  EXPECT_EQ(hash_of(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(hash_of("abc"), "06b05ab6733a618578af5f94892f3950");
}

TEST(Fingerprint, IsTheDocumentedOne) {
  // From the definition in dev/FORMATS.md, with a hash of the whole concatenation at once.
  for (const size_t bytes :
       {size_t{0}, size_t{5}, size_t{1} << 20, (size_t{1} << 20) + 1, size_t{5'000'003}}) {
    const std::string file = pattern(bytes);
    std::string hashed(8, '\0');
    for (size_t i = 0; i < 8; ++i) hashed[i] = static_cast<char>(bytes >> (8 * i));
    if (bytes <= size_t{1} << 20) {
      hashed += file;
    } else {
      for (size_t i = 0; i < 16; ++i) hashed += file.substr(i * (bytes - 65536) / 15, 65536);
    }
    const XXH128_hash_t whole = XXH3_128bits(hashed.data(), hashed.size());
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, whole);
    std::string hex;
    for (const unsigned char byte : canonical.digest) {
      hex += "0123456789abcdef"[byte >> 4];
      hex += "0123456789abcdef"[byte & 15];
    }
    EXPECT_EQ(fingerprint_of(file), hex) << bytes;
  }
}

TEST(Fingerprint, SeesEndsLengthAndRewriting) {
  const std::string file = pattern(3'000'000);
  const std::string print = fingerprint_of(file);
  for (const size_t at : {size_t{0}, size_t{65535}, file.size() - 65536, file.size() - 1}) {
    std::string changed = file;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    EXPECT_NE(fingerprint_of(changed), print) << at;
  }
  EXPECT_NE(fingerprint_of(file + "x"), print);
  EXPECT_NE(fingerprint_of(file.substr(0, file.size() - 1)), print);
  EXPECT_NE(fingerprint_of(std::string(1, '\0')), fingerprint_of(std::string(2, '\0')));
}

// ---- Manifests -------------------------------------------------------------------------------------------------------

constexpr const char* kHash = "0123456789abcdef0123456789abcdef";

class ManifestTest : public testing::Test {
 protected:
  std::string shard(const std::string& name, size_t tokens = 100) const {
    std::vector<uint16_t> words(512 + tokens);
    const int32_t header[3] = {20240520, 1, static_cast<int32_t>(tokens)};
    std::memcpy(words.data(), header, sizeof(header));
    for (size_t i = 0; i < tokens; ++i) words[512 + i] = static_cast<uint16_t>(i % 10);
    put_file(directory / name, {reinterpret_cast<const char*>(words.data()), words.size() * 2});
    return directory / name;
  }
  static std::string manifest(const std::string& files, const std::string& tokenizer_hash = kHash,
                              const std::string& vocab = "50", const std::string& eot = "9") {
    return cat(
        R"({"format": "kinoe-data-1", "note": "more keys are allowed", "tokenizer": {"file": "tokenizer.json", "xxh3_128": ")",
        tokenizer_hash, R"(", "vocab_size": )", vocab, R"(, "eot_id": )", eot, R"(}, "files": [)", files,
        "]}");
  }
  static std::string entry(const std::string& name, int64_t bytes = 1224, int64_t tokens = 100) {
    return cat(R"({"name": ")", name, R"(", "split": "train", "bytes": )", bytes, R"(, "tokens": )", tokens,
               R"(, "documents": 10, "xxh3_128": ")", kHash, "\"}");
  }
  Dataset open(const std::vector<std::string>& paths, int64_t vocab = 50) const {
    DatasetOptions options;
    options.seq_len = 9;
    options.vocab_size = vocab;
    options.shuffle = false;
    options.document_mask = true;
    options.end_token = 3;
    return Dataset::open(expand_data(paths), options);
  }

  FreshDirectory directory;
};

TEST_F(ManifestTest, SaysWhichTokenEndsADocumentAndWhichTokenizerMadeTheData) {
  const std::string a = shard("a.bin"), b = shard("b.bin");
  put_file(directory / "manifest.json", manifest(entry("a.bin")));
  const Dataset data = open({a});
  EXPECT_EQ(data.state().tokenizer, kHash);
  EXPECT_EQ(data.place(0).shard->end_token(), 9) << "the manifest knows better than the model";
  const Dataset unlisted = open({b});
  EXPECT_EQ(unlisted.state().tokenizer, "");
  EXPECT_EQ(unlisted.place(0).shard->end_token(), 3);
  put_file(directory / "manifest.json", manifest(entry("a.bin"), kHash, "50", "null"));
  expect_error(ExitCode::usage, {"--document-mask", "a.bin"}, [&] { open({a}); });
}

TEST_F(ManifestTest, ShardsMustBeTheOnesThatWerePrepared) {
  const std::string a = shard("a.bin");
  const auto refused = [&](const std::string& text, const std::vector<std::string>& parts) {
    put_file(directory / "manifest.json", text);
    expect_error(ExitCode::data, parts, [&] { open({a}); });
  };
  refused(manifest(entry("a.bin", 1226)), {"a.bin", "1224 bytes", "manifest.json", "1226"});
  refused(manifest(entry("a.bin", 1224, 99)), {"a.bin", "100 tokens", "99"});
  refused(manifest(entry("a.bin"), kHash, "51"), {"tokenizer of 51 ids", "vocabulary has 50"});

  std::filesystem::create_directory(directory / "other");
  put_file(directory / "manifest.json", manifest(entry("a.bin")));
  const std::string b = shard("other/b.bin");
  put_file(directory / "other/manifest.json", manifest(entry("b.bin"), "ffffffffffffffffffffffffffffffff"));
  expect_error(ExitCode::data, {"different tokenizers", kHash, "ffffffff"}, [&] { open({a, b}); });
  put_file(directory / "other/manifest.json", manifest(entry("b.bin")));
  EXPECT_EQ(open({a, b}).state().tokenizer, kHash);
}

TEST_F(ManifestTest, EveryFault) {
  const std::string good = manifest(entry("a.bin") + ", " + entry("b.bin"));
  const std::string path = directory / "manifest.json";
  put_file(path, good);
  const auto read = read_manifest(path);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->files.size(), 2U);
  EXPECT_EQ(read->files.at("b.bin").tokens, 100);
  EXPECT_EQ(read->files.at("b.bin").hash, kHash);
  EXPECT_EQ(read->end_token, 9);
  EXPECT_EQ(read->vocab_size, 50);
  EXPECT_EQ(read->tokenizer_file, "tokenizer.json");
  const auto refused = [&](const std::string& from, const std::string& to, const std::string& part) {
    std::string text = good;
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    put_file(path, text);
    expect_error(ExitCode::data, {path, part}, [&] { (void)read_manifest(path); });
  };
  refused("kinoe-data-1", "kinoe-data-2", "\"kinoe-data-1\"");
  refused("\"tokenizer\":", "\"tokeniser\":", "tokenizer: expected an object, found nothing");
  refused("\"tokenizer.json\"", "1", "tokenizer.file: expected a string, found 1");
  refused(kHash, "0123", "tokenizer.xxh3_128: expected 32 hexadecimal digits");
  refused(kHash, "0123456789ABCDEF0123456789ABCDEF", "lower case");
  refused("\"vocab_size\": 50", "\"vocab_size\": 0", "vocab_size");
  refused("\"eot_id\": 9", "\"eot_id\": 50", "below vocab_size");
  refused("\"eot_id\": 9", "\"eot_id\": -1", "eot_id");
  refused("\"eot_id\": 9", "\"eot\": 9", "eot_id");
  refused("\"files\": [", "\"files\": [1, ", "files[0]");
  refused("\"train\"", "\"test\"", "files[0].split");
  refused("1224", "-1", "files[0].bytes");
  refused("\"b.bin\"", "\"a.bin\"", "each name once");
  refused("\"b.bin\"", "\"../b.bin\"", "without slashes");
  for (size_t length = 0; length < good.size(); length += 11) {
    put_file(path, good.substr(0, length));
    expect_error(ExitCode::data, {path}, [&] { (void)read_manifest(path); });
  }
  put_file(path, R"({"name": "a web page", "icons": []})");
  EXPECT_FALSE(read_manifest(path).has_value()) << "another program's manifest.json";
  EXPECT_EQ(open({shard("a.bin")}).state().tokenizer, "");
}

TEST_F(ManifestTest, TheStateHasFingerprintsOfAllFiles) {
  const std::string a = shard("a.bin"), b = shard("b.bin", 200);
  const Dataset data = open({a, b});
  const auto& files = data.state().sources[0].files;
  ASSERT_EQ(files.size(), 2U);
  EXPECT_EQ(files[0].fingerprint.size(), 32U);
  EXPECT_NE(files[0].fingerprint, files[1].fingerprint);
  EXPECT_EQ(open({a, b}).state(), data.state());
  // One token changed: size and counts are as before.
  shard("a.bin");
  std::fstream(a, std::ios::in | std::ios::out | std::ios::binary).seekp(1100).write("\5\0", 2);
  const auto changes = describe_change(data.state(), open({a, b}).state());
  ASSERT_EQ(changes.size(), 1U);
  EXPECT_NE(changes[0].find("a.bin: contents"), std::string::npos) << changes[0];

  DatasetOptions options;
  options.seq_len = 9;
  options.vocab_size = 256;
  const auto stories = [&](int64_t bytes) {
    return Dataset::stories(StorySplit::training, bytes, options).state();
  };
  EXPECT_EQ(stories(1000), stories(1000));
  EXPECT_NE(stories(1000).sources[0].files[0].fingerprint, stories(5000).sources[0].files[0].fingerprint);
}

}  // namespace
}  // namespace kinoe
