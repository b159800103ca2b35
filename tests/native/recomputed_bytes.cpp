#include "recomputed_bytes.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "graph/graph.h"
#include "hooks/decider.h"
#include "hooks/observer.h"
#include "record/context.h"

namespace ebb {
namespace {

std::atomic<bool> isOn{false};
std::mutex mutex;  // guards `recomputed`: any thread may replay
std::map<std::string, size_t> recomputed;

// The module that made a value.
struct Module final : Extra {
  explicit Module(std::string name) : name(std::move(name)) {}
  static const SlotNumber kSlot;
  const std::string name;
};
const SlotNumber Module::kSlot = takeSlot();

struct CountsBytes final : OpEvents, BackwardEvents {
  void made(const Made& made) override {
    made.value.attach(c10::make_intrusive<Module>(made.context.decider->module()));
  }
  void replayed(const Graph& graph, const Recipe& recipe, Value& value) override {
    std::lock_guard<std::mutex> lock(mutex);
    recomputed[value.extra<Module>()->name] += value.home().nbytes();
  }
};

[[maybe_unused]] const bool isRegistered = observeGraphs([](Graph& graph) {
  if (isOn) {
    graph.observers.add(std::make_unique<CountsBytes>());
  }
});

}  // namespace

void countRecomputedBytes(bool on) { isOn = on; }

std::map<std::string, size_t> recomputedBytes() {
  std::lock_guard<std::mutex> lock(mutex);
  return recomputed;
}

}  // namespace ebb
