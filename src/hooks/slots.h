// Data that plug-ins attach to values, handles and graphs.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "ebb/export.h"

namespace ebb {

struct Graph;
struct Value;

// A saved tensor whose bytes backward is about to get.
struct Unpacked {
  const Graph& graph;
  Value* value;           // null: the handle holds the storage itself
  c10::Storage bytes;     // the bytes that backward would get
  bool onlyOurs = false;  // no other code can read `bytes`
};

// Data that one plug-in attaches to a value, a handle or a graph. Lives as long as one of them.
struct Extra : c10::intrusive_ptr_target {
  // True if the recorder must keep the value until its region ends, even if the value's storage is
  // gone.
  virtual bool waitsForEnd() const { return false; }
  // True if a replay or a stash gives back only a part of the value's bytes. Results that the other
  // part would change must then have no recipe (ResultVeto).
  virtual bool isPartial() const { return false; }
  // Returns the bytes that backward gets from the handle. Called under the graph's lock.
  virtual c10::Storage shown(Unpacked unpacked) { return std::move(unpacked.bytes); }
  // Backward node number `node` unpacks the handle. Called without a lock, on backward's thread.
  virtual void unpacks(uint32_t node) {}
};
using ExtraPtr = c10::intrusive_ptr<Extra>;

// The number of a slot. A class derived from Extra has a static member `kSlot`, which takeSlot()
// gives when the library is loaded.
using SlotNumber = size_t;
constexpr SlotNumber kMostSlots = 12;
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
  bool isPartial() const {
    for (const auto& extra : all_) {
      if (extra && extra->isPartial()) {
        return true;
      }
    }
    return false;
  }

 private:
  std::array<ExtraPtr, kMostSlots> all_;
};

}  // namespace ebb
