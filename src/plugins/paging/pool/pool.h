// A pool of pages for rows of one width, and the tensors whose valid rows are in the pool.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

#include "ebb/export.h"
#include "plugins/paging/pool/mover.h"

namespace ebb {

struct PagePoolOptions {
  c10::Device device = c10::kCPU;
  int64_t rowBytes = 0;
  int64_t pageRows = 64;
  int64_t devicePages = 0;
  int64_t hostPages = 0;  // in pinned memory, used if the device pages are taken
  bool isStack = false;   // tensors come back in reverse order; pages of one row, no list of free
                          // pages
};

// Thrown if there is no pinned memory for a pool.
class EBB_API NoPinnedMemory : public c10::Error {
 public:
  using Error::Error;
};

// Uninitialised host memory for a pool on `device`; pinned unless `device` is the CPU. Throws
// NoPinnedMemory.
at::Tensor allocateForPool(at::IntArrayRef shape, at::ScalarType dtype, c10::Device device);

// A tensor that is or was in a pool.
struct PageTicket {
  at::Tensor state;      // int64, on the pool's device: a PageTicketState and its page ids
  PageRows whole{0, 0};  // of the tensor

  PageTicketState* get() const { return static_cast<PageTicketState*>(state.mutable_data_ptr()); }
};

class EBB_API PagePool {
 public:
  // Throws c10::NotImplementedError for a device without kernels, and NoPinnedMemory if there is
  // none for the second tier.
  explicit PagePool(const PagePoolOptions& options);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // A ticket for tensors of `totalRows` rows.
  PageTicket makeTicket(int64_t totalRows) const;

  // Copies the first `rows` rows of `source`, the memory of the ticket's tensor, into pages, on the
  // current stream; `rows` is one int64 on the pool's device. Neither waits nor allocates.
  void stash(PageTicket& ticket, const c10::Storage& source, const at::Tensor& rows);

  // Copies the rows back and gives the pages back, unless `fill` keeps the pages. After an error,
  // fills all rows of `destination` with the bytes `fill.failed`.
  void restore(PageTicket& ticket, const c10::Storage& destination, PageFill fill);

  // Gives the pages back, if the ticket has any. In a stack, all tensors stashed later must have
  // been given back before.
  void giveBack(const PageTicket& ticket);

  // Frees all pages, clears errors and invalidates tickets.
  void reset();

  // The bookkeeping on the pool's device: a PagePoolState, and the ids of free pages by tier.
  const at::Tensor& state() const { return state_; }
  const at::Tensor& freeIds(int tier) const { return free_[tier]; }

  // Two int64 on the pool's device: error bits, see pool/layout.h, and whether a tensor went to the
  // second tier.
  at::Tensor flags() const;

  // Size of the first tier's rows and of the pool's bookkeeping.
  size_t deviceBytes() const;

  // Size of the second tier, in pinned memory.
  size_t hostBytes() const;
  const PagePoolOptions& options() const { return options_; }

 private:
  void warmUp();
  PageTicketState* stateOf(const PageTicket& ticket, const c10::Storage& storage) const;
  PagePoolState* pool() const;
  void* stream() const;

  const PageMover& mover_;  // of the pool's device; launches kernels there whatever device is
                            // current
  const PagePoolOptions options_;
  at::Tensor rows_[2];  // bytes, by tier
  at::Tensor free_[2];  // ids, by tier
  at::Tensor state_;    // a PagePoolState
};

// True if ebb has a mover for such devices, perhaps not in this build.
bool hasPageMover(c10::DeviceType type);

// Throws c10::NotImplementedError if there is no mover, or none in this build.
const PageMover& pageMoverOf(c10::Device device);

// Sets the mover of the backend out of tree (PrivateUse1), before anything is paged there. `mover`
// is never freed; null removes the mover.
EBB_API void setPageMover(const PageMover* mover);

// Explains the error bits in words; empty for 0.
EBB_API std::string describePageErrors(int64_t errors);

// Tells the user how to avoid these errors, in one sentence.
const char* remedyOfPageErrors(int64_t errors);

}  // namespace ebb
