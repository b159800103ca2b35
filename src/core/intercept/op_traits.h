// The facts that the recorder needs about an operator. The schema, the tags and the tables in
// op_tables.h are read once, and the facts are cached for the life of the process.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "ebb/export.h"

namespace ebb {

class CallGuard;
struct NotRepeatable;

// How an op uses an argument.
enum class ArgUse : uint8_t {
  Read,       // an ordinary input
  Write,      // written in part, or the old contents matter
  Overwrite,  // written whole if the tensor covers the storage; old contents do not matter
  Scratch,    // written as a side effect on which no result depends (running statistics)
  Unread,     // only shape, dtype and device matter
};

inline bool isWritten(ArgUse use) { return use != ArgUse::Read && use != ArgUse::Unread; }

// How an argument holds tensors. ebb scans lists of lists (TensorLists), but does not replay
// operators that take them.
enum class ArgType : uint8_t { Other, Tensor, TensorList, TensorLists };

// How ebb treats an op's calls.
enum class OpKind : uint8_t {
  PassThrough,  // views, and ops that neither return nor write tensors: nothing to record
  InplaceView,  // changes a tensor's metadata (t_, resize_, set_), not the bytes of a storage
  Recorded,     // everything else
};

// The settings of precision (TF32 and the like) that a kernel reads.
enum class PrecisionRead : uint8_t {
  None,
  Solvers,   // the preferred library for linear algebra
  Products,  // settings for matrix products
  All,       // also settings for convolutions and recurrent kernels
};

// The facts about an operator's arguments. Each list has an entry for each argument on the stack.
struct ArgumentTraits {
  c10::SmallVector<ArgType, 12> types;
  c10::SmallVector<ArgUse, 12> uses;
  c10::SmallVector<bool, 12> counted;    // see Note [Which writes are counted]
  c10::SmallVector<uint16_t, 8> others;  // indices of arguments that are not single tensors
  bool writes = false;                   // the op writes to an argument
  bool readsOnlyShapes = false;          // reads no contents, as zeros_like
  bool conditionIsFlag = false;          // argument `condition` is a bool, not a number
  int16_t condition = -1;  // argument; `uses` applies if the bool is true or the number is 0
  c10::SmallVector<ArgUse, 12> otherwise;  // the uses if the condition does not hold

  ArgUse useOf(size_t argument, bool holds) const {
    const ArgUse use = uses[argument];
    return holds || use == ArgUse::Read ? use : otherwise[argument];
  }
};

// The facts that limit replays of an operator.
struct ReplayLimits {
  bool custom = false;         // from outside torch: see Note [Custom operators]
  bool neverReplayed = false;  // collectives and the like; see Note [Never replayed]
  bool asynchronous = false;   // may write after its return: see Note [Communication]
  bool uninitialised = false;  // empty*: see Note [Uninitialised memory is not a recipe]
  bool constantFill = false;   // zeros, ones, full: no recipe if read before a visible write
};

// The random numbers that an operator draws.
struct RandomTraits {
  bool draws = false;              // from a generator: tagged nondeterministic_seeded
  int16_t generatorArgument = -1;  // index of the argument of type Generator?
  int16_t dropoutArgument = -1;    // index of dropout_p: at 0 the op draws nothing
};

// The state besides its arguments that an operator's kernel depends on.
struct KernelTraits {
  PrecisionRead precision = PrecisionRead::None;  // see productPrecision
  bool isConvolution = false;                     // see conditions/repeatable.h
  bool readsRequiresGrad = false;  // kernel choice depends on requires_grad and grad mode
  const NotRepeatable* notRepeatable = nullptr;  // null: its bits repeat
};

// The facts about an operator that change while the process runs.
struct OpState {
  std::atomic<bool> demoted{false};     // verify mode found that the results must be saved
  std::atomic<bool> registered{true};   // false once the defining library is gone
  std::atomic<bool> movesFirst{false};  // see Note [Versions that move first]
};

// All facts about one operator; read-only after the first call, except for `state`. The members
// that each call reads come first: a call's traits are seldom in the L1 cache.
struct OpTraits {
  explicit OpTraits(c10::OperatorHandle handle) : op(std::move(handle)) {}

  c10::OperatorHandle op;  // valid while `state.registered`
  uint32_t index = 0;      // dense; compiled policies are tables over it
  OpKind kind = OpKind::Recorded;
  ReplayLimits limits;
  CallGuard* guard = nullptr;  // null: the op needs none, or the plug-in is not built
  KernelTraits kernel;
  RandomTraits random;
  mutable OpState state;
  ArgumentTraits arguments;
  c10::SmallVector<ArgType, 4> results;  // one per result
  std::string name;                      // "aten::mm.default", as in rules and messages
};

// The traits of `op`; the reference stays valid forever.
EBB_API const OpTraits& opTraits(const c10::OperatorHandle& op);

// True for operators that are not intercepted: views, and ops that neither return nor write
// tensors.
bool passesThrough(const c10::OperatorHandle& op);

// True if an operator of this name is torch's. See Note [Custom operators].
bool isTorchsOwn(std::string_view name);

// Called when an operator is removed: forgets the address of its handle, because a new operator may
// get the same address.
void forgetOpTraits(const c10::OperatorHandle& op);

// "aten::mm.default": includes the overload, as in Python.
std::string qualifiedName(const c10::OperatorName& name);

// Calls f(tensor, index, element) for every tensor of the values, including undefined tensors in
// lists. `element` is the index in a list, or through all lists of a list; -1: not in a list.
template <class Types, class F>
void forEachTensor(const c10::IValue* values, const Types& types, F&& f) {
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == ArgType::Tensor) {
      if (values[i].isTensor()) {
        f(values[i].toTensor(), i, -1);
      }
    } else if (types[i] == ArgType::TensorList && values[i].isList()) {
      const auto list = values[i].toListRef();
      for (size_t e = 0; e < list.size(); ++e) {
        static const at::Tensor undefined;
        f(list[e].isTensor() ? list[e].toTensor() : undefined, i, static_cast<int32_t>(e));
      }
    } else if (types[i] == ArgType::TensorLists && values[i].isList()) {
      int32_t element = 0;
      for (const c10::IValue& list : values[i].toListRef()) {
        for (const c10::IValue& tensor : list.toListRef()) {
          f(tensor.toTensor(), i, element++);
        }
      }
    }
  }
}

// Calls f(tensor) for every tensor that a call with these arguments may write.
template <class F>
void forEachWritten(const ArgumentTraits& traits, const c10::IValue* arguments, F&& f) {
  forEachTensor(arguments, traits.types, [&](const at::Tensor& tensor, size_t i, int32_t) {
    if (tensor.defined() && isWritten(traits.uses[i])) {
      f(tensor);
    }
  });
}

}  // namespace ebb
