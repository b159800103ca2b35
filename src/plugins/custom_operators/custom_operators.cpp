#include <memory>

#include "conditions/fingerprint.h"
#include "graph/recipe.h"
#include "hooks/call_guard.h"
#include "plugins/custom_operators/kept_results.h"
#include "plugins/custom_operators/python_calls.h"
#include "plugins/custom_operators/unsaid_writes.h"
#include "record/context.h"

namespace ebb {
namespace {

constexpr const char* kNotDeclared =
    "custom operator, which may have hidden state; a rule with RECOMPUTE that names it applies";

// Why ebb does not replay a custom operator that a policy or a checkpointed call declares
// repeatable: it was registered with an effect (a print, a counter, a message to another process),
// which a second run would repeat. Null if it was not. A program may register the effect at any
// time, so ebb asks at each call.
const char* effectOf(const OpTraits& op) {
  return hasEffect != nullptr && hasEffect(op.name)
             ? "registered with an effect, which a second run would repeat; a rule with force=True "
               "applies"
             : nullptr;
}

// Off the CPU there is no fingerprint.
void takeFingerprint(const GuardedResult& result) {
  const uint64_t taken =
      result.written ? fingerprint(result.tensor.storage()) : fingerprintOfShown(result.tensor);
  if (taken != 0) {
    result.value->attach(c10::make_intrusive<ResultFingerprint>(taken));
  }
}

// One run of a custom operator.
class CustomRun final : public GuardedRun {
 public:
  explicit CustomRun(const GuardedCall& call)
      : context_(call.context),
        op_(call.call.op),
        unsaid_(op_, call.arguments),
        isNotDeclared_(call.obstacle == kNotDeclared) {}

  const char* whyToGiveUp(ValueMap& values) override {
    if (!unsaid_.giveUp(values)) {
      return nullptr;
    }
    isNotDeclared_ = false;
    return "it writes to an argument that its schema does not declare as written";
  }
  void warn() override { unsaid_.warn(); }
  void made(const GuardedResult& result) override {
    if (result.value->recipe()) {
      takeFingerprint(result);
    } else if (
        isNotDeclared_ && recomputes(result.verdict.decision) && result.value->facts().madeHere) {
      KeptResults::of(context_).add(context_.graph, result.value, op_);
    }
  }

 private:
  const Context& context_;
  const OpTraits& op_;
  UnsaidWrites unsaid_;
  bool isNotDeclared_;  // only the declaration is missing
};

// Note [Custom operators]
// A custom operator, that is, one from outside torch, may keep state that no schema shows: a step
// counter, a generator, a cache. A second run would then silently give another result. So ebb keeps
// the results, with two exceptions. A rule of the policy that matches the operator declares it
// repeatable. A checkpointed call declares all inner operators repeatable
// (Context::trustCustomOps), since torch's checkpoint would run them again. In both cases, ebb
// compares the results of the replay with the forward's: on the CPU by fingerprints, on other
// devices in verify mode only. In a checkpointed call on the CPU, ebb also recomputes a result of
// `empty` that such an operator fills. A fingerprint, taken when `empty` returns, shows that
// nothing wrote to the memory in between, so a replay may use new memory.
class CustomOperators final : public CallGuard {
 public:
  const char* whyNotReplayed(const GuardedCall& call) override {
    if (!call.context.trusts(call.verdict)) {
      return kNotDeclared;
    }
    // The core has its own reason if the call's writes cannot be replayed.
    const bool asks = !call.verdict.forced && call.arguments.writesCanBeReplayed();
    return asks ? effectOf(call.call.op) : nullptr;
  }

  std::unique_ptr<GuardedRun> begins(const GuardedCall& call) override {
    return std::make_unique<CustomRun>(call);
  }

  void check(const ReplayedResult& result) override {
    const auto* expected = result.value.extra<ResultFingerprint>();
    if (expected == nullptr) {
      return;
    }
    const uint64_t now =
        result.tensor != nullptr ? fingerprintOfShown(*result.tensor) : fingerprint(result.storage);
    TORCH_CHECK(
        now == expected->fingerprint, otherBits(result.graph, result.recipe, result.output, ""));
  }
};

[[maybe_unused]] const bool isRegistered = [] {
  static auto* guard = new CustomOperators;
  return registerGuard(Guarded::CustomOperators, *guard);
}();

}  // namespace

bool (*hasEffect)(const std::string& op) = nullptr;
void (*tellKept)(const std::string& op, const std::string& region, size_t bytes) = nullptr;

}  // namespace ebb
