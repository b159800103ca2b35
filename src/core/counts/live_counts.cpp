#include "counts/live_counts.h"

#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "support/thread_owned.h"

namespace ebb {
namespace {

struct Shares {
  std::mutex mutex;
  std::deque<LiveCounts> all;          // never shrinks: a thread that ends leaves its counts
  std::vector<LiveCounts*> ownerless;  // shares of ended threads, which new threads take over
};

Shares& shares() {
  static auto* instance = new Shares;
  return *instance;
}

// See Note [Static TLS]
[[gnu::tls_model("initial-exec")]] constinit thread_local LiveCounts* tlsShare = nullptr;

void leaveShare(void*) {
  std::lock_guard<std::mutex> lock(shares().mutex);
  shares().ownerless.push_back(std::exchange(tlsShare, nullptr));
}

[[gnu::noinline]] LiveCounts& takeShare() {
  {
    std::lock_guard<std::mutex> lock(shares().mutex);
    if (shares().ownerless.empty()) {
      tlsShare = &shares().all.emplace_back();
    } else {
      tlsShare = shares().ownerless.back();
      shares().ownerless.pop_back();
    }
  }
  atThreadExit(&leaveShare, nullptr);
  return *tlsShare;
}

}  // namespace

LiveCounts& liveCounts() { return tlsShare != nullptr ? *tlsShare : takeShare(); }

int64_t liveTotal(std::atomic<int64_t> LiveCounts::* which) {
  std::lock_guard<std::mutex> lock(shares().mutex);
  int64_t total = 0;
  for (const LiveCounts& share : shares().all) {
    total += (share.*which).load(std::memory_order_relaxed);
  }
  return total;
}

}  // namespace ebb
