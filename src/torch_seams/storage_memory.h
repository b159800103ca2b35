// Gives a storage other memory, or none. torch has no public interface for this.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <string>

namespace ebb {

// `storage` has this memory from now on. Releases the memory before.
void giveMemory(const c10::Storage& storage, c10::DataPtr memory, size_t nbytes);

// Frees the memory of `storage`. Later reads raise an error with `message`.
void takeMemory(const c10::Storage& storage, const std::string& message);

// Removes the error of takeMemory().
void allowAccess(const c10::Storage& storage);

}  // namespace ebb
