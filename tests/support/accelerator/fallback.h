// Every operator without a kernel of its own: run by the CPU's, late where its results can be
// planned.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/rand.h>
#include <torch/library.h>

#include <exception>
#include <utility>
#include <vector>

#include "generator.h"
#include "memory.h"
#include "streams.h"
#include "tensors.h"

namespace late {

inline void draw(const c10::OperatorHandle& op, torch::jit::Stack& stack, c10::IValue* generator) {
  const bool given = generator != nullptr && generator->isGenerator();
  if (draws == Draws::FromCpu) {
    op.callBoxed(&stack);  // with a generator of the device it raises
    return;
  }
  {
    const Drawing drawing(
        draws == Draws::FromHidden ? hiddenGenerator()
        : given                    ? generator->toGenerator()
                                   : defaultGenerator());
    if (given) {
      *generator = c10::IValue();
    }
    op.callBoxed(&stack);
  }
  if (draws == Draws::FromBoth) {
    const at::Tensor factor = at::rand({}, c10::TensorOptions(c10::kCPU));
    for (const c10::IValue& result : stack) {
      if (result.isTensor() && result.toTensor().is_floating_point()) {
        result.toTensor().mul_(factor);
      }
    }
  }
}

// Of a CTC loss's workspace nobody reads what is behind an input's end: memory that was used before
// has something else there each time.
inline void fillRest(const c10::IValue& lengths, const at::Tensor& workspace) {
  static int64_t calls = 0;
  ++calls;
  for (int64_t i = 0; i < workspace.size(0); ++i) {
    const int64_t length = lengths.toIntVector()[i];
    workspace[i].narrow(0, length, workspace.size(1) - length).fill_(calls);
  }
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : op_(op),
        schema_(op.schema()),
        arguments_(stack.end() - schema_.arguments().size(), stack.end()) {
    onCpu_.reserve(arguments_.size());
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const bool isDevice = arguments_[i].isDevice();
      onCpu_.push_back(
          isDevice ? c10::IValue(c10::Device(c10::kCPU)) : mapTensors(arguments_[i], shown));
      if (schema_.arguments()[i].name() == "generator") {
        generator_ = &onCpu_.back();
      }
    }
  }

  // Gives the results.
  std::vector<c10::IValue> run() {
    std::vector<c10::IValue> plan;
    return makePlan(plan) ? runLate(plan) : runNow();
  }

 private:
  // Whether the meta kernels tell what will be returned.
  bool makePlan(std::vector<c10::IValue>& plan) {
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) {
      return false;
    }
    for (const auto& result : schema_.returns()) {
      if (result.type()->kind() != c10::TypeKind::TensorType) {
        return false;
      }
    }
    for (const c10::IValue& argument : arguments_) {
      plan.push_back(
          argument.isDevice() ? c10::IValue(c10::Device(c10::kMeta))
                              : mapTensors(argument, planOf));
    }
    const std::vector<c10::IValue> planned(plan);
    try {
      op_.callBoxed(&plan);
    } catch (const std::exception&) {
      return false;
    }
    growOutputs(planned);
    return true;
  }

  // An `out=` may have grown.
  void growOutputs(const std::vector<c10::IValue>& planned) {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite() && arguments_[i].isTensor()) {
        at::native::resize_(arguments_[i].toTensor(), planned[i].toTensor().sizes());
        onCpu_[i] = shown(arguments_[i].toTensor());
      }
    }
  }

  std::vector<c10::IValue> runLate(const std::vector<c10::IValue>& plan) {
    std::vector<c10::IValue> results;
    std::vector<at::Tensor> targets(schema_.returns().size());
    for (size_t i = 0; i < targets.size(); ++i) {
      const c10::IValue* argument = returned(i);
      results.push_back(argument != nullptr ? *argument : emptyLike(plan[i].toTensor()));
      if (argument == nullptr) {
        targets[i] = shown(results[i].toTensor());
      }
    }
    enqueue(currentStream, [op = op_, onCpu = std::move(onCpu_), targets] {
      const Below inside;
      torch::jit::Stack values(onCpu);
      op.callBoxed(&values);
      for (size_t i = 0; i < targets.size(); ++i) {
        if (targets[i].defined()) {
          targets[i].copy_(values[i].toTensor());
        }
      }
    });
    return results;
  }

  std::vector<c10::IValue> runNow() {
    finish(currentStream);
    const c10::IValue third = arguments_.size() > 2 ? onCpu_[2] : c10::IValue();
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) {
      draw(op_, onCpu_, generator_);
    } else {
      op_.callBoxed(&onCpu_);
    }
    if (schema_.name() == "aten::_ctc_loss" && third.isIntList()) {
      fillRest(third, onCpu_[1].toTensor());
    }
    std::vector<c10::IValue> results;
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      const c10::IValue* argument = returned(i);
      results.push_back(argument != nullptr ? *argument : mapTensors(onCpu_[i], copied));
    }
    return results;
  }

  static at::Tensor copied(const at::Tensor& tensor) {
    const at::Tensor copy = emptyLike(tensor);
    shown(copy).copy_(tensor);
    return copy;
  }

  // The argument that this result is, or null.
  const c10::IValue* returned(size_t slot) const {
    const auto* alias = schema_.returns()[slot].alias_info();
    for (size_t i = 0; alias != nullptr && i < arguments_.size(); ++i) {
      const auto* other = schema_.arguments()[i].alias_info();
      if (other != nullptr && *other == *alias) {
        return &arguments_[i];
      }
    }
    return nullptr;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::vector<c10::IValue> arguments_;
  torch::jit::Stack onCpu_;           // the arguments as CPU tensors; after the call, the results
  c10::IValue* generator_ = nullptr;  // of onCpu_, if there is one
};

inline void runOnDevice(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Below below;
  const std::vector<c10::IValue> results = Call(op, *stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->insert(stack->end(), results.begin(), results.end());
}

}  // namespace late
