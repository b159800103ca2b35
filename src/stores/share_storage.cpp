#include "stores/share_storage.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "hooks/process_state.h"
#include "memory/bytes.h"
#include "torch_seams/storage_memory.h"

namespace ebb {

namespace {

void share(const c10::Storage& to, const c10::Storage& from, size_t nbytes) {
  const ProcessStateChange change;
  c10::DataPtr pointer = sharedPointer(from);
  from.unsafeGetStorageImpl()->set_resizable(false);
  giveMemory(to, std::move(pointer), nbytes);
}

void checkKind(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.defined(), "ebb: ", name, " is an undefined tensor");
  const auto* impl = tensor.unsafeGetTensorImpl();
  TORCH_CHECK_VALUE(
      impl->layout() == c10::kStrided && impl->has_storage() &&
          !impl->key_set().has_any(
              c10::DispatchKeySet(
                  {c10::DispatchKey::Python, c10::DispatchKey::NestedTensor,
                   c10::DispatchKey::Quantized, c10::DispatchKey::Functionalize})) &&
          !tensor.is_meta(),
      "ebb: share_storage needs plain strided tensors; ", name, " is a ", tensor.toString());
}

template <class T>
void checkSame(const char* what, const T& dst, const T& src) {
  TORCH_CHECK_VALUE(
      dst == src, "ebb: share_storage needs tensors of the same ", what, "; dst has ", dst,
      ", src has ", src);
}

}  // namespace

void shareStorage(const at::Tensor& dst, const at::Tensor& src) {
  checkKind(dst, "dst");
  checkKind(src, "src");
  checkSame("dtype", dst.scalar_type(), src.scalar_type());
  checkSame("device", dst.device(), src.device());
  checkSame("size", dst.sizes(), src.sizes());
  checkSame("stride", dst.strides(), src.strides());
  checkSame("storage offset", dst.storage_offset(), src.storage_offset());
  const c10::Storage to = dst.storage();
  const c10::Storage from = ownerOf(src.storage());
  const size_t shown = at::detail::computeStorageNbytes(
      dst.sizes(), dst.strides(), dst.element_size(), dst.storage_offset());
  const size_t needed = std::max(to.nbytes(), shown);
  TORCH_CHECK_VALUE(
      src.storage().nbytes() >= needed, "ebb: share_storage needs a src of at least ", needed,
      " bytes; its storage has ", src.storage().nbytes());
  if (ownerOf(to).is_alias_of(from)) {
    return;  // the memory is shared already
  }
  TORCH_CHECK_VALUE(
      to.resizable(),
      "ebb: share_storage needs a dst whose storage is resizable; the memory of this one belongs "
      "to other code (numpy, from_blob), or an earlier share_storage used it as src");
  share(to, from, src.storage().nbytes());
}

void emptyStorage(const c10::Storage& storage, const std::string& message) {
  const ProcessStateChange change;
  takeMemory(storage, message);
}

void fillStorage(const c10::Storage& storage, const c10::Storage& from) {
  allowAccess(storage);
  const c10::Storage owner = ownerOf(from);
  if (!ownerOf(storage).is_alias_of(owner)) {  // else the memory is shared already
    share(storage, owner, from.nbytes());
  }
}

}  // namespace ebb
