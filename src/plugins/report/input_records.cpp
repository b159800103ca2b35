#include "plugins/report/input_records.h"

namespace ebb {
namespace {

// True if the record is about a storage that was still in memory after its region.
bool isThere(const ValueRecord& record) {
  return record.fate == Fate::Saved || record.fate == Fate::Kept || record.fate == Fate::Escaped ||
         record.fate == Fate::Result;
}

}  // namespace

InputRecords::InputRecords(const std::deque<ValueRecord>& records) {
  for (const ValueRecord& record : records) {
    if (isThere(record) || has(record)) {
      records_.emplace(record.memory.address, &record);
    }
  }
  for (const auto& [address, record] : records_) {
    if (has(*record)) {
      const ValueRecord* other = before(*record);
      if (other == nullptr || other->fate == Fate::Result) {
        kept_.insert(other == nullptr ? record : other);
      }
    }
  }
}

bool InputRecords::has(const ValueRecord& record) {
  return record.fate == Fate::Outside && record.use.isActivation;
}

bool InputRecords::isInEager(const ValueRecord& record) const {
  return record.use.packed && (record.fate != Fate::Outside || has(record)) &&
         !wasPackedBefore(record);
}

const ValueRecord& InputRecords::first(const ValueRecord& record) const {
  const ValueRecord* other = has(record) ? before(record) : nullptr;
  return other == nullptr ? record : first(*other);
}

bool InputRecords::wasPackedBefore(const ValueRecord& record) const {
  const ValueRecord* other = has(record) ? before(record) : nullptr;
  return other != nullptr && (other->use.packed || wasPackedBefore(*other));
}

// The latest earlier record about the same storage; null if there is none. The record of a region's
// result counts, although that record ended with the region.
const ValueRecord* InputRecords::before(const ValueRecord& record) const {
  const ValueRecord* last = nullptr;
  const auto [begin, end] = records_.equal_range(record.memory.address);
  for (auto place = begin; place != end; ++place) {
    const ValueRecord& other = *place->second;
    const bool lasts = other.fate == Fate::Result || other.times.ended == kNever ||
                       other.times.ended > record.times.made;
    if (other.memory.nbytes == record.memory.nbytes && other.times.made < record.times.made &&
        lasts && (last == nullptr || other.times.made > last->times.made)) {
      last = &other;
    }
  }
  return last;
}

}  // namespace ebb
