#include "graph/parts_inside.h"

// Else it includes every operator.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>

#include "graph/geometry.h"
#include "memory/bytes.h"

namespace ebb {

PartsInside partsInside(const at::Tensor& tensor) {
  PartsInside parts;
  const auto add = [&](const at::Tensor& part) {
    if (part.defined() && isRecordable(part)) {
      parts.push_back(part);
    }
  };
  // A wrapper's layout is what it says, not what it is.
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (const auto* sparse = dynamic_cast<at::SparseTensorImpl*>(impl)) {
    add(sparse->indices());
    add(sparse->values());
  } else if (auto* compressed = dynamic_cast<at::SparseCsrTensorImpl*>(impl)) {
    add(compressed->compressed_indices());
    add(compressed->plain_indices());
    add(compressed->values());
  } else if (impl->has_storage() && impl->unsafe_storage()) {
    add(bytesOf(impl->unsafe_storage()));
  }
  return parts;
}

}  // namespace ebb
