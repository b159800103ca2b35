#include "conditions/fingerprint.h"

#include <bit>
#include <cstring>

#include "memory/bytes.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

constexpr size_t kHashedWhole = 1024;  // bytes
constexpr size_t kSamples = 64;

// Each step is one-to-one in `word` and in `hash`, so one changed word always changes the result.
uint64_t mix(uint64_t hash, uint64_t word) {
  return std::rotl(hash ^ word, 29) * 0x9E3779B97F4A7C15ULL;
}

uint64_t wordAt(const char* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// Hashes `count` words, `stride` bytes apart, in lanes that do not depend on each other.
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

uint64_t hash(const char* bytes, size_t nbytes, bool everything) {
  constexpr size_t kWord = sizeof(uint64_t);
  if (!everything && nbytes > kHashedWhole) {
    return hashWords(bytes, kSamples, (nbytes - kWord) / (kSamples - 1));
  }
  const uint64_t whole = hashWords(bytes, nbytes / kWord, kWord);
  uint64_t rest = 0;
  std::memcpy(&rest, bytes + nbytes / kWord * kWord, nbytes % kWord);
  return mix(whole, rest);
}

template <class F>
auto unseen(F function) {
  const auto below = belowEverything();
  return function();
}

}  // namespace

uint64_t fingerprint(const c10::Storage& storage, FingerprintOf what) {
  const bool everything = what == FingerprintOf::Everything;
  if (everything && !storage.device().is_cpu()) {
    const at::Tensor copy = unseen([&] { return bytesOf(storage).cpu(); });
    return fingerprint(copy.storage(), what);
  }
  const auto* bytes = static_cast<const char*>(storage.data());
  if (!storage.device().is_cpu() || bytes == nullptr) {
    return 0;
  }
  return hash(bytes, storage.nbytes(), everything);
}

uint64_t fingerprintOfShown(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.numel() == 0) {
    return 0;
  }
  const at::Tensor dense = tensor.is_non_overlapping_and_dense()
                               ? tensor
                               : unseen([&] { return tensor.clone(at::MemoryFormat::Contiguous); });
  return hash(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes(), false);
}

}  // namespace ebb
