// What a data file is, from its first bytes; and, when it is nothing Kinoe reads, what it looks like.
#pragma once

#include <cstdint>
#include <string>

#include "dataloader/token_format.h"

namespace kinoe {

// llm.c shards: a header of 256 int32, then the tokens. header[0] magic, [1] version, [2] number of tokens.
inline constexpr int32_t kLlmcMagicUint16 = 20240520;
inline constexpr int32_t kLlmcVersionUint16 = 1;
inline constexpr int32_t kLlmcMagicUint32 = 20240801;
inline constexpr int32_t kLlmcVersionUint32 = 7;
inline constexpr int64_t kLlmcHeaderBytes = 1024;

/// The format of a file of `bytes` > 0 bytes at `data`. The magic decides first, then for a .bin the Megatron index beside it;
/// data error for a wrong version, swapped byte order, a known foreign format, or any other .bin. Everything else is text.
TokenFormat identify(const std::string& path, const unsigned char* data, int64_t bytes);

/// Checks the size of an llm.c shard against its header and returns its number of tokens.
int64_t llmc_token_count(const std::string& path, const unsigned char* data, int64_t bytes,
                         int64_t token_bytes);

/// A byte order mark, or every second byte of the beginning NUL.
bool looks_like_utf16(const unsigned char* data, int64_t bytes);

}  // namespace kinoe
