#include "graph/versions.h"

#include <ATen/core/TensorBody.h>

#include <algorithm>

namespace ebb {

void Versions::stamp(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    written_.counter = tensor.unsafeGetTensorImpl()->version_counter();
    written_.version = written_.counter.current_version();
  }
}

[[gnu::noinline]] void Versions::inherit(const Versions& before) {
  before.forEach([&](const VersionStamp& stamp) { learn(stamp.counter, stamp.version); });
}

bool Versions::othersHold() const { return std::ranges::all_of(others_, &VersionStamp::holds); }

void Versions::learn(const c10::VariableVersion& seen) {
  learn(seen, seen.enabled() ? seen.current_version() : 0);
}

[[gnu::noinline]] void Versions::learn(const c10::VariableVersion& seen, uint32_t at) {
  if (seen.enabled() && !know(seen)) {
    others_.push_front({seen, at});
  }
}

void Versions::allowOne(const c10::VariableVersion& seen) {
  const auto allow = [&](VersionStamp& stamp) {
    const auto& known = stamp.counter;
    stamp.version += sameCounter(known, seen) && known.current_version() == stamp.version + 1;
  };
  allow(written_);
  std::ranges::for_each(others_, allow);
}

bool Versions::know(const c10::VariableVersion& seen) const {
  return isWriters(seen) || std::ranges::any_of(others_, [&](const VersionStamp& stamp) {
           return sameCounter(seen, stamp.counter);
         });
}

}  // namespace ebb
