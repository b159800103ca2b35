// Moves rows between tensors and page pools: on the CPU, or with kernels on a CUDA device.
#pragma once

#include <cstdint>

#include "ebb/export.h"
#include "plugins/paging/pool/layout.h"

namespace ebb {

// Pointers refer to memory that the mover can use. Calls on one pool must not overlap: on a device,
// use one stream.
class PageMover {
 public:
  virtual ~PageMover() = default;

  // Copies the first `*rows` rows of `source` to pages.
  virtual void stash(
      PagePoolState* pool, PageTicketState* ticket, PageRows whole, const void* source,
      const int64_t* rows, void* stream) const = 0;

  // Copies the rows to `destination` and gives the pages back, unless `fill` keeps the pages.
  virtual void restore(
      PagePoolState* pool, PageTicketState* ticket, PageRows whole, void* destination,
      PageFill fill, void* stream) const = 0;

  // Gives the pages back, even if the rows were not restored.
  virtual void giveBack(PagePoolState* pool, PageTicketState* ticket, void* stream) const = 0;

  // Frees all pages, clears errors and invalidates tickets. Allocates nothing.
  virtual void reset(PagePoolState* pool, void* stream) const = 0;
};

EBB_API const PageMover& cpuPageMover();

}  // namespace ebb
