// Stands for a value's bytes while they are in host memory, on disk or in a page pool.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include "ebb/export.h"

namespace ebb {

class EBB_API Stash : public c10::intrusive_ptr_target {
 public:
  // Brings the bytes back to the device, for the current stream. `living` is the original storage,
  // if other code still refers to the storage: then nothing is copied.
  virtual c10::Storage fetch(const c10::Storage& living) = 0;

  // Like fetch(), but on another thread, before backward needs the bytes. Returns null if only
  // backward may fetch the bytes.
  virtual c10::Storage fetchAhead(const c10::Storage& living) = 0;

  // True if, after fetchAhead(), the engine must be told when the region's backward begins.
  virtual bool awaitsBackward() const {
    return false;
  }

  // False if fetch() gives padding rows other contents than the forward's: see Note [Dead rows].
  virtual bool isExact() const {
    return true;
  }

  // Called before a write to the original storage on the current stream.
  virtual void beforeWrite() = 0;
};

}  // namespace ebb
