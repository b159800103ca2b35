#include "plugins/paging/log.h"

#include <ATen/ceil_div.h>

#include <utility>

namespace ebb {

void PageLog::stepBegins() {
  if (std::exchange(recordNext, false)) {
    isRecording = true;
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
  struct Use {
    PageNeed now;               // after the records so far; `largest`: of the last record
    std::vector<size_t> stack;  // numbers of the tensors
  };
  PageNeeds needs;
  std::map<PoolKey, Use> uses;
  std::vector<bool> isGone(records_.size());
  for (size_t number = 0; number < records_.size(); ++number) {
    const Record& record = records_[number];
    if (skipped(record.entry)) {
      continue;
    }
    auto& [now, stack] = uses[record.pool];
    const bool isNew = record.stash == number;
    const int64_t sign = isNew ? 1 : -1;
    now.pages += sign * at::ceil_div(record.rows, pageRows);
    now.rows += sign * record.rows;
    now.padded += sign * record.total;
    now.largest = record.rows;
    if (isNew) {
      now.stackRows += record.rows;
      stack.push_back(number);
    }
    isGone[record.stash] = !isNew;
    for (; !stack.empty() && isGone[stack.back()]; stack.pop_back()) {
      now.stackRows -= records_[stack.back()].rows;
    }
    needs[record.pool].raiseTo(now);
  }
  records_.clear();
  return needs;
}

}  // namespace ebb
