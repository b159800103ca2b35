// Data that plug-ins attach to values, handles and graphs.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "ebb/export.h"

namespace ebb {

// Data that one plug-in attaches to a value, a handle or a graph. Lives as long as one of them.
struct Extra : c10::intrusive_ptr_target {
  // True if the recorder must keep the value until its region ends, even if the value's storage is
  // gone.
  virtual bool waitsForEnd() const {
    return false;
  }
  // Backward node number `node` unpacks the handle. Called without a lock, on backward's thread.
  virtual void unpacks(uint32_t node) {
  }
};
using ExtraPtr = c10::intrusive_ptr<Extra>;

// The number of a slot. A class derived from Extra has a static member `kSlot`, which takeSlot()
// gives when the library is loaded.
using SlotNumber = size_t;
constexpr SlotNumber kMostSlots = 5;
EBB_API SlotNumber takeSlot();

// The extras of a value or of a graph: at most one for each slot.
class Extras {
 public:
  template <class Part>
  Part* get() const {
    return static_cast<Part*>(all_[Part::kSlot].get());
  }
  template <class Part>
  void set(c10::intrusive_ptr<Part> extra) {
    all_[Part::kSlot] = std::move(extra);
  }
  bool waitForEnd() const {
    for (const auto& extra : all_) {
      if (extra && extra->waitsForEnd()) {
        return true;
      }
    }
    return false;
  }

 private:
  std::array<ExtraPtr, kMostSlots> all_;
};

}  // namespace ebb
