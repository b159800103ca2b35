// Regions: the dynamic extent in which ebb intercepts ops.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "policy/policy.h"

namespace ebb {

// The operators outside torch that ebb may repeat: those named by a rule, or all, as in a
// checkpointed call. See Note [Operators from elsewhere].
enum class Repeats { IfRulesSaySo, All };

// Enters a region on this thread. The outermost region is the boundary of recomputation. Inner
// regions change the policy and the name, and inherit Repeats::All. Returns the id of this entry,
// never 0. Throws if interception cannot be installed.
EBB_API uint64_t
enterRegion(const PolicyPtr& policy, std::string name, Repeats repeats = Repeats::IfRulesSaySo);

// Leaves the region. Throws RuntimeError if another thread entered it (the other thread then drops
// it by itself), or if inner regions are still open (they are closed). The next region works in
// both cases.
EBB_API void leaveRegion(uint64_t id);

// Leaves the region. An outermost region also frees the memory of recomputable values that are
// still referenced: see Note [Escapes]. Returns the graph if there was such a value, else null.
EBB_API c10::intrusive_ptr<Graph> leaveRegionEmptyingEscapes(
    uint64_t id, const std::vector<at::Tensor>& results, bool onlyResults, bool hasBackward);

// Begins a write that torch does not see: see Note [Opaque writes].
EBB_API void opaqueWriteBegins(const at::Tensor& tensor);
// Ends a write that opaqueWriteBegins() began.
EBB_API void opaqueWriteEnds(const at::Tensor& tensor);

// A collective that is not an operator is about to write to `tensor`: see Note [Communication].
EBB_API void collectiveWrites(const at::Tensor& tensor);

// True if this thread is inside a region.
EBB_API bool inRegion();

}  // namespace ebb
