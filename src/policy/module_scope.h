// Which module is running.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "ebb/export.h"

namespace ebb {

// Note [Modules by number]
// Rules may ask for the module that runs. Whoever tracks modules (the Python package, by way of
// subclasses whose forward enters a scope) gives each name a number once; entering and leaving then
// is the exchange of a number of the thread's. Numbers are never given back: there are as many as a
// model has modules. 0 stands for no module.
// Rules match either of its names.
struct ModuleNames {
  std::string plain;  // without the parts that wrappers (DDP's, FSDP's) put into it
  std::string full;   // as the model gives it

  friend bool operator<(const ModuleNames& a, const ModuleNames& b) {
    return std::tie(a.plain, a.full) < std::tie(b.plain, b.full);
  }
};
EBB_API uint32_t moduleNumber(ModuleNames names);
EBB_API const ModuleNames& moduleNames(uint32_t number);

EBB_API bool anyModuleHasNumber();

// The module that runs on this thread; `exchangeModule` gives the one before.
EBB_API uint32_t currentModule();
EBB_API uint32_t exchangeModule(uint32_t number);

}  // namespace ebb
