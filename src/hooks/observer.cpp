#include "hooks/observer.h"

#include <c10/util/Exception.h>

namespace ebb {
namespace {

// Filled while libraries are loaded, so the lists need no lock.
std::vector<AddObservers>& plugins(Turn turn) {
  static auto* any = new std::vector<AddObservers>;
  static auto* last = new std::vector<AddObservers>;
  return turn == Turn::Any ? *any : *last;
}

std::vector<void (*)(const at::Tensor&)>& beforeWrites() {
  static auto* all = new std::vector<void (*)(const at::Tensor&)>;
  return *all;
}

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

bool observeGraphs(AddObservers add, Turn turn) {
  plugins(turn).push_back(add);
  return true;
}

void addObservers(Graph& graph) {
  for (const Turn turn : {Turn::Any, Turn::Last}) {
    for (const auto add : plugins(turn)) {
      add(graph);
    }
  }
}

bool callBeforeUnseenWrites(void (*before)(const at::Tensor& tensor)) {
  beforeWrites().push_back(before);
  return true;
}

void beforeUnseenWrite(const at::Tensor& tensor) {
  for (const auto before : beforeWrites()) {
    before(tensor);
  }
}

}  // namespace ebb
