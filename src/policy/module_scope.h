// The module that runs on a thread.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "ebb/export.h"

namespace ebb {

// Note [Modules by number]
// A rule may have a condition on the running module. The code that tracks modules gives each
// module's name a number once; the Python package tracks modules through subclasses whose forward
// enters a scope. To enter or leave a scope then only sets the thread's current number. A name
// keeps its number, so a process has as many numbers as names. 0 is no module. A rule matches a
// module if the rule's glob matches either of the module's names.
struct ModuleNames {
  std::string plain;  // without the parts that wrappers (DDP, FSDP) insert
  std::string full;   // as in the model

  friend bool operator<(const ModuleNames& a, const ModuleNames& b) {
    return std::tie(a.plain, a.full) < std::tie(b.plain, b.full);
  }
};
EBB_API uint32_t moduleNumber(ModuleNames names);
EBB_API const ModuleNames& moduleNames(uint32_t number);

EBB_API bool anyModuleHasNumber();

// The number of the module that runs on this thread.
EBB_API uint32_t currentModule();
// Sets the running module; returns the module before.
EBB_API uint32_t exchangeModule(uint32_t number);

}  // namespace ebb
