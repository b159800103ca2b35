#include "record/arguments.h"

#include <algorithm>

#include "graph/parts_inside.h"
#include "graph/recipe.h"
#include "intercept/each_tensor.h"
#include "intercept/key.h"
#include "record/value_map.h"

namespace ebb {

Arguments::Arguments(const Call& call, ValueMap& values) : op_(call.op), values_(values) {
  if (op_.conditionArgument >= 0) {
    const c10::IValue& given = call.arguments[op_.conditionArgument];
    condition_ = op_.conditionIsFlag ? given.isBool() && given.toBool()
                                     : given.isScalar() && given.toScalar().equal(0);
  }
  forEachTensor(
      call.arguments, op_.types, [&](const at::Tensor& tensor, size_t i, int32_t element) {
        scan(tensor, i, element);
      });
}

void Arguments::scan(const at::Tensor& tensor, size_t argument, int32_t element) {
  const ArgUse use = useOf(argument);
  const auto index = static_cast<uint16_t>(argument);
  if (!tensor.defined()) {
    if (element >= 0) {
      tensors_.push_back({&tensor, {}, ArgUse::Read, index, element});
    }
    return;
  }
  if (!isRecordable(tensor)) {
    recordable_ = false;
    if (use != ArgUse::Read && use != ArgUse::Unread) {
      for (const at::Tensor& part : partsInside(tensor)) {
        addWrite(part, argument, element, false);
      }
    }
    return;
  }
  GeometryFlags flags = geometryFlags(tensor);
  flags.requiresGrad = (op_.readsRequiresGrad || op_.untrusted) && tensor.requires_grad();
  shapeCount_ += Input::shapeCount(flags, use);
  tensors_.push_back({&tensor, flags, use, index, element});
  offCpu_ |= !flags.device.is_cpu();
  storages_.push_back(storageOf(tensor));
  if (use != ArgUse::Read && use != ArgUse::Unread) {
    addWrite(tensor, argument, element, op_.counted[argument] && !insidePythonDispatch());
  }
}

[[gnu::noinline]] void Arguments::addWrite(
    const at::Tensor& tensor, size_t argument, int32_t element, bool counted) {
  const ArgUse use = useOf(argument);
  const bool whole = use == ArgUse::Overwrite && coversStorage(tensor);
  c10::StorageImpl* storage = storageOf(tensor);
  const auto same = std::find_if(
      writes_.begin(), writes_.end(), [&](const Write& write) { return write.storage == storage; });
  if (same != writes_.end()) {
    same->whole &= whole;
    same->counted &= counted;
    same->sideEffect &= use == ArgUse::Scratch;
    return;
  }
  writes_.push_back(
      {storage,
       tensor,
       values_.current(tensor),
       static_cast<uint16_t>(argument),
       element,
       whole,
       counted,
       versionOf(tensor),
       use == ArgUse::Scratch});
}

// Note [Writes to leaves]
// A write to a storage that was not made inside the region (a parameter, a buffer, an input) is a
// side effect: it happens once, in the forward, and the new state is a leaf. So is the state after
// a write into memory whose old contents no recipe can make. The op's other results then are leaves
// too, since running it again would write again.
bool Arguments::writesCanBeReplayed() const {
  return std::all_of(writes_.begin(), writes_.end(), [&](const Write& write) {
    const Value& before = *write.before;
    const bool toCpu = offCpu_ && write.tensor.is_cpu();
    return write.sideEffect || (before.madeHere && !toCpu && (write.whole || before.recipe));
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
