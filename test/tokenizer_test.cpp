// Bytes in, bytes out; and text made safe for a terminal.
#include "dataloader/tokenizer.h"

#include <gtest/gtest.h>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

TEST(TokenizerTest, EveryByteComesBack) {
  const auto tokenizer = byte_tokenizer();
  EXPECT_EQ(tokenizer->name(), "bytes");
  EXPECT_EQ(tokenizer->vocab_size(), 256);
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(static_cast<unsigned char>(i));
  const auto ids = tokenizer->encode(all);
  ASSERT_EQ(ids.size(), 256U);
  for (int i = 0; i < 256; ++i) EXPECT_EQ(ids[static_cast<size_t>(i)], i);
  EXPECT_EQ(tokenizer->decode(ids), all);
  EXPECT_EQ(tokenizer->decode({}), "");
}

TEST(TokenizerTest, IdsThatAreNoBytes) {
  for (const int32_t id : {-1, 256, 50256}) {
    try {
      (void)byte_tokenizer()->decode(std::vector<int32_t>{65, id});
      ADD_FAILURE() << id;
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ExitCode::data);
      EXPECT_NE(std::string(error.what()).find(std::to_string(id)), std::string::npos) << error.what();
    }
  }
}

TEST(TokenizerTest, Printable) {
  EXPECT_EQ(printable("Zeile\n\tzwei"), "Zeile\n\tzwei");
  EXPECT_EQ(printable("K\xC3\xB6ln \xE2\x82\xAC \xF0\x9F\x98\x80"),
            "K\xC3\xB6ln \xE2\x82\xAC \xF0\x9F\x98\x80");
  EXPECT_EQ(printable("\x1B[2Jx\x07\x7F\r"), "?[2Jx???");
  EXPECT_EQ(printable("\xC2\x9B"
                      "2J"),
            "?2J");  // CSI as a C1 control
  EXPECT_EQ(one_line("a\tb\n\x1B[31m\xFF"), "a\\tb\\n?[31m\xEF\xBF\xBD");
  EXPECT_EQ(printable("a\xE2\x82"), "a\xEF\xBF\xBD\xEF\xBF\xBD");
  EXPECT_EQ(printable("\xED\xA0\x80"), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
}

}  // namespace
}  // namespace kinoe
