#include "graph/observers.h"

namespace ebb {
namespace {

// The extras of several plug-ins for one handle.
struct Notes final : Extra {
  void unpacks(uint32_t node) override {
    for (const ExtraPtr& note : all) {
      note->unpacks(node);
    }
  }
  c10::Storage shown(Unpacked unpacked) override {
    for (const ExtraPtr& note : all) {
      unpacked.bytes = note->shown(unpacked);
    }
    return std::move(unpacked.bytes);
  }

  std::vector<ExtraPtr> all;
};

}  // namespace

void Observers::clear() {
  ops_.clear();
  regions_.clear();
  backwards_.clear();
  vetoes_.clear();
  all_.clear();
}

RegionNotes Observers::enter(
    const std::string& name, const std::shared_ptr<const Policy>& policy) const {
  RegionNotes notes;
  regions_.forEach([&](RegionEvents& each) { notes.push_back(each.enters(name, policy)); });
  return notes;
}

bool Observers::wantInput(const at::Tensor& tensor) const {
  bool wanted = false;
  regions_.forEach([&](RegionEvents& each) { wanted |= each.wantsInput(tensor); });
  return wanted;
}

[[gnu::cold]] ExtraPtr Observers::tellPacked(
    Value& value, const at::Tensor& tensor, Retention retention) const {
  std::vector<ExtraPtr> notes;
  regions_.forEach([&](RegionEvents& each) {
    if (auto note = each.packed(value, tensor, retention)) {
      notes.push_back(std::move(note));
    }
  });
  if (notes.size() <= 1) {
    return notes.empty() ? ExtraPtr() : std::move(notes.front());
  }
  auto several = c10::make_intrusive<Notes>();
  several->all = std::move(notes);
  return several;
}

[[gnu::cold]] c10::Storage Observers::checked(
    const Graph& graph, Value& value, const Geometry& geometry, c10::Storage bytes) const {
  backwards_.forEach([&](BackwardEvents& each) {
    bytes = each.checked(graph, value, geometry, std::move(bytes));
  });
  return bytes;
}

[[gnu::cold]] const char* Observers::askVetoes(const NewState& state) const {
  const char* why = nullptr;
  vetoes_.forEach([&](ResultVeto& each) {
    const char* given = each.whyNotReplayed(state);
    why = why != nullptr ? why : given;
  });
  return why;
}

}  // namespace ebb
