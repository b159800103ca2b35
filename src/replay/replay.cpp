#include "replay/replay.h"

#include <ATen/core/List.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "graph/recipe.h"
#include "intercept/key.h"
#include "kernel/fingerprint.h"
#include "kernel/kernel_state.h"
#include "kernel/random_state.h"
#include "memory/bytes.h"
#include "memory/stash.h"
#include "report/ledger.h"
#include "verify/compare.h"
#include "verify/poison.h"

namespace ebb {
namespace {

[[gnu::cold]] void noteReloaded(Value& value, JournalTime start) {
  Journal& journal = value.entry->journal();
  std::string op;
  value.entry->update([&](Line& line) {
    line.back = journal.now();
    op = *line.op;
  });
  journal.add("reload", op, start, value.nbytes);
}

// The bytes of an offloaded value, on the device again; null if its storage was written unseen
// before they were copied for sure.
c10::Storage bringBack(Value& value) {
  RECORD_USER_SCOPE("ebb::reload");
  const c10::Storage living = value.living();
  if (!living && !value.isPrivate && !value.versionHolds()) {
    return {};
  }
  const JournalTime start = value.entry ? value.entry->journal().now() : 0;
  if (!value.part) {
    value.bytes = value.stash->fetch(living);
  } else if (living) {
    value.bytes = living;
  } else {
    value.bytes = value.part->scatter(value.stash->fetch({}), value.nbytes);
  }
  value.part.reset();
  value.isPrivate = !living;
  value.stash.reset();
  if (value.entry) {
    noteReloaded(value, start);
  }
  return value.bytes;
}

bool isWrite(ArgUse use) {
  return use == ArgUse::Write || use == ArgUse::Overwrite;
}

// One recipe, run again.
class Rerun {
 public:
  // `stack` is empty, and is given for its memory.
  Rerun(Graph& graph, Recipe& recipe, torch::jit::Stack& stack)
      : graph_(graph), recipe_(recipe), stack_(stack) {
  }

  void run() {
    RECORD_USER_SCOPE("ebb::replay " + recipe_.op.name);
    const JournalTime start = graph_.journal ? graph_.journal->now() : 0;
    pushArguments();
    runKernel();
    handOut(start);
    if (graph_.journal) {
      graph_.journal->add("replay", recipe_.op.name, start);
    }
  }

 private:
  // A buffer that stands for a value which the op writes.
  struct Buffer {
    const Value* value;
    c10::Storage storage;
  };

  c10::ArrayRef<Input> inputs() const {
    return {recipe_.inputs, recipe_.inputCount};
  }

