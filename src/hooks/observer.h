// The interfaces by which a plug-in follows what regions do. See docs/design/plugins.md.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "hooks/slots.h"

namespace ebb {

class Arguments;
class Geometry;
class Policy;
class ReplayLock;
class Stash;
class ValueMap;
enum class Retention : uint8_t;
struct Call;
struct Context;
struct Graph;
struct Output;
struct Recipe;
struct Value;

// Data of a plug-in for one open region. The core destroys the data when the thread leaves the
// region.
struct RegionNote {
  virtual ~RegionNote() = default;
};
using RegionNotes = std::vector<std::unique_ptr<RegionNote>>;

// A value that an op has made, or that a region has met.
struct Made {
  const Context& context;
  Value& value;
  const at::Tensor& tensor;    // shows the value
  const std::string& op;       // the op that made the value, or "from outside"
  const char* whyKept;         // why the value cannot be recomputed; null if it can, or need not be
  uint16_t rule = UINT16_MAX;  // the policy's deciding rule; see Verdict::rule
};

// A state that an op has made, before the core decides on it.
struct NewState {
  Value& value;
  const at::Tensor& tensor;  // shows the value
  const Value* before;       // the state that a write has replaced; null: the op made the storage
  bool whole;                // the op has written all of the storage
};

// An observer follows one graph, that is, an outermost region and its backward. The class of an
// observer derives from one or more of the four classes below, and overrides some of their
// methods. The core calls a method under the graph's lock, unless the method's comment says
// otherwise.
struct Observer {
  virtual ~Observer() = default;
};

// The core calls these methods for the ops of a region, on the region's thread.
struct OpEvents : virtual Observer {
  // An op is about to run, and has not overwritten its arguments yet. `replayable`: it has a
  // recipe.
  virtual void willRun(
      const Context& context, ValueMap& values, const Call& call, const Arguments& arguments,
      bool replayable) {}
  // The op's kernel has returned. Without the lock, as its results are not recorded yet.
  virtual void hasRun() {}
  // All results of the op are recorded. Not called if the op has thrown.
  virtual void recorded() {}

  // A value exists from now on.
  virtual void made(const Made& made) {}
  // `output`, shown by `tensor`, can be recomputed from `recipe`. Comes before made().
  virtual void canBeReplayed(const Recipe& recipe, const Output& output, const at::Tensor& tensor) {
  }
  // The policy has decided again, because the program has named the value.
  virtual void decidedAgain(const Context& context, Value& value) {}
  // The value's storage is about to be written (`seen`), or an unseen write to it has been found.
  virtual void stateEnds(Value& value, bool seen) {}
  // The value has got a copy of its bytes, because its storage is about to be written.
  virtual void copied(Value& value) {}
  // The handles on `before` show `after` from now on: see Note [Handles that follow].
  virtual void handedOn(Value& before, Value& after) {}
  // A store has taken the value's bytes: `nbytes` of the tensor `of`. `kind` names the store.
  virtual void sent(Value& value, const char* kind, const std::string& of, size_t nbytes) {}
  // A store has not taken the value's bytes.
  virtual void notSent(Value& value, const char* why) {}
  // The value's bytes stay in memory, although a store had taken them or should. `why`: null if
  // this is what the policy wants.
  virtual void stays(Value& value, const char* why) {}
  // A plug-in has changed what it keeps with the value.
  virtual void extraChanged(Value& value) {}
};

// The core asks these methods about the results of ops, on the region's thread.
struct ResultVeto : virtual Observer {
  // Returns why the op cannot be replayed for this result; null if it can. May attach an extra to
  // the value.
  virtual const char* whyNotReplayed(const NewState& state) = 0;
};

// The core calls these methods for a region, and for the tensors that autograd saves in the region,
// on the region's thread.
struct RegionEvents : virtual Observer {
  // The thread enters a region, perhaps a nested one. Without the lock.
  virtual std::unique_ptr<RegionNote> enters(
      const std::string& name, const std::shared_ptr<const Policy>& policy) {
    return nullptr;
  }
  // True if a tensor that autograd saves, and that no op of the region has read, must get a value.
  virtual bool wantsInput(const at::Tensor& tensor) { return false; }
  // Autograd has packed the value, shown by `tensor`. The handle keeps the result, which may be
  // null.
  virtual ExtraPtr packed(Value& value, const at::Tensor& tensor, Retention retention) {
    return {};
  }
  // The region reads a result of the region of `maker`.
  virtual void readsResultOf(const c10::weak_intrusive_ptr<Graph>& maker) {}

