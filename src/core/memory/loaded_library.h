// Functions of libraries that the process has loaded. ebb is built without CUDA, and finds CUDA's
// functions by name.
#pragma once

#include <string_view>

namespace ebb {

// The address of the function `symbol`; null if there is none. Searches the global symbols, then
// the first loaded library whose file name begins with `library`: symbols of torch's dependencies
// are usually not global, and the file names may contain a hash, as in the archives of libtorch.
void* findLoaded(std::string_view library, const char* symbol);

template <class Function>
Function loadedFunction(std::string_view library, const char* symbol) {
  return reinterpret_cast<Function>(findLoaded(library, symbol));
}

}  // namespace ebb
