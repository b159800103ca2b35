#include "plugins/ahead/room.h"

#include <algorithm>
#include <vector>

#include "allocator/in_use.h"
#include "allocator/shortage.h"
#include "support/leaked.h"
#include "support/python_support.h"

namespace ebb {

Room& Room::get() { return leaked<Room>(); }

void Room::opened(const c10::intrusive_ptr<Graph>& graph) {
  setReserve(Reserve::Recomputable, [](c10::Device device) { return get().giveBack(device); });
  std::vector<c10::intrusive_ptr<Graph>> asked;  // dropped after the lock is released
  std::lock_guard<std::mutex> lock(mutex_);
  asked.swap(asked_);
  open_.emplace_back(graph);
}

void Room::closed(const c10::intrusive_ptr<Graph>& graph) {
  const Lookahead& lookahead = *lookaheadOf(*graph);
  size_t kept = 0;
  {
    std::lock_guard<PythonMutex> lock(graph->mutex);  // another thread may free the kept values
    kept = lookahead.hasRoom ? lookahead.keptBytes() : 0;
  }
  std::vector<c10::intrusive_ptr<Graph>> passed;  // dropped after the lock is released
  const auto keepsNothing = [&](const WeakGraph& weak) {
    passed.push_back(weak.lock());
    return !passed.back() || !lookaheadOf(*passed.back())->holds.load();
  };
  std::lock_guard<std::mutex> lock(mutex_);
  passed.insert(passed.end(), asked_.begin(), asked_.end());
  asked_.clear();
  std::erase_if(
      open_, [&](const WeakGraph& weak) { return weak.expired() || weak == WeakGraph(graph); });
  while (!closed_.empty() && keepsNothing(closed_.front())) {
    closed_.pop_front();
  }
  // If the first graph waits long for its backward, the loop above removes nothing.
  if (closed_.size() > mostGraphs_) {
    std::erase_if(closed_, keepsNothing);
    mostGraphs_ = 64 + 2 * closed_.size();
  }
  if (lookahead.holds.load()) {
    closed_.emplace_back(graph);
    size_t& largest = devices_[lookahead.device].largest;
    largest = std::max(largest, kept);
  }
}

void Room::setLimit(size_t nbytes) {
  std::vector<c10::intrusive_ptr<Graph>> asked;  // dropped after the lock is released
  if (nbytes != 0) {
    useCountingAllocator();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  asked.swap(asked_);
  limit_ = nbytes;
  for (auto& [device, about] : devices_) {
    about.limit = 0;
  }
  isOn_.store(nbytes != 0);
}

void Room::setLimit(size_t nbytes, c10::Device device) {
  if (device.is_cpu()) {
    useCountingAllocator();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  limit_ = limit_ == 0 ? nbytes : limit_;
  devices_[device].limit = nbytes;
  isOn_.store(true);
}

size_t Room::limit(c10::Device device) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = devices_.find(device);
  return found == devices_.end() || found->second.limit == 0 ? limit_ : found->second.limit;
}

void Room::make() {
  std::vector<std::pair<c10::Device, size_t>> needed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [device, about] : devices_) {
      needed.emplace_back(device, about.largest);
    }
  }
  for (const auto& [device, nbytes] : needed) {
    make(device, nbytes);
  }
}

void Room::make(c10::Device device, size_t needed) {
  const size_t most = limit(device);
  size_t used = bytesInUse(device);
  while (used + needed > most) {
    const auto graph = takeFirst(device);
    if (!graph) {
      return;
    }
    size_t given = 0;
    {
      const WithoutGil withoutGil;
      std::lock_guard<PythonMutex> lock(graph->mutex);
      given = lookaheadOf(*graph)->keptBytes();
      lookaheadOf(*graph)->dropHeld();
    }
    used -= std::min(used, given);
    std::lock_guard<std::mutex> lock(mutex_);
    count(given);
  }
}

namespace {

// Returns the number of freed bytes; 0 if a thread, the calling one included, holds the graph's
// lock.
size_t giveUp(Graph& graph, c10::Device device, std::vector<c10::Storage>& freed) {
  if (!lookaheadOf(graph)->holds.load()) {
    return 0;
  }
  const std::unique_lock<PythonMutex> lock(graph.mutex, std::try_to_lock);
  const bool wasFree = lock.owns_lock() && graph.mutex.depth() == 1;
  return wasFree ? lookaheadOf(graph)->giveBackOn(device, freed) : 0;
}

}  // namespace

bool Room::giveBack(c10::Device device) {
  const size_t used = bytesInUse(device);
  size_t given = 0;
  std::vector<c10::Storage> freed;  // dropped after the lock is released
  std::lock_guard<std::mutex> lock(mutex_);
  // Returns true if the graph keeps nothing any more.
  const auto ask = [&](const WeakGraph& weak) {
    auto graph = weak.lock();
    if (!graph) {
      return false;
    }
    const size_t nbytes = giveUp(*graph, device, freed);
    count(nbytes);
    given += nbytes;
    const bool isOver = !lookaheadOf(*graph)->holds.load();
    if (std::find(asked_.begin(), asked_.end(), graph) == asked_.end()) {
      asked_.push_back(std::move(graph));
    }
    return isOver;
  };
  std::erase_if(closed_, ask);
  std::for_each(open_.begin(), open_.end(), ask);
  if (given != 0) {
    tighten(device, used);
    ++stats_.shortages;
  }
  return given != 0;
}

// The bytes in use are the true limit. A tenth of them is left for other allocations.
void Room::tighten(c10::Device device, size_t used) {
  size_t& limit = devices_[device].limit;
  const size_t before = limit == 0 ? limit_ : limit;
  limit = std::min(before, used - used / 10);
}

void Room::count(size_t given) {
  stats_.regionsGivenUp += given != 0 ? 1 : 0;
  stats_.bytesGivenUp += given;
}

// Removes the returned graph from the list, and all earlier graphs that keep nothing. Skips graphs
// on other devices. `passed` drops its references after the lock is released, since a graph may die
// with its last reference.
c10::intrusive_ptr<Graph> Room::takeFirst(c10::Device device) {
  std::vector<c10::intrusive_ptr<Graph>> passed;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto place = closed_.begin(); place != closed_.end();) {
    auto graph = place->lock();
    const bool holds = graph && lookaheadOf(*graph)->holds.load();
    if (holds && lookaheadOf(*graph)->device != device) {
      passed.push_back(std::move(graph));
      ++place;
      continue;
    }
    place = closed_.erase(place);
    if (holds) {
      return graph;
    }
    passed.push_back(std::move(graph));
  }
  return {};
}

RoomStats Room::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

size_t Room::graphs() {
  std::lock_guard<std::mutex> lock(mutex_);
  return closed_.size() + open_.size();
}

void keepWhileThereIsRoom(size_t limit) { Room::get().setLimit(limit); }

RoomStats roomStats() { return Room::get().stats(); }

}  // namespace ebb