  // The region is about to end.
  virtual void willClose() {}
  // The region ends. Afterwards the core releases its references to the values.
  virtual void closes(const ValueMap& values) {}
  // The core has released its references. Values that backward does not need are gone.
  virtual void closed() {}
  // The thread has left the region. Without the lock.
  virtual void left(const c10::intrusive_ptr<Graph>& graph) {}
  // The thread enters its next outermost region. Without the lock.
  virtual void nextOpens(const c10::intrusive_ptr<Graph>& graph, Graph& next) {}
};

// The core calls these methods when saved tensors are unpacked or recomputed, on any thread,
// perhaps while the region is still open.
struct BackwardEvents : virtual Observer {
  // A saved tensor is about to be unpacked, usually by backward. May throw. Without the lock.
  virtual void unpacks(Graph& graph) {}

  // ebb is about to replay recipes for a value of a graph with GraphRules::sameOnAllRanks. May
  // throw, and may replay recipes.
  virtual void beginsReplay(const ReplayLock& locked) {}
  // A replay needs to run `recipe`. May throw.
  virtual void willNeed(const Graph& graph, const Recipe& recipe) {}

  // The bytes of a stashed value are about to come back, and have come back.
  virtual void fetches(Value& value) {}
  virtual void fetched(Value& value) {}

  // A recipe is about to run again; `ahead`: before backward needs its results.
  virtual void willReplay(const Recipe& recipe, bool ahead) {}
  // The recipe's kernel has returned.
  virtual void hasReplayed() {}
  // The recipe has given `value` its bytes.
  virtual void replayed(const Graph& graph, const Recipe& recipe, Value& value) {}
  // All results of the recipe have their bytes. Not called if the replay has thrown.
  virtual void replayEnds(const Recipe& recipe) {}
  // The value is recomputed together with `asked`, which backward unpacks.
  virtual void replaysWith(const Value& asked, const Value& value) {}
  // Backward has arrived at a graph that may have been replayed ahead. `cameBack`: the stashes that
  // have waited for this (Stash::awaitsBackward); each store removes its own. May throw.
  virtual void arrives(std::vector<c10::intrusive_ptr<Stash>>& cameBack) {}
  // A plug-in counts an event of the graph, under this name. Without the lock.
  virtual void counted(const char* what) {}

  // Backward unpacks `value`, whose replay gave `bytes`. Returns the bytes to use, or throws.
  virtual c10::Storage checked(
      const Graph& graph, Value& value, const Geometry& geometry, c10::Storage bytes) {
    return bytes;
  }
};

// When a plug-in adds its observers: those that depend on Graph::rules come last.
enum class Turn : uint8_t { Any, Last };

// Called for each graph that a region opens: may add observers, and set Graph::rules.
using AddObservers = void (*)(Graph& graph);

// Registers a function. Returns true, so that a plug-in can call it when the library is loaded.
EBB_API bool observeGraphs(AddObservers add, Turn turn = Turn::Any);

// Calls the registered functions.
void addObservers(Graph& graph);

// From now on `before` is called before code that torch does not see may write to a tensor.
bool callBeforeUnseenWrites(void (*before)(const at::Tensor& tensor));
EBB_API void beforeUnseenWrite(const at::Tensor& tensor);

}  // namespace ebb
