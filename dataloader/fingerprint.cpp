// The blocks of a file that its fingerprint covers: terabytes cannot be read at every start.
#include "dataloader/fingerprint.h"

#include <xxhash.h>

#include <array>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

constexpr int64_t kBlocks = 16, kBlockBytes = 64 << 10;

}  // namespace

void ContentHash::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

ContentHash::ContentHash() : state_(XXH3_createState()) {
  CHECK(state_ && XXH3_128bits_reset(state_.get()) == XXH_OK, "no state of XXH3");
}

void ContentHash::add(const void* data, int64_t bytes) {
  const XXH_errorcode result = XXH3_128bits_update(state_.get(), data, static_cast<size_t>(bytes));
  CHECK(result == XXH_OK, "XXH3 of ", bytes, " bytes");
}

std::string ContentHash::hex() const {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_.get()));
  std::string text;
  for (const unsigned char byte : canonical.digest)
    for (const int nibble : {byte >> 4, byte & 15}) text += "0123456789abcdef"[nibble];
  return text;
}

void add_fingerprint(ContentHash& hash, const unsigned char* data, int64_t bytes) {
  std::array<unsigned char, 8> size{};
  for (size_t i = 0; i < size.size(); ++i) size[i] = static_cast<unsigned char>(bytes >> (8 * i));
  hash.add(size.data(), 8);
  if (bytes <= kBlocks * kBlockBytes) {
    hash.add(data, bytes);
    return;
  }
  // Quotient and remainder apart: i (bytes - block) may exceed 63 bits.
  const int64_t last = bytes - kBlockBytes, quotient = last / (kBlocks - 1), remainder = last % (kBlocks - 1);
  for (int64_t i = 0; i < kBlocks; ++i)
    hash.add(data + i * quotient + i * remainder / (kBlocks - 1), kBlockBytes);
}

}  // namespace kinoe
