#include "torch_seams/storage_memory.h"

#include <utility>

namespace ebb {

#if EBB_TORCH_VERSION < 21200
// torch 2.11 has no function to remove the error message that takeMemory() sets. The arguments of
// an explicit instantiation may name private members, so a template gives access.
template <bool c10::StorageImpl::* flag, void (c10::StorageImpl::*refresh)()>
struct AccessError {
  friend void clearAccessError(c10::StorageImpl& storage) {
    storage.*flag = false;
    (storage.*refresh)();
  }
};
void clearAccessError(c10::StorageImpl& storage);
template struct AccessError<
    &c10::StorageImpl::throw_on_immutable_data_ptr_, &c10::StorageImpl::refresh_has_data_ptr_check>;
#endif

void giveMemory(const c10::Storage& storage, c10::DataPtr memory, size_t nbytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(nbytes);
}

void takeMemory(const c10::Storage& storage, const std::string& message) {
  giveMemory(storage, c10::DataPtr(nullptr, storage.device()), 0);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void allowAccess(const c10::Storage& storage) {
#if EBB_TORCH_VERSION < 21200
  clearAccessError(*storage.unsafeGetStorageImpl());
#else
  storage.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
#endif
}

}  // namespace ebb
