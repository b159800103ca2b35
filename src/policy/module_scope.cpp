#include "policy/module_scope.h"

#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "ebb/region.h"
#include "support/leaked.h"

namespace ebb {
namespace {

struct Modules {
  std::mutex mutex;  // guards all members below
  std::map<ModuleNames, uint32_t> numbers;
  std::deque<ModuleNames> names{{}};  // by number; elements do not move
};

Modules& modules() { return leaked<Modules>(); }

// See Note [Static TLS]
[[gnu::tls_model("initial-exec")]] constinit thread_local uint32_t tlsModule = 0;

}  // namespace

uint32_t moduleNumber(ModuleNames names) {
  std::lock_guard<std::mutex> lock(modules().mutex);
  const auto [place, isNew] = modules().numbers.emplace(names, modules().names.size());
  if (isNew) {
    modules().names.push_back(std::move(names));
  }
  return place->second;
}

const ModuleNames& moduleNames(uint32_t number) {
  std::lock_guard<std::mutex> lock(modules().mutex);
  return modules().names.at(number);
}

bool anyModuleHasNumber() {
  std::lock_guard<std::mutex> lock(modules().mutex);
  return !modules().numbers.empty();
}

uint32_t currentModule() { return tlsModule; }

uint32_t exchangeModule(uint32_t number) { return std::exchange(tlsModule, number); }

ModuleScope::ModuleScope(const std::string& name)
    : before_(exchangeModule(moduleNumber({name, name}))) {}

ModuleScope::~ModuleScope() { exchangeModule(before_); }

}  // namespace ebb
