#include "fake_transfer.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

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

void freeHostBlock(void* context) {
  auto* block = static_cast<HostBlock*>(context);
  std::memset(block->memory, kPoison, block->nbytes);
  *block->total -= block->nbytes;
  std::free(block->memory);
  delete block;
}

}  // namespace

struct FakeTransfer::FakeEvent final : TransferEvent {
  explicit FakeEvent(Clock given) : clock(std::move(given)) {
  }
  Clock clock;
};

FakeTransfer::FakeTransfer(size_t hostBytes)
    : hostLimit_(hostBytes), hostBytes_(std::make_shared<size_t>(0)) {
}

bool FakeTransfer::isDevice(c10::Device device) const {
  return device.is_cpu();
}

c10::Stream FakeTransfer::computeStream(c10::Device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return streamOf(computeNumber());
}

// Of the calling thread; the lock is held.
FakeTransfer::StreamId FakeTransfer::computeNumber() const {
  const auto own = computeNumbers_.find(std::this_thread::get_id());
  return own == computeNumbers_.end() ? 0 : own->second;
}

c10::Stream FakeTransfer::outStream(c10::Device) {
  return streamOf(kOut);
}

c10::Stream FakeTransfer::inStream(c10::Device) {
  return streamOf(kIn);
}

bool FakeTransfer::isCompute(StreamId stream) const {
  return stream < kOut;
}

const FakeTransfer::Clock& FakeTransfer::clockOf(const TransferEvent& event) const {
  return static_cast<const FakeEvent&>(event).clock;
}

TransferEventPtr FakeTransfer::record(c10::Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (isCompute(stream.id())) {
    clocks_[stream.id()][stream.id()] = ++lastTick_;
  }
  return std::make_shared<const FakeEvent>(clocks_[stream.id()]);
}

void FakeTransfer::wait(c10::Stream stream, const TransferEventPtr& event) {
  std::lock_guard<std::mutex> lock(mutex_);
  Clock& clock = clocks_[stream.id()];
  for (const auto& [other, number] : clockOf(*event)) {
    clock[other] = std::max(clock[other], number);
  }
  // Ops run when they are called, so what they wait for must have run.
  if (isCompute(stream.id()) && !allRan(clockOf(*event))) {
    ++counts_.deviceWaits;
    runBefore(clockOf(*event));
  }
}

bool FakeTransfer::isDone(const TransferEvent& event) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counts_.asked;
  const bool done = allRan(clockOf(event));
  if (done) {
    hostKnows(clockOf(event));
  }
  return done;
}

void FakeTransfer::finish(const TransferEvent& event) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counts_.asked;
  if (!allRan(clockOf(event))) {
    ++counts_.hostWaits;
    runBefore(clockOf(event));
  }
  hostKnows(clockOf(event));
}

void FakeTransfer::hostKnows(const Clock& clock) {
  std::erase_if(ran_, [&](const Copy& copy) {
    const auto limit = clock.find(copy.stream);
    return limit != clock.end() && copy.number <= limit->second;
  });
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
      c10::Storage::use_byte_size_t(),
      nbytes,
      c10::DataPtr(block->memory, block, &freeHostBlock, c10::Device(c10::kCPU)));
}

void FakeTransfer::copy(
    const c10::Storage& to, const c10::Storage& from, size_t nbytes, c10::Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!isCompute(stream.id()), "the fake accelerator copies on streams of its own only");
  const auto weak = [](const c10::Storage& storage) {
    return c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage.unsafeGetStorageImpl());
  };
  Clock& clock = clocks_[stream.id()];
  const uint64_t number = ++lastCopy_;
  queue_.push_back(
      {number, stream.id(), clock, weak(to), weak(from), to.data(), from.data(), nbytes});
  checkOrder(queue_.back());
  checkBehindCompute(queue_.back(), from);
  tickOfLastCopy_ = lastTick_;
  clock[stream.id()] = number;
}

