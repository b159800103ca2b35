// The core's door for plug-ins that look at regions: reports, verify mode. See
// docs/design/plugins.md.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ebb/export.h"
#include "hooks/slots.h"

namespace ebb {

class Arguments;
class Geometry;
class Policy;
class ValueMap;
struct Call;
struct Context;
struct Graph;
struct Output;
struct Recipe;
struct Value;

// What an observer keeps with an open region. Destroyed when the thread leaves the region.
struct RegionNote {
  virtual ~RegionNote() = default;
};

// A value that an op has made, or that a region has met.
struct Made {
  const Context& context;
  Value& value;
  const at::Tensor& tensor;  // shows the value
  const std::string& op;     // the op that made the value, or "from outside"
  const char* whyKept;       // why the value cannot be recomputed; null if it can, or need not be
};

// What an observer sees while a region is recorded. The region's thread calls.
class ForwardEvents {
 public:
  virtual ~ForwardEvents() = default;

  // The region's thread enters a region, perhaps a nested one. Without the lock.
  virtual std::unique_ptr<RegionNote> enters(
      const std::string& /*name*/, const std::shared_ptr<const Policy>& /*policy*/) {
    return nullptr;
  }

  // True if a tensor that autograd saves, and that no op of the region has read, must get a value.
  virtual bool wantsInput(const at::Tensor& /*tensor*/) {
    return false;
  }

  // An op is about to run. `replayable`: it has a recipe.
  virtual void willRun(
      const Context& /*context*/,
      ValueMap& /*values*/,
      const Call& /*call*/,
      const Arguments& /*arguments*/,
      bool /*replayable*/) {
  }
  // The op's kernel has returned. Without the lock, as its results are not recorded yet.
  virtual void hasRun() {
  }
  // All results of the op are recorded. Not called if the op has thrown.
  virtual void recorded() {
  }

  // A value exists from now on.
  virtual void made(const Made& /*made*/) {
  }
  // `output`, shown by `tensor`, can be recomputed from `recipe`. Comes before made().
  virtual void canBeReplayed(
      const Recipe& /*recipe*/, const Output& /*output*/, const at::Tensor& /*tensor*/) {
  }
  // The policy has decided again, because the program named the value.
  virtual void decidedAgain(const Context& /*context*/, Value& /*value*/) {
  }
  // The value's storage is about to be written (`seen`), or an unseen write to it has been found.
  virtual void stateEnds(Value& /*value*/, bool /*seen*/) {
  }
  // The value has got a copy of its bytes, because its storage is about to be written.
  virtual void copied(Value& /*value*/) {
  }
  // Autograd has packed the value, shown by `tensor`. `resident`: its bytes stay in memory. The
  // handle keeps the result, which may be null.
  virtual ExtraPtr packed(
      Value& /*value*/, const at::Tensor& /*tensor*/, bool /*resident*/) {
    return {};
  }
  // A store has taken the value's bytes: `nbytes` of the tensor `of`. `kind` names the store.
  virtual void sent(
      Value& /*value*/, const char* /*kind*/, const std::string& /*of*/, size_t /*nbytes*/) {
  }
  // A store has not taken the value's bytes.
  virtual void notSent(Value& /*value*/, const char* /*why*/) {
  }
  // The value's bytes stay in memory, although a store had taken them or should. `why`: null if
  // this is what the policy wants.
  virtual void stays(Value& /*value*/, const char* /*why*/) {
  }
  // A plug-in has changed what it keeps with the value.
  virtual void extraChanged(Value& /*value*/) {
  }

  // The region ends. Afterwards the core releases its references to the values.
  virtual void closes(const ValueMap& /*values*/) {
  }
  // The core has released its references. Values that backward does not need are gone.
  virtual void closed() {
  }
};

// What an observer sees of a region's replays. Any thread calls, perhaps while the region is open.
class BackwardEvents {
 public:
  virtual ~BackwardEvents() = default;

  // The bytes of a stashed value are about to come back, and have come back.
  virtual void fetches(Value& /*value*/) {
  }
  virtual void fetched(Value& /*value*/) {
  }

  // A recipe is about to run again; `ahead`: before backward needs its results.
  virtual void willReplay(const Recipe& /*recipe*/, bool /*ahead*/) {
  }
  // The recipe's kernel has returned.
  virtual void hasReplayed() {
  }
  // The recipe has given `value` its bytes.
  virtual void replayed(const Graph& /*graph*/, const Recipe& /*recipe*/, Value& /*value*/) {
  }
  // All results of the recipe have their bytes. Not called if the replay has thrown.
  virtual void replayEnds(const Recipe& /*recipe*/) {
  }
  // The value is recomputed together with `asked`, which backward unpacks.
  virtual void replaysWith(const Value& /*asked*/, const Value& /*value*/) {
  }

  // A plug-in counts an event of the graph, under this name. Without the lock.
  virtual void counted(const char* /*what*/) {
  }

  // Backward unpacks `value`, whose replay gave `bytes`. Returns the bytes to use, or throws.
  virtual c10::Storage checked(
      const Graph& /*graph*/,
      Value& /*value*/,
      const Geometry& /*geometry*/,
      c10::Storage bytes) {
    return bytes;
  }
};

// Looks at one graph: a region and its backward. Decides nothing, with one exception: checked().
// Each graph has observers of its own, which a function given to observeGraphs() adds. The calls
// come under the graph's lock, which the observer must not release, except where a comment says
// otherwise.
class Observer : public ForwardEvents, public BackwardEvents {};

// The observers of a graph. A graph nearly always has none.
class Observers {
 public:
  void add(std::unique_ptr<Observer> observer) {
    all_.push_back(std::move(observer));
  }
  void clear() {
    all_.clear();
  }
  bool any() const {
    return !all_.empty();
  }

  // Calls a method of each observer.
  template <class Events, class... Parameters, class... Arguments>
  void tell(void (Events::*what)(Parameters...), Arguments&&... arguments) const {
    if (any()) [[unlikely]] {
      tellAll(what, arguments...);
    }
  }

  // The same for methods with results.
  std::vector<std::unique_ptr<RegionNote>> enter(
      const std::string& name, const std::shared_ptr<const Policy>& policy) const;
  bool wantInput(const at::Tensor& tensor) const;
  ExtraPtr packed(Value& value, const at::Tensor& tensor, bool resident) const;
  c10::Storage checked(
      const Graph& graph, Value& value, const Geometry& geometry, c10::Storage bytes) const;

 private:
  template <class Events, class... Parameters, class... Arguments>
  [[gnu::cold, gnu::noinline]] void tellAll(
      void (Events::*what)(Parameters...), Arguments&... arguments) const {
    for (const auto& observer : all_) {
      (observer.get()->*what)(arguments...);
    }
  }

  c10::SmallVector<std::unique_ptr<Observer>, 2> all_;
};

// From now on `add` is called for each graph that a region opens: it may add observers, and set
// Graph::rules. Returns true, so that a plug-in can call it when the library is loaded.
EBB_API bool observeGraphs(void (*add)(Graph& graph));

// Calls the functions given to observeGraphs().
void addObservers(Graph& graph);

}  // namespace ebb
