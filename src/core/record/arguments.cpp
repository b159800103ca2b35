#include "record/arguments.h"

// Without this macro, the headers below include every operator.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>

#include <algorithm>

#include "conditions/fingerprint.h"
#include "graph/geometry.h"
#include "graph/recipe.h"
#include "intercept/op_traits.h"
#include "memory/bytes.h"
#include "record/value_map.h"
#include "torch_seams/key.h"

namespace ebb {

PartsInside partsInside(const at::Tensor& tensor) {
  PartsInside parts;
  const auto add = [&](const at::Tensor& part) {
    if (part.defined() && isRecordable(part)) {
      parts.push_back(part);
    }
  };
  // A wrapper subclass may report any layout, so check the class of its TensorImpl.
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (const auto* sparse = dynamic_cast<at::SparseTensorImpl*>(impl)) {
    add(sparse->indices());
    add(sparse->values());
  } else if (auto* compressed = dynamic_cast<at::SparseCsrTensorImpl*>(impl)) {
    add(compressed->compressed_indices());
    add(compressed->plain_indices());
    add(compressed->values());
  } else if (impl->has_storage() && impl->unsafe_storage()) {
    add(bytesOf(impl->unsafe_storage()));
  }
  return parts;
}

Arguments::Arguments(const Call& call, ValueMap& values, bool trustCustomOps)
    : op_(call.op), values_(values), trustCustomOps_(trustCustomOps) {
  if (op_.arguments.condition >= 0) {
    const c10::IValue& given = call.arguments[op_.arguments.condition];
    condition_ = op_.arguments.conditionIsFlag ? given.isBool() && given.toBool()
                                               : given.isScalar() && given.toScalar().equal(0);
  }
  forEachTensor(
      call.arguments, op_.arguments.types,
      [&](const at::Tensor& tensor, size_t i, int32_t element) { scan(tensor, i, element); });
}

void Arguments::scan(const at::Tensor& tensor, size_t argument, int32_t element) {
  ArgUse use = useOf(argument);
  const auto index = static_cast<uint16_t>(argument);
  if (!tensor.defined()) {
    if (element >= 0) {
      tensors_.push_back({&tensor, {}, ArgUse::Read, index, element});
    }
    return;
  }
  const bool writes = isWritten(use);
  if (!isRecordable(tensor)) {
    recordable_ = false;
    for (const at::Tensor& part : writes ? partsInside(tensor) : PartsInside()) {
      addWrite(part, use, argument, element, false);
    }
    return;
  }
  if (op_.limits.custom && use == ArgUse::Write && trustCustomOps_ && isUnfilled(tensor)) {
    use = ArgUse::Overwrite;
  }
  GeometryFlags flags = geometryFlags(tensor);
  flags.requiresGrad =
      (op_.kernel.readsRequiresGrad || op_.limits.custom) && tensor.requires_grad();
  flags.offset &= Input::showsStorage(flags, use);
  shapeCount_ += Input::shapeCount(flags, use);
  tensors_.push_back({&tensor, flags, use, index, element});
  if (device_.is_cpu()) {
    device_ = flags.device;
  }
  storages_.push_back(storageOf(tensor));
  if (writes) {
    addWrite(
        tensor, use, argument, element, op_.arguments.counted[argument] && !insidePythonDispatch());
  }
}

[[gnu::noinline]] void Arguments::addWrite(
    const at::Tensor& tensor, ArgUse use, size_t argument, int32_t element, bool counted) {
  const bool whole = use == ArgUse::Overwrite && coversStorage(tensor);
  // Before current(), which would take a version that has moved for an unseen write. A part of a
  // wrapper has a version of its own: `counted` is false for it.
  const bool movedFirst =
      op_.limits.custom && op_.arguments.counted[argument] && acceptIfMovedFirst(tensor);
  c10::StorageImpl* storage = storageOf(tensor);
  const auto same = std::find_if(
      writes_.begin(), writes_.end(), [&](const Write& write) { return write.storage == storage; });
  if (same != writes_.end()) {  // what is true of each of the arguments that show the storage
    same->whole &= whole;
    same->counted &= counted;
    same->sideEffect &= use == ArgUse::Scratch;
    return;
  }
  writes_.push_back(
      {storage, tensor, values_.current(tensor), static_cast<uint16_t>(argument), element, whole,
       counted, versionOf(tensor), use == ArgUse::Scratch, movedFirst});
}

// Note [Versions that move first]
// torch's own operators move the version of an argument after the kernel has written the argument.
// An operator made by torch.library.custom_op moves the version before its kernel, so the recorder
// sees a version that is one higher than expected. An unseen write could have the same effect. So
// in the operator's first call, the recorder takes the moved version for an unseen write, and
// watches whether the version moves after the kernel. If the version does not move, the operator
// moves versions first, and the recorder accepts the moved version in later calls. In a
// checkpointed call on the CPU, the recorder accepts the moved version in the first call too, since
// fingerprints of results would reveal an unseen write. Counters begin at 0. So for a counter that
// the recorder has not seen yet, such as that of a result of torch.zeros, the expected version is
// 0: see Note [Version stamps].
[[gnu::cold]] bool Arguments::acceptIfMovedFirst(const at::Tensor& tensor) {
  auto* known = values_.find(tensor);
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (known == nullptr || !counter.enabled()) {
    return false;
  }
  Value& value = **known;
  const bool isNew = !value.versions().know(counter);
  const uint32_t before = isNew ? 0 : value.versions().written().version;
  const bool isWriters = isNew || value.versions().isWriters(counter);
  if (!isWriters || counter.current_version() != before + 1) {
    return false;
  }
  if (op_.state.movesFirst.load(std::memory_order_relaxed) ||
      (trustCustomOps_ && tensor.is_cpu())) {
    value.versions().accept(counter);
  }
  return true;
}

// See Note [Custom operators]
[[gnu::cold]] bool Arguments::isUnfilled(const at::Tensor& tensor) const {
  const auto* known = values_.find(tensor);
  return known != nullptr && (*known)->facts().unfilled && coversStorage(tensor) &&
         fingerprint(tensor.storage(), FingerprintOf::Everything) == (*known)->home().fingerprint();
}

// Note [Writes to leaves]
// A write to a storage from outside the region (a parameter, a buffer, an input) is a side effect:
// the write happens once, in the forward, and the new state is a leaf. If ebb cannot recompute the
// old contents of a storage, a write that depends on them or leaves some of them also gives a leaf.
// The op's other results are leaves too, since a replay would write again.
bool Arguments::writesCanBeReplayed() const {
  return std::all_of(writes_.begin(), writes_.end(), [&](const Write& write) {
    const Value& before = *write.before;
    const bool toCpu = areOffCpu() && write.tensor.is_cpu();
    return write.sideEffect ||
           (before.facts().madeHere && !toCpu && (write.whole || before.recipe()));
  });
}

bool Arguments::add(c10::StorageImpl* storage) {
  const bool known = std::find(storages_.begin(), storages_.end(), storage) != storages_.end();
  if (!known) {
    storages_.push_back(storage);
  }
  return known;
}

}  // namespace ebb
