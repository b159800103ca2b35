// The observer of verify mode.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "conditions/fingerprint.h"
#include "graph/graph.h"
#include "graph/recipe.h"
#include "hooks/observer.h"
#include "intercept/op_traits.h"
#include "memory/bytes.h"
#include "plugins/verify/compare.h"
#include "plugins/verify/poison.h"

namespace ebb {
namespace {

struct Workspace {
  std::string_view name;
  size_t first;  // these are indices of results
  size_t last;
};

// Results that may be partly unwritten: scratch memory of kernels, and the random state that
// attention kernels return, which they do not write without dropout.
constexpr Workspace kWorkspaces[] = {
    {"aten::_ctc_loss", 1, 1},
    {"aten::mkldnn_rnn_layer", 3, 3},
    {"aten::_cudnn_rnn", 3, 3},
    {"aten::miopen_rnn", 3, 3},
    {"aten::cudnn_batch_norm", 3, 3},
    {"aten::_batch_norm_with_update", 3, 3},
    {"aten::_batch_norm_with_update_functional", 3, 3},
    {"aten::_scaled_dot_product_flash_attention", 6, 7},
    {"aten::_flash_attention_forward", 2, 3},
    {"aten::_scaled_dot_product_efficient_attention", 2, 3},
    {"aten::_efficient_attention_forward", 2, 3},
    {"aten::_scaled_dot_product_cudnn_attention", 6, 7},
    {"aten::_cudnn_attention_forward", 6, 7},
    {"aten::_scaled_dot_product_fused_attention_overrideable", 6, 7},
};

// True if result `slot` is a workspace for the backward kernel. Some of its bytes are never written
// or read, so they may differ after a replay.
bool isWorkspace(std::string_view name, size_t slot) {
  return std::ranges::any_of(kWorkspaces, [&](const Workspace& workspace) {
    return workspace.name == name && workspace.first <= slot && slot <= workspace.last;
  });
}

// The names of arguments whose contents have changed since the op read them, although no version
// counter has moved.
std::string changedInputsOf(const Recipe& recipe) {
  std::string changed;
  for (const Input& input : recipe.inputs()) {
    if (!input.value) {
      continue;
    }
    const Value& value = *input.value;
    const c10::Storage storage = value.home().isPrivate() ? c10::Storage() : value.available();
    if (value.facts().changedBeforeCopy ||
        (storage && hasChanged(value, storage, FingerprintOf::Everything))) {
      const auto& argument = recipe.op.op.schema().arguments()[input.argument];
      changed += (changed.empty() ? "'" : ", '") + argument.name() + "'";
    }
  }
  return changed;
}

// The members of VerifyCounts, for the whole process.
std::atomic<uint64_t> compared{0};
std::atomic<uint64_t> differing{0};

// See Note [Verify mode]
class Verifier final : public OpEvents, public BackwardEvents {
 public:
  explicit Verifier(VerifyMode mode) : mode_(mode) {}

  void canBeReplayed(
      const Recipe& recipe, const Output& output, const at::Tensor& tensor) override {
    const auto value = output.value.lock();
    auto record = c10::make_intrusive<Witness>();
    record->op = &recipe.op;
    record->region = recipe.region;
    record->output.written = output.written;
    record->output.slot = output.slot;
    record->output.element = output.element;
    record->dtype = tensor.scalar_type();
    record->lost = !output.written && isWorkspace(recipe.op.op.schema().name(), output.slot);
    value->attach(record, true);
    if (!poisonWhenFreed(tensor.storage(), record->dtype, value) && !record->lost) {
      record->bytes = tensor.storage();  // keeps the storage alive: its end would not be noticed
    }
  }

  void stateEnds(Value& value, bool seen) override {
    Witness* record = value.extra<Witness>();
    const auto living = record ? value.home().storage().lock() : nullptr;
    if (!living) {
      return;
    }
    const c10::Storage storage{living};
    forgetOwner(storage);
    const auto isCopied = [&] { return record->bytes && !record->bytes.is_alias_of(storage); };
    {
      std::lock_guard<std::mutex> lock(record->mutex);
      seen = seen && !record->lost;
      if (seen && isCopied()) {
        return;
      }
    }
    c10::Storage bytes = seen ? copyOf(storage) : c10::Storage();
    std::lock_guard<std::mutex> lock(record->mutex);
    record->lost |= !seen;
    if (record->lost || !isCopied()) {
      std::swap(record->bytes, bytes);  // the old bytes die after the lock is released
    }
  }

  void replayed(const Graph& graph, const Recipe& recipe, Value& value) override {
    if (const Witness* record = value.extra<Witness>()) {
      compare(graph, recipe, value);
      poisonWhenFreed(value.home().bytes(), record->dtype, {});
    }
  }

  // Throws if the replay differs; in the mode Demote, warns and returns the forward's bytes.
  c10::Storage checked(
      const Graph& graph, Value& value, const Geometry& geometry, c10::Storage bytes) override {
    const c10::Storage truth = trueBytes(value, bytes);
    compared += truth ? 1 : 0;
    if (!truth || sameBits(geometry, bytes, truth)) {
      return bytes;
    }
    ++differing;
    reportMismatch(mode_, mismatchOf(graph, value, truth));
    return truth;
  }

 private:
  // Notes in the value's witness whether a replay has given other bytes, and where that began.
  static void compare(const Graph& graph, const Recipe& recipe, Value& value) {
    const c10::Storage truth = trueBytes(value, value.home().bytes());
    if (!truth || sameBytes(value.home().bytes(), truth)) {
      return;
    }
    Witness& record = *value.extra<Witness>();
    for (const Input& input : recipe.inputs()) {
      const Witness* read = input.value ? input.value->extra<Witness>() : nullptr;
      if (read != nullptr && read->mismatch) {
        record.mismatch = read->mismatch;
        return;
      }
    }
    record.changedInputs = changedInputsOf(recipe);
    mismatchOf(graph, value, truth);
  }

  const VerifyMode mode_;
};

VerifyMode modeFromEnvironment() {
  const char* variable = std::getenv("EBB_VERIFY");
  const std::string_view value = variable == nullptr ? "" : variable;
  if (value.empty() || value == "0") {
    return VerifyMode::Off;
  }
  if (value == "1") {
    return VerifyMode::Raise;
  }
  TORCH_CHECK_VALUE(
      value == "demote", "ebb: EBB_VERIFY must be 0, 1 or demote; it is '", value, "'");
  return VerifyMode::Demote;
}

std::atomic<VerifyMode>& currentMode() {
  static std::atomic<VerifyMode> mode{modeFromEnvironment()};
  return mode;
}

[[maybe_unused]] const bool isRegistered = observeGraphs([](Graph& graph) {
  const VerifyMode mode = verifyMode();
  if (mode != VerifyMode::Off) {
    graph.rules.compareAll = true;
    graph.rules.onlyInBackward = true;
    graph.rules.raiseIfDifferent = mode == VerifyMode::Raise;
    graph.observers.add(std::make_unique<Verifier>(mode));
  }
});

}  // namespace

const SlotNumber Witness::kSlot = takeSlot();

VerifyMode verifyMode() { return currentMode().load(std::memory_order_relaxed); }

VerifyMode setVerifyMode(VerifyMode mode) { return currentMode().exchange(mode); }

VerifyCounts verifyCounts() { return {compared.load(), differing.load()}; }

}  // namespace ebb
