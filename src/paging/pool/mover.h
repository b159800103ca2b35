// Moves rows between tensors and page pools: on the CPU, or with kernels on a CUDA device.
#pragma once

#include <cstdint>

#include "ebb/export.h"
#include "paging/pool/layout.h"

namespace ebb {

// Pointers are to the mover's kind of memory. Calls with one pool must come one after the other: on
// a device, on one stream.
class PageMover {
 public:
  virtual ~PageMover() = default;

  // Copies the first `*rows` rows of `source` to pages.
  virtual void stash(
      PagePoolState* pool,
      PageTicketState* ticket,
      PageRows whole,
      const void* source,
      const int64_t* rows,
      void* stream) const = 0;

  // Copies them back to `destination` and gives the pages back, unless they are to be kept.
  virtual void restore(
      PagePoolState* pool,
      PageTicketState* ticket,
      PageRows whole,
      void* destination,
      PageFill fill,
      void* stream) const = 0;

  // Gives the pages back, whether their rows have come back or not.
  virtual void giveBack(PagePoolState* pool, PageTicketState* ticket, void* stream) const = 0;

  // All pages are free and there is no error; tickets are stale. Allocates nothing.
  virtual void reset(PagePoolState* pool, void* stream) const = 0;
};

EBB_API const PageMover& cpuPageMover();

// That of the library libebb_cuda beside this one. Throws c10::NotImplementedError if ebb was built
// without nvcc.
EBB_API const PageMover& cudaPageMover();

}  // namespace ebb
