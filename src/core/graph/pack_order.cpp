#include "graph/pack_order.h"

#include <algorithm>

namespace ebb {

void PackOrder::add(const c10::intrusive_ptr<Value>& value, uint32_t node) {
  if (packed_.size() >= fullAt_) {
    std::erase_if(packed_, [](const Packed& packed) { return packed.value.expired(); });
    fullAt_ = std::max(kFewest, 2 * packed_.size());
  }
  packed_.push_back({c10::weak_intrusive_ptr<Value>(value), node});
}

c10::SmallVector<c10::intrusive_ptr<Value>, 4> PackOrder::of(uint32_t node) const {
  c10::SmallVector<c10::intrusive_ptr<Value>, 4> values;
  const auto [first, last] = std::ranges::equal_range(packed_, node, {}, &Packed::node);
  for (auto packed = first; packed != last; ++packed) {
    if (auto value = packed->value.lock()) {
      values.push_back(std::move(value));
    }
  }
  return values;
}

}  // namespace ebb
