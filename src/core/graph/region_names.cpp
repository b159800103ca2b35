#include "graph/region_names.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace ebb {

uint16_t RegionNames::indexOf(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found =
      std::find_if(names_.begin(), names_.end(), [&](const auto& known) { return *known == name; });
  const auto index = found - names_.begin();
  if (found == names_.end()) {
    TORCH_CHECK(
        names_.size() < std::numeric_limits<uint16_t>::max(),
        "ebb: more than 65,535 different region names inside one outermost region; reuse names");
    names_.push_back(std::make_unique<const std::string>(name));
  }
  return static_cast<uint16_t>(index);
}

const std::string& RegionNames::operator[](uint16_t index) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return *names_[index];
}

void RegionNames::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  names_.clear();
}

}  // namespace ebb
