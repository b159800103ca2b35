// The generator state that an op drew from, and the restoration of that state for a replay.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/TensorBody.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "ebb/export.h"
#include "intercept/op_traits.h"
#include "support/python_mutex.h"

namespace ebb {

// Note [Random state]
// The recipe of an op that draws holds the generator's state before the draw (CPU: the engine's
// state; CUDA: philox seed and offset). If the op takes a Generator argument, the replay passes a
// private clone in that state and touches nothing else. Other ops draw from the device's default
// generator, which is set for the replay and put back. Meanwhile no other thread in a region may
// draw, so all such runs, in a forward or a replay, hold one process-wide lock, the lock of draws.
// A thread that records and holds a graph's lock must never wait for the lock of draws, since
// replays take the lock of draws with the graph's lock held. Where possible, ebb exchanges the
// state object of CUDA's generator, and does not set the state: after a set, cuDNN's recurrent
// layers begin their dropout masks anew, unlike in eager.
//
// Note [Random numbers in a capture]
// While a graph is captured, the offset of CUDA's generator counts from the beginning of the
// capture, and its state object can be neither cloned nor exchanged. ebb sets the state instead,
// also for ops with a Generator argument. A user's own generator must be registered with the graph,
// or the forward raises. A state of one capture is meaningless in another capture or outside: when
// a graph is launched, the draws begin at the generator's state at that time. So a replay raises
// unless it is captured with its forward, or neither is captured.
//
// Note [Threads that draw outside of regions]
// Threads outside of regions do not take the lock of draws, and may draw after ebb has read the
// state and before the kernel draws. On the CPU, an op with a Generator argument therefore draws
// from a private clone in the forward too, and the clone's state is then put into the default
// generator. For other ops, the recipe has a digest of the state after the draw and, on the CPU, a
// fingerprint of the result. A replay that ends in another state or gives another result raises.
//
// Note [Which generator an op drew from]
// A kernel draws from the generator that it is given, or from the default generator of its device.
// But if a device has no kernel for an op (as some backends, out of tree and in torch), the CPU
// kernel runs and draws from the CPU generator; some devices have no generator at all. So on
// devices other than the CPU and CUDA ebb compares both generators before and after. The op drew
// from the one whose state has changed. If both changed, the op may have drawn from both. If
// neither changed, an out-of-tree backend may have a hidden generator. In these two cases the draw
// of a replay is unknown, and the op's results are kept.
struct RandomState {
  at::Generator generator;   // the op drew from this generator in the forward
  at::Generator cpuBefore;   // on the CPU: has the state before the draw, in half the memory
  at::Tensor stateBefore;    // on other devices: the state before the draw
  uint64_t digestAfter = 0;  // digest of the state after the draw
  uint64_t fingerprint = 0;  // of the op's first result, if the generator was shared
  uint64_t capture = 0;      // the capture of the draw; see captureOf

  // Keeps `state`, which the generator had before the draw.
  void keep(const at::Tensor& state);
  // The kept state.
  at::Tensor before() const;

  // See Note [Random numbers in a capture]
  EBB_API bool canBeSetNow() const;
};

// True if an op may draw from a generator when called with these arguments.
bool mayDrawWith(const OpTraits& op, const c10::IValue* arguments);
inline bool mayDraw(const OpTraits& op, const c10::IValue* arguments) {
  const bool isUnknown = op.limits.custom && !op.limits.asynchronous;
  return (op.random.draws || isUnknown) && mayDrawWith(op, arguments);
}

// Takes the generator's state before an op that may draw, and decides after the op if a recipe
// needs the state.
class EBB_API RandomScope {
 public:
  // `arguments` points to the op's arguments; the generator among them may be replaced. `recorded`:
  // the op gets a recipe, so the state is needed.
  RandomScope(const OpTraits& op, c10::DispatchKeySet keys, c10::IValue* arguments, bool recorded);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

  // Called after the op: the state for the recipe; null if the op drew nothing, or if
  // drewFromUnknown() is true.
  std::unique_ptr<RandomState> finish();

  // Called after finish(): true if ebb cannot tell which generator the op drew from.
  bool drewFromUnknown() const { return unknown_; }

 private:
  void findWhatMoved();
  void letOpDrawFromClone(c10::IValue& argument);
  void putCloneBack();

  std::unique_ptr<RandomState> state_;  // null if the op gets no recipe
  at::Tensor before_;     // the generator's state before the op; undefined: no generator
  at::Tensor cpuBefore_;  // the CPU generator's, if the op may draw from it
  at::Generator clone_;   // the op draws from it in place of the original; undefined: not used
  std::optional<at::mt19937_data_pod> engineBefore_;  // of the original; set if a clone is used
  bool confirm_ = false;                // the op is not tagged as random: compare states
  bool unknown_ = false;                // see Note [Which generator an op drew from]
  std::unique_lock<PythonMutex> lock_;  // see Note [Random state]
};

// While the object lives, an op whose arguments are on top of `stack` draws the same numbers as in
// the forward. Requires RandomState::canBeSetNow().
class EBB_API RandomReplay {
 public:
  RandomReplay(const OpTraits& op, const RandomState* state, torch::jit::Stack& stack);
  ~RandomReplay();
  RandomReplay(const RandomReplay&) = delete;
  RandomReplay& operator=(const RandomReplay&) = delete;

  // Called after the op: true if the op drew the same numbers as in the forward.
  bool drewTheSame() const;

  // Called after drewTheSame(): restores the shared generator. May throw, like every call to a
  // device. Without this call the destructor restores the generator, and does not throw.
  void putBack();

 private:
  bool lend();

  const RandomState* state_;            // null if the op draws nothing
  at::Generator clone_;                 // the op draws from it, if the op takes a generator
  at::Generator generator_;             // the shared generator to restore, if any
  at::Tensor outer_;                    // the state to restore, if the generator was set
  at::Generator lender_;                // the generator's own state, if the replay exchanged it
  std::unique_lock<PythonMutex> lock_;  // see Note [Random state]
};

}  // namespace ebb
