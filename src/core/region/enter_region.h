// Regions: the dynamic extent in which ebb intercepts ops.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <string>

#include "hooks/decider.h"

namespace ebb {

class Recorder;

// Selects the custom operators that ebb may replay: those that a rule names, or all. Checkpointed
// calls use All. See Note [Custom operators].
enum class Repeats { IfRulesSaySo, All };

// Enters a region on this thread. The outermost region is the boundary of recomputation. Inner
// regions change the policy and the name, and inherit Repeats::All. Returns the id of this entry,
// never 0. Throws if interception cannot be installed.
EBB_API uint64_t
enterRegion(const PolicyPtr& policy, std::string name, Repeats repeats = Repeats::IfRulesSaySo);

// Leaves the region. Throws RuntimeError if another thread entered the region (the other thread
// then drops the region by itself), or if inner regions are still open (ebb closes them). The next
// region works in both cases.
EBB_API void leaveRegion(uint64_t id);

// The program is about to empty `storage`: see Note [Parts of a region].
EBB_API void storageEmptied(c10::StorageImpl* storage);

// The recorder of the outermost region, if `id` is the outermost region, and no other region and no
// unseen write is open; else null.
Recorder* recorderThatEndsWith(uint64_t id);

// Begins a write unseen by torch: see Note [Opaque writes].
EBB_API void opaqueWriteBegins(const at::Tensor& tensor);
// Ends a write begun by opaqueWriteBegins().
EBB_API void opaqueWriteEnds(const at::Tensor& tensor);

// A collective outside the dispatcher is about to write to `tensor`: see Note [Communication].
EBB_API void collectiveWrites(const at::Tensor& tensor);

// True if this thread is inside a region.
EBB_API bool inRegion();

}  // namespace ebb
