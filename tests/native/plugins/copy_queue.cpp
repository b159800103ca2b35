#include "copy_queue.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace ebb {

uint64_t CopyQueue::push(Side to, Side from, size_t nbytes, StreamId stream, const Clock& after) {
  const auto weak = [](Side side) {
    auto* storage = side.storage.unsafeGetStorageImpl();
    return c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
  };
  const auto place = [](Side side) { return Place{side.storage.data(), side.owner}; };
  queue_.push_back({++last_, stream, after, weak(to), weak(from), place(to), place(from), nbytes});
  checkOrder(queue_.back());
  return last_;
}

void CopyQueue::checkBehind(StreamId compute, uint64_t tick) {
  const Copy& copy = queue_.back();
  const auto known = copy.after.find(compute);
  if (known == copy.after.end() || known->second < tick) {
    violations_.push_back(
        c10::str("copy ", copy.number, " does not run after what its compute stream was given"));
  }
}

// Two copies conflict if one writes what the other reads or writes.
void CopyQueue::checkOrder(const Copy& copy) {
  const auto check = [&](const Copy& other) {
    const bool conflict = other.toPlace == copy.toPlace || other.fromPlace == copy.toPlace ||
                          other.toPlace == copy.fromPlace;
    if (other.number == copy.number || !conflict) {
      return;
    }
    const auto known = copy.after.find(other.stream);
    if (known == copy.after.end() || known->second < other.number) {
      violations_.push_back(
          c10::str(
              "copy ", copy.number, " conflicts with copy ", other.number,
              ", and nothing orders them"));
    }
  };
  std::for_each(queue_.begin(), queue_.end(), check);
  std::for_each(ran_.begin(), ran_.end(), check);
}

bool CopyQueue::allRan(const Clock& clock) const {
  return std::none_of(queue_.begin(), queue_.end(), [&](const Copy& copy) {
    const auto limit = clock.find(copy.stream);
    return limit != clock.end() && copy.number <= limit->second;
  });
}

void CopyQueue::runBefore(const Clock& clock) {
  // Each copy follows the copies that it waits for in the queue. So the loop collects due copies
  // from the back, and runs them from the front.
  std::deque<Copy> rest;
  std::vector<Copy> due;
  Clock needed = clock;
  for (auto copy = queue_.rbegin(); copy != queue_.rend(); ++copy) {
    const auto limit = needed.find(copy->stream);
    if (limit != needed.end() && copy->number <= limit->second) {
      for (const auto& [stream, number] : copy->after) {
        needed[stream] = std::max(needed[stream], number);
      }
      due.push_back(std::move(*copy));
    } else {
      rest.push_front(std::move(*copy));
    }
  }
  queue_ = std::move(rest);
  for (auto copy = due.rbegin(); copy != due.rend(); ++copy) {
    run(std::move(*copy));
  }
}

void CopyQueue::runFirst() {
  Copy copy = std::move(queue_.front());
  queue_.pop_front();
  run(std::move(copy));
}

void CopyQueue::run(Copy copy) {
  const auto to = copy.to.lock();
  const auto from = copy.from.lock();
  ++counts_[copy.stream];
  if (!to || to->data() != copy.toPlace.address || to->nbytes() < copy.nbytes) {
    violations_.push_back(c10::str("copy ", copy.number, " writes to memory that was freed"));
  } else if (!from || from->data() != copy.fromPlace.address || from->nbytes() < copy.nbytes) {
    violations_.push_back(c10::str("copy ", copy.number, " reads from memory that was freed"));
  } else if (copy.nbytes > 0) {
    std::memcpy(to->mutable_data(), from->data(), copy.nbytes);
  }
  ran_.push_back(std::move(copy));
}

void CopyQueue::hostKnows(const Clock& clock) {
  std::erase_if(ran_, [&](const Copy& copy) {
    const auto limit = clock.find(copy.stream);
    return limit != clock.end() && copy.number <= limit->second;
  });
}

std::vector<std::string> CopyQueue::takeViolations() { return std::exchange(violations_, {}); }

}  // namespace ebb
