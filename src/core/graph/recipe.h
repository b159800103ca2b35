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
  ReaderOf value;  // null: undefined, a stand-in or a number
  GeometryFlags flags;
  ArgUse use : 7 = ArgUse::Read;
  bool wholeOverwrite : 1 = false;  // the old contents do not matter
  uint16_t argument = 0;            // index on the stack
  int32_t element = -1;             // index in a list argument; -1: not a list
  int32_t sameAs = -1;  // an earlier input with the same tensor object: kernels check identity

  // See Note [Numbers]
  static bool isNumber(const GeometryFlags& flags, ArgUse use) {
    return flags.wrappedNumber && flags.device.is_cpu() && use == ArgUse::Read;
  }
  bool isNumber() const { return isNumber(flags, use); }

  // True if the contents do not matter: a replay passes other memory.
  static bool isStandIn(ArgUse use) { return use == ArgUse::Scratch || use == ArgUse::Unread; }
  bool isStandIn() const { return isStandIn(use); }

  // True if a replay passes this input with its storage offset. False for a number and an unread
  // input: the replay makes a new tensor, whose offset is 0.
  static bool showsStorage(const GeometryFlags& flags, ArgUse use) {
    return use != ArgUse::Unread && !isNumber(flags, use);
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
  bool written = false;  // true: an argument that the op wrote; false: a result
  uint16_t slot = 0;     // index of the argument or of the result
  int32_t element = -1;  // index in a list; -1: not a list
};

// The inputs that the op's kernel had besides its arguments: see Note [What a kernel sees besides
// its arguments].
struct KernelInputs {
  c10::DispatchKeySet keys;             // the dispatch keys of the kernels that ran
  const KernelState* state = nullptr;   // the settings; the graph owns them
  std::unique_ptr<RandomState> random;  // null if the op draws nothing
  uint32_t precision = 0;               // productPrecision()
  bool gradMode = false;                // some kernels depend on the mode, such as mkldnn_rnn_layer
};

// How to recompute the results of one call of an op.
struct Recipe final : c10::intrusive_ptr_target {
  // Note [A recipe is one block]
  // A recipe, its inputs, its other arguments and the shapes of its inputs follow each other in one
  // allocation. See Input::shapeCount.
  static c10::intrusive_ptr<Recipe> make(
      const OpTraits& op, uint32_t inputCount, uint32_t shapeCount);
  ~Recipe() override;

  std::span<Input> inputs() const {
    return {reinterpret_cast<Input*>(const_cast<Recipe*>(this) + 1), inputCount_};
  }
  // See ArgumentTraits::others. Lists of tensors are stored empty.
  c10::IValue* others() const {
    return reinterpret_cast<c10::IValue*>(inputs().data() + inputCount_);
  }
  int64_t* shapes() const {
    return reinterpret_cast<int64_t*>(others() + op.arguments.others.size());
  }

  static constexpr int kNestedBits = 24;

  const OpTraits& op;
  uint64_t sequence : 40 = 0;  // order of recording; replays run in this order
  // Identifies the entry of the nested region; 0: the outermost region.
  uint64_t nested : kNestedBits = 0;
  c10::SmallVector<Output, 1> outputs;
  [[no_unique_address]] KernelInputs kernel;
  uint16_t region = 0;  // index in Graph::names
  uint32_t visit = 0;   // RecipeNumbers::visit of the last search that visited this recipe

  void operator delete(void* block);

 private:
  struct Extra {};
  static void* operator new(size_t size, size_t extra, Extra);
  static void operator delete(void* block, size_t extra, Extra);
  Recipe(const OpTraits& traits, uint32_t inputCount);

  const uint32_t inputCount_;
};

// "aten::mm.default in region 'block'", for messages.
std::string where(const Graph& graph, const Recipe& recipe);

// The message of an error: the replay has computed other bits for `output` than the forward.
// `cause` is a sentence with a cause that only some operators have, or empty.
std::string otherBits(
    const Graph& graph, const Recipe& recipe, const Output& output, const char* cause);

}  // namespace ebb
