#include "memory.h"

#include <algorithm>

namespace emulated {
namespace {

// A moment of a thread: its clock's time, which thread, and whether the access was atomic.
constexpr uint32_t kAtomic = 1U << 31;
constexpr uint32_t kMany = 1U << 31;  // of readers: the rest is a place in the list of clocks
constexpr unsigned kTimeBits = 24;
constexpr size_t kRedZone = 64;

uint32_t moment(unsigned thread, const Order& order) {
  return thread << kTimeBits | order.now(thread);
}

unsigned threadOf(uint32_t moment) { return (moment & ~kAtomic) >> kTimeBits; }

uint32_t timeOf(uint32_t moment) { return moment & ((1U << kTimeBits) - 1); }

bool isBefore(uint32_t moment, const Clock& seen) {
  return timeOf(moment) <= seen[threadOf(moment)];
}

std::string name(unsigned thread) {
  return "thread " + std::to_string(thread % here.threads.x) + " of block " +
         std::to_string(thread / here.threads.x);
}

}  // namespace

Memory::Memory()
    : bytes_(new unsigned char[kBytes]), did_(new Byte[kBytes]), owner_(new uint16_t[kBytes]{}) {}

void* Memory::allocate(size_t bytes, size_t misaligned, const std::string& name) {
  const auto base = reinterpret_cast<uintptr_t>(bytes_.get());
  const uintptr_t free = base + used_ + kRedZone;
  const size_t begin = (free + 255) / 256 * 256 + misaligned % 256 - base;
  if (begin + bytes + kRedZone > kBytes) {
    fail("the emulated device has no memory left");
  }
  buffers_.push_back({name, begin, begin + bytes, false});
  std::fill_n(owner_.get() + begin, bytes, static_cast<uint16_t>(buffers_.size()));
  used_ = begin + bytes;
  return bytes_.get() + begin;
}

void* Memory::allocateShared(size_t bytes, unsigned block) {
  void* memory = allocate(bytes, 0, "shared memory of block " + std::to_string(block));
  buffers_.back().isShared = true;
  return memory;
}

void Memory::freeLast() {
  const Buffer& last = buffers_.back();
  std::fill(owner_.get() + last.begin, owner_.get() + last.end, uint16_t{0});
  buffers_.pop_back();
  used_ = buffers_.empty() ? 0 : buffers_.back().end;
}

void Memory::freeShared() {
  while (buffers_.size() > beforeShared_) {
    freeLast();
  }
}

void Memory::forget() {
  ++grid_;
  readers_.clear();
  beforeShared_ = buffers_.size();
}

bool Memory::has(const void* address) const {
  const auto* at = static_cast<const unsigned char*>(address);
  return at >= bytes_.get() && at < bytes_.get() + kBytes;
}

void Memory::access(
    const void* address, size_t bytes, Access kind, unsigned thread, const Order& order) {
  const size_t begin = static_cast<const unsigned char*>(address) - bytes_.get();
  const uint16_t owner = owner_[begin];
  const Clock& seen = order.seen(thread);
  const uint32_t now = moment(thread, order);
  for (size_t at = begin; at < begin + bytes; ++at) {
    if (owner == 0 || owner_[at] != owner) {
      fail("out of bounds: " + name(thread) + " touches " + placeOf(at));
    }
    Byte& byte = did_[at];
    if (byte.grid != grid_) {
      byte = {grid_, 0, 0};
    }
    const bool bothAtomic = kind == Access::Atomic && (byte.written & kAtomic) != 0;
    if (byte.written != 0 && !bothAtomic && !isBefore(byte.written, seen)) {
      race(at, byte.written, true, thread);
    }
    if (kind == Access::Read) {
      if (buffers_[owner - 1].isShared && byte.written == 0) {
        fail("unwritten: " + name(thread) + " reads " + placeOf(at));
      }
      noteRead(byte, thread, order);
    } else {
      checkReaders(byte, at, thread, order);
      byte.written = now | (kind == Access::Atomic ? kAtomic : 0);
      byte.read = 0;
    }
  }
}

void Memory::noteRead(Byte& byte, unsigned thread, const Order& order) {
  const bool isMany = (byte.read & kMany) != 0;
  if (!isMany && (byte.read == 0 || threadOf(byte.read) == thread)) {
    byte.read = moment(thread, order);
    return;
  }
  if (!isMany) {
    Clock first;
    first[threadOf(byte.read)] = timeOf(byte.read);
    byte.read = kMany | static_cast<uint32_t>(readers_.size());
    readers_.push_back(first);
  }
  readers_[byte.read & ~kMany][thread] = order.now(thread);
}

void Memory::checkReaders(const Byte& byte, size_t at, unsigned thread, const Order& order) const {
  const Clock& seen = order.seen(thread);
  if ((byte.read & kMany) == 0) {
    if (byte.read != 0 && !isBefore(byte.read, seen)) {
      race(at, byte.read, false, thread);
    }
    return;
  }
  const Clock& readers = readers_[byte.read & ~kMany];
  for (unsigned other = 0; other < kMostThreads; ++other) {
    if (readers[other] > seen[other]) {
      race(at, other << kTimeBits, false, thread);
    }
  }
}

void Memory::race(size_t at, uint32_t other, bool wrote, unsigned thread) const {
  fail(
      "race: " + name(thread) + " touches " + placeOf(at) + ", which " + name(threadOf(other)) +
      (wrote ? " writes" : " reads") + ", in no order");
}

std::string Memory::placeOf(size_t at) const {
  for (const Buffer& buffer : buffers_) {
    if (at >= buffer.begin && at < buffer.end) {
      return "byte " + std::to_string(at - buffer.begin) + " of " + buffer.name;
    }
    if (at + kRedZone >= buffer.begin && at < buffer.end + kRedZone) {
      const auto from = static_cast<int64_t>(at) - static_cast<int64_t>(buffer.begin);
      return "byte " + std::to_string(from) + " of the " +
             std::to_string(buffer.end - buffer.begin) + " of " + buffer.name;
    }
  }
  return "memory that no buffer has";
}

}  // namespace emulated
