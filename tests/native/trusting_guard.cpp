// A guard for tests of the core in a build without plug-ins: lets a rule, or a checkpointed call,
// replay custom operators.
#include "hooks/call_guard.h"
#include "module.h"
#include "record/context.h"

namespace ebb::bindings {
namespace {

struct TrustingGuard final : CallGuard {
  const char* whyNotReplayed(const GuardedCall& call) override {
    return call.context.trusts(call.verdict) ? nullptr : "no rule names the custom operator";
  }
  std::unique_ptr<GuardedRun> begins(const GuardedCall& call) override { return nullptr; }
  void check(const ReplayedResult& result) override {}
};

// Call this before the first region.
void trustCustomOperators() {
  static auto* guard = new TrustingGuard;
  registerGuard(Guarded::CustomOperators, *guard);
}

[[maybe_unused]] const bool isTrustingGuardBound = bindTests(
    [](pybind11::module_& module) { module.def("trust_custom_operators", &trustCustomOperators); });

}  // namespace
}  // namespace ebb::bindings
