// The generator state that an op drew from, and putting it back for a replay.
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
#include <vector>

#include "ebb/export.h"
#include "intercept/op_traits.h"

namespace ebb {

// Note [Random state]
// A recipe of an op that draws holds the generator's state before the draw (CPU: the engine's
// state; CUDA: philox seed and offset). If the op takes a Generator argument the replay passes a
// private clone in that state and touches nothing else. The others draw from the device's default
// generator, which is set for the replay and put back. Two threads in regions must not draw in
// between, so all such runs, first or replayed, hold one process-wide lock. It is never waited for
// by a thread that holds a graph's lock and records: replays take it with that lock held.
// CUDA's generator is not set, where it can be lent another state: setting it makes cuDNN's
// recurrent layers begin their masks anew, and an eager program would not have done so.
//
// Note [Random numbers in a capture]
// While a graph is captured CUDA's generator counts from the capture's own beginning, and cannot be
// cloned or lent a state. It can be set, so that is done for ops with a Generator argument too; a
// user's own generator has been registered with the graph, or the forward had raised. A state of
// one capture says nothing in another, nor outside: when graphs run each begins where the generator
// is then. So a replay is refused unless it is captured with its forward, or neither is.
//
// Note [Threads that draw outside of regions]
// They know nothing of that lock, and may draw between our look at the state and the kernel's draw.
// On the CPU an op with a Generator argument therefore draws from a private clone in the forward
// too, whose state is then put into the default generator. For the others the recipe has a digest
// of the state after the draw and, on the CPU, a fingerprint of the result: a replay that ends in
// another state or gives another result is an error.
//
// Note [Which generator an op drew from]
// A kernel draws from the generator that it is given, or from its device's default one. But where a
// device has no kernel for an op (backends out of tree, and some in it) the CPU's runs, and draws
// from the CPU's; some devices have no generator at all. So on devices other than the CPU and CUDA
// both are watched, and the one that moved was drawn from. If both moved, the op may have drawn
// from both; if none did, a backend out of tree may have one that it does not show. Then it is not
// known what another run would draw, and the op's results are kept.
struct RandomState {
  at::Generator generator;       // drawn from in the forward
  std::vector<uint32_t> packed;  // its state before the draw; see packState
  uint64_t digestAfter = 0;      // of its state after the draw
  uint64_t fingerprint = 0;      // of the op's first result, if it drew from a shared generator
  uint64_t capture = 0;          // in which it drew; see captureOf

  // See Note [Random numbers in a capture]
  EBB_API bool canBeSetNow() const;
};

// Whether an op may draw from a generator when it is called like this.
bool mayDrawWith(const OpTraits& op, const c10::IValue* arguments);
inline bool mayDraw(const OpTraits& op, const c10::IValue* arguments) {
  return (op.random || op.untrusted) && mayDrawWith(op, arguments);
}

// Takes the state before an op runs that may draw, and decides afterwards whether it was needed.
class EBB_API RandomScope {
 public:
  // `arguments` points to the op's arguments, of which the generator may be replaced; `recorded`:
  // the op gets a recipe, so the state is wanted.
  RandomScope(const OpTraits& op, c10::DispatchKeySet keys, c10::IValue* arguments, bool recorded);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

  // After the op ran: the state to put in its recipe, null if it drew nothing.
  std::unique_ptr<RandomState> finish();

  // After the op has thrown: whether it can be run again, to draw what it would have drawn; and
  // sees to it that it does.
  bool canBeginAgain() const;
  void beginAgain();

  // Then: whether it is not known what the op drew from.
  bool drewFromUnknown() const {
    return unknown_;
  }

 private:
  void findWhatMoved();
  void drawFromClone(c10::IValue& argument);
  void putCloneBack();

  std::unique_ptr<RandomState> state_;  // null if the op cannot draw
  at::Tensor before_;     // the generator's state before the op; undefined: the device has none
  at::Tensor cpuBefore_;  // the CPU's, if the op may draw from that instead
  at::Generator clone_;   // drawn from instead; usually undefined
  std::optional<at::mt19937_data_pod> engineBefore_;  // of the original, if there is a clone
  bool confirm_ = false;               // the op is not tagged: compare the state afterwards
  bool unknown_ = false;               // see Note [Which generator an op drew from]
  std::unique_lock<std::mutex> lock_;  // see Note [Random state]
};

// For the life of the object, an op run with `stack`'s top as its arguments draws what it drew in
// the forward, where RandomState::canBeSetNow().
class EBB_API RandomReplay {
 public:
  RandomReplay(const OpTraits& op, const RandomState* state, torch::jit::Stack& stack);
  ~RandomReplay();
  RandomReplay(const RandomReplay&) = delete;
  RandomReplay& operator=(const RandomReplay&) = delete;

  // After the op ran: whether it drew what it drew in the forward.
  bool drewTheSame() const;

  // Then: gives the shared generator back its state. May throw, as all that is asked of a device;
  // where it was not called the destructor does that, and does not.
  void putBack();

 private:
  bool lend();

  const RandomState* state_;           // null if the op draws nothing
  at::Generator clone_;                // drawn from, if the op takes a generator
  at::Generator generator_;            // a shared generator to put back, if one was set
  at::Tensor outer_;                   // its state outside the replay
  at::Generator lender_;               // ... which it gets back instead, if it was lent another
  std::unique_lock<std::mutex> lock_;  // see Note [Random state]
};

}  // namespace ebb