  void pushArguments() {
    stack_.resize(recipe_.op.argumentCount);
    pushOthers();
    const int64_t* shape = recipe_.shapes;
    c10::SmallVector<at::Tensor, 8> tensors;
    for (const Input& input : inputs()) {
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
    const c10::IValue* other = recipe_.others;
    for (const uint16_t i : recipe_.op.others) {
      // Lists of tensors were stored empty; each run fills lists of its own.
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
    const bool written = std::any_of(inputs().begin(), inputs().end(), [&](const Input& other) {
      return isWrite(other.use) && other.value == input.value;
    });
    if (written) {
      return show(bufferFor(input), input, shape);
    }
    const c10::Storage storage = input.value->available();
    TORCH_CHECK(
        storage,
        "ebb: an input of ",
        recipe_.op.name,
        " in region '",
        graph_.names[recipe_.region],
        "' was written or freed by another thread while it was being recomputed");
    return show(storage, input, shape);
  }

  at::Tensor show(const c10::Storage& storage, const Input& input, const int64_t* shape) const {
    return viewOf(storage, input.flags, shape, input.offset);
  }

  // The op gets a private copy of what it writes, or the buffer itself if nothing else needs it.
  // All arguments that show the same value get the same buffer: they aliased in the forward.
  c10::Storage bufferFor(const Input& input) {
    for (const Buffer& buffer : buffers_) {
      if (buffer.value == input.value.get()) {
        return buffer.storage;
      }
    }
    size_t ours = 0;
    bool contentsMatter = false;
    for (const Input& other : inputs()) {
      if (other.value == input.value) {
        ++ours;
        contentsMatter |= !other.wholeOverwrite;
      }
    }
    Value& value = *input.value;
    c10::Storage storage;
    if (!contentsMatter) {
      storage = allocate(value.nbytes, input.flags.device);
    } else if (value.isPrivate && input.value.use_count() == ours && allOutputsWanted()) {
      storage = std::move(value.bytes);
      value.bytes = c10::Storage();
    } else {
      storage = copyOf(value.available());
    }
    buffers_.push_back({&value, storage});
    return storage;
  }

  // Whether every output that is alive will take its bytes from this run, so that none runs it
  // again.
  bool allOutputsWanted() const {
    return std::all_of(recipe_.outputs.begin(), recipe_.outputs.end(), [](const Output& output) {
      const auto value = output.value.lock();
      return !value || !value->available();
    });
  }

  void runKernel() {
    checkPrecision();
    c10::AutoGradMode gradMode(recipe_.gradMode);
    RandomReplay random(recipe_.op, recipe_.random.get(), stack_);
    recipe_.op.op.redispatchBoxed(recipe_.keys, &stack_);
    TORCH_CHECK(
        random.drewTheSame() && resultIsTheSame(),
        "ebb: cannot recompute ",
        recipe_.op.name,
        " in region '",
        graph_.names[recipe_.region],
        "': it draws other random numbers than in the forward, where another thread drew from the "
        "same generator while it ran. Give that thread a torch.Generator of its own, or give ",
        recipe_.op.name,
        " the decision SAVE.");
  }

  // See Note [Threads that draw outside of regions]
  bool resultIsTheSame() const {
    return recipe_.random == nullptr || recipe_.random->fingerprint == 0 ||
           fingerprint(stack_.front().toTensor().storage()) == recipe_.random->fingerprint;
  }

  void checkPrecision() const {
    TORCH_CHECK(
        recipe_.precision == float32Precision(recipe_.op.precision, recipe_.keys),
        "ebb: cannot recompute ",
        recipe_.op.name,
        " in region '",
        graph_.names[recipe_.region],
        "': the float32 precision (set_float32_matmul_precision, fp32_precision, allow_tf32) was "
        "changed after the forward. Change it between steps, or give ",
        recipe_.op.name,
        " the decision SAVE.");
  }

  void handOut(JournalTime start) {
    for (const Output& output : recipe_.outputs) {
      const auto value = output.value.lock();
      if (!value || value->available()) {
        continue;
      }
      c10::Storage storage = storageOf(output);
      TORCH_CHECK(
          storage.nbytes() == value->nbytes,
          "ebb: replaying ",
          recipe_.op.name,
          " in region '",
          graph_.names[recipe_.region],
          "' gave ",
          storage.nbytes(),
          " bytes where the forward gave ",
          value->nbytes,
          ". Likely causes: 1. the operator depends on state outside its arguments; 2. an input "
          "was "
          "changed by code that bypasses torch. Give this operator the decision SAVE.");
      value->bytes = std::move(storage);
      value->isPrivate = true;
      value->recipe.reset();
      if (value->entry) {
        note(*value, std::exchange(start, kNever));
      }
      if (graph_.verify != VerifyMode::Off) {
        verify(*value);
      }
    }
  }

  // The run's time counts for the first of its results.
  static void note(Value& value, JournalTime start) {
    value.entry->update([&](Line& line) {
      line.back = value.entry->journal().now();
      line.replayTime += start == kNever ? 0 : line.back - start;
      ++line.replays;
    });
  }

  // See Note [Verify mode]
  void verify(Value& value) const {
    if (value.witness) {
      compareReplay(graph_, recipe_, value);
      poisonWhenFreed(value.bytes, value.witness->dtype, {});
    }
  }

  c10::Storage storageOf(const Output& output) const {
    if (output.written) {
      for (const Input& input : inputs()) {
        if (input.argument == output.slot && input.element == output.element) {
          for (const Buffer& buffer : buffers_) {
            if (buffer.value == input.value.get()) {
              return buffer.storage;
            }
          }
        }
      }
      TORCH_INTERNAL_ASSERT(false, "no buffer for a written argument of ", recipe_.op.name);
    }
    const c10::IValue& result = stack_[output.slot];
    const at::Tensor& tensor =
        output.element < 0 ? result.toTensor() : result.toListRef()[output.element].toTensor();
    TORCH_CHECK(
        tensor.defined() && tensor.has_storage(),
        "ebb: replaying ",
        recipe_.op.name,
        " in region '",
        graph_.names[recipe_.region],
        "' gave no tensor where the forward gave one. Give this operator the decision SAVE.");
    return tensor.storage();
  }

  Graph& graph_;
  Recipe& recipe_;
  torch::jit::Stack& stack_;
  c10::SmallVector<Buffer, 1> buffers_;  // of this run
};

// The work that one value needs.
class Slice {
 public:
  explicit Slice(Graph& graph) : graph_(graph) {
  }

  void collect(Value& wanted) {
    ++graph_.lastVisit;
    add(wanted.recipe);
    for (size_t next = 0; next < recipes_.size(); ++next) {
      const Recipe& recipe = *recipes_[next];
      for (uint32_t i = 0; i < recipe.inputCount; ++i) {
        const Input& input = recipe.inputs[i];
        if (input.value && !input.wholeOverwrite) {
          need(*input.value, recipe);
        }
      }
    }
    std::sort(recipes_.begin(), recipes_.end(), [](const auto& a, const auto& b) {
      return a->sequence < b->sequence;
    });
  }

  void run() {
    RegionCounters counters;
    uint16_t region = recipes_.front()->region;
    std::optional<KernelStateGuard> guard;
    const KernelState* state = nullptr;
    torch::jit::Stack stack;
    for (auto& recipe : recipes_) {
      if (recipe->region != region) {
        ledgerAdd(graph_.names[region], std::exchange(counters, {}));
        region = recipe->region;
      }
      if (recipe->state != state) {
        guard.reset();
        state = recipe->state;
        guard.emplace(*state);
      }
      Rerun(graph_, *recipe, stack).run();
      stack.clear();
      ++counters.opsReplayed;
      recipe.reset();  // inputs that nothing else needs are freed here
    }
    ledgerAdd(graph_.names[region], counters);
  }

 private:
  void add(const c10::intrusive_ptr<Recipe>& recipe) {
    if (recipe->visit != graph_.lastVisit) {
      recipe->visit = graph_.lastVisit;
      checkRegistered(*recipe);
      recipes_.push_back(recipe);
    }
  }

  void need(Value& value, const Recipe& consumer) {
    if (value.stash) {
      bringBack(value);
    }
    if (c10::Storage storage = value.available()) {
      checkFingerprint(value, storage, consumer);
      pinned_.push_back(std::move(storage));
    } else if (value.recipe) {
      add(value.recipe);
    } else {
      throwLostLeaf(value, consumer);
    }
  }

  void checkFingerprint(
      const Value& value, const c10::Storage& storage, const Recipe& consumer) const {
    // In verify mode the comparison decides: the change may not matter.
    const bool changed =
        value.tampered || (!value.isPrivate && hasChanged(value, storage, graph_.verify));
    TORCH_CHECK(
        !changed || graph_.verify != VerifyMode::Off,
        "one of the variables needed for gradient computation has been modified without moving "
        "its version: ebb must recompute ",
        consumer.op.name,
        " in region '",
        graph_.names[consumer.region],
        "', and one of its inputs has other contents than in the forward. Likely causes: a write "
        "through .data, a fused optimizer step, batch norm statistics, or numpy, before backward. "
        "Write after backward, or give ",
        consumer.op.name,
        " the decision SAVE.");
  }

  void checkRegistered(const Recipe& recipe) const {
    TORCH_CHECK(
        recipe.op.registered.load(std::memory_order_acquire),
        "ebb: cannot recompute ",
        recipe.op.name,
        " in region '",
        graph_.names[recipe.region],
        "': the operator was unregistered after the forward. Keep its library alive until backward "
        "has run, or give it the decision SAVE.");
  }

  // See Note [Version checks]
  [[noreturn]] void throwLostLeaf(const Value& value, const Recipe& consumer) const {
    const std::string where =
        consumer.op.name + " in region '" + graph_.names[consumer.region] + "'";
    const bool freed = value.bytes && value.bytes.nbytes() != value.nbytes;
    TORCH_CHECK(
        !freed,
        "ebb: cannot recompute ",
        where,
        ": the storage of one of its inputs was resized from ",
        value.nbytes,
        " to ",
        value.bytes ? value.bytes.nbytes() : 0,
        " bytes after the region (a parameter that was resharded, or a buffer that was freed). "
        "Restore it before backward, make each block whose parameters are resharded a region of "
        "its own (ebb.apply), or give ",
        consumer.op.name,
        " the decision SAVE.");
    TORCH_CHECK(
        value.bytes || value.stash,
        "ebb: cannot recompute ",
        where,
        ": an earlier attempt failed half way. Run forward again.");
    TORCH_CHECK(
        false,
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation: ebb must recompute ",
        where,
        ", and one of its inputs is at version ",
        value.counter.enabled() ? value.counter.current_version() : 0,
        "; expected version ",
        value.version,
        " instead. Write to it after backward, put all forwards that share it in one region, or "
        "give ",
        consumer.op.name,
        " the decision SAVE.");
  }

  Graph& graph_;
  std::vector<c10::intrusive_ptr<Recipe>> recipes_;  // to run; sorted by sequence
  std::vector<c10::Storage> pinned_;                 // living storages that the recipes read
};

}  // namespace

// Note [Replay]
// The needed recipes are collected backwards from the wanted value, stopping at values whose bytes
// are available, and run in the order of recording, with autograd, dispatch modes and our own key
// excluded. Each result that is still referred to gets its bytes and drops its recipe; with the
// recipe go the inputs that nothing else needs. So a slice holds no more than it must, and no
// recipe runs twice.
c10::Storage materialise(Graph& graph, Value& value) {
  if (value.stash) {
    return bringBack(value);
  }
  if (c10::Storage storage = value.available()) {
    return storage;
  }
  TORCH_CHECK(
      value.recipe,
      "ebb: a saved tensor cannot be recomputed: an earlier attempt failed half way. Run forward "
      "again.");
  Slice slice(graph);
  slice.collect(value);
  slice.run();
  TORCH_INTERNAL_ASSERT(value.bytes);
  return value.bytes;
}

}  // namespace ebb
