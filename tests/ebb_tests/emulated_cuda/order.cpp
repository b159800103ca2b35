#include "order.h"

#include <algorithm>

namespace emulated {

void Clock::join(const Clock& other) {
  for (unsigned thread = 0; thread < kMostThreads; ++thread) {
    of_[thread] = std::max(of_[thread], other.of_[thread]);
  }
}

void Order::begin(unsigned threads) {
  of_.assign(threads, {});
  told_.clear();
  for (unsigned thread = 0; thread < threads; ++thread) {
    of_[thread].seen[thread] = 1;
  }
}

void Order::fence(unsigned thread) {
  Thread& it = of_[thread];
  it.seen.join(it.observed);
  it.fenced = it.seen;
  ++it.seen[thread];
}

void Order::atomic(unsigned thread, const void* address) {
  Thread& it = of_[thread];
  const auto isThere = [&](const Told& told) { return told.address == address; };
  auto told = std::find_if(told_.begin(), told_.end(), isThere);
  if (told == told_.end()) {
    told = told_.insert(told_.end(), {address, {}});
  }
  it.observed.join(told->clock);
  told->clock.join(it.fenced);
  ++it.seen[thread];
}

void Order::barrier(const std::vector<unsigned>& threads) {
  Clock all;
  for (const unsigned thread : threads) {
    all.join(of_[thread].seen);
  }
  for (const unsigned thread : threads) {
    of_[thread].seen = all;
    ++of_[thread].seen[thread];
  }
}

}  // namespace emulated
