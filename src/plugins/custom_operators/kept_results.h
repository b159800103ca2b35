// Results of custom operators, kept because no rule declares the operator repeatable.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"
#include "hooks/observer.h"
#include "record/context.h"

namespace ebb {

// Results of one outermost region that are kept against the policy's decision to recompute: see
// Note [Custom operators]. When the thread has left the region, the destructor logs each operator
// once. A region may have several graphs: see Note [Parts of a region].
class KeptResults final : public RegionNote {
 public:
  explicit KeptResults(std::string region) : region_(std::move(region)) {}
  KeptResults(const KeptResults&) = delete;
  KeptResults& operator=(const KeptResults&) = delete;
  ~KeptResults() override;

  // The open region's object. Adds it when it is asked for first.
  static KeptResults& of(const Context& context);

  void add(
      const c10::intrusive_ptr<Graph>& graph, const c10::intrusive_ptr<Value>& result,
      const OpTraits& op);

  // Called when a graph ends, before the recorder drops its values. Notes which results autograd
  // has saved.
  void closing();

 private:
  void tell() const;

  struct Result {
    c10::weak_intrusive_ptr<Value> value;
    const OpTraits* op;
    size_t saved = 0;  // bytes that autograd holds
  };

  const std::string region_;
  WeakGraph graph_{c10::intrusive_ptr<Graph>()};  // of the last result
  std::vector<Result> all_;
};

}  // namespace ebb
