#include "kernel/fingerprint.h"

#include <bit>
#include <cstring>

#include "intercept/key.h"
#include "memory/bytes.h"

namespace ebb {
namespace {

constexpr size_t kHashedWhole = 1024;  // bytes
constexpr size_t kSamples = 64;

// Each step is one-to-one in `word` and in `hash`, so one changed word always shows.
uint64_t mix(uint64_t hash, uint64_t word) {
  return std::rotl(hash ^ word, 29) * 0x9E3779B97F4A7C15ULL;
}

uint64_t wordAt(const char* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// Hashes `count` words that lie `stride` bytes apart, in lanes that do not wait for each other.
uint64_t hashWords(const char* bytes, size_t count, size_t stride) {
  constexpr size_t kLanes = 4;
  uint64_t lanes[kLanes] = {0, 1, 2, 3};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes, bytes += kLanes * stride) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = mix(lanes[lane], wordAt(bytes + lane * stride));
    }
  }
  for (; i < count; ++i, bytes += stride) {
    lanes[0] = mix(lanes[0], wordAt(bytes));
  }
  return mix(mix(mix(lanes[0], lanes[1]), lanes[2]), lanes[3]);
}

}  // namespace

uint64_t fingerprint(const c10::Storage& storage, FingerprintOf what) {
  const bool everything = what == FingerprintOf::Everything;
  if (everything && !storage.device().is_cpu()) {
    const auto below = belowEverything();
    return fingerprint(bytesOf(storage).cpu().storage(), what);
  }
  const size_t nbytes = storage.nbytes();
  const auto* bytes = static_cast<const char*>(storage.data());
  if (!storage.device().is_cpu() || bytes == nullptr) {
    return 0;
  }
  constexpr size_t kWord = sizeof(uint64_t);
  if (!everything && nbytes > kHashedWhole) {
    return hashWords(bytes, kSamples, (nbytes - kWord) / (kSamples - 1));
  }
  const uint64_t hash = hashWords(bytes, nbytes / kWord, kWord);
  uint64_t rest = 0;
  std::memcpy(&rest, bytes + nbytes / kWord * kWord, nbytes % kWord);
  return mix(hash, rest);
}

}  // namespace ebb
