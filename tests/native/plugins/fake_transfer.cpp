#include "fake_transfer.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace ebb {
namespace {

constexpr int kPoison = 0xA5;
constexpr int64_t kOut = 1000;  // numbers of our streams; compute streams have smaller ones
constexpr int64_t kIn = 1001;

c10::Stream streamOf(int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCPU), number);
}

// Memory that is poisoned before it is freed, and tells `bytes`.
struct HostBlock {
  void* memory;
  size_t nbytes;
  std::shared_ptr<size_t> total;
};

struct FakeEvent final : TransferEvent {
  FakeEvent(FakeTransfer& fake, Clock given) : fake(fake), clock(std::move(given)) {}
  bool isDone() const override { return fake.isDone(clock); }
  void wait() const override { fake.finish(clock); }

  FakeTransfer& fake;
  const Clock clock;
};

bool isCompute(StreamId stream) { return stream < kOut; }

void freeHostBlock(void* context) {
  auto* block = static_cast<HostBlock*>(context);
  std::memset(block->memory, kPoison, block->nbytes);
  *block->total -= block->nbytes;
  std::free(block->memory);
  delete block;
}

}  // namespace

FakeTransfer::FakeTransfer(size_t hostBytes)
    : hostLimit_(hostBytes), hostBytes_(std::make_shared<size_t>(0)) {}

bool FakeTransfer::isDevice(c10::Device device) const { return device.is_cpu(); }

c10::Stream FakeTransfer::computeStream(c10::Device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return streamOf(computeNumber());
}

// Of the calling thread; the lock is held.
StreamId FakeTransfer::computeNumber() const {
  const auto own = computeNumbers_.find(std::this_thread::get_id());
  return own == computeNumbers_.end() ? 0 : own->second;
}

c10::Stream FakeTransfer::outStream(c10::Device) { return streamOf(kOut); }

c10::Stream FakeTransfer::inStream(c10::Device) { return streamOf(kIn); }

TransferEventPtr FakeTransfer::record(c10::Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (isCompute(stream.id())) {
    clocks_[stream.id()][stream.id()] = ++lastTick_;
  }
  return std::make_shared<const FakeEvent>(*this, clocks_[stream.id()]);
}

void FakeTransfer::wait(c10::Stream stream, const TransferEventPtr& event) {
  std::lock_guard<std::mutex> lock(mutex_);
  Clock& clock = clocks_[stream.id()];
  const Clock& awaited = static_cast<const FakeEvent&>(*event).clock;
  for (const auto& [other, number] : awaited) {
    clock[other] = std::max(clock[other], number);
  }
  // Ops run when they are called, so what they wait for must have run.
  if (isCompute(stream.id()) && !queue_.allRan(awaited)) {
    ++counts_.deviceWaits;
    queue_.runBefore(awaited);
  }
}

bool FakeTransfer::isDone(const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counts_.asked;
  const bool done = queue_.allRan(clock);
  if (done) {
    queue_.hostKnows(clock);
  }
  return done;
}

void FakeTransfer::finish(const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counts_.asked;
  if (!queue_.allRan(clock)) {
    ++counts_.hostWaits;
    queue_.runBefore(clock);
  }
  queue_.hostKnows(clock);
}

void FakeTransfer::failAllocationsAfter(size_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  allocationsLeft_ = count;
}

void FakeTransfer::onDeviceAllocation(std::function<void()> told) {
  std::lock_guard<std::mutex> lock(mutex_);
  onDeviceAllocation_ = std::move(told);
}

c10::Storage FakeTransfer::allocateOnDevice(size_t nbytes, c10::Device) {
  std::function<void()> told;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    told = onDeviceAllocation_;
    TORCH_CHECK_WITH(
        OutOfMemoryError, allocationsLeft_ > 0, "the fake accelerator's device has no memory left");
    --allocationsLeft_;
  }
  if (told) {
    told();
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, c10::GetAllocator(c10::kCPU), true);
  if (nbytes > 0) {
    std::memset(storage.mutable_data(), kPoison, nbytes);
  }
  return storage;
}

c10::Storage FakeTransfer::allocateOnHost(size_t nbytes, c10::Device) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(*hostBytes_ + nbytes <= hostLimit_, "the fake accelerator's host has no memory left");
  ++counts_.hostAllocations;
  *hostBytes_ += nbytes;
  auto* block = new HostBlock{std::malloc(std::max<size_t>(nbytes, 1)), nbytes, hostBytes_};
  std::memset(block->memory, kPoison, nbytes);
  return c10::Storage(
      c10::Storage::use_byte_size_t(), nbytes,
      c10::DataPtr(block->memory, block, &freeHostBlock, c10::Device(c10::kCPU)));
}

void FakeTransfer::copy(
    const c10::Storage& to, const c10::Storage& from, size_t nbytes, c10::Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!isCompute(stream.id()), "the fake accelerator copies on streams of its own only");
  Clock& clock = clocks_[stream.id()];
  // Rules 3 and 4: what compute streams have been given is counted in ticks.
  const bool isOut = stream.id() == kOut;
  const auto [compute, tick] = isOut ? packings_.at(from.unsafeGetStorageImpl())
                                     : Packing{computeNumber(), tickOfLastCopy_ + 1};
  const uint64_t number = queue_.push(
      {to, isOut ? CopyQueue::kHost : compute}, {from, isOut ? compute : CopyQueue::kHost}, nbytes,
      stream.id(), clock);
  queue_.checkBehind(compute, tick);
  tickOfLastCopy_ = lastTick_;
  clock[stream.id()] = number;
}

void FakeTransfer::packed(const c10::Storage& storage) {
  std::lock_guard<std::mutex> lock(mutex_);
  const StreamId stream = computeNumber();
  clocks_[stream][stream] = ++lastTick_;
  packings_[storage.unsafeGetStorageImpl()] = {stream, lastTick_};
}

void FakeTransfer::advance(size_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (; count > 0 && queue_.size() > 0; --count) {
    queue_.runFirst();
  }
}

void FakeTransfer::useComputeStream(int64_t number) {
  TORCH_CHECK(number >= 0 && number < kOut, "a compute stream has a number from 0 to ", kOut - 1);
  std::lock_guard<std::mutex> lock(mutex_);
  computeNumbers_[std::this_thread::get_id()] = number;
}

FakeTransfer::Counts FakeTransfer::counts() {
  std::lock_guard<std::mutex> lock(mutex_);
  Counts now = counts_;
  now.queued = queue_.size();
  now.copiesOut = queue_.ranOn(kOut);
  now.copiesIn = queue_.ranOn(kIn);
  now.hostBytes = *hostBytes_;
  return now;
}

std::vector<std::string> FakeTransfer::takeViolations() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.takeViolations();
}

}  // namespace ebb
