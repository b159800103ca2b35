// Which module is running.
#pragma once

#include <cstdint>
#include <string>

#include "ebb/export.h"

namespace ebb {

// Note [Modules by number]
// Rules may ask for the module that runs. Whoever tracks modules (the Python package, by way of
// subclasses whose forward enters a scope) gives each name a number once; entering and leaving then
// is the exchange of a number of the thread's. Numbers are never given back: there are as many as a
// model has modules. 0 stands for no module.
EBB_API uint32_t moduleNumber(const std::string& name);
EBB_API const std::string& moduleName(uint32_t number);

bool anyModuleHasNumber();

// The module that runs on this thread; `exchangeModule` gives the one before.
EBB_API uint32_t currentModule();
EBB_API uint32_t exchangeModule(uint32_t number);

}  // namespace ebb
