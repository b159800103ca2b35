#include "graph/value.h"

#include <ATen/core/TensorBody.h>

#include <cstring>

#include "graph/recipe.h"

namespace ebb {

void Value::stamp(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  home = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
  nbytes = storage->nbytes();
  if (!tensor.is_inference()) {
    counter = tensor.unsafeGetTensorImpl()->version_counter();
    version = counter.current_version();
  }
}

c10::Storage Value::available() const {
  if (bytes && (isPrivate || (versionHolds() && !superseded && bytes.nbytes() == nbytes))) {
    return bytes;
  }
  if (superseded || !versionHolds()) {
    return {};
  }
  auto living = home.lock();
  // Somebody may have emptied the storage to save memory; then it is the recipe's turn.
  if (!living || living->nbytes() != nbytes) {
    return {};
  }
  return c10::Storage(std::move(living));
}

void Value::release_resources() {
  recipe.reset();
  bytes = c10::Storage();
  redefined = c10::Storage();
  home.reset();
  counter = c10::VariableVersion();
}

bool sameCounter(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  // VariableVersion is one intrusive_ptr; equal pointers are equal counters.
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return std::memcmp(
             static_cast<const void*>(&a), static_cast<const void*>(&b), sizeof(void*)) == 0;
}

}  // namespace ebb
