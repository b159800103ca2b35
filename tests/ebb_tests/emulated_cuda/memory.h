// Memory that kernels may touch, and what a grid's threads did to each byte of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "order.h"

namespace emulated {

enum class Access : unsigned char { Read, Write, Atomic };

class Memory {
 public:
  Memory();

  // Between any two are bytes that belong to nobody.
  void* allocate(size_t bytes, size_t misaligned, const std::string& name);
  void* allocateShared(size_t bytes, unsigned block);
  void freeLast();
  void freeShared();

  // A new grid: whatever earlier ones did comes before.
  void forget();

  bool has(const void* address) const;

  // Fails unless the bytes belong to one buffer and the access is ordered with all others to them.
  void access(const void* address, size_t bytes, Access kind, unsigned thread, const Order& order);

 private:
  // Moments of threads: 0 is none.
  struct Byte {
    uint32_t grid = 0;     // of which the rest is
    uint32_t written = 0;  // by whom last
    uint32_t read = 0;     // by whom, since; with kMany: in `readers_`
  };
  struct Buffer {
    std::string name;
    size_t begin, end;
    bool isShared;  // bytes of which nobody may read what nobody wrote
  };

  static constexpr size_t kBytes = 4 << 20;

  void noteRead(Byte& byte, unsigned thread, const Order& order);
  void checkReaders(const Byte& byte, size_t at, unsigned thread, const Order& order) const;
  [[noreturn]] void race(size_t at, uint32_t other, bool wrote, unsigned thread) const;
  std::string placeOf(size_t at) const;

  const std::unique_ptr<unsigned char[]> bytes_;
  const std::unique_ptr<Byte[]> did_;
  const std::unique_ptr<uint16_t[]> owner_;  // of each byte: one more than its place in `buffers_`
  std::vector<Buffer> buffers_;
  std::vector<Clock> readers_;
  size_t used_ = 0;
  size_t beforeShared_ = 0;  // buffers, when a grid began
  uint32_t grid_ = 1;
};

}  // namespace emulated
