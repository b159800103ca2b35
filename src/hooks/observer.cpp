#include "hooks/observer.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace ebb {
namespace {

// Filled while the library is loaded, so it needs no lock.
std::vector<void (*)(Graph&)>& plugins() {
  static auto* all = new std::vector<void (*)(Graph&)>;
  return *all;
}

}  // namespace

std::vector<std::unique_ptr<RegionNote>> Observers::enter(
    const std::string& name, const std::shared_ptr<const Policy>& policy) const {
  std::vector<std::unique_ptr<RegionNote>> notes;
  for (const auto& observer : all_) {
    notes.push_back(observer->enters(name, policy));
  }
  return notes;
}

bool Observers::wantInput(const at::Tensor& tensor) const {
  return std::any_of(all_.begin(), all_.end(), [&](const auto& observer) {
    return observer->wantsInput(tensor);
  });
}

[[gnu::cold]] ExtraPtr Observers::packed(
    Value& value, const at::Tensor& tensor, bool resident) const {
  ExtraPtr note;
  for (const auto& observer : all_) {
    if (auto given = observer->packed(value, tensor, resident)) {
      TORCH_INTERNAL_ASSERT(!note, "two observers want to keep something with a handle");
      note = std::move(given);
    }
  }
  return note;
}

[[gnu::cold]] c10::Storage Observers::checked(
    const Graph& graph, Value& value, const Geometry& geometry, c10::Storage bytes) const {
  for (const auto& observer : all_) {
    bytes = observer->checked(graph, value, geometry, std::move(bytes));
  }
  return bytes;
}

bool observeGraphs(void (*add)(Graph& graph)) {
  plugins().push_back(add);
  return true;
}

void addObservers(Graph& graph) {
  for (const auto add : plugins()) {
    add(graph);
  }
}

}  // namespace ebb
