#include "graph/pack_order.h"

#include <algorithm>

namespace ebb {

void PackOrder::add(const c10::intrusive_ptr<Value>& value, uint64_t ops) {
  if (packed_.size() >= fullAt_) {
    std::erase_if(packed_, [](const Packed& packed) { return packed.value.expired(); });
    fullAt_ = std::max(kFewest, 2 * packed_.size());
  }
  packed_.push_back({c10::weak_intrusive_ptr<Value>(value), ops});
}

c10::SmallVector<c10::intrusive_ptr<Value>, 4> PackOrder::near(uint64_t ops) const {
  c10::SmallVector<c10::intrusive_ptr<Value>, 4> values;
  auto packed = std::lower_bound(
      packed_.begin(), packed_.end(), ops, [](const Packed& one, uint64_t least) {
        return one.ops < least;
      });
  for (; packed != packed_.end() && packed->ops <= ops + 1; ++packed) {
    if (auto value = packed->value.lock()) {
      values.push_back(std::move(value));
    }
  }
  return values;
}

}  // namespace ebb
