#include "plugins/verify/poison.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "plugins/verify/witness.h"

namespace ebb {
namespace {

// The context of a wrapped data pointer.
struct Wrapper {
  c10::DataPtr memory;  // the original pointer, with its own deleter
  size_t nbytes;        // size of `memory`
  bool floating;        // poison with NaN
  c10::weak_intrusive_ptr<Value> owner{c10::intrusive_ptr<Value>()};
};

// Returns null if there is no memory: a deleter must not raise.
c10::Storage copied(const Wrapper& wrapper) {
  try {
    c10::Storage copy(
        c10::Storage::use_byte_size_t(), static_cast<int64_t>(wrapper.nbytes),
        c10::GetDefaultCPUAllocator(), true);
    std::memcpy(copy.mutable_data(), wrapper.memory.get(), wrapper.nbytes);
    return copy;
  } catch (const c10::Error&) {
    return {};
  }
}

// Copies the bytes into the owner's witness before the bytes are lost. Needs no lock of the graph:
// a region that records on another thread does not touch a value whose storage has just lost its
// last reference.
void tellOwner(const Wrapper& wrapper) {
  const auto owner = wrapper.owner.lock();
  if (!owner || owner->home().isOverwritten() || !owner->versions().areUnmoved()) {
    return;
  }
  Witness& record = *owner->extra<Witness>();
  const auto isOver = [&] { return record.bytes || record.lost; };
  {
    std::lock_guard<std::mutex> lock(record.mutex);
    if (isOver()) {
      return;
    }
  }
  c10::Storage copy = copied(wrapper);
  std::lock_guard<std::mutex> lock(record.mutex);
  if (!isOver()) {
    record.lost = !copy;
    std::swap(record.bytes, copy);
  }
}

void poisonAndFree(void* context) {
  const std::unique_ptr<Wrapper> wrapper(static_cast<Wrapper*>(context));
  tellOwner(*wrapper);
  // All bits set are a NaN in every floating-point format that torch has.
  std::memset(wrapper->memory.get(), wrapper->floating ? 0xFF : 0xA5, wrapper->nbytes);
}

// True for memory of torch's CPU allocator, also if ebb counts the memory: see Note [Tensors in
// host memory are counted].
bool isFreedByTorch(const c10::DataPtr& memory) {
  return memory.get_deleter() == c10::GetDefaultCPUAllocator()->raw_deleter() ||
         memory.get_deleter() == c10::GetCPUAllocator()->raw_deleter();
}

Wrapper* wrapperOf(const c10::Storage& storage) {
  const c10::DataPtr& pointer = storage.data_ptr();
  const bool ours = pointer.get_deleter() == &poisonAndFree;
  return ours ? static_cast<Wrapper*>(pointer.get_context()) : nullptr;
}

}  // namespace

bool poisonWhenFreed(
    const c10::Storage& storage, c10::ScalarType dtype, const c10::intrusive_ptr<Value>& owner) {
  const auto weak = c10::weak_intrusive_ptr<Value>(owner);
  if (Wrapper* wrapper = wrapperOf(storage)) {
    wrapper->owner = weak;
    return true;
  }
  const c10::DataPtr& memory = storage.data_ptr();
  if (!storage.device().is_cpu() || memory.get() == nullptr || storage.nbytes() == 0 ||
      !isFreedByTorch(memory)) {
    return false;
  }
  void* data = storage.mutable_data();
  const bool floating = c10::isFloatingType(dtype) || c10::isComplexType(dtype);
  auto wrapper = std::make_unique<Wrapper>(
      Wrapper{c10::DataPtr(), storage.nbytes(), floating, std::move(weak)});
  Wrapper* context = wrapper.release();
  context->memory =
      storage.set_data_ptr(c10::DataPtr(data, context, &poisonAndFree, c10::Device(c10::kCPU)));
  return true;
}

void forgetOwner(const c10::Storage& storage) {
  if (Wrapper* wrapper = wrapperOf(storage)) {
    wrapper->owner.reset();
  }
}

}  // namespace ebb
