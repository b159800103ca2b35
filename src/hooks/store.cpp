#include "hooks/store.h"

#include <c10/util/Exception.h>

#include <array>

namespace ebb {
namespace {

// Filled while libraries are loaded, so the list needs no lock.
std::array<Store*, kDecisions>& stores() {
  static std::array<Store*, kDecisions> all{};
  return all;
}

}  // namespace

bool registerStore(Decision decision, Store& store) {
  stores()[static_cast<size_t>(decision)] = &store;
  return true;
}

Store* storeOf(Decision decision) {
  if (!isStored(decision)) {
    return nullptr;
  }
  Store* store = stores()[static_cast<size_t>(decision)];
  TORCH_CHECK_VALUE(
      store != nullptr, "ebb: this build cannot ",
      decision == Decision::Offload ? "OFFLOAD: it has no plug-in 'offload'"
                                    : "PAGE: it has no plug-in 'paging'",
      " (-DEBB_PLUGINS). Use another decision, or build ebb with the plug-in.");
  return store;
}

}  // namespace ebb
