// A recipe: how to recompute the results of one op.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "graph/geometry.h"
#include "graph/value.h"
#include "intercept/op_traits.h"

namespace ebb {

struct Graph;
struct RandomState;
struct KernelState;

// Note [Numbers]
// `x + 1e-6` reaches ebb as an op on two tensors: torch made a tensor of the number for this call.
// A recipe stores the number itself. A leaf would hold memory until backward.

// One tensor argument: a value and the geometry in which the op saw it. An undefined tensor in a
// list has an input without a value, so that lists keep their exact length.
struct Input {
  c10::intrusive_ptr<Value> value;  // null: undefined, a stand-in or a number
  GeometryFlags flags;
  ArgUse use : 7 = ArgUse::Read;
  bool wholeOverwrite : 1 = false;  // the old contents do not matter
  uint16_t argument = 0;            // index on the stack
  int32_t element = -1;             // index in a list argument; -1: not a list
  int32_t sameAs = -1;  // an earlier input with the same tensor object: kernels check identity
  int64_t offset = 0;   // storage offset, in elements

  // See Note [Numbers]
  static bool isNumber(const GeometryFlags& flags, ArgUse use) {
    return flags.wrappedNumber && flags.device.is_cpu() && use == ArgUse::Read;
  }
  bool isNumber() const {
    return isNumber(flags, use);
  }

  // True if the contents do not matter: a replay passes other memory.
  static bool isStandIn(ArgUse use) {
    return use == ArgUse::Scratch || use == ArgUse::Unread;
  }
  bool isStandIn() const {
    return isStandIn(use);
  }

  // How many numbers of Recipe::shapes belong to this input: the output of writeShape, then the
  // size of a stand-in in bytes, or the number.
  static uint32_t shapeCount(const GeometryFlags& flags, ArgUse use) {
    const uint32_t more = isStandIn(use) ? 1 : isNumber(flags, use) ? kNumberWords : 0;
    return flags.shapeCount() + more;
  }
  static constexpr uint32_t kNumberWords = 2;  // a complex number of double precision
};

// One result of the op. The reference is weak: a recipe never keeps results alive.
struct Output {
  c10::weak_intrusive_ptr<Value> value{c10::intrusive_ptr<Value>()};
  bool written = false;  // the op wrote an argument; else a result
  uint16_t slot = 0;     // index of the argument or of the result
  int32_t element = -1;  // index in a list; -1: not a list
  // Fingerprint of the output in the forward, for a custom operator on the CPU; 0: unknown.
  uint64_t fingerprint = 0;
};

// The inputs that the op's kernel had besides its arguments: see docs/design/kernel.md.
struct KernelInputs {
  c10::DispatchKeySet keys;             // the kernels that the op was dispatched to
  const KernelState* state = nullptr;   // the settings; the graph owns them
  std::unique_ptr<RandomState> random;  // null if the op draws nothing
  uint32_t precision = 0;               // productPrecision()
  bool gradMode = false;                // some kernels depend on the mode, such as mkldnn_rnn_layer
  bool forced = false;                  // of a convolution: a rule allows any algorithm
};

// How to recompute the results of one call of an op.
struct Recipe final : c10::intrusive_ptr_target {
  // Note [A recipe is one block]
  // A recipe, its non-tensor arguments, its inputs and their shapes share one allocation. The
  // shapes of the inputs follow each other: see Input::shapeCount.
  static c10::intrusive_ptr<Recipe> make(
      const OpTraits& op, uint32_t inputCount, uint32_t shapeCount);
  ~Recipe() override;

  std::span<Input> inputs() const {
    return {inputs_, inputCount_};
  }

  const OpTraits& op;
  uint64_t sequence = 0;  // order of recording; replays run in this order
  uint32_t visit = 0;     // RecipeNumbers::visit of the last search that visited this recipe
  uint16_t region = 0;    // index in Graph::names
  KernelInputs kernel;
  c10::IValue* others;  // see ArgumentTraits::others; lists of tensors are stored empty
  int64_t* shapes;
  c10::SmallVector<Output, 1> outputs;

  void operator delete(void* block);

 private:
  struct Extra {};
  static void* operator new(size_t size, size_t extra, Extra);
  static void operator delete(void* block, size_t extra, Extra);
  Recipe(const OpTraits& traits, uint32_t inputCount);

  Input* inputs_;
  uint32_t inputCount_;
};

// "aten::mm.default in region 'block'", for messages.
std::string where(const Graph& graph, const Recipe& recipe);

}  // namespace ebb
