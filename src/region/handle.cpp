#include "region/handle.h"

#include <c10/util/StringUtil.h>

#include <mutex>

#include "graph/recipe.h"
#include "graph/replay.h"
#include "region/python_support.h"

namespace ebb {

Handle::Handle(Recorder& recorder)
    : recorder_(&recorder), graph_(recorder.graph()), region_(recorder.region()) {
  liveCounts().handles.fetch_add(1, std::memory_order_relaxed);
}

Handle::Handle(const Handle& other)
    : SavedVariableHooks(),
      recorder_(nullptr),
      graph_(other.graph_),
      value_(other.value_),
      recompute_(other.recompute_),
      storage_(other.storage_),
      kept_(other.kept_),
      geometry_(other.geometry_),
      counter_(other.counter_),
      version_(other.version_),
      region_(other.region_),
      producer_(other.producer_) {
  liveCounts().handles.fetch_add(1, std::memory_order_relaxed);
  if (value_) {
    ++value_->handles;
  }
}

Handle::~Handle() {
  if (value_) {
    --value_->handles;
  }
  liveCounts().handles.fetch_sub(1, std::memory_order_relaxed);
}

// Note [What a handle keeps]
//   1. A value to be recomputed: the value and the geometry. No bytes.
//   2. A kept value that has a grad_fn: its storage and the geometry, never the tensor, which owns
//      the node that owns this handle.
//   3. Everything else (parameters, inputs, subclasses, sparse tensors): the tensor itself, as
//      eager does, so that unpack gives the same object.
// In the last two cases the bytes are shared with the living tensor exactly as in eager.
void Handle::call_pack_hook(const at::Tensor& tensor) {
  counter_ = tensor.unsafeGetTensorImpl()->version_counter();
  version_ = counter_.enabled() ? counter_.current_version() : 0;
  Packed packed = recorder_->pack(tensor);
  recorder_ = nullptr;
  producer_ = packed.producer;
  value_ = std::move(packed.value);
  recompute_ = packed.recompute;
  if (recompute_) {
    geometry_ = Geometry(tensor);
  } else if (!tensor.grad_fn()) {
    kept_ = tensor;
  } else if (isRecordable(tensor)) {
    storage_ = tensor.storage();
    geometry_ = Geometry(tensor);
  } else {
    kept_ = tensor.tensor_data();
  }
}

at::Tensor Handle::call_unpack_hook() {
  return unpack();
}

at::Tensor Handle::unpack() const {
  ledgerBackwardSeen();
  checkVersion();
  if (kept_.defined()) {
    return unpackKept();
  }
  at::Tensor tensor = geometry_.viewOf(value_ ? materialised() : storage_);
  if (counter_.enabled()) {
    tensor.unsafeGetTensorImpl()->set_version_counter(counter_);
  }
  return tensor;
}

// Note [Unpacked bytes may be written]
// Some backward functions reuse what they unpack as scratch memory. Eager's saved tensors share
// their storage among themselves, and with nothing that is yet to be computed; so a storage that
// recipes still read is not handed out: the caller gets a copy. Where the tensor is still alive the
// caller gets its storage, as in eager, and the recipes get the copy.
c10::Storage Handle::materialised() const {
  WithoutGil withoutGil;
  std::lock_guard<std::recursive_mutex> lock(graph_->mutex);
  if (value_->redefined) {
    return value_->redefined;  // see Note [Silent writes]
  }
  if (!recompute_) {
    return isReadByRecipes() ? copyOf(storage_) : storage_;
  }
  c10::Storage storage = materialise(*graph_, *value_);
  if (!isReadByRecipes()) {
    return storage;
  }
  c10::Storage copy = copyOf(storage);
  if (value_->isPrivate) {
    return copy;
  }
  value_->bytes = std::move(copy);
  value_->isPrivate = true;
  value_->recipe.reset();
  return storage;
}

// Inside the region the map's reference counts too, which costs a copy and no bit.
bool Handle::isReadByRecipes() const {
  return readers(value_) > 0;
}

at::Tensor Handle::unpackKept() const {
  TORCH_CHECK(
      !isRecordable(kept_) || kept_.numel() == 0 || kept_.storage().nbytes() > 0,
      "ebb: a saved tensor of shape ",
      kept_.sizes(),
      ", ",
      origin(),
      ", has no data any more: its storage was resized to zero after the forward (a parameter that "
      "was resharded, or a buffer that was freed). Restore it before backward.");
  return kept_;
}

// Note [Version checks]
// Saved-tensor hooks switch autograd's own check off, so this is the only one, and it raises
// exactly where eager raises: when the version of the packed tensor has moved since. Leaves that a
// recipe needs are checked too, in Slice::throwLostLeaf.
void Handle::checkVersion() const {
  if (!counter_.enabled() || counter_.current_version() == version_) {
    return;
  }
  const bool rebuilt = !kept_.defined();
  TORCH_CHECK(
      false,
      "one of the variables needed for gradient computation has been modified by an inplace "
      "operation: [",
      rebuilt ? c10::toString(geometry_.dtype()) : c10::toString(kept_.scalar_type()),
      " ",
      rebuilt ? geometry_.sizes() : kept_.sizes(),
      "], ",
      origin(),
      ", is at version ",
      counter_.current_version(),
      "; expected version ",
      version_,
      " instead. Hint: eager raises here too; write to a copy (out of place), or after backward.");
}

std::string Handle::origin() const {
  return c10::str(
      producer_ != nullptr ? "the output of " : "an input",
      producer_ != nullptr ? producer_ : "",
      " saved in region '",
      graph_->names[region_],
      "'");
}

std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> Handle::retrieve_unpack_hook_data()
    const {
  const PythonSupport* support = pythonSupport();
  TORCH_CHECK(support != nullptr, "ebb: compiled autograd needs the Python module of ebb");
  return support->unpackHook(*this);
}

}  // namespace ebb
