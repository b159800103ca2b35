// Activations from outside of a region that the region's backward needs.
#pragma once

#include <deque>
#include <unordered_map>
#include <unordered_set>

#include "plugins/report/step_trace.h"

namespace ebb {

// An example is the activation between two blocks. Several records may describe one storage: the
// record of the region that made the storage, and one record of each region that reads it. All of
// these records have the same address.
class InputRecords {
 public:
  explicit InputRecords(const std::deque<ValueRecord>& records);

  // True if `record` is about such an activation.
  static bool has(const ValueRecord& record);

  // True if the storage counts as kept in this record. A storage counts in one record only.
  bool isKept(const ValueRecord& record) const { return kept_.count(&record) > 0; }

  // True if eager would hold the storage for backward, and no record of an earlier region counts
  // it.
  bool isInEager(const ValueRecord& record) const;

  // The record of the region that made the storage, or that was the first to read it.
  const ValueRecord& first(const ValueRecord& record) const;

 private:
  // True if an earlier region has packed the same storage, so the storage was counted.
  bool wasPackedBefore(const ValueRecord& record) const;
  const ValueRecord* before(const ValueRecord& record) const;

  std::unordered_multimap<const void*, const ValueRecord*> records_;  // by the address of the bytes
  std::unordered_set<const ValueRecord*> kept_;
};

}  // namespace ebb
