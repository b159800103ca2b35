// Gives a storage other memory, or none. torch has no public interface for this.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <string>

#include "ebb/export.h"

namespace ebb {

// `storage` has this memory from now on. Releases the memory before.
EBB_API void giveMemory(const c10::Storage& storage, c10::DataPtr memory, size_t nbytes);

// Frees the memory of `storage`. Later reads raise an error with `message`.
EBB_API void takeMemory(const c10::Storage& storage, const std::string& message);

// Removes the error of takeMemory().
EBB_API void allowAccess(const c10::Storage& storage);

}  // namespace ebb
