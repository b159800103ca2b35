#include "plugins/ahead/recipe_scope.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "hooks/process_state.h"
#include "support/leaked.h"
#include "support/python_support.h"

namespace ebb {
namespace {

std::atomic<uint32_t> replaysAhead{0};  // recipes that run, or are about to check for changes
std::atomic<uint32_t> stateChanges{0};  // of Note [Changes of the process's state]

void leaveScope() {
  if (replaysAhead.fetch_sub(1) == 1) {
    replaysAhead.notify_all();
  }
}

// Lists the storages on which the program has a hand, and the storages that running replays ahead
// read: see Note [Hands on a storage]. Lists the threads of these replays too.
struct Hands {
  struct Hand {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being reused
    uint64_t until;
  };

  std::mutex mutex;  // guards all members below
  ska::flat_hash_map<c10::StorageImpl*, Hand> on;
  std::vector<c10::StorageImpl*> read;
  // The threads that hold an AheadRecipeScope. A kernel written in Python may begin a
  // ProcessStateChange, which must not wait for its own thread. The threads are few, so a list
  // replaces a thread_local: see Note [Static TLS].
  std::vector<std::thread::id> threads;
  size_t sweepAt = 64;

  void forgetDead() {
    for (auto entry = on.begin(); entry != on.end();) {
      entry = entry->second.storage.expired() ? on.erase(entry) : std::next(entry);
    }
    sweepAt = 2 * on.size() + 64;
  }

  bool isOn(c10::StorageImpl* storage, uint64_t closed) const {
    const auto hand = on.find(storage);
    return hand != on.end() && hand->second.until >= closed;
  }
};

Hands& allHands() { return leaked<Hands>(); }

template <class T>
bool has(const std::vector<T>& all, T element) {
  return std::ranges::find(all, element) != all.end();
}

template <class T>
void removeOne(std::vector<T>& all, T element) {
  all.erase(std::ranges::find(all, element));
}

}  // namespace

AheadRecipeScope::AheadRecipeScope() {
  replaysAhead.fetch_add(1);
  holds_ = stateChanges.load() == 0;
  if (!holds_) {
    leaveScope();
    return;
  }
  Hands& hands = allHands();
  std::lock_guard<std::mutex> lock(hands.mutex);
  hands.threads.push_back(std::this_thread::get_id());
}

AheadRecipeScope::~AheadRecipeScope() {
  if (!holds_) {
    return;
  }
  {
    Hands& hands = allHands();
    std::lock_guard<std::mutex> lock(hands.mutex);
    removeOne(hands.threads, std::this_thread::get_id());
    for (const c10::Storage& storage : storages_) {
      removeOne(hands.read, storage.unsafeGetStorageImpl());
    }
  }
  leaveScope();
}

bool AheadRecipeScope::mayRead(std::vector<c10::Storage> storages, uint64_t closed) {
  storages_ = std::move(storages);
  Hands& hands = allHands();
  std::lock_guard<std::mutex> lock(hands.mutex);
  bool isAllowed = true;
  for (const c10::Storage& storage : storages_) {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    isAllowed &= !hands.isOn(impl, closed);
    hands.read.push_back(impl);
  }
  return isAllowed;
}

void excludeFromAhead(const c10::Storage& storage, uint64_t until) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  Hands& hands = allHands();
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
    isRead = has(hands.read, impl);
  }
  if (isRead) {
    const ProcessStateChange wait;
  }
}

namespace {

// True if this thread runs a recipe ahead.
bool isOwnReplay() {
  Hands& hands = allHands();
  std::lock_guard<std::mutex> lock(hands.mutex);
  return has(hands.threads, std::this_thread::get_id());
}

void changeBegins() {
  stateChanges.fetch_add(1);
  uint32_t running = replaysAhead.load();
  if (running != 0 && !isOwnReplay()) {
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
  Hands& hands = allHands();
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
