#include "memory/loaded_library.h"

#include <dlfcn.h>
#include <link.h>

#include <string>

namespace ebb {
namespace {

struct Search {
  std::string_view library;
  std::string path;  // of the library; empty: not found
};

int compare(dl_phdr_info* loaded, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  const std::string_view path = loaded->dlpi_name;
  if (!path.substr(path.rfind('/') + 1).starts_with(search.library)) {
    return 0;
  }
  search.path = path;
  return 1;
}

}  // namespace

void* findLoaded(std::string_view library, const char* symbol) {
  if (void* global = dlsym(RTLD_DEFAULT, symbol)) {
    return global;
  }
  Search search{library, {}};
  dl_iterate_phdr(&compare, &search);
  void* loaded =
      search.path.empty() ? nullptr : dlopen(search.path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  return loaded == nullptr ? nullptr : dlsym(loaded, symbol);
}

}  // namespace ebb
