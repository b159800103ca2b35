// Host memory that copies run to and from by themselves: dear to allocate, so it is kept.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <map>
#include <vector>

namespace ebb {

class Transfer;

// Not thread-safe: the engine's lock guards it.
class HostPool {
 public:
  explicit HostPool(Transfer& via) : via_(via) {
  }

  // At least `nbytes`, and at most a quarter more, see Note [Classes of sizes]; null if the limit
  // does not allow it or the system has none. With `anyway` there is no limit.
  c10::Storage take(size_t nbytes, c10::Device device, bool anyway = false);

  // The same from what is free; null if none fits.
  c10::Storage takeFree(size_t nbytes);

  // Memory from take() that no copy uses any more.
  void give(c10::Storage memory);

  // Bytes that may be held; memory in use is never taken away. With `retain` nor is memory that is
  // not: it is only used again.
  void setLimit(size_t bytes, bool retain);

  // Frees what is not in use, whether it was to be retained or not.
  void trim();

  size_t held() const {
    return held_;
  }
  size_t used() const {
    return used_;
  }

 private:
  static size_t classOf(size_t nbytes);
  c10::Storage takeFitting(size_t nbytes, size_t most);
  c10::Storage takeNew(size_t nbytes, c10::Device device, bool anyway);
  c10::Storage allocate(size_t nbytes, c10::Device device);
  void freeUntil(size_t bytes);

  Transfer& via_;                                     // whose memory it is
  std::map<size_t, std::vector<c10::Storage>> free_;  // by size
  bool retain_ = false;
  size_t limit_ = 0;  // bytes
  size_t held_ = 0;   // bytes, in use or not
  size_t used_ = 0;   // bytes in use
};

}  // namespace ebb
