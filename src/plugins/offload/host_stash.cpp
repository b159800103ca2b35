#include "plugins/offload/host_stash.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "plugins/offload/offload_engine.h"

namespace ebb {

HostStash::HostStash(
    std::shared_ptr<Offload> sender, c10::Storage bytes, size_t size, TransferAccountPtr bookedOn,
    c10::Stream stream)
    : engine(std::move(sender)),
      account(std::move(bookedOn)),
      onDevice(std::move(bytes)),
      sent{size, stream, onDevice.data()} {}

HostStash::~HostStash() { engine->forget(*this); }

c10::Storage HostStash::fetch(const c10::Storage& living) { return engine->fetch(*this, living); }

void HostStash::beforeWrite() { engine->beforeWrite(*this); }

void HostStash::become(State next) {
  const auto* end = std::end(kTransitions);
  TORCH_INTERNAL_ASSERT(
      std::find(std::begin(kTransitions), end, std::pair(state_, next)) != end,
      static_cast<int>(state_), " to ", static_cast<int>(next));
  state_ = next;
}

void HostStash::checkCameBack(const TransferEvent& event) const {
  const std::string error = event.error();
  TORCH_CHECK(
      error.empty(), "ebb: cannot restore ", account->of, ": ", error,
      ". Run the forward again, with another folder for the disk tier or without one "
      "(ebb.config.offload.disk = '').");
}

void HostStash::warnOfFailure(const char* remains, const std::string& error) const {
  if (!std::exchange(OffloadShared::get().warnedOfFailure, true)) {
    TORCH_WARN(
        "ebb: copying ", account->of, " failed, so it ", remains, ": ", error,
        " (Shown once; other tensors may be affected.)");
  }
}

HostStashPtr ifAlive(HostStash* listed) {
  // Borrows the weak reference of the list: reclaim() and release() change no count.
  auto weak = c10::weak_intrusive_ptr<HostStash>::reclaim(listed);
  HostStashPtr stash = weak.lock();
  weak.release();
  return stash;
}

}  // namespace ebb
