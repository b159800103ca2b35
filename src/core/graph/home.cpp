#include "graph/home.h"

namespace ebb {

void Home::stamp(c10::StorageImpl* storage) {
  storage_ = Weak::reclaim_copy(storage);
  nbytes_ = storage->nbytes();
  address_ = storage->data();
}

c10::Storage Home::living() const {
  auto storage = isOverwritten_ ? nullptr : storage_.lock();
  const bool whole = storage && hasMemoryOf(*storage);  // other code may change the memory
  return whole ? c10::Storage(std::move(storage)) : c10::Storage();
}

void Home::share(const c10::Storage& bytes) {
  setBytes(bytes, false);
  address_ = bytes.data();
}

void Home::demoteToWeak() {
  storage_ = Weak::reclaim_copy(bytes_.unsafeGetStorageImpl());
  address_ = bytes_.data();
  isOverwritten_ = false;
  bytes_ = c10::Storage();
}

}  // namespace ebb
