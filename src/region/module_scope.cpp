#include "region/module_scope.h"

#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "ebb/ebb.h"

namespace ebb {
namespace {

struct Modules {
  std::mutex mutex;  // guards what follows
  std::unordered_map<std::string, uint32_t> numbers;
  std::deque<std::string> names{""};  // by number; elements do not move
};

Modules& modules() {
  static auto* instance = new Modules;
  return *instance;
}

thread_local uint32_t tlsModule = 0;

}  // namespace

uint32_t moduleNumber(const std::string& name) {
  std::lock_guard<std::mutex> lock(modules().mutex);
  const auto [place, isNew] = modules().numbers.emplace(name, modules().names.size());
  if (isNew) {
    modules().names.push_back(name);
  }
  return place->second;
}

const std::string& moduleName(uint32_t number) {
  std::lock_guard<std::mutex> lock(modules().mutex);
  return modules().names.at(number);
}

bool anyModuleHasNumber() {
  std::lock_guard<std::mutex> lock(modules().mutex);
  return !modules().numbers.empty();
}

uint32_t currentModule() {
  return tlsModule;
}

uint32_t exchangeModule(uint32_t number) {
  return std::exchange(tlsModule, number);
}

ModuleScope::ModuleScope(const std::string& name) : before_(exchangeModule(moduleNumber(name))) {
}

ModuleScope::~ModuleScope() {
  exchangeModule(before_);
}

}  // namespace ebb
