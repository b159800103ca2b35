// Noticing that memory changed though no version moved.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace ebb {

// Note [Fingerprints of leaves]
// Some writes move no version: `p.data.mul_()`, fused optimizers, running statistics, numpy. If one
// hits a leaf that a recipe needs, the replay would silently compute something else. So a leaf is
// fingerprinted when a recipe first reads it, and compared before a replay does. A small storage is
// hashed whole, a larger one in 64 places: enough for updates that touch every element, not for a
// write to a few. Only on the CPU: elsewhere reading would wait for the device, and this gives 0.
// So is a computed tensor that lives on after its region, when that ends: if it has changed it is
// made again. In verify mode the whole storage is hashed, wherever it is.
enum class FingerprintOf { Samples, Everything };
uint64_t fingerprint(const c10::Storage& storage, FingerprintOf what = FingerprintOf::Samples);

// A fingerprint of a tensor's own elements. The rest of its storage, such as padding that no kernel
// has written, does not count.
uint64_t fingerprintOfShown(const at::Tensor& tensor);

}  // namespace ebb
