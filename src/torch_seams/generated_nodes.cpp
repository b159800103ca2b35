#include "torch_seams/generated_nodes.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <typeinfo>

namespace ebb {

// A dynamic_cast in each unpack would cost more than the rest of unpack, so the answers for a few
// classes are cached.
bool isGenerated(const torch::autograd::Node& node) {
  // Each entry is the address of the class's type_info, plus 1 if torch generates the class. An
  // entry is one atomic word, so threads can share the cache without a lock.
  static std::array<std::atomic<uintptr_t>, 64> all{};
  const auto type = reinterpret_cast<uintptr_t>(&typeid(node));
  auto& slot = all[type / alignof(std::type_info) % all.size()];
  uintptr_t known = slot.load(std::memory_order_relaxed);
  if ((known & ~uintptr_t{1}) != type) {
    const bool own = dynamic_cast<const torch::autograd::TraceableFunction*>(&node) != nullptr;
    known = type + (own ? 1 : 0);
    slot.store(known, std::memory_order_relaxed);
  }
  return (known & 1) != 0;
}

}  // namespace ebb
