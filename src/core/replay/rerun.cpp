#include "replay/rerun.h"

#include <ATen/core/List.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "conditions/fingerprint.h"
#include "conditions/kernel_state.h"
#include "conditions/random_state.h"
#include "hooks/call_guard.h"
#include "memory/bytes.h"
#include "replay/buffers.h"

namespace ebb {
namespace {

bool isWrite(ArgUse use) { return use == ArgUse::Write || use == ArgUse::Overwrite; }

void checkSize(
    const Graph& graph, const Recipe& recipe, const Value& value, const c10::Storage& storage) {
  TORCH_CHECK(
      storage.nbytes() == value.home().nbytes(), "ebb: replaying ", where(graph, recipe), " gave ",
      storage.nbytes(), " bytes where the forward gave ", value.home().nbytes(),
      ". Likely causes: 1. the operator depends on state outside its arguments; 2. an input was "
      "changed by code that bypasses torch. Give this operator the decision SAVE.");
}

// One run of a recipe.
class Rerun {
 public:
  // `stack` is empty; its memory is reused.
  Rerun(
      Graph& graph, Recipe& recipe, torch::jit::Stack& stack, TransientValues& transient,
      bool ahead)
      : graph_(graph),
        recipe_(recipe),
        stack_(stack),
        transient_(transient),
        ahead_(ahead),
        buffers_(graph, recipe, transient, !ahead) {}

  void run() {
    RECORD_USER_SCOPE("ebb::replay " + graph_.names[recipe_.region] + " " + recipe_.op.name);
    graph_.observers.tell(&BackwardEvents::willReplay, recipe_, ahead_);
    checkPrecision();
    checkCapture();
    pushArguments();
    runKernel();
    graph_.observers.tell(&BackwardEvents::hasReplayed);
    if (ahead_) {
      checkInputsAreStill();
    }
    handOut();
    graph_.observers.tell(&BackwardEvents::replayEnds, recipe_);
  }

 private:
  void pushArguments() {
    stack_.resize(recipe_.op.arguments.types.size());
    pushOthers();
    const int64_t* shape = recipe_.shapes();
    c10::SmallVector<at::Tensor, 8> tensors;
    for (const Input& input : recipe_.inputs()) {
      at::Tensor tensor = input.sameAs >= 0 ? tensors[input.sameAs] : tensorFor(input, shape);
      shape += Input::shapeCount(input.flags, input.use);
      tensors.push_back(tensor);
      c10::IValue& argument = stack_[input.argument];
      if (input.element < 0) {
        argument = std::move(tensor);
      } else if (argument.isTensorList()) {
        argument.toTensorList().push_back(std::move(tensor));
      } else {
        auto list = argument.toOptionalTensorList();
        list.push_back(tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt);
      }
    }
  }

  void pushOthers() {
    const c10::IValue* other = recipe_.others();
    for (const uint16_t i : recipe_.op.arguments.others) {
      // Lists of tensors are stored empty; each run fills new lists.
      if (other->isTensorList()) {
        stack_[i] = c10::List<at::Tensor>();
      } else if (other->isOptionalTensorList()) {
        stack_[i] = c10::List<std::optional<at::Tensor>>();
      } else {
        stack_[i] = *other;
      }
      ++other;
    }
  }

  at::Tensor tensorFor(const Input& input, const int64_t* shape) {
    if (input.isStandIn()) {
      const auto nbytes = static_cast<size_t>(shape[input.flags.shapeCount()]);
      return show(allocateZeroed(nbytes, input.flags.device), input, shape);
    }
    if (input.isNumber()) {
      const c10::Storage number = allocate(Input::kNumberWords * sizeof(int64_t), c10::kCPU);
      std::memcpy(number.mutable_data(), shape + input.flags.shapeCount(), number.nbytes());
      return show(number, input, shape);
    }
    if (!input.value) {
      return {};
    }
    const bool written =
        std::any_of(recipe_.inputs().begin(), recipe_.inputs().end(), [&](const Input& other) {
          return isWrite(other.use) && other.value.pointer() == input.value.pointer();
        });
    if (written) {
      return show(buffers_.of(input), input, shape);
    }
    const c10::Storage storage = input.value->available();
    TORCH_CHECK(
        storage, "ebb: cannot recompute ", where(graph_, recipe_),
        ": another thread wrote or freed one of its inputs meanwhile. Let that thread wait for "
        "backward, or give ",
        recipe_.op.name, " the decision SAVE.");
    graph_.streams.use(*input.value, storage);
    return show(storage, input, shape);
  }

  at::Tensor show(const c10::Storage& storage, const Input& input, const int64_t* shape) const {
    return viewOf(storage, input.flags, shape);
  }

  void runKernel() {
    c10::AutoGradMode gradMode(recipe_.kernel.gradMode);
    RandomReplay random(recipe_.op, recipe_.kernel.random.get(), stack_);
    recipe_.op.op.redispatchBoxed(recipe_.kernel.keys, &stack_);
    if (recipe_.op.guard != nullptr) [[unlikely]] {
      recipe_.op.guard->hasReplayed(recipe_, stack_);
    }
    TORCH_CHECK(
        random.drewTheSame() && resultIsTheSame(), "ebb: cannot recompute ", where(graph_, recipe_),
        ": its replay draws other random numbers than the forward, because another thread used the "
        "same generator during the forward. Give that thread a torch.Generator of its own, or "
        "give ",
        recipe_.op.name, " the decision SAVE.");
    random.putBack();
  }

