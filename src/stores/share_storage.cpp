#include "stores/share_storage.h"

#include <utility>

#include "hooks/process_state.h"
#include "memory/bytes.h"
#include "torch_seams/storage_memory.h"

namespace ebb {

void emptyStorage(const c10::Storage& storage, const std::string& message) {
  const ProcessStateChange change;
  takeMemory(storage, message);
}

void fillStorage(const c10::Storage& storage, const c10::Storage& from) {
  const ProcessStateChange change;
  allowAccess(storage);
  c10::Storage owner = ownerOf(from);
  if (ownerOf(storage).is_alias_of(owner)) {
    return;  // the memory is shared already
  }
  owner.unsafeGetStorageImpl()->set_resizable(false);
  giveMemory(storage, sharedPointer(std::move(owner)), from.nbytes());
}

}  // namespace ebb
