#include "ebb/profile.h"

#include <c10/util/Exception.h>

#include <memory>
#include <mutex>
#include <utility>

#include "report/journal.h"
#include "report/memory_log.h"
#include "report/shelf.h"

namespace ebb {
namespace {

struct Going {
  JournalPtr journal;  // null: no profile has begun
  std::shared_ptr<MemoryLog> memory;
};

struct Shared {
  std::mutex mutex;  // guards all members below
  Going going;
};

Shared& shared() {
  static auto* instance = new Shared;
  return *instance;
}

Going going() {
  std::lock_guard<std::mutex> lock(shared().mutex);
  return shared().going;
}

// Begins the profile `next` if no profile is active; an empty `next` ends the active profile.
// Returns false if there is nothing to end, or if a profile is active already.
bool change(Going next) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  const bool changes = (shared().going.journal == nullptr) != (next.journal == nullptr);
  if (changes) {
    std::swap(shared().going, next);
  }
  return changes;
}

constexpr const char* kAlreadyRecording =
    "ebb: another ebb.profile or ebb.plan is already recording in this process; run one at a time";

}  // namespace

void beginProfile() {
  TORCH_CHECK(!going().journal, kAlreadyRecording);
  TORCH_CHECK(
      !MemoryLog::isTaken(),
      "ebb: torch.profiler is active on this thread, and a profile of ebb needs its place; stop it "
      "first");
  const auto journal = std::make_shared<Journal>(0, Journal::For::Profile);
  const auto memory =
      std::make_shared<MemoryLog>([journal] { return static_cast<double>(journal->now()) * 1e-6; });
  TORCH_CHECK(change({journal, memory}), kAlreadyRecording);
  memory->install(memory);
  putJournalInPlace(journal);
}

Profile endProfile() {
  const auto [journal, memory] = going();
  TORCH_CHECK(journal, "ebb: no profile has begun");
  putJournalInPlace(nullptr);
  TORCH_CHECK(
      memory->close(),
      "ebb: a profile must end on the thread on which it began; nothing more is recorded");
  change({});
  Profile found = journal->profile();
  found.allocations = memory->take();
  return found;
}

}  // namespace ebb
