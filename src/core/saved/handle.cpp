#include "saved/handle.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "counts/statistics.h"
#include "support/python_support.h"

namespace ebb {

static_assert(alignof(Handle) <= kArenaAlignment);
Handle::Handle() { count(liveCounts().handles, 1); }

Handle::Handle(const Handle& other)
    : SavedVariableHooks(), saved_(other.saved_), packed_(other.packed_) {
  count(liveCounts().handles, 1);
}

Handle::~Handle() { count(liveCounts().handles, -1); }

void Handle::call_pack_hook(const at::Tensor& tensor) {
  packed_.counter = tensor.unsafeGetTensorImpl()->version_counter();
  packed_.version = versionOf(tensor);
  saved_.pack(*openRecorder(), tensor);
}

at::Tensor Handle::call_unpack_hook() {
  statisticsBackwardSeen();
  if (const Recorder* recorder = openRecorder()) {
    recorder->context().graph->hasUnpacked = true;
  }
  checkVersion();
  checkTracer();
  at::Tensor tensor = saved_.unpack();
  if (saved_.isRebuilt() && packed_.counter.enabled()) {
    tensor.unsafeGetTensorImpl()->set_version_counter(packed_.counter);
  }
  return tensor;
}

// Note [Version checks]
// Saved-tensor hooks disable autograd's own version check, so a handle checks the version. The
// handle raises exactly where eager raises: when the version of the packed tensor has moved since
// packing. In addition, a replay raises if a leaf that it reads has changed; see
// Slice::throwLostLeaf.
void Handle::checkVersion() const {
  TORCH_CHECK(
      packed_.holds(),
      "one of the variables needed for gradient computation has been modified by an inplace "
      "operation: [",
      saved_.description(), "], ", saved_.origin(), ", is at version ",
      packed_.counter.current_version(), "; expected version ", packed_.version,
      " instead. Hint: eager raises here too; write to a copy (out of place), or after backward.");
}

// torch.jit.trace follows tensors by identity, so a rebuilt tensor would be a constant in the
// trace. While autograd packs, ebb cannot see that a trace runs. So if a trace was started inside a
// region, unpacking raises. See also isTraced() in region/enter_region.cpp.
void Handle::checkTracer() const {
  TORCH_CHECK(
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer) || !saved_.isRebuilt() ||
          !saved_.isOfOpenRegion(),
      "ebb: torch.jit.trace was started inside a region and traces a backward there: ",
      saved_.origin(),
      " would be a constant in its graph. Start torch.jit.trace outside of regions.");
}

std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> Handle::retrieve_unpack_hook_data()
    const {
  const PythonSupport* support = pythonSupport();
  TORCH_CHECK(support != nullptr, "ebb: compiled autograd needs the Python module of ebb");
  return support->unpackHook(*this);
}

}  // namespace ebb
