#include "memory/stillness.h"

#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <mutex>

namespace ebb {
namespace {

std::atomic<uint32_t> replaysAhead{0};  // recipes that run, or are about to ask whether they may
std::atomic<uint32_t> commotions{0};

// This thread is one of them: a kernel may be Python's, and do what others wait with. See also Note
// [Static TLS].
[[gnu::tls_model("initial-exec")]] constinit thread_local bool tlsIsStill = false;

void leaveStillness() {
  tlsIsStill = false;
  if (replaysAhead.fetch_sub(1) == 1) {
    replaysAhead.notify_all();
  }
}

// Weakly held, so that no other storage takes its place.
struct ResizedStorages {
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

  std::mutex mutex;  // guards what follows
  ska::flat_hash_map<c10::StorageImpl*, Weak> all;
  size_t sweepAt = 64;
  std::atomic<bool> some{false};

  static ResizedStorages& get() {
    static auto* instance = new ResizedStorages;
    return *instance;
  }
};

}  // namespace

Stillness::Stillness() {
  replaysAhead.fetch_add(1);
  holds_ = commotions.load() == 0;
  tlsIsStill = holds_;
  if (!holds_) {
    leaveStillness();
  }
}

Stillness::~Stillness() {
  if (holds_) {
    leaveStillness();
  }
}

Commotion::Commotion() {
  beginCommotion();
}

Commotion::~Commotion() {
  endCommotion();
}

void beginCommotion() {
  commotions.fetch_add(1);
  uint32_t running = replaysAhead.load();
  if (running != 0 && !tlsIsStill) {
    const WithoutGil withoutGil;
    while (running != 0) {
      replaysAhead.wait(running);
      running = replaysAhead.load();
    }
  }
}

void endCommotion() {
  commotions.fetch_sub(1);
}

void noteResizedByHand(const c10::Storage& storage) {
  ResizedStorages& resized = ResizedStorages::get();
  std::lock_guard<std::mutex> lock(resized.mutex);
  resized.some.store(true, std::memory_order_release);
  if (resized.all.size() >= resized.sweepAt) {
    for (auto entry = resized.all.begin(); entry != resized.all.end();) {
      entry = entry->second.expired() ? resized.all.erase(entry) : std::next(entry);
    }
    resized.sweepAt = 2 * resized.all.size() + 64;
  }
  resized.all.emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
}

bool isResizedByHand(const c10::Storage& storage) {
  ResizedStorages& resized = ResizedStorages::get();
  if (!resized.some.load(std::memory_order_acquire)) {
    return false;
  }
  std::lock_guard<std::mutex> lock(resized.mutex);
  return resized.all.count(storage.unsafeGetStorageImpl()) > 0;
}

}  // namespace ebb