void FakeTransfer::packed(const c10::Storage& storage) {
  std::lock_guard<std::mutex> lock(mutex_);
  const StreamId stream = computeNumber();
  clocks_[stream][stream] = ++lastTick_;
  packings_[storage.unsafeGetStorageImpl()] = {stream, lastTick_};
}

// Rules 3 and 4: what compute streams have been given is counted in ticks.
void FakeTransfer::checkBehindCompute(const Copy& copy, const c10::Storage& from) {
  const auto [stream, tick] = copy.stream == kOut ? packings_.at(from.unsafeGetStorageImpl())
                                                  : Packing{computeNumber(), tickOfLastCopy_ + 1};
  const auto known = copy.after.find(stream);
  if (known == copy.after.end() || known->second < tick) {
    report(c10::str("copy ", copy.number, " does not run after what its compute stream was given"));
  }
}

// Two copies conflict if one writes what the other reads or writes.
void FakeTransfer::checkOrder(const Copy& copy) {
  const auto check = [&](const Copy& other) {
    const bool conflict = other.toAddress == copy.toAddress ||
                          other.fromAddress == copy.toAddress ||
                          other.toAddress == copy.fromAddress;
    if (other.number == copy.number || !conflict) {
      return;
    }
    const auto known = copy.after.find(other.stream);
    if (known == copy.after.end() || known->second < other.number) {
      report(
          c10::str(
              "copy ",
              copy.number,
              " conflicts with copy ",
              other.number,
              ", and nothing orders them"));
    }
  };
  std::for_each(queue_.begin(), queue_.end(), check);
  std::for_each(ran_.begin(), ran_.end(), check);
}

void FakeTransfer::report(std::string violation) {
  violations_.push_back(std::move(violation));
}

bool FakeTransfer::allRan(const Clock& clock) const {
  return std::none_of(queue_.begin(), queue_.end(), [&](const Copy& copy) {
    const auto limit = clock.find(copy.stream);
    return limit != clock.end() && copy.number <= limit->second;
  });
}

void FakeTransfer::runBefore(const Clock& clock) {
  // What a copy runs after was queued before it, so this order is a right one.
  std::deque<Copy> rest;
  std::vector<Copy> due;
  Clock needed = clock;
  for (auto copy = queue_.rbegin(); copy != queue_.rend(); ++copy) {
    const auto limit = needed.find(copy->stream);
    if (limit != needed.end() && copy->number <= limit->second) {
      for (const auto& [stream, number] : copy->after) {
        needed[stream] = std::max(needed[stream], number);
      }
      due.push_back(std::move(*copy));
    } else {
      rest.push_front(std::move(*copy));
    }
  }
  queue_ = std::move(rest);
  for (auto copy = due.rbegin(); copy != due.rend(); ++copy) {
    run(std::move(*copy));
  }
}

void FakeTransfer::advance(size_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (; count > 0 && !queue_.empty(); --count) {
    Copy copy = std::move(queue_.front());
    queue_.pop_front();
    run(std::move(copy));
  }
}

void FakeTransfer::run(Copy copy) {
  const auto to = copy.to.lock();
  const auto from = copy.from.lock();
  ++(copy.stream == kOut ? counts_.copiesOut : counts_.copiesIn);
  if (!to || to->data() != copy.toAddress || to->nbytes() < copy.nbytes) {
    report(c10::str("copy ", copy.number, " writes to memory that was freed"));
  } else if (!from || from->data() != copy.fromAddress || from->nbytes() < copy.nbytes) {
    report(c10::str("copy ", copy.number, " reads from memory that was freed"));
  } else if (copy.nbytes > 0) {
    std::memcpy(to->mutable_data(), from->data(), copy.nbytes);
  }
  ran_.push_back(std::move(copy));
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
  now.hostBytes = *hostBytes_;
  return now;
}

std::vector<std::string> FakeTransfer::takeViolations() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(violations_, {});
}

}  // namespace ebb
