// The names of the regions of one graph.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ebb {

// The thread that records a graph adds names, while other threads read earlier names for messages
// and statistics. Some of these readers are destructors, which take no lock of a graph: see Note
// [One lock per graph]. So the names have a lock of their own. A name never moves in memory, so a
// reference stays valid without the lock.
class RegionNames {
 public:
  // Index of `name`. Regions with the same name share an index.
  uint16_t indexOf(const std::string& name);

  const std::string& operator[](uint16_t index) const;

  // The name of the outermost region.
  const std::string& front() const { return (*this)[0]; }

  // Nobody reads a name any more.
  void clear();

 private:
  mutable std::mutex mutex_;  // guards all members below
  std::vector<std::unique_ptr<const std::string>> names_;
};

}  // namespace ebb
