// The copies of the fake accelerator.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

namespace ebb {

using StreamId = int64_t;
using Clock = std::map<StreamId, uint64_t>;  // per stream: the copy up to which all are before

// The copies that were queued, and rules 1 and 2 of Note [The fake accelerator]. Not thread-safe:
// the accelerator's lock guards the queue.
class CopyQueue {
 public:
  // The memory of a storage, and who gets the memory when it is freed: an allocator gives memory of
  // the device only to the compute stream that had it.
  struct Side {
    const c10::Storage& storage;
    StreamId owner;
  };
  static constexpr StreamId kHost = -1;

  // Queues a copy on `stream` that runs after `after`. Returns the number of the copy.
  uint64_t push(Side to, Side from, size_t nbytes, StreamId stream, const Clock& after);

  // Reports the latest copy if it need not run after `tick` of the stream `compute`.
  void checkBehind(StreamId compute, uint64_t tick);

  bool allRan(const Clock& clock) const;
  void runBefore(const Clock& clock);
  void runFirst();

  // The host knows that the copies before `clock` are done.
  void hostKnows(const Clock& clock);

  // The number of copies that have not run.
  size_t size() const { return queue_.size(); }

  // The number of copies that have run on `stream`.
  size_t ranOn(StreamId stream) const {
    const auto known = counts_.find(stream);
    return known == counts_.end() ? 0 : known->second;
  }

  std::vector<std::string> takeViolations();

 private:
  struct Place {
    bool operator==(const Place&) const = default;

    const void* address;
    StreamId owner;
  };

  struct Copy {
    uint64_t number;
    StreamId stream;
    Clock after;  // copies that run before this copy
    c10::weak_intrusive_ptr<c10::StorageImpl> to;
    c10::weak_intrusive_ptr<c10::StorageImpl> from;
    Place toPlace;
    Place fromPlace;
    size_t nbytes;
  };

  void run(Copy copy);
  void checkOrder(const Copy& copy);

  uint64_t last_ = 0;                    // number of the latest copy
  std::deque<Copy> queue_;               // in the order of queueing
  std::deque<Copy> ran_;                 // those that the host does not know to be done
  std::map<StreamId, size_t> counts_;    // of copies that have run
  std::vector<std::string> violations_;  // in the order in which they were found
};

}  // namespace ebb
