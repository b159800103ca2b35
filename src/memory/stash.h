// Bytes of a value that are elsewhere than on the device.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include "ebb/export.h"

namespace ebb {

class EBB_API Stash : public c10::intrusive_ptr_target {
 public:
  // The bytes on the device, for the current stream. `living` is the storage that they were in if
  // somebody else holds it: then nothing is copied.
  virtual c10::Storage fetch(const c10::Storage& living) = 0;

  // The same before backward asks, on another thread. Null: not before it does.
  virtual c10::Storage fetchAhead(const c10::Storage& living) = 0;

  // Whether its engine is told when backward arrives at what was fetched ahead, and needs it then.
  virtual bool awaitsBackward() const {
    return false;
  }

  // The storage that they were in is about to be written on the current stream.
  virtual void beforeWrite() = 0;
};

}  // namespace ebb
