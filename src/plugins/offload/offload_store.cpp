// Puts values into host memory: see Note [Stored values].
#include <ATen/record_function.h>

#include "graph/recipe.h"
#include "graph/value.h"
#include "hooks/store.h"
#include "plugins/offload/accounts.h"
#include "plugins/offload/offload_engine.h"
#include "record/context.h"

namespace ebb {
namespace {

class OffloadStore final : public Store {
 public:
  bool accepts(const Value& value, const at::Tensor& tensor) override {
    return offloadEngine().takes(tensor);
  }

  StashPtr put(const Context& context, Value& value, const c10::Storage& storage) override {
    RECORD_USER_SCOPE("ebb::offload " + context.regionName());
    static const std::string kInput = "input";
    const size_t nbytes = value.home().nbytes();
    const auto account =
        transferAccount(context.regionName(), value.recipe() ? value.recipe()->op.name : kInput);
    HostStashPtr stash = offloadEngine().send(storage, nbytes, account);
    if (stash) {
      context.counters->bytesOffloaded += nbytes;
      context.graph->observers.tell(&OpEvents::sent, value, "offload", account->of, nbytes);
    }
    return stash;
  }
  const char* whyFull() const override {
    return "no pinned host memory was left for OFFLOAD (pinned_limit)";
  }

  void regionEnds() override { offloadEngine().regionEnds(); }
};

OffloadStore store;

[[maybe_unused]] const bool isRegistered = registerStore(Decision::Offload, store);

}  // namespace
}  // namespace ebb
