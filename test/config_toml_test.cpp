// TOML: what is read, what is refused with which line, and values that come back to the bit.
#include "trainer/config_toml.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstdlib>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

using Strings = std::vector<std::string>;

std::string refusal(const std::string& text) {
  try {
    parse_toml(text, "run.toml");
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ExitCode::usage);
    return error.what();
  }
  return "";
}

Strings values(const std::string& line) {
  const std::vector<TomlEntry> entries = parse_toml(line, "run.toml");
  EXPECT_EQ(entries.size(), 1U) << line;
  return entries.at(0).values;
}

TEST(ConfigToml, EntriesWithCommentsBlanksAndLineEnds) {
  const auto entries = parse_toml(
      "# a comment\r\n"
      "\n"
      "steps = 100  # behind a value\r\n"
      "\tlr=1e-3\n"
      "'out' = \"a # b\"\n"
      "data = [ \"x\",  # first\n"
      "         'y',\n"
      "]\n"
      "dry-run = true",
      "run.toml");
  ASSERT_EQ(entries.size(), 5U);
  EXPECT_EQ(entries[0].key, "steps");
  EXPECT_EQ(entries[0].values, Strings{"100"});
  EXPECT_EQ(entries[0].line, 3);
  EXPECT_EQ(entries[1].values, Strings{"1e-3"});
  EXPECT_EQ(entries[2].key, "out");
  EXPECT_EQ(entries[2].values, Strings{"a # b"});
  EXPECT_FALSE(entries[2].array);
  EXPECT_EQ(entries[3].values, (Strings{"x", "y"}));
  EXPECT_TRUE(entries[3].array);
  EXPECT_EQ(entries[4].values, Strings{"true"});
  EXPECT_EQ(entries[4].line, 9);
  EXPECT_TRUE(parse_toml("", "run.toml").empty());
  EXPECT_TRUE(values("x = []").empty());
}

TEST(ConfigToml, Numbers) {
  EXPECT_EQ(values("x = 1_000_000"), Strings{"1000000"});
  EXPECT_EQ(values("x = +5"), Strings{"5"});
  EXPECT_EQ(values("x = -0.5E+3"), Strings{"-0.5e3"});
  EXPECT_EQ(values("x = 6e-04"), Strings{"6e-04"});
  EXPECT_EQ(values("x = nan"), Strings{"nan"});
  EXPECT_EQ(values("x = -inf"), Strings{"-inf"});
  for (const char* bad :
       {"1__0", "_1", "1_", "1.", ".5", "1e", "1e+", "64k", "0x10", "--1", "1.5.2", "tiny", "True"})
    EXPECT_NE(refusal(std::string("x = ") + bad).find("run.toml line 1"), std::string::npos) << bad;
}

TEST(ConfigToml, Strings) {
  EXPECT_EQ(values(R"(x = "a\"b\\c\td\u00e9\U0001F600")"), Strings{"a\"b\\c\td\xC3\xA9\xF0\x9F\x98\x80"});
  EXPECT_EQ(values(R"(x = 'C:\dir "q"')"), Strings{"C:\\dir \"q\""});
  EXPECT_EQ(values("x = \"\""), Strings{""});
  for (const char* bad : {"x = \"abc", "x = 'abc\n'", "x = \"\\q\"", "x = \"\\u12\"", "x = \"\\uD800\"",
                          "x = \"\\U00110000\"", "x = \"\"\"abc\"\"\"", "x = '''abc'''", "x = \"\\"})
    EXPECT_NE(refusal(bad), "") << bad;
}

TEST(ConfigToml, WhatIsNotThisSubsetIsRefusedWithItsLine) {
  EXPECT_NE(refusal("a = 1\n[section]\n").find("run.toml line 2"), std::string::npos);
  EXPECT_NE(refusal("a = 1\n\na = 2").find("already set in line 1"), std::string::npos);
  for (const char* bad :
       {"steps", "steps 5", "steps = ", "= 5", "a.b = 5", "a = {b = 1}", "a = 1 2", "a = 1 b = 2",
        "a = [1] b = 2", "a = [1", "a = [1 2]", "a = [[1]]", "a = 2024-05-01", "a = [,]", "{\"steps\": 5}"})
    EXPECT_NE(refusal(bad).find("run.toml line 1"), std::string::npos) << bad << " -> " << refusal(bad);
}

TEST(ConfigToml, WrittenStringsReadBack) {
  for (const std::string& text :
       {std::string("plain"), std::string("quote \" back \\ slash"), std::string("\n\t\x01\x7f"),
        std::string("\xC3\xA9"), std::string(), std::string("# no = comment")})
    EXPECT_EQ(values("x = " + toml_string(text)), Strings{text});
}

TEST(ConfigToml, WrittenFloatsReadBackToTheSameBits) {
  EXPECT_EQ(toml_float(1.0), "1.0");
  EXPECT_EQ(toml_float(0.1), "0.1");
  uint64_t bits = 0x123456789ABCDEFULL;
  for (int i = 0; i < 2000; ++i) {
    bits = bits * 6364136223846793005ULL + 1442695040888963407ULL;
    const double x = std::bit_cast<double>(bits);
    if (x - x != 0) continue;  // NaN, infinity
    const std::string text = toml_float(x);
    EXPECT_NE(text.find_first_of(".e"), std::string::npos) << text;
    EXPECT_EQ(std::strtod(values("x = " + text).at(0).c_str(), nullptr), x) << text;
  }
}

}  // namespace
}  // namespace kinoe
