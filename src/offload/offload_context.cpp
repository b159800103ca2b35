#include "offload/offload_context.h"

#include <c10/util/Exception.h>

#include <utility>

namespace ebb {

OffloadShared& OffloadShared::get() {
  // Leaked on purpose, like the engines: handles may outlive static objects.
  static auto* instance = new OffloadShared;
  return *instance;
}

OffloadContext::OffloadContext(Transfer& transfer)
    : shared(OffloadShared::get()),
      settings(shared.settings),
      stats(shared.stats),
      via(transfer),
      host(transfer) {
}

void OffloadContext::warnOfFailure(
    const HostStash& stash, const char* remains, const std::string& error) {
  if (!std::exchange(shared.warnedOfFailure, true)) {
    TORCH_WARN(
        "ebb: copying ",
        stash.account->of,
        " failed, so it ",
        remains,
        ": ",
        error,
        " (Shown once; other tensors may be affected.)");
  }
}

}  // namespace ebb
