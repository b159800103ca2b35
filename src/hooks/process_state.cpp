#include "hooks/process_state.h"

namespace ebb {
namespace {

// Set while libraries are loaded.
constinit ProcessStateFollower follower;

}  // namespace

bool followProcessState(const ProcessStateFollower& functions) {
  follower = functions;
  return true;
}

void beginProcessStateChange() {
  if (follower.changeBegins != nullptr) {
    follower.changeBegins();
  }
}

void endProcessStateChange() {
  if (follower.changeEnds != nullptr) {
    follower.changeEnds();
  }
}

void beforeUnseenResize(const c10::Storage& storage) {
  if (follower.willResize != nullptr) {
    follower.willResize(storage);
  }
}

size_t weakReferencesOfOthers(
    const c10::Storage& storage, size_t (*count)(const c10::Storage& storage)) {
  return follower.countWithoutOwn != nullptr ? follower.countWithoutOwn(storage, count)
                                             : count(storage);
}

}  // namespace ebb
