#include "record/made_values.h"

#include <atomic>
#include <bit>

namespace ebb {
namespace {

constexpr size_t kSome = 4;

std::atomic<size_t> lookedAt{0};

}  // namespace

size_t valuesLookedAt() {
  return lookedAt.load(std::memory_order_relaxed);
}

// Note [When dead values are looked for]
// A kept value lives at least as long as the map names it, though everything that read it may be
// gone: without gradients that is every kept value. So the map is swept when it has doubled, and
// whenever so many bytes have been kept since the last time. On a GPU each weight is as large as
// that, and a region may know ten thousand values, so such a sweep looks at the latest ones only:
// each second one at twice as many as the one before it, each fourth at four times as many, and so
// on. What is made dies young, and nothing is dead whose consumers are not, so it is enough to look
// at the latest, latest first. An op pays for a few values, a few more each time that the map
// doubles; and what has died is found when half as much has been made again as had been in its
// life, or sooner.
size_t MadeValues::nextWindow() {
  if (isFull()) {
    return size();
  }
  // Twice as many as were made since the last sweep that went so far, and some.
  const auto level = std::min<size_t>(std::countr_zero(++sweeps_), madeAt_.size() - 1);
  const size_t inAll = forgotten_ + size();
  const size_t window = 2 * (inAll - madeAt_[level]) + (kSome << level);
  const bool all = window >= size();
  std::fill_n(madeAt_.begin(), all ? madeAt_.size() : level + 1, inAll);
  return all ? size() : window;
}

size_t MadeValues::forgetMarked(size_t window) {
  const bool full = isFull() && window == size();
  const auto first = entries_.end() - static_cast<std::ptrdiff_t>(window);
  const auto isMarked = [](const Entry& entry) { return entry.first == nullptr; };
  const auto end = std::remove_if(first, entries_.end(), isMarked);
  const auto left = static_cast<size_t>(end - first);
  entries_.erase(end, entries_.end());
  forgotten_ += window - left;
  if (full) {
    fullAt_ = std::max(kFewest, 2 * size());
  }
  lookedAt.fetch_add(window, std::memory_order_relaxed);
  return left;
}

void MadeValues::clear() {
  if (entries_.capacity() > 8 * (entries_.size() + kFewest)) {
    std::vector<Entry>().swap(entries_);
  }
  entries_.clear();
  fullAt_ = kFewest;
  forgotten_ = sweeps_ = 0;
  madeAt_.fill(0);
}

}  // namespace ebb
