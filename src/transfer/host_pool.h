// Host memory that devices copy to and from asynchronously. The pool keeps freed memory, since
// allocation is expensive.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <map>
#include <vector>

namespace ebb {

class Transfer;

// Not thread-safe: the engine's lock guards the pool.
class HostPool {
 public:
  explicit HostPool(Transfer& via) : via_(via) {
  }

  // At least `nbytes`, and at most a quarter more; see Note [Classes of sizes]. Null if the limit
  // does not allow the size or the system has no memory. With `anyway` the limit does not apply.
  c10::Storage take(size_t nbytes, c10::Device device, bool anyway = false);

  // As take(), but only from free memory; null if nothing fits.
  c10::Storage takeFree(size_t nbytes);

  // Returns memory from take(); no copy may use the memory any more.
  void give(c10::Storage memory);

  // Limits the bytes allocated; the pool frees unused memory beyond. With `retain` the pool frees
  // nothing, and only uses memory again.
  void setLimit(size_t bytes, bool retain);

  // Frees all unused memory, even with `retain`.
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

  Transfer& via_;                                     // allocates the memory
  std::map<size_t, std::vector<c10::Storage>> free_;  // unused memory by size
  bool retain_ = false;
  size_t limit_ = 0;  // bytes
  size_t held_ = 0;   // bytes, in use or not
  size_t used_ = 0;   // bytes in use
};

}  // namespace ebb
