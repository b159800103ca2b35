// What a kernel sees besides its arguments, so that a replay shows it the same.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <forward_list>
#include <optional>
#include <utility>
#include <vector>

#include "intercept/op_traits.h"
#include "memory/stillness.h"

namespace ebb {

// Settings of the process or thread that change which kernel runs, or its last bits.
struct NumericSettings {
  c10::ScalarType defaultDtype;  // factories and integer-to-float promotion
  int threads;                   // intra-op threads: they split reductions
  bool mkldnn;                   // oneDNN kernels are allowed
  bool mkldnnDeterministic;      // ... and made repeatable
  bool nnpack;                   // NNPACK kernels are allowed
  bool cudnn;                    // cuDNN kernels are allowed
  bool cudnnBenchmark;           // ... and chosen by timing
  bool cudnnDeterministic;       // ... and chosen for repeatability
  bool deterministic;            // torch.use_deterministic_algorithms
  bool deterministicWarnOnly;    // ... which then only warns
  bool flushDenormals;           // of this thread's floating-point unit
  bool operator==(const NumericSettings&) const = default;

  static NumericSettings current();
  // Makes these the current ones; touches only what differs from `from`.
  void apply(const NumericSettings& from) const;

  // The same, but for what each thread has for itself.
  bool equalsForProcess(const NumericSettings& other) const;
};

using AutocastDtypes = std::vector<std::pair<c10::DeviceType, c10::ScalarType>>;

// Note [What a kernel sees besides its arguments]
// 1. Numeric settings: a user may change them between forward and backward, or inside the region.
// 2. Autocast: ops that it knows run with it excluded. Kernels of the others still see it, and the
//    ops that they call are cast; replayed outside autocast they would give another precision.
// 3. Grad mode and, for some ops, requires_grad: see Recipe::gradMode.
// 4. Precision (TF32, sums in half precision, the preferred BLAS): read by products only; see
//    productPrecision.
struct KernelState {
  NumericSettings settings;
  c10::DispatchKeySet autocast;   // autocast keys that were not excluded
  AutocastDtypes autocastDtypes;  // per enabled device type; empty if `autocast` is

  static KernelState now();  // on this thread
  bool isCurrent() const;    // whether it equals now()
};

// The states in which a graph's recipes were recorded. There are few, so recipes point to them.
class KernelStates {
 public:
  // The state on this thread; the reference stays valid.
  const KernelState& current();

 private:
  std::forward_list<KernelState> all_;  // no two are equal
  const KernelState* last_ = nullptr;   // nearly always the current one
};

// The precision in which a kernel of `keys` makes products, as one number. A replay under another
// one is refused, since torch's two interfaces for it cannot be mixed.
uint32_t productPrecision(PrecisionRead read, c10::DispatchKeySet keys);

// Runs kernels as the forward did: below autograd, dispatch modes, functorch and interception, and
// with the recorded state rather than the one of the thread that runs backward.
class KernelStateGuard {
 public:
  // What the process has, other threads see too: see Note [Nothing moves under a replay ahead].
  // OfThread: the caller has made sure that this is as recorded.
  enum class Changes : uint8_t { OfProcess, OfThread };
  explicit KernelStateGuard(const KernelState& state, Changes changes = Changes::OfProcess);
  ~KernelStateGuard();
  KernelStateGuard(const KernelStateGuard&) = delete;
  KernelStateGuard& operator=(const KernelStateGuard&) = delete;

 private:
  c10::impl::PODLocalDispatchKeySet saved_;  // the thread's own dispatch key sets
  const KernelState& state_;                 // what was asked for
  NumericSettings outer_;                    // what was before
  std::optional<Commotion> commotion_;       // while the process's settings are others
  AutocastDtypes outerDtypes_;               // ... what was before, of devices that `state_` names
};

}  // namespace ebb
