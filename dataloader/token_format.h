// How the tokens of a file are stored.
#pragma once

#include <cstdint>

namespace kinoe {

enum class TokenFormat : uint8_t {
  llmc_uint16,
  llmc_uint32,
  text,  // a token is a byte
  megatron_uint8,
  megatron_int8,
  megatron_int16,
  megatron_int32,
  megatron_int64,
  megatron_uint16,
};

/// "llm.c uint16", "text", "Megatron int32", ...
constexpr const char* name_of(TokenFormat format) {
  switch (format) {
    case TokenFormat::llmc_uint16: return "llm.c uint16";
    case TokenFormat::llmc_uint32: return "llm.c uint32";
    case TokenFormat::text: return "text";
    case TokenFormat::megatron_uint8: return "Megatron uint8";
    case TokenFormat::megatron_int8: return "Megatron int8";
    case TokenFormat::megatron_int16: return "Megatron int16";
    case TokenFormat::megatron_int32: return "Megatron int32";
    case TokenFormat::megatron_int64: return "Megatron int64";
    case TokenFormat::megatron_uint16: return "Megatron uint16";
  }
  return "?";
}

constexpr bool is_megatron(TokenFormat format) { return format >= TokenFormat::megatron_uint8; }

/// Calls visit with a value of the stored type.
template <class Visit>
constexpr auto with_word(TokenFormat format, Visit&& visit) {
  switch (format) {
    case TokenFormat::llmc_uint16:
    case TokenFormat::megatron_uint16: return visit(uint16_t{});
    case TokenFormat::llmc_uint32: return visit(uint32_t{});
    case TokenFormat::megatron_int8: return visit(int8_t{});
    case TokenFormat::megatron_int16: return visit(int16_t{});
    case TokenFormat::megatron_int32: return visit(int32_t{});
    case TokenFormat::megatron_int64: return visit(int64_t{});
    case TokenFormat::text:
    case TokenFormat::megatron_uint8: break;
  }
  return visit(uint8_t{});
}

constexpr int64_t token_bytes(TokenFormat format) {
  return with_word(format, [](auto word) { return static_cast<int64_t>(sizeof(word)); });
}

}  // namespace kinoe
