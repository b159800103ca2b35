#include "report/ledger.h"

#include <atomic>
#include <mutex>

namespace ebb {
namespace {

struct Books {
  std::mutex mutex;                      // guards ledger
  Ledger ledger;                         // of the current step
  std::atomic<bool> backwardSeen{false};  // the next outermost region begins a step
};

Books& books() {
  static auto* instance = new Books;
  return *instance;
}

}  // namespace

RegionCounters& RegionCounters::operator+=(const RegionCounters& other) {
  entered += other.entered;
  opsSeen += other.opsSeen;
  opsRecorded += other.opsRecorded;
  opsReplayed += other.opsReplayed;
  bytesSaved += other.bytesSaved;
  bytesDropped += other.bytesDropped;
  bytesCopied += other.bytesCopied;
  return *this;
}

LiveCounts& liveCounts() {
  static auto* counts = new LiveCounts;
  return *counts;
}

void ledgerRegionEntered() {
  Books& shared = books();
  if (!shared.backwardSeen.load(std::memory_order_relaxed)) {
    return;
  }
  std::lock_guard<std::mutex> lock(shared.mutex);
  if (shared.backwardSeen.exchange(false)) {
    shared.ledger.regions.clear();
    shared.ledger.total = {};
    ++shared.ledger.step;
  }
}

void ledgerBackwardSeen() {
  Books& shared = books();
  if (!shared.backwardSeen.load(std::memory_order_relaxed)) {
    shared.backwardSeen.store(true, std::memory_order_relaxed);
  }
}

void ledgerAdd(const std::string& region, const RegionCounters& counters) {
  Books& shared = books();
  std::lock_guard<std::mutex> lock(shared.mutex);
  shared.ledger.regions[region] += counters;
  shared.ledger.total += counters;
}

Ledger readLedger() {
  Books& shared = books();
  std::lock_guard<std::mutex> lock(shared.mutex);
  return shared.ledger;
}

void resetLedger() {
  Books& shared = books();
  std::lock_guard<std::mutex> lock(shared.mutex);
  shared.backwardSeen.store(false);
  shared.ledger = {};
}

}  // namespace ebb
