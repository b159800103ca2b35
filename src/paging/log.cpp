#include "paging/log.h"

#include <algorithm>

namespace ebb {
namespace {

// Current use of one pool.
struct Use {
  struct Stacked {
    size_t stash;
    int64_t rows;
    bool gone;
  };
  int64_t pages = 0;
  int64_t rows = 0;
  int64_t padded = 0;
  int64_t stackRows = 0;
  std::vector<Stacked> stack;

  void push(size_t stash, int64_t addedPages, int64_t addedRows, int64_t total) {
    pages += addedPages;
    rows += addedRows;
    padded += total;
    stackRows += addedRows;
    stack.push_back({stash, addedRows, false});
  }

  void remove(size_t stash, int64_t removedPages, int64_t removedRows, int64_t total) {
    pages -= removedPages;
    rows -= removedRows;
    padded -= total;
    for (auto& stacked : stack) {
      stacked.gone |= stacked.stash == stash;
    }
    for (; !stack.empty() && stack.back().gone; stack.pop_back()) {
      stackRows -= stack.back().rows;
    }
  }
};

}  // namespace

size_t PageLog::stashed(
    const PoolKey& pool, int64_t rows, int64_t total, const ScheduleEntry& entry) {
  const size_t number = events_.size();
  events_.push_back({pool, rows, total, entry, number});
  return number;
}

void PageLog::gone(size_t number) {
  if (number < events_.size()) {
    Event event = events_[number];
    event.stash = number;
    events_.push_back(event);
  }
}

PageNeeds PageLog::needs(
    int64_t pageRows, const std::function<bool(const ScheduleEntry&)>& skipped) const {
  std::map<PoolKey, PageNeed> needs;
  std::map<PoolKey, Use> uses;
  for (size_t place = 0; place < events_.size(); ++place) {
    const Event& event = events_[place];
    if (skipped(event.entry)) {
      continue;
    }
    Use& use = uses[event.pool];
    const int64_t pages = (event.rows + pageRows - 1) / pageRows;
    if (event.stash == place) {
      use.push(event.stash, pages, event.rows, event.total);
    } else {
      use.remove(event.stash, pages, event.rows, event.total);
    }
    PageNeed& need = needs[event.pool];
    need.pages = std::max(need.pages, use.pages);
    need.stackRows = std::max(need.stackRows, use.stackRows);
    need.rows = std::max(need.rows, use.rows);
    need.padded = std::max(need.padded, use.padded);
    need.largest = std::max(need.largest, event.rows);
  }
  return needs;
}

}  // namespace ebb
