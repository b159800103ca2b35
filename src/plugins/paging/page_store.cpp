// Puts the valid rows of values into page pools: see Note [Stored values] and Note [Rows].
#include <ATen/record_function.h>

#include <memory>
#include <mutex>
#include <vector>

#include "ebb/paging.h"
#include "graph/recipe.h"
#include "hooks/observer.h"
#include "hooks/store.h"
#include "plugins/paging/page_stash.h"
#include "plugins/paging/paging_engine.h"
#include "plugins/paging/row_marks.h"
#include "record/recorder.h"
#include "stores/rows.h"

namespace ebb {
namespace {

// The pages and the rows of one graph.
struct GraphPages final : Extra {
  static const SlotNumber kSlot;

  PageGroupPtr group;         // null until a value has been paged
  RowMarks* marks = nullptr;  // an observer of the graph; null until the program has marked rows
};
const SlotNumber GraphPages::kSlot = takeSlot();

GraphPages& pagesOf(Graph& graph) {
  if (graph.extras.get<GraphPages>() == nullptr) {
    graph.extras.set(c10::make_intrusive<GraphPages>());
  }
  return *graph.extras.get<GraphPages>();
}

// Follows the backward of a graph with rows.
class RowsInBackward final : public BackwardEvents {
 public:
  explicit RowsInBackward(const GraphPages& pages) : pages_(pages) {}

  void fetches(Value& value) override {
    if (Rows* rows = value.extra<Rows>()) {
      const auto* stash = dynamic_cast<const PageStash*>(value.stash().get());
      rows->padded = stash != nullptr && !stash->isExact() && !value.home().living();
    }
  }

  // See Note [Dead rows]
  void replayed(const Graph& graph, const Recipe& recipe, Value& value) override {
    Rows* rows = value.extra<Rows>();
    if (rows != nullptr && rows->lossy && rows->pads && rows->live->isPaged) {
      writePadding(value.home().bytes(), *rows);
      rows->padded = true;
    }
  }

  void arrives(std::vector<StashPtr>& cameBack) override {
    if (pages_.group) {
      Paging::get().backwardArrives(*pages_.group, cameBack);
    }
  }

 private:
  const GraphPages& pages_;  // an extra of the graph
};

class PageStore final : public Store {
 public:
  bool accepts(const Value& value, const at::Tensor& tensor) override {
    const bool accepted = hasPageMover(tensor.device().type());
    if (!accepted) {
      TORCH_WARN_ONCE(
          "ebb: tensors on ", tensor.device(),
          " are saved instead of paged: PAGE supports only CUDA devices and the CPU. Shown once.");
    }
    return accepted;
  }
  bool isReady(const Value& value) const override { return value.extra<Rows>() != nullptr; }
  bool takesWithoutRecipe() const override { return true; }
  // Earlier readers may have mixed rows, and paging would not restore padding rows.
  bool mayBeChosen(const Value& value) const override { return value.uses().readers() == 0; }

  StashPtr put(const Context& context, Value& value, const c10::Storage& storage) override {
    RECORD_USER_SCOPE("ebb::stash " + context.regionName());
    const size_t nbytes = value.home().nbytes();
    Graph& graph = *context.graph;
    PageGroupPtr& group = pagesOf(graph).group;
    if (!group) {
      group = std::make_shared<PageGroup>(graph.names.front());
    }
    const Rows& rows = *value.extra<Rows>();
    const char* op = value.recipe() ? value.recipe()->op.name.c_str() : "an input";
    StashPtr stash = Paging::get().send({storage, rows, op}, group);
    if (group->resident) {
      context.counters->bytesSaved += nbytes;
      context.counters->bytesPacked += nbytes;
      graph.observers.tell(&OpEvents::stays, value, nullptr);
    } else {
      rows.live->isPaged = true;
      context.counters->bytesPaged += nbytes;
      graph.observers.tell(&OpEvents::sent, value, "stash", op, nbytes);
    }
    return stash;
  }

  const char* whyFull() const override {
    return "its storage was resized before PAGE could take it";  // put() has room, or throws
  }

  void staysInstead(const Context& context, Value& value) override {
    context.counters->bytesNotPaged += value.home().nbytes();
  }
};

PageStore store;

[[maybe_unused]] const bool isRegistered = registerStore(Decision::Page, store);

}  // namespace

void markRows(const at::Tensor& tensor, const at::Tensor& rows) {
  Recorder* recorder = openRecorder();
  if (recorder == nullptr) {
    return;
  }
  Graph& graph = *recorder->context().graph;
  std::lock_guard<PythonMutex> lock(graph.mutex);
  recorder->values().applyDeferred();
  GraphPages& pages = pagesOf(graph);
  if (pages.marks == nullptr) {
    auto marks = std::make_unique<RowMarks>(recorder->context(), recorder->values());
    pages.marks = marks.get();
    graph.observers.add(std::move(marks));
    graph.observers.add(std::make_unique<RowsInBackward>(pages));
  }
  pages.marks->mark(tensor, rows);
}

}  // namespace ebb
