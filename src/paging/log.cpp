#include "paging/log.h"

#include <algorithm>
#include <utility>

namespace ebb {
namespace {

// The use of one pool at one point of the recorded step.
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

void PageLog::stepBegins() {
  if (std::exchange(next_, false)) {
    recording_ = true;
    records_.clear();
  }
}

size_t PageLog::stashed(
    const PoolKey& pool, int64_t rows, int64_t total, const ScheduleEntry& entry) {
  const size_t number = records_.size();
  records_.push_back({pool, rows, total, entry, number});
  return number;
}

void PageLog::gone(size_t number) {
  if (number < records_.size()) {
    Record record = records_[number];
    record.stash = number;
    records_.push_back(record);
  }
}

PageNeeds PageLog::takeNeeds(
    int64_t pageRows, const std::function<bool(const ScheduleEntry&)>& skipped) {
  std::map<PoolKey, PageNeed> needs;
  std::map<PoolKey, Use> uses;
  for (size_t place = 0; place < records_.size(); ++place) {
    const Record& record = records_[place];
    if (skipped(record.entry)) {
      continue;
    }
    Use& use = uses[record.pool];
    const int64_t pages = (record.rows + pageRows - 1) / pageRows;
    if (record.stash == place) {
      use.push(record.stash, pages, record.rows, record.total);
    } else {
      use.remove(record.stash, pages, record.rows, record.total);
    }
    PageNeed& need = needs[record.pool];
    need.pages = std::max(need.pages, use.pages);
    need.stackRows = std::max(need.stackRows, use.stackRows);
    need.rows = std::max(need.rows, use.rows);
    need.padded = std::max(need.padded, use.padded);
    need.largest = std::max(need.largest, record.rows);
  }
  records_.clear();
  return needs;
}

}  // namespace ebb
