// What the recorder must know about an operator, read once from its schema, its tags and the tables
// in op_tables.h, and cached for the life of the process.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "ebb/export.h"

namespace ebb {

// How an op uses one of its arguments.
enum class ArgUse : uint8_t {
  Read,       // a plain input
  Write,      // written in part, or its old contents matter
  Overwrite,  // written whole if the tensor covers its storage; old contents do not matter
  Scratch,    // written as a side effect on which no result depends (running statistics)
  Unread,     // only its shape, dtype and device matter
};

// Which arguments hold tensors. Lists of lists are only scanned, never passed again.
enum class ArgType : uint8_t { Other, Tensor, TensorList, TensorLists };

// How a call of the op is treated.
enum class OpKind : uint8_t {
  PassThrough,  // views, and ops that neither return nor write tensors: nothing to record
  InplaceView,  // changes a tensor's metadata (t_, resize_, set_), not a storage's bytes
  Recorded,     // everything else
};

// Which settings of precision (TF32 and the like) a kernel reads.
enum class PrecisionRead : uint8_t {
  None,
  Products,  // of matrices
  All,       // and of convolutions and recurrent kernels
};

// What an op does with the rows of its arguments: see Note [Rows] in graph/rows.h.
enum class RowRule : uint8_t {
  Unknown,       // may mix them
  EachRow,       // element by element, with broadcasting
  OneArgument,   // row i of the result is made of row i of one argument and all of the others
  Groups,        // row i is made of row i of the first, if the second is a stack of matrices
  Batches,       // products of batches of matrices
  TrailingDims,  // normalises over as many last dimensions as a list has sizes
  AlongDims,     // works along dimensions that are given
  ShapeOnly,     // reads nothing but the argument's shape
};

// All that is known of one operator: its members are many, and read-only from the first call on.
struct OpTraits {
  explicit OpTraits(c10::OperatorHandle handle) : op(std::move(handle)) {
  }

  // What each call reads comes first: a call's traits are seldom in the nearest cache.
  c10::OperatorHandle op;      // valid while `registered`
  uint32_t index = 0;          // dense; compiled policies are tables over it
  uint16_t argumentCount = 0;  // arguments on the stack
  uint16_t returnCount = 0;    // results on the stack
  OpKind kind = OpKind::Recorded;
  mutable std::atomic<bool> demoted{false};  // verify mode found that it must be saved
  bool random = false;         // draws from a generator: tagged nondeterministic_seeded
  bool untrusted = false;      // see Note [Operators from elsewhere]
  bool neverReplayed = false;  // collectives and the like; see Note [Never replayed]
  bool communicates = false;   // see Note [Communication]
  bool writes = false;         // to an argument
  bool uninitialised = false;  // empty*: see Note [Uninitialised memory is not a recipe]
  bool constantFill = false;   // zeros, ones, full: no recipe either, if read before a seen write
  PrecisionRead precision = PrecisionRead::None;  // see productPrecision in kernel/kernel_state.h
  bool isConvolution = false;                     // see kernel/convolutions.h
  bool readsRequiresGrad = false;  // kernel choice depends on requires_grad and grad mode
  int16_t generatorArgument = -1;  // index of a Generator? argument
  int16_t dropoutArgument = -1;    // index of dropout_p: at 0 the op draws nothing
  int16_t conditionArgument = -1;  // `uses` hold if this bool is true, or this number is 0
  bool conditionIsFlag = false;    // it is declared as a bool
  RowRule rows = RowRule::Unknown;
  int16_t rowArgument = -1;  // with rows (OneArgument), or the sizes or dimensions of `rows`
  c10::SmallVector<ArgType, 12> types;   // one per argument
  c10::SmallVector<ArgUse, 12> uses;     // one per argument
  c10::SmallVector<bool, 12> counted;    // one per argument; see Note [Which writes are counted]
  c10::SmallVector<uint16_t, 8> others;  // arguments that are no single tensors
  c10::SmallVector<ArgType, 4> results;  // one per result
  std::string name;                      // "aten::mm.default", as rules and messages spell it
  std::atomic<bool> registered{true};    // false once the library that defined it is gone
  mutable std::atomic<bool> writesUnsaid{false};  // somebody was told; see Note [Unsaid writes]
  mutable std::atomic<bool> movesFirst{false};    // see Note [Versions that move first]
  mutable std::atomic<bool> toldPinned{false};    // the log was; see Pinned

  // Some uses hold on a condition: see conditionArgument.
  ArgUse useOf(size_t argument, bool condition) const {
    const ArgUse use = uses[argument];
    return condition || use == ArgUse::Read ? use : otherwise[argument];
  }
  c10::SmallVector<ArgUse, 12> otherwise;  // `uses` where the condition does not hold
};

// The traits of `op`; the reference is valid for ever.
EBB_API const OpTraits& opTraits(const c10::OperatorHandle& op);

// Whether calls of `op` need not be seen: views, and ops that neither return nor write tensors.
bool passesThrough(const c10::OperatorHandle& op);

// Whether an operator of this name is one of torch's. See Note [Operators from elsewhere].
bool isTorchsOwn(std::string_view name);

// Told by the registration listener: the address may be given to another operator.
void forgetOpTraits(const c10::OperatorHandle& op);

// "aten::mm.default": the overload is spelt out, as in Python.
std::string qualifiedName(const c10::OperatorName& name);

}  // namespace ebb
