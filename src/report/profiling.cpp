#include "ebb/profile.h"

#include <c10/util/Exception.h>

#include <memory>
#include <mutex>
#include <utility>

#include "report/journal.h"
#include "report/memory_log.h"

namespace ebb {
namespace {

struct Going {
  std::mutex mutex;  // guards what follows
  JournalPtr journal;
  std::shared_ptr<MemoryLog> memory;
};

Going& going() {
  static auto* instance = new Going;
  return *instance;
}

}  // namespace

void beginProfile() {
  Going& now = going();
  std::lock_guard<std::mutex> lock(now.mutex);
  TORCH_CHECK(!now.journal, "ebb: a profile has begun already");
  TORCH_CHECK(
      !MemoryLog::isTaken(),
      "ebb: torch's profiler runs on this thread, and a profile takes its place: end it before");
  now.journal = std::make_shared<Journal>(0, Journal::For::Profile);
  now.memory = std::make_shared<MemoryLog>(
      [journal = now.journal] { return static_cast<double>(journal->now()) * 1e-6; });
  now.memory->install(now.memory);
  putJournalInPlace(now.journal);
}

Profile endProfile() {
  Going& now = going();
  JournalPtr journal;
  std::shared_ptr<MemoryLog> memory;
  {
    std::lock_guard<std::mutex> lock(now.mutex);
    TORCH_CHECK(now.journal, "ebb: no profile has begun");
    now.memory->remove();
    putJournalInPlace(nullptr);
    journal = std::exchange(now.journal, nullptr);
    memory = std::exchange(now.memory, nullptr);
  }
  Profile found = journal->profile();
  found.allocations = memory->take();
  return found;
}

}  // namespace ebb
