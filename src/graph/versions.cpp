#include "graph/versions.h"

#include <ATen/core/TensorBody.h>

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

bool Versions::othersHold() const {
  const CounterStamp* stamp = others_.get();
  while (stamp != nullptr && stamp->holds()) {
    stamp = stamp->next.get();
  }
  return stamp == nullptr;
}

void Versions::learn(const c10::VariableVersion& seen) {
  learn(seen, seen.enabled() ? seen.current_version() : 0);
}

[[gnu::noinline]] void Versions::learn(const c10::VariableVersion& seen, uint32_t at) {
  if (!seen.enabled() || know(seen)) {
    return;
  }
  auto stamp = std::make_unique<CounterStamp>();
  stamp->counter = seen;
  stamp->version = at;
  stamp->next = std::move(others_);
  others_ = std::move(stamp);
}

void Versions::allowOne(const c10::VariableVersion& seen) {
  const auto allow = [&](VersionStamp& stamp) {
    const auto& known = stamp.counter;
    stamp.version += sameCounter(known, seen) && known.current_version() == stamp.version + 1;
  };
  allow(written_);
  for (CounterStamp* stamp = others_.get(); stamp != nullptr; stamp = stamp->next.get()) {
    allow(*stamp);
  }
}

bool Versions::know(const c10::VariableVersion& seen) const {
  if (sameCounter(seen, written_.counter)) {
    return true;
  }
  const CounterStamp* stamp = others_.get();
  while (stamp != nullptr && !sameCounter(seen, stamp->counter)) {
    stamp = stamp->next.get();
  }
  return stamp != nullptr;
}

}  // namespace ebb
