#include "graph/fingerprint.h"

#include <algorithm>
#include <cstring>

#include "graph/geometry.h"
#include "graph/kernel_state.h"
#include "graph/value.h"

namespace ebb {
namespace {

constexpr size_t kHashedWhole = 1024;  // bytes
constexpr size_t kSamples = 64;

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 29);
}

}  // namespace

uint64_t fingerprint(const c10::Storage& storage, FingerprintOf what) {
  const bool everything = what == FingerprintOf::Everything;
  if (everything && !storage.device().is_cpu()) {
    KernelStateGuard plain(nullptr);
    return fingerprint(bytesOf(storage).cpu().storage(), what);
  }
  const size_t nbytes = storage.nbytes();
  const auto* bytes = static_cast<const char*>(storage.data());
  if (!storage.device().is_cpu() || bytes == nullptr || nbytes == 0) {
    return 0;
  }
  uint64_t hash = nbytes;
  uint64_t word = 0;
  if (everything || nbytes <= kHashedWhole) {
    for (size_t at = 0; at < nbytes; at += sizeof(word)) {
      word = 0;
      std::memcpy(&word, bytes + at, std::min(sizeof(word), nbytes - at));
      hash = mix(hash, word);
    }
    return hash;
  }
  const size_t last = nbytes - sizeof(word);
  for (size_t i = 0; i < kSamples; ++i) {
    std::memcpy(&word, bytes + last * i / (kSamples - 1), sizeof(word));
    hash = mix(hash, word);
  }
  return hash;
}

bool hasChanged(const Value& value, const c10::Storage& storage, VerifyMode mode) {
  const auto what = mode == VerifyMode::Off ? FingerprintOf::Samples : FingerprintOf::Everything;
  return value.fingerprint != 0 && fingerprint(storage, what) != value.fingerprint;
}

}  // namespace ebb
