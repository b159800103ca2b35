// A pool of pages for rows of one width, and tensors whose live rows are in it.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "paging/pool/mover.h"

namespace ebb {

struct PagePoolOptions {
  c10::Device device = c10::kCPU;
  int64_t rowBytes = 0;
  int64_t pageRows = 64;
  int64_t devicePages = 0;
  int64_t hostPages = 0;  // in pinned memory, for when the device has no room
  bool isStack = false;   // what is stashed last is given back first; pages of one row, no table
};

// What the pool's memory shows; reading it waits for the device.
struct PagePoolStatus {
  int64_t errors = 0;  // bits, see pool/layout.h
  bool spilled = false;
  int64_t epoch = 0;
  int64_t head[2] = {0, 0};         // by tier, as in PageTier
  int64_t tail[2] = {0, 0};         // by tier, too
  std::vector<int64_t> freeIds[2];  // the ids from head to tail; in a stack none
};

// There is no pinned memory for a pool.
class EBB_API NoPinnedMemory : public c10::Error {
 public:
  using Error::Error;
};

// Memory on the host for a pool on `device`, uninitialised: pinned if that is another. Throws
// NoPinnedMemory.
at::Tensor allocateForPool(at::IntArrayRef shape, at::ScalarType dtype, c10::Device device);

// A tensor that is in a pool, or was.
struct PageTicket {
  at::Tensor state;      // int64, on the pool's device: a PageTicketState and its page ids
  PageRows whole{0, 0};  // of the tensor
};

class EBB_API PagePool {
 public:
  // Throws c10::ValueError for sizes that make no sense, c10::NotImplementedError on a device for
  // which ebb has no kernels, and NoPinnedMemory if there is none for the second tier.
  explicit PagePool(const PagePoolOptions& options);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // A ticket for tensors of so many rows.
  PageTicket makeTicket(int64_t totalRows) const;

  // Copies the first `rows` rows of `tensor` into pages, on the current stream; `rows` is one int64
  // on the pool's device. Neither waits nor allocates. Throws c10::ValueError if the tensor is not
  // contiguous, or its rows do not fit the pool or the ticket.
  void stash(PageTicket& ticket, const at::Tensor& tensor, const at::Tensor& rows);

  // Copies them back and gives the pages back, unless `fill` says to keep them. After an error the
  // whole of `tensor` is filled with bytes that show.
  void restore(PageTicket& ticket, at::Tensor& tensor, PageFill fill);

  // Gives the pages back, if the ticket has any. In a stack: only when those of all that was
  // stashed later have been given back.
  void giveBack(PageTicket& ticket);

  // All pages are free again and errors forgotten; tickets are stale.
  void reset();

  PagePoolStatus status() const;

  // Two int64 on the pool's device: error bits, see pool/layout.h, and whether anything spilled.
  at::Tensor flags() const;

  // Of rows, in both tiers, and of what the pool knows of them; the second is in pinned memory.
  size_t deviceBytes() const;
  size_t hostBytes() const;
  const PagePoolOptions& options() const {
    return options_;
  }

 private:
  void warmUp();
  PageRows rowsOf(const at::Tensor& tensor, const PageTicket& ticket) const;
  PagePoolState* pool() const;
  void* stream() const;

  const PageMover& mover_;  // of the device, on which kernels are launched whichever is current
  const PagePoolOptions options_;
  at::Tensor rows_[2];  // bytes, by tier
  at::Tensor free_[2];  // ids, by tier
  at::Tensor state_;    // a PagePoolState
};

// What each page error means, in words; empty for no bit.
EBB_API std::string describePageErrors(int64_t errors);

}  // namespace ebb
