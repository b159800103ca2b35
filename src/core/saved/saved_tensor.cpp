#include "saved/saved_tensor.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <optional>

#include "graph/recipe.h"
#include "memory/bytes.h"
#include "replay/replay.h"
#include "replay/same_node.h"
#include "support/python_support.h"
#include "torch_seams/generated_nodes.h"

namespace ebb {
namespace {

// The end of a message: how the user can save the tensor.
std::string howToSave(const char* producer) {
  return producer != nullptr ? c10::str("give ", producer, " the decision SAVE.")
                             : "use a policy with inputs=ebb.SAVE.";
}

// True if no other function will unpack the tensor: the current function is torch's own, in a
// backward that does not retain the graph. Such a function unpacks each saved tensor once.
bool isLastUnpack() {
  if (torch::autograd::get_current_graph_task_keep_graph()) {
    return false;
  }
  const auto node = torch::autograd::get_current_node();
  return node != nullptr && isGenerated(*node);
}

// True if a recipe may still read `storage` as the bytes of `value`. While the region is open the
// result may be true without such a recipe, because the recorder's map refers to the value too. The
// only effect is an extra copy.
bool isReadByRecipes(const c10::intrusive_ptr<Value>& value, const c10::Storage& storage) {
  if (onlyHandlesOwn(value)) {
    return false;
  }
  const c10::Storage read = value->available();
  return read && read.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
}

// True if only handles and the value itself hold `storage`, the bytes of a saved value, besides the
// caller.
bool isOnlyOurs(const Packed& packed, const c10::Storage& storage) {
  const Value& value = *packed.shown();
  if (packed.recompute || isReadByRecipes(packed.shown().pointer(), storage)) {
    return false;
  }
  const bool has = value.home().bytes().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  const size_t handles = value.uses().relyOnBytes() ? 0 : value.uses().handles();
  return storage.use_count() <= 1 + handles + (has ? 1 : 0);
}

// The bytes that backward gets from the handle, where `storage` has the forward's.
c10::Storage shownBytes(const Packed& packed, const Graph& graph, c10::Storage storage) {
  if (!packed.note) [[likely]] {
    return storage;
  }
  const bool onlyOurs = packed.shown() && isOnlyOurs(packed, storage);
  return packed.note->shown({graph, packed.shown().get(), std::move(storage), onlyOurs});
}

}  // namespace

// Note [Wrapper subclasses]
// A tensor of a class with __tensor_flatten__ (DTensor, a scaled float8 tensor) wraps tensors known
// to the recorder. If an inner tensor is to be recomputed, ebb saves each inner tensor alone and
// rebuilds the wrapper in backward. In all other cases ebb keeps the whole wrapper: the class lacks
// the protocol, the protocol raises, or an inner tensor requires grad itself or is ragged or
// quantised. Autograd checks only the wrapper's version, so eager's backward sees the new contents
// after a direct write to an inner tensor. An unpacked inner tensor therefore shows the current
// contents of its storage. If that storage no longer exists, unpacking raises.
struct SavedTensor::Parts {
  std::vector<SavedTensor> inner;
  c10::SafePyObject recipe;  // Python's data to rebuild the wrapper
};

// Note [What a handle keeps]
//   1. A value to be recomputed: the value and the geometry. No bytes.
//   2. A wrapper around such values: each inner tensor, and how to rebuild the wrapper.
//   3. A kept value that has a grad_fn, or that the policy saves: its storage and the geometry. The
//      handle does not keep the tensor, for two reasons. A tensor with a grad_fn owns the node that
//      owns this handle, so there would be a reference cycle. And the storage's reference count
//      shows whether other code holds the storage (ownsItsBytes) only if the handle shares no
//      tensor with the program.
//   4. Any other tensor without a grad_fn (parameters, inputs): the tensor itself, as in eager, so
//      that unpack gives the same object.
//   5. Any other tensor (sparse tensors, other subclasses): an alias without the grad_fn.
// In cases 3 to 5 the handle shares the bytes with the living tensor exactly as in eager.
void SavedTensor::pack(Recorder& recorder, const at::Tensor& tensor, bool part) {
  graph_ = recorder.context().graph;
  requiresGrad_ = tensor.requires_grad();
  region_ = recorder.context().region;
  packed_ = recorder.pack(tensor, part);
  const bool wrapper = tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
  if (packed_.recompute || (wrapper && packParts(recorder, tensor))) {
    geometry_.take(tensor);
  } else if (!tensor.grad_fn() && !packed_.shown()) {
    kept_ = tensor;
  } else if (isRecordable(tensor)) {
    storage_ = tensor.storage();
    geometry_.take(tensor);
  } else {
    kept_ = tensor.tensor_data();
  }
}

[[gnu::noinline]] bool SavedTensor::packParts(Recorder& recorder, const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const PythonSupport* python = pythonSupport();
  const bool leaf = requiresGrad_ && !tensor.grad_fn();
  if (python == nullptr || leaf || impl->layout() != c10::kStrided ||
      impl->has_symbolic_sizes_strides()) {
    return false;
  }
  std::vector<at::Tensor> inner;
  auto recipe = python->flatten(tensor, inner);
  const bool plain = std::none_of(
      inner.begin(), inner.end(), [](const at::Tensor& part) { return part.grad_fn() != nullptr; });
  if (!recipe || !plain) {
    return false;
  }
  auto parts = std::make_shared<Parts>(Parts{{}, std::move(*recipe)});
  parts->inner.reserve(inner.size());
  for (const at::Tensor& part : inner) {
    SavedTensor& saved = parts->inner.emplace_back();
    saved.pack(recorder, part, true);
    if (packed_.producer == nullptr) {
      packed_.producer = saved.packed_.producer;
    }
  }
  const bool recomputed = std::any_of(
      parts->inner.begin(), parts->inner.end(),
      [](const auto& part) { return part.isRecomputed(); });
  if (recomputed) {
    parts_ = std::move(parts);
  }
  return recomputed;
}

bool SavedTensor::isRecomputed() const { return packed_.recompute || parts_ != nullptr; }

bool SavedTensor::isOfOpenRegion() const {
  const Recorder* recorder = openRecorder();
  return recorder != nullptr && recorder->context().graph == graph_;
}

bool SavedTensor::isOffloaded() const { return packed_.shown() && packed_.shown()->stash(); }

// Note [One tensor for all unpacks]
// If a saved tensor needs no grad, eager's unpack gives the saved tensor itself. If a backward
// function returns this tensor as a gradient, the engine sees another owner and does not write to
// the gradient in place. So ebb keeps the tensor of the first unpack and gives the same tensor
// again. If the tensor needs grad, torch makes a new tensor from the result of unpack, with and
// without hooks.
at::Tensor SavedTensor::unpack() {
  if (packed_.note) [[unlikely]] {
    packed_.note->unpacks(packed_.node);
  }
  graph_->observers.tell(&BackwardEvents::unpacks, *graph_);
  if (kept_.defined()) {
    return unpackKept();
  }
  const ReplayLock locked(*graph_);
  if (requiresGrad_) {
    at::Tensor tensor = rebuild(locked);
    giveUp();
    return tensor;
  }
  if (!unpacked_.defined()) {
    unpacked_ = rebuild(locked);
  } else if (packed_.recompute) {
    graph_->streams.use(*packed_.shown(), unpacked_.storage());
  }
  return unpacked_;
}

void SavedTensor::shareWithAllStreams(const at::Tensor& unpacked) {
  const ReplayLock locked(*graph_);
  if (packed_.shown()) {
    graph_->streams.findPlace();
    TORCH_CHECK(
        !graph_->streams.isElsewhere(), "ebb: ", origin(),
        " cannot be restored in another CUDA graph capture than its region's: other code may read "
        "it before the graph is launched. Capture forward and backward together, or do not discard "
        "it.");
    graph_->streams.share(unpacked.storage());
  }
}

// Note [Given up when unpacked]
// Autograd holds the saved tensors of a function until it has validated the function's gradients,
// which may need memory. So ebb drops the handle's reference at the last unpack, as
// torch.utils.checkpoint does, if no other handle or recipe uses the recomputed value. From then on
// only the function's own variables hold the tensor, and the tensor is freed when the function
// returns. Before that, a second unpack, such as a hook's, still finds the tensor; a later unpack
// raises.
void SavedTensor::giveUp() {
  const auto& value = packed_.shown();
  const bool only = packed_.recompute && value->home().isPrivate() && value->home().bytes() &&
                    !value->redefined() && value->uses().handles() == 1 &&
                    packed_.latest.use_count() <= 1 && onlyHandlesOwn(value.pointer()) &&
                    !value->facts().compared;
  if (!only || !isLastUnpack()) {
    return;
  }
  value->giveUp();
  givenUp_ = true;
}

// Makes the saved tensor from its geometry and bytes, or a wrapper from its inner tensors.
at::Tensor SavedTensor::rebuild(const ReplayLock& locked) {
  std::optional<c10::InferenceMode> normal;
  if (c10::InferenceMode::is_enabled()) {
    normal.emplace(false);  // only normal tensors accept a version counter
  }
  if (parts_ == nullptr) {
    c10::Storage storage = packed_.shown() ? bytesForBackward(locked) : storage_;
    return geometry_.viewOf(shownBytes(packed_, *graph_, std::move(storage)));
  }
  std::vector<at::Tensor> inner;
  for (SavedTensor& part : parts_->inner) {
    inner.push_back(part.unpack());
  }
  return pythonSupport()->unflatten(parts_->recipe, inner);
}

// Note [Unpacked bytes may be written]
// Some backward functions reuse unpacked tensors as scratch memory. In eager, all saved tensors of
// one storage and the program's own tensor see such a write. Results that were computed from the
// storage before the write do not. So all handles on a value give the same storage: the program's
// own storage, if that still exists. If recipes still read the value, ebb runs those whose results
// the same node needs (Note [Saved by one node]). The others get a copy from then on.
c10::Storage SavedTensor::bytesForBackward(const ReplayLock& locked) const {
  const auto& value = packed_.shown();
  if (value->redefined()) {
    graph_->streams.use(*value, value->redefined());
    return value->redefined();  // see also Note [Silent writes]
  }
  c10::Storage storage = packed_.recompute ? value->home().living() : storage_;
  if (storage && value->stash()) {
    materialise(locked, *value);  // the storage lives: nothing is copied back
  }
  if (packed_.recompute && value->facts().compared) {
    const c10::Storage right =
        graph_->observers.checked(*graph_, *value, geometry_, materialise(locked, *value));
    storage = storage ? storage : right;
  } else if (!storage) {
    checkCanComeBack();
    storage = materialise(locked, *value);
    TORCH_CHECK(
        storage, "ebb: cannot restore ", origin(),
        " after offloading: its storage was written or replaced through a tensor that does not "
        "share its version counter (such as .data). Do this after backward, or ",
        howToSave(packed_.producer));
  }
  if (packed_.recompute) {
    TORCH_CHECK(
        graph_->streams.mayUse(*value), "ebb: ", origin(), " was recomputed ",
        GraphStreams::kElsewhere, ", or ", howToSave(packed_.producer));
    graph_->streams.use(*value, storage);
  }
  if (isReadByRecipes(value.pointer(), storage)) {
    giveRecipesTheirOwn(locked, storage);
  }
  return storage;
}

void SavedTensor::giveRecipesTheirOwn(const ReplayLock& locked, const c10::Storage& storage) const {
  Value& value = *packed_.shown();
  materialiseSameNode(locked, value, packed_.node);
  if (!isReadByRecipes(packed_.shown().pointer(), storage)) {
    return;
  }
  if (value.recipe() && hasChanged(value, storage, graph_->rules.fingerprints())) {
    value.showInstead(storage);  // a replay makes what recipes read: see Note [Silent writes]
    value.release();
    return;
  }
  graph_->streams.findPlace();
  value.restore(copyOf(storage), true);
  // The copy runs after the work that made `storage`.
  graph_->streams.made(value, value.home().bytes());
  if (packed_.recompute) {
    value.showInstead(storage, false);
  }
}

void SavedTensor::checkCanComeBack() const {
  TORCH_CHECK(
      packed_.shown()->versions().areUnmoved(), "ebb: ", origin(),
      " was freed after a write through a tensor that does not share its version counter (an inner "
      "tensor of a subclass, an alias from .data). Move the write after backward, or keep a "
      "reference to the tensor until then.");
  TORCH_CHECK(
      !givenUp_, "ebb: ", origin(),
      " is unpacked again, after backward has recomputed and freed it. Call backward with "
      "retain_graph=True, or give its operator the decision SAVE.");
  const bool lost = packed_.shown()->state() == ValueState::Held &&
                    packed_.shown()->home().bytes().nbytes() != packed_.shown()->home().nbytes();
  TORCH_CHECK(
      !lost, "ebb: the storage of ", origin(),
      " was freed or resized after the region, but backward still needs it. Free it after the last "
      "backward, or ",
      howToSave(packed_.producer));
}

at::Tensor SavedTensor::unpackKept() const {
  TORCH_CHECK(
      !isRecordable(kept_) || kept_.numel() == 0 || kept_.storage().nbytes() > 0,
      "ebb: a saved tensor of shape ", kept_.sizes(), ", ", origin(),
      ", has no data any more: its storage was resized to zero after the forward (a parameter that "
      "was resharded, or a buffer that was freed). Restore it before backward.");
  const c10::Storage storage =
      packed_.note ? shownBytes(packed_, *graph_, kept_.storage()) : c10::Storage();
  if (!storage || storage.is_alias_of(kept_.storage())) {
    return kept_;
  }
  Geometry geometry;
  geometry.take(kept_);
  return geometry.viewOf(storage);
}

std::string SavedTensor::origin() const {
  return c10::str(
      packed_.producer != nullptr ? "the output of " : "an input",
      packed_.producer != nullptr ? packed_.producer : "", " saved in region '",
      graph_->names[region_], "'");
}

// Returns the tensor's type and sizes. Torch's Python bindings turn a type such as "CPUFloatType"
// into "torch.FloatTensor" in messages.
std::string SavedTensor::description() const {
  if (isRebuilt()) {
    const at::Tensor typed(
        c10::make_intrusive<c10::TensorImpl>(
            c10::DispatchKeySet(), c10::scalarTypeToTypeMeta(geometry_.dtype()),
            geometry_.device()));
    return c10::str(typed.toString(), " ", geometry_.sizes());
  }
  if (kept_.is_nested()) {
    return c10::str(kept_.toString(), " ", kept_._nested_tensor_size());
  }
  return c10::str(kept_.toString(), " ", kept_.sym_sizes());
}

}  // namespace ebb
