// Sharing one memory between two storages, without a copy.
#pragma once

#include <c10/core/Storage.h>

#include <string>

#include "ebb/export.h"

namespace ebb {

// Note [Shared storages]
// A storage gets a pointer to the memory of another one, and a deleter that owns a reference to the
// other one. So every tensor on the storage, made before or after, shows the other one's data. The
// other storage may die first: the memory is freed when both are gone. No version counter is
// incremented, because the new data is the data that the storage is meant to have. The other
// storage must keep its memory, so it is not resizable from then on.

// Frees the memory of `storage`, which must be resizable. Later reads raise an error with
// `message`.
void emptyStorage(const c10::Storage& storage, const std::string& message);

// Shares the memory of `from` with `storage`, which was emptied.
EBB_API void fillStorage(const c10::Storage& storage, const c10::Storage& from);

}  // namespace ebb
