#include "torch_seams/owners.h"

namespace ebb {

bool hasNoOtherOwner(const at::TensorBase& tensor, size_t known) {
  const size_t owners = tensor.use_count();
  return owners == known || (owners == known + 1 &&
                             tensor.unsafeGetTensorImpl()->pyobj_slot()->has_unique_reference());
}

size_t weakReferences(const c10::Storage& storage) {
  return storage.getWeakStorageImpl().weak_use_count() - 1;  // without this call's own
}

}  // namespace ebb
