// Regions: the dynamic extent in which ops are intercepted.
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

// Which operators outside torch can be repeated: those that a rule names, or all of them, as in a
// checkpointed call. See Note [Operators from elsewhere].
enum class Repeats { IfRulesSaySo, All };

// Enters a region on this thread. The outermost one is the boundary of recomputation; inner ones
// change the policy and the name, and inherit Repeats::All. Gives the number of this entry, which
// is not 0. Throws if interception cannot be installed.
EBB_API uint64_t
enterRegion(const PolicyPtr& policy, std::string name, Repeats repeats = Repeats::IfRulesSaySo);

// Leaves it again. Throws RuntimeError if it was entered on another thread (that thread drops it
// by itself) or if regions inside it are still open (they are closed); either way the next region
// works.
EBB_API void leaveRegion(uint64_t id);

// The same, and if it is the outermost region, gives up the memory of what is still referenced and
// can be recomputed: see Note [Escapes]. Returns the graph if there was any such value, else null.
EBB_API c10::intrusive_ptr<Graph> leaveRegionEmptyingEscapes(
    uint64_t id, const std::vector<at::Tensor>& results, bool onlyResults, bool hasBackward);

// Around a write that torch does not see: see Note [Opaque writes].
EBB_API void opaqueWriteBegins(const at::Tensor& tensor);
EBB_API void opaqueWriteEnds(const at::Tensor& tensor);

// A collective that no operator shows is about to write to `tensor`: see Note [Communication].
EBB_API void collectiveWrites(const at::Tensor& tensor);

// Whether this thread is inside a region.
EBB_API bool inRegion();

}  // namespace ebb
