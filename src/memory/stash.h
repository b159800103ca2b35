// The bytes of a value while they are not on the device.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include "ebb/export.h"

namespace ebb {

class EBB_API Stash : public c10::intrusive_ptr_target {
 public:
  // Brings the bytes back to the device, for the current stream. `living` is the original storage,
  // if other code still holds it: then nothing is copied.
  virtual c10::Storage fetch(const c10::Storage& living) = 0;

  // Like fetch(), but on another thread, before backward needs the bytes. Null: only backward may
  // fetch.
  virtual c10::Storage fetchAhead(const c10::Storage& living) = 0;

  // True if the engine must be told when backward arrives at bytes that were fetched ahead.
  virtual bool awaitsBackward() const {
    return false;
  }

  // Called before a write to the original storage on the current stream.
  virtual void beforeWrite() = 0;
};

}  // namespace ebb