  // Throws if another thread has written to an input during the run.
  void checkInputsAreStill() const {
    for (const Input& input : recipe_.inputs()) {
      if (!input.value || input.value->home().isPrivate() || input.isStandIn() ||
          input.wholeOverwrite) {
        continue;
      }
      const c10::Storage storage = input.value->available();
      TORCH_CHECK(
          storage && !hasChanged(*input.value, storage, FingerprintOf::Samples),
          "ebb: an input of ", where(graph_, recipe_),
          " was written while it was being recomputed ahead");
    }
  }

  // See Note [Threads that draw outside of regions]
  bool resultIsTheSame() const {
    return recipe_.kernel.random == nullptr || recipe_.kernel.random->fingerprint == 0 ||
           fingerprint(stack_.front().toTensor().storage()) == recipe_.kernel.random->fingerprint;
  }

  void checkCapture() const {
    TORCH_CHECK(
        recipe_.kernel.random == nullptr || recipe_.kernel.random->canBeSetNow(),
        "ebb: cannot recompute ", where(graph_, recipe_), ": it drew random numbers ",
        recipe_.kernel.random->capture == 0 ? "outside of" : "inside",
        " a CUDA graph capture, and its replay is not in the same place. Capture forward and "
        "backward together, or give ",
        recipe_.op.name, " the decision SAVE.");
  }

  void checkPrecision() const {
    TORCH_CHECK(
        recipe_.kernel.precision ==
            productPrecision(recipe_.op.kernel.precision, recipe_.kernel.keys),
        "ebb: cannot recompute ", where(graph_, recipe_),
        ": a matmul precision setting (set_float32_matmul_precision, fp32_precision, allow_tf32, "
        "allow_fp16_accumulation, allow_.._reduced_precision_reduction, preferred_blas_library, "
        "preferred_linalg_library, _set_sm_carveout_experimental) was changed after the forward. "
        "Change it between steps, or give ",
        recipe_.op.name, " the decision SAVE.");
  }

  // True if `value` needs no bytes from this replay.
  bool hasItsBytes(const Value& value) const {
    return value.available() && !(repeatsAll() && value.recipe());
  }

  bool repeatsAll() const { return recipe_.op.guard != nullptr && recipe_.op.guard->repeatsAll(); }

  void handOut() {
    for (const Output& output : recipe_.outputs) {
      const auto value = output.value.lock();
      const bool hasBytes = value && hasItsBytes(*value);
      if (!value || (hasBytes && !repeatsAll())) {
        continue;
      }
      c10::Storage storage = storageOf(output);
      checkSize(graph_, recipe_, *value, storage);
      checkBits(output, *value, storage);
      if (hasBytes) {
        continue;
      }
      if (!transient_.staysUnmade(*value)) {
        value->restore(std::move(storage), true);
      } else if (!transient_.made(*value, std::move(storage))) {
        continue;
      }
      graph_.streams.made(*value, value->home().bytes());
      graph_.observers.tell(&BackwardEvents::replayed, graph_, recipe_, *value);
    }
  }

  // An observer that compares all bits gives a better message.
  void checkBits(const Output& output, const Value& value, const c10::Storage& storage) const {
    if (recipe_.op.guard != nullptr && !graph_.rules.compareAll) [[unlikely]] {
      const at::Tensor* tensor = output.written ? nullptr : &resultOf(output);
      recipe_.op.guard->check({graph_, recipe_, output, value, storage, tensor});
    }
  }

  c10::Storage storageOf(const Output& output) const {
    if (output.written) {
      for (const Input& input : recipe_.inputs()) {
        if (input.argument == output.slot && input.element == output.element) {
          if (const c10::Storage* buffer = buffers_.find(input)) {
            return *buffer;
          }
        }
      }
      TORCH_INTERNAL_ASSERT(false, "no buffer for a written argument of ", recipe_.op.name);
    }
    const at::Tensor& tensor = resultOf(output);
    TORCH_CHECK(
        tensor.defined() && tensor.has_storage(), "ebb: replaying ", where(graph_, recipe_),
        " gave no tensor where the forward gave one. Give this operator the decision SAVE.");
    return tensor.storage();
  }

  const at::Tensor& resultOf(const Output& output) const {
    const c10::IValue& result = stack_[output.slot];
    return output.element < 0 ? result.toTensor() : result.toListRef()[output.element].toTensor();
  }

  Graph& graph_;
  Recipe& recipe_;
  torch::jit::Stack& stack_;
  TransientValues& transient_;
  const bool ahead_;
  Buffers buffers_;
};

}  // namespace

void rerun(
    Graph& graph, Recipe& recipe, torch::jit::Stack& stack, TransientValues& transient,
    bool ahead) {
  Rerun(graph, recipe, stack, transient, ahead).run();
}

}  // namespace ebb
