#include "plugins/report/shelf.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <iterator>
#include <mutex>
#include <vector>

#include "ebb/report.h"

namespace ebb {
namespace {

struct Shelf {
  std::mutex mutex;                 // guards all members below
  std::deque<JournalPtr> journals;  // the current step's journal is last
  uint64_t step = 0;
  JournalPtr profile;              // replaces the current step's journal; null: no profile
  std::atomic<uint32_t> steps{0};  // number of kept reports; 0: reports are not recorded
  std::atomic<bool> on{false};     // reports or a profile are recorded

  // Begins a journal for the current step, and moves surplus journals into `old`. The caller
  // destroys `old` after unlocking: see Note [Locks and the GIL].
  void begin(std::vector<JournalPtr>& old) {
    journals.push_back(std::make_shared<Journal>(step));
    while (journals.size() > steps.load() + size_t{1}) {  // 1 more: the last may be incomplete
      // Journals without records go first, such as those of steps that a profile recorded.
      const auto last = std::prev(journals.end());
      auto next = std::find_if(journals.begin(), last, std::mem_fn(&Journal::isEmpty));
      next = next == last ? journals.begin() : next;
      old.push_back(std::move(*next));
      journals.erase(next);
    }
  }
};

Shelf& shelf() {
  static auto* instance = new Shelf;
  return *instance;
}

}  // namespace

JournalPtr currentJournal() {
  Shelf& all = shelf();
  if (!all.on.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  std::vector<JournalPtr> old;
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.profile) {
    return all.profile;
  }
  if (all.journals.empty()) {
    all.begin(old);
  }
  return all.journals.back();
}

void putJournalInPlace(JournalPtr profile) {
  Shelf& all = shelf();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.profile.swap(profile);  // the previous profile is destroyed after the lock is released
  all.on.store(all.profile || all.steps.load() > 0);
}

void journalStepBegins(uint64_t step) {
  Shelf& all = shelf();
  std::vector<JournalPtr> old;
  std::lock_guard<std::mutex> lock(all.mutex);
  all.step = step;
  if (all.steps.load() > 0) {
    all.begin(old);
  }
}

uint32_t setReporting(uint32_t steps) {
  Shelf& all = shelf();
  std::vector<JournalPtr> old;
  std::lock_guard<std::mutex> lock(all.mutex);
  const uint32_t before = all.steps.exchange(steps);
  all.on.store(steps > 0 || all.profile);
  if (before == 0 && steps > 0) {
    all.begin(old);  // earlier records of this step belong to another report
  }
  return before;
}

bool isReporting() {
  return shelf().steps.load(std::memory_order_relaxed) > 0;
}

void clearReports() {
  std::deque<JournalPtr> old;
  std::lock_guard<std::mutex> lock(shelf().mutex);
  old.swap(shelf().journals);
}

std::vector<Report> reports() {
  std::deque<JournalPtr> journals;
  {
    std::lock_guard<std::mutex> lock(shelf().mutex);
    journals = shelf().journals;
  }
  std::vector<Report> all;
  for (const JournalPtr& journal : journals) {
    all.push_back(journal->report());
  }
  return all;
}

}  // namespace ebb
