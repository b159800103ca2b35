// The state that a kernel sees besides its arguments, restored for a replay.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <forward_list>
#include <optional>
#include <utility>
#include <vector>

#include "hooks/process_state.h"
#include "intercept/op_traits.h"

namespace ebb {

// Settings of the process or thread that decide which kernel runs, or change the last bits.
struct NumericSettings {
  c10::ScalarType defaultDtype;  // factories and integer-to-float promotion
  int threads;                   // intra-op threads: they split reductions
  bool mkldnn;                   // oneDNN kernels are allowed
  bool mkldnnDeterministic;      // oneDNN kernels must be repeatable
  bool nnpack;                   // NNPACK kernels are allowed
  bool cudnn;                    // cuDNN kernels are allowed
  bool cudnnBenchmark;           // cuDNN kernels are chosen by timing
  bool cudnnDeterministic;       // cuDNN kernels are chosen for repeatability
  bool deterministic;            // torch.use_deterministic_algorithms
  bool deterministicWarnOnly;    // the setting above only warns
  bool flushDenormals;           // of this thread's floating-point unit
  bool operator==(const NumericSettings&) const = default;

  static NumericSettings current();
  // Applies these settings where they differ from the current settings, `from`.
  void apply(const NumericSettings& from) const;

  // Compares all settings except those of the thread: denormals, and with OpenMP intra-op threads.
  bool equalsForProcess(const NumericSettings& other) const;
};

using AutocastDtypes = std::vector<std::pair<c10::DeviceType, c10::ScalarType>>;

// Note [What a kernel sees besides its arguments]
// 1. Numeric settings: a user may change them between forward and backward, or inside the region.
//    With OpenMP, the number of intra-op threads is a setting of the thread. A thread starts with
//    the number that the program set last, so ebb must not set it through torch.
// 2. Autocast: ops that autocast knows run with autocast excluded. Kernels of other ops still see
//    autocast, and the ops that they call are cast. A replay outside autocast would have another
//    precision.
// 3. Grad mode and, for some ops, requires_grad: see Recipe::gradMode.
// 4. Precision (TF32, sums in half precision, preferred libraries, the SMs that a product may use):
//    read by matrix products, solvers, convolutions and recurrent kernels only; see
//    productPrecision.
struct KernelState {
  NumericSettings settings;
  c10::DispatchKeySet autocast;   // autocast keys that were not excluded
  AutocastDtypes autocastDtypes;  // per enabled device type; empty if `autocast` is empty

  static KernelState now();  // on this thread
  bool isCurrent() const;    // equals now()
};

// The states in which a graph's recipes were recorded. There are few, so recipes point to them.
class KernelStates {
 public:
  // The state on this thread; the reference stays valid.
  const KernelState& current();

 private:
  std::forward_list<KernelState> all_;  // no two are equal
  const KernelState* last_ = nullptr;   // usually the current state
};

// The precision settings of `read` that matter to the kernel that `keys` select, as one number. A
// replay under other settings raises, because ebb cannot restore these settings: torch has an old
// and a new interface for them, and raises if a program uses both.
uint32_t productPrecision(PrecisionRead read, c10::DispatchKeySet keys);

// While the guard lives, kernels run as in the forward: below autograd, dispatch modes, functorch
// and interception, with the recorded state in place of the state of backward's thread.
class KernelStateGuard {
 public:
  // OfProcess: the settings of the process, visible to other threads, may change too. See Note
  // [Changes of the process's state]. OfThread: the caller has checked that the process has the
  // recorded settings.
  enum class Changes : uint8_t { OfProcess, OfThread };
  explicit KernelStateGuard(const KernelState& state, Changes changes = Changes::OfProcess);
  ~KernelStateGuard();
  KernelStateGuard(const KernelStateGuard&) = delete;
  KernelStateGuard& operator=(const KernelStateGuard&) = delete;

 private:
  c10::impl::PODLocalDispatchKeySet saved_;   // the thread's own dispatch key sets
  const KernelState& state_;                  // the recorded state
  NumericSettings outer_;                     // the settings to restore
  std::optional<ProcessStateChange> change_;  // for OfProcess, if the settings differ
  AutocastDtypes outerDtypes_;  // the autocast dtypes to restore, for the devices in `state_`
};

}  // namespace ebb
