// The interface of a plug-in that decides on replays of operators from outside torch.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "ebb/export.h"
#include "hooks/slots.h"

namespace ebb {

class Arguments;
class ValueMap;
struct Call;
struct Context;
struct Graph;
struct Output;
struct Recipe;
struct Value;
struct Verdict;

// A call that is about to run.
struct GuardedCall {
  const Context& context;
  const Call& call;
  const Arguments& arguments;
  const Verdict& verdict;          // the policy's verdict on the call
  const Recipe* recipe = nullptr;  // null in whyNotReplayed(), and if there is an obstacle
  const char* obstacle = nullptr;  // why the call has no recipe
};

// A result of a call, or an argument that the call has written. The value has a recipe if it can be
// recomputed.
struct GuardedResult {
  const c10::intrusive_ptr<Value>& value;
  const at::Tensor& tensor;  // shows the value
  bool written;              // an argument
  const Verdict& verdict;    // the policy's verdict on this result
};

// One run of an operator in a region. The core calls the methods in this order on the region's
// thread, under the graph's lock unless the comment says otherwise. If the kernel throws, the core
// only destroys the object.
class GuardedRun {
 public:
  virtual ~GuardedRun() = default;

  // The kernel has returned `results`, which are not recorded yet. May throw. Without the lock.
  virtual void hasRun(const c10::IValue* results) {}
  // Returns why the call cannot be replayed after all; null if it can. May turn the values of
  // arguments into leaves.
  virtual const char* whyToGiveUp(ValueMap& values) { return nullptr; }
  // May warn, and releases the arguments. Without the lock.
  virtual void warn() {}
  // The core has decided on a result.
  virtual void made(const GuardedResult& result) {}
};

// The fingerprint of a result of the forward. A guard attaches it to values on the CPU, and
// compares it in CallGuard::check().
struct ResultFingerprint final : Extra {
  explicit ResultFingerprint(uint64_t of) : fingerprint(of) {}

  static const SlotNumber kSlot;
  const uint64_t fingerprint;
};

// The bytes that a replay gives to a value.
struct ReplayedResult {
  const Graph& graph;
  const Recipe& recipe;
  const Output& output;
  const Value& value;
  const c10::Storage& storage;
  const at::Tensor* tensor;  // shows the result; null for an argument that the op has written
};

// Says which calls of one kind of operator ebb may replay, and checks the replays. Any thread may
// call the methods. Without a guard, ebb keeps the results of such operators, and does not notice
// writes that their schemas omit.
class CallGuard {
 public:
  // Returns why the call is not replayed; null if it may be. The core gives a recipe only to
  // results that Context::trusts, whatever the guard says. Under the graph's lock.
  virtual const char* whyNotReplayed(const GuardedCall& call) = 0;
  // The call is about to run, and has a recipe or an obstacle. Returns null if the guard need
  // not follow this run. Under the graph's lock.
  virtual std::unique_ptr<GuardedRun> begins(const GuardedCall& call) = 0;

  // An op with a recipe reads `value`, which a collective of the region has made, through `tensor`.
  // Under the graph's lock.
  virtual void isRead(Value& value, const at::Tensor& tensor) {}

  // The kernel of a replay has returned the results in `stack`. May throw.
  virtual void hasReplayed(const Recipe& recipe, const std::vector<c10::IValue>& stack) {}
  // True if a replay gives new bytes to each value with a recipe, even if the value's old bytes are
  // still in memory. The core then calls check() for all results of the replay.
  virtual bool repeatsAll() const { return false; }
  // Throws if a replay has given other bytes than the forward. Comes before the value gets the
  // bytes. Not called if an observer compares all bits (GraphRules::compareAll).
  virtual void check(const ReplayedResult& result) = 0;

 protected:
  ~CallGuard() = default;
};

// The kinds of operators that need a guard.
enum class Guarded : uint8_t { CustomOperators, Collectives };

// Registers the guard of a kind, before ebb first sees an operator of that kind: the operator's
// traits look the guard up once. Returns true, so that a plug-in can call it when the library is
// loaded.
EBB_API bool registerGuard(Guarded kind, CallGuard& guard);

// Null if the plug-in is not built.
CallGuard* guardOf(Guarded kind);

}  // namespace ebb
