#include "memory/stillness.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "torch_seams/owners.h"

namespace ebb {
namespace {

std::atomic<uint32_t> replaysAhead{0};  // recipes that run, or are about to check for commotions
std::atomic<uint32_t> commotions{0};

// The threads that hold a Stillness. A kernel written in Python may begin a Commotion, which must
// not wait for its own thread. The threads are few, so a list replaces a thread_local: see Note
// [Static TLS].
class StillThreads {
 public:
  static StillThreads& get() {
    static auto* instance = new StillThreads;
    return *instance;
  }

  void add() {
    std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back(std::this_thread::get_id());
  }
  void remove() {
    std::lock_guard<std::mutex> lock(mutex_);
    all_.erase(std::find(all_.begin(), all_.end(), std::this_thread::get_id()));
  }
  bool hasThis() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::find(all_.begin(), all_.end(), std::this_thread::get_id()) != all_.end();
  }

 private:
  std::mutex mutex_;  // guards all_
  std::vector<std::thread::id> all_;
};

void leaveStillness() {
  if (replaysAhead.fetch_sub(1) == 1) {
    replaysAhead.notify_all();
  }
}

// Lists the storages on which the program has a hand, and the storages that running replays ahead
// read: see Note [Hands on a storage].
struct Hands {
  struct Hand {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being reused
    uint64_t until;
  };

  std::mutex mutex;  // guards all members below
  ska::flat_hash_map<c10::StorageImpl*, Hand> on;
  std::vector<c10::StorageImpl*> read;
  size_t sweepAt = 64;

  static Hands& get() {
    static auto* instance = new Hands;
    return *instance;
  }

  void forgetDead() {
    for (auto entry = on.begin(); entry != on.end();) {
      entry = entry->second.storage.expired() ? on.erase(entry) : std::next(entry);
    }
    sweepAt = 2 * on.size() + 64;
  }

  bool isRead(c10::StorageImpl* storage) const {
    return std::find(read.begin(), read.end(), storage) != read.end();
  }

  bool isOn(c10::StorageImpl* storage, uint64_t closed) const {
    const auto hand = on.find(storage);
    return hand != on.end() && hand->second.until >= closed;
  }
};

}  // namespace

Stillness::Stillness() {
  replaysAhead.fetch_add(1);
  holds_ = commotions.load() == 0;
  if (holds_) {
    StillThreads::get().add();
  } else {
    leaveStillness();
  }
}

Stillness::~Stillness() {
  if (holds_) {
    StillThreads::get().remove();
    leaveStillness();
  }
}

void beginCommotion() {
  commotions.fetch_add(1);
  uint32_t running = replaysAhead.load();
  if (running != 0 && !StillThreads::get().hasThis()) {
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

void noteHandOn(const c10::Storage& storage, uint64_t until) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  Hands& hands = Hands::get();
  bool isRead = false;
  {
    std::lock_guard<std::mutex> lock(hands.mutex);
    if (hands.on.size() >= hands.sweepAt) {
      hands.forgetDead();
    }
    const auto place = hands.on.find(impl);
    const uint64_t before = place != hands.on.end() ? place->second.until : 0;
    hands.on.insert_or_assign(
        impl, Hands::Hand{storage.getWeakStorageImpl(), std::max(before, until)});
    isRead = hands.isRead(impl);
  }
  if (isRead) {
    const Commotion wait;
  }
}

size_t weakReferencesTo(const c10::Storage& storage) {
  Hands& hands = Hands::get();
  std::lock_guard<std::mutex> lock(hands.mutex);
  const bool ours = hands.on.count(storage.unsafeGetStorageImpl()) != 0;
  return weakReferences(storage) - (ours ? 1 : 0);
}

ReadAhead::ReadAhead(std::vector<c10::Storage> storages, uint64_t closed)
    : storages_(std::move(storages)) {
  Hands& hands = Hands::get();
  std::lock_guard<std::mutex> lock(hands.mutex);
  allowed_ = std::none_of(storages_.begin(), storages_.end(), [&](const c10::Storage& storage) {
    return hands.isOn(storage.unsafeGetStorageImpl(), closed);
  });
  for (const c10::Storage& storage : storages_) {
    hands.read.push_back(storage.unsafeGetStorageImpl());
  }
}

ReadAhead::~ReadAhead() {
  Hands& hands = Hands::get();
  std::lock_guard<std::mutex> lock(hands.mutex);
  for (const c10::Storage& storage : storages_) {
    hands.read.erase(
        std::find(hands.read.begin(), hands.read.end(), storage.unsafeGetStorageImpl()));
  }
}

}  // namespace ebb
