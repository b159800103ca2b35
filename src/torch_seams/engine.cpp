#include "torch_seams/engine.h"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace ebb {
namespace {

namespace autograd = torch::autograd;

// torch 2.13 moved autograd nodes from shared_ptr to intrusive_ptr.
#if EBB_TORCH_VERSION >= 21300
using NodePointer = c10::intrusive_ptr<autograd::Node>;
#else
using NodePointer = std::shared_ptr<autograd::Node>;
#endif

// Note [Handles without Python]
// SavedVariable asks the default engine for saved-tensor hooks, and hooks are a C++ interface. So
// ebb puts its own engine in front of the default one. In a region, ebb's engine answers the call
// for hooks, and forwards all other calls. Pack and unpack are then plain virtual calls: no Python
// object, no GIL. As in torch, the innermost hooks win: hooks pushed inside the region replace
// ebb's, and hooks pushed outside see only tensors that are packed outside, and the arguments of
// checkpointed calls: see Note [Hooks around a checkpointed call].
//
// If there is an interpreter, the default engine is the Python engine: a static object that torch
// rebuilds in place after a fork. So a reference to the engine stays valid.
class ForwardingEngine final : public autograd::Engine {
 public:
  ForwardingEngine(autograd::Engine& next, MakeHooks hooks) : next_(&next), hooks_(hooks) {}
  ~ForwardingEngine() override { stop(); }

  autograd::variable_list execute(
      const autograd::edge_list& roots, const autograd::variable_list& inputs, bool keepGraph,
      bool createGraph, bool accumulateGrad, const autograd::edge_list& outputs) override {
    return next().execute(roots, inputs, keepGraph, createGraph, accumulateGrad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<autograd::GraphTask>& task, NodePointer root,
      autograd::InputBuffer&& buffer) override {
    return next().execute_with_graph_task(task, std::move(root), std::move(buffer));
  }

  std::unique_ptr<autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return next().make_anomaly_metadata();
  }

  std::unique_ptr<autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    auto hooks = hooks_();
    return hooks ? std::move(hooks) : next().get_default_saved_variable_hooks();
  }

#if EBB_TORCH_VERSION >= 21500
  std::vector<std::unique_ptr<autograd::NodeCreationHook>> get_node_creation_hooks() override {
    return next().get_node_creation_hooks();
  }
#endif

  void thread_on_exception(
      const std::shared_ptr<autograd::GraphTask>& task, const NodePointer& node,
      std::exception& error) override {
    next().thread_on_exception(task, node, error);
  }

  void follow(autograd::Engine& next) { next_.store(&next, std::memory_order_release); }

 private:
  autograd::Engine& next() const { return *next_.load(std::memory_order_acquire); }

  std::atomic<autograd::Engine*> next_;  // does all other work
  MakeHooks hooks_;                      // as given to installEngine
};

std::atomic<ForwardingEngine*> ours{nullptr};

autograd::Engine& forwardingEngine() { return *ours.load(std::memory_order_acquire); }

}  // namespace

void installEngine(MakeHooks hooks) {
  autograd::Engine& current = autograd::Engine::get_default_engine();
  if (&current == ours.load(std::memory_order_acquire)) {
    return;
  }
  static auto* mutex = new std::mutex;
  std::lock_guard<std::mutex> lock(*mutex);
  if (ForwardingEngine* engine = ours.load(std::memory_order_acquire)) {
    engine->follow(current);
  } else {
    // Leaked on purpose: backward threads may outlive static destructors.
    ours.store(new ForwardingEngine(current, hooks), std::memory_order_release);
  }
  autograd::set_default_engine_stub(&forwardingEngine);
}

}  // namespace ebb
