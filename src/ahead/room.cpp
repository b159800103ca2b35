#include "ahead/room.h"

#include <algorithm>
#include <vector>

#include "memory/in_use.h"
#include "support/python_support.h"

namespace ebb {

Room& Room::get() {
  static auto* instance = new Room;
  return *instance;
}

Room::Room() {
  setReserve(Reserve::Recomputable, [](Shortage shortage) { return get().giveBack(shortage); });
}

void Room::opened(const c10::intrusive_ptr<Graph>& graph) {
  std::lock_guard<std::mutex> lock(mutex_);
  open_.emplace_back(graph);
}

void Room::closed(const c10::intrusive_ptr<Graph>& graph) {
  const Lookahead& lookahead = *graph->lookahead;
  size_t kept = 0;
  {
    std::lock_guard<PythonMutex> lock(graph->mutex);  // another thread may free the kept values
    kept = lookahead.hasRoom ? lookahead.keptBytes() : 0;
  }
  std::vector<c10::intrusive_ptr<Graph>> passed;  // dropped after the lock is released
  const auto keepsNothing = [&](const WeakGraph& weak) {
    passed.push_back(weak.lock());
    return !passed.back() || !passed.back()->lookahead->holds.load();
  };
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(
      open_, [&](const WeakGraph& weak) { return weak.expired() || weak == WeakGraph(graph); });
  while (!graphs_.empty() && keepsNothing(graphs_.front())) {
    graphs_.pop_front();
  }
  // If the first graph waits long for its backward, the loop above removes nothing.
  if (graphs_.size() > mostGraphs_) {
    std::erase_if(graphs_, keepsNothing);
    mostGraphs_ = 64 + 2 * graphs_.size();
  }
  if (lookahead.holds.load()) {
    graphs_.emplace_back(graph);
    size_t& largest = devices_[lookahead.device].largest;
    largest = std::max(largest, kept);
  }
}

void Room::setLimit(size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  limit_ = nbytes;
  for (auto& [device, about] : devices_) {
    about.limit = 0;
  }
  isOn_.store(nbytes != 0);
}

void Room::setLimit(size_t nbytes, c10::Device device) {
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
      given = graph->lookahead->keptBytes();
      graph->lookahead->dropHeld();
    }
    used -= std::min(used, given);
    count(given);
  }
}

namespace {

// Frees the kept values of `graph`. Returns the number of freed bytes; 0 if another thread holds
// the graph's lock. Does not wait for the lock: the calling thread may hold another graph's lock.
size_t giveUp(Graph& graph, Shortage shortage) {
  if (!graph.lookahead->holds.load()) {
    return 0;
  }
  const std::unique_lock<PythonMutex> lock(graph.mutex, std::try_to_lock);
  if (!lock.owns_lock() || graph.lookahead->keptBytes(shortage == Shortage::Host) == 0) {
    return 0;
  }
  const size_t given = graph.lookahead->keptBytes();
  graph.lookahead->dropHeld();
  return given;
}

}  // namespace

bool Room::giveBack(Shortage shortage) {
  const size_t enough = std::max<size_t>(tighten(shortage), 1);
  size_t given = 0;
  for (const auto& graph : all()) {
    if (const size_t nbytes = giveUp(*graph, shortage)) {
      count(nbytes);
      given += nbytes;
    }
    if (given >= enough) {
      break;
    }
  }
  return given != 0;
}

// After a failed allocation, the bytes in use are the true limit. A tenth of them is reserved for
// later allocations outside of regions, where ebb sees no failure. Returns that tenth.
size_t Room::tighten(Shortage shortage) {
  const c10::Device device = deviceInUse();
  const size_t used = bytesInUse(device);
  if (!isOn() || used == 0 || device.is_cpu() != (shortage == Shortage::Host)) {
    return 0;
  }
  const size_t spare = used / 10;
  std::lock_guard<std::mutex> lock(mutex_);
  size_t& limit = devices_[device].limit;
  limit = std::min(limit == 0 ? limit_ : limit, used - spare);
  return spare;
}

std::vector<c10::intrusive_ptr<Graph>> Room::all() {
  std::vector<c10::intrusive_ptr<Graph>> found;
  const auto add = [&](const WeakGraph& weak) {
    if (auto graph = weak.lock()) {
      found.push_back(std::move(graph));
    }
  };
  std::lock_guard<std::mutex> lock(mutex_);
  std::for_each(graphs_.begin(), graphs_.end(), add);
  std::for_each(open_.begin(), open_.end(), add);
  return found;
}

void Room::count(size_t given) {
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.regionsGivenUp += given != 0 ? 1 : 0;
  stats_.bytesGivenUp += given;
}

// Removes the returned graph from the list, and all earlier graphs that keep nothing. Skips graphs
// on other devices. `passed` drops its references after the lock is released, since a graph may die
// with its last reference.
c10::intrusive_ptr<Graph> Room::takeFirst(c10::Device device) {
  std::vector<c10::intrusive_ptr<Graph>> passed;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto place = graphs_.begin(); place != graphs_.end();) {
    auto graph = place->lock();
    const bool holds = graph && graph->lookahead->holds.load();
    if (holds && graph->lookahead->device != device) {
      passed.push_back(std::move(graph));
      ++place;
      continue;
    }
    place = graphs_.erase(place);
    if (holds) {
      return graph;
    }
    passed.push_back(std::move(graph));
  }
  return {};
}

RoomStats Room::stats() {
  const ReliefCounts relief = reliefCounts();
  std::lock_guard<std::mutex> lock(mutex_);
  RoomStats stats = stats_;
  stats.failures = relief.failures;
  stats.overcome = relief.overcome;
  return stats;
}

size_t Room::graphs() {
  std::lock_guard<std::mutex> lock(mutex_);
  return graphs_.size() + open_.size();
}

void keepWhileThereIsRoom(size_t limit) {
  Room::get().setLimit(limit);
}

RoomStats roomStats() {
  return Room::get().stats();
}

}  // namespace ebb
