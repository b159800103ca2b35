#include "plugins/ahead/recipe_scope.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "hooks/process_state.h"
#include "support/python_support.h"

namespace ebb {
namespace {

std::atomic<uint32_t> replaysAhead{0};  // recipes that run, or are about to check for changes
std::atomic<uint32_t> stateChanges{0};  // of Note [Changes of the process's state]

// The threads that hold an AheadRecipeScope. A kernel written in Python may begin a
// ProcessStateChange, which must not wait for its own thread. The threads are few, so a list
// replaces a thread_local: see Note [Static TLS].
class RecipeThreads {
 public:
  static RecipeThreads& get() {
    static auto* instance = new RecipeThreads;
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

void leaveScope() {
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

AheadRecipeScope::AheadRecipeScope() {
  replaysAhead.fetch_add(1);
  holds_ = stateChanges.load() == 0;
  if (holds_) {
    RecipeThreads::get().add();
  } else {
    leaveScope();
  }
}

AheadRecipeScope::~AheadRecipeScope() {
  if (holds_) {
    RecipeThreads::get().remove();
    leaveScope();
  }
}

void excludeFromAhead(const c10::Storage& storage, uint64_t until) {
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
    const ProcessStateChange wait;
  }
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

namespace {

void changeBegins() {
  stateChanges.fetch_add(1);
  uint32_t running = replaysAhead.load();
  if (running != 0 && !RecipeThreads::get().hasThis()) {
    const WithoutGil withoutGil;
    while (running != 0) {
      replaysAhead.wait(running);
      running = replaysAhead.load();
    }
  }
}

void changeEnds() { stateChanges.fetch_sub(1); }

void willResize(const c10::Storage& storage) { excludeFromAhead(storage, kForEver); }

size_t countWithoutOwn(const c10::Storage& storage, size_t (*count)(const c10::Storage& storage)) {
  Hands& hands = Hands::get();
  std::lock_guard<std::mutex> lock(hands.mutex);
  const bool ours = hands.on.count(storage.unsafeGetStorageImpl()) != 0;
  return count(storage) - (ours ? 1 : 0);
}

[[maybe_unused]] const bool followsProcessState = followProcessState(
    {.changeBegins = &changeBegins,
     .changeEnds = &changeEnds,
     .willResize = &willResize,
     .countWithoutOwn = &countWithoutOwn});

}  // namespace

}  // namespace ebb
