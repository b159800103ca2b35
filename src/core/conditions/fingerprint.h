// Fingerprints of memory, which detect writes that do not increment a version counter.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace ebb {

// Note [Fingerprints of leaves]
// Some writes increment no version counter: `p.data.mul_()`, fused optimizers, running statistics,
// numpy. After such a write to a leaf that a recipe needs, the replay would silently compute other
// results. So ebb takes a leaf's fingerprint when a recipe first reads the leaf, and compares it
// before a replay reads the leaf. A small storage is hashed whole, a larger one in 64 places. The
// samples detect an update of every element, but may miss a write to a few. Outside verify mode,
// only storages on the CPU have fingerprints: elsewhere reading would wait for the device, and
// fingerprint() returns 0. A computed tensor that outlives its region is fingerprinted when the
// region ends, and recomputed if it has changed. In verify mode the whole storage is hashed, on any
// device.
enum class FingerprintOf { Samples, Everything };
uint64_t fingerprint(const c10::Storage& storage, FingerprintOf what = FingerprintOf::Samples);

// A fingerprint of a tensor's own elements. The rest of the storage, such as padding that no kernel
// has written, does not count.
uint64_t fingerprintOfShown(const at::Tensor& tensor);

}  // namespace ebb
