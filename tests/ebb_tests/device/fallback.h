// Every operator without a kernel of its own: run by the CPU's, late where its results can be
// planned.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <torch/library.h>

#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "generator.h"
#include "memory.h"
#include "streams.h"
#include "tensors.h"
#include "unsteady.h"

namespace late {

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
        name_(c10::toString(op.operator_name())),
        unsteady_(unsteadyCall(name_)),
        isRandom_(op.hasTag(at::Tag::nondeterministic_seeded)),
        arguments_(stack.end() - schema_.arguments().size(), stack.end()) {
    findDevice();
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const bool isDevice = arguments_[i].isDevice();
      onCpu_.push_back(
          isDevice ? c10::IValue(c10::Device(c10::kCPU)) : mapTensors(arguments_[i], shown));
      if (schema_.arguments()[i].name() == "generator") {
        generator_ = i;
      }
    }
  }

  // Gives the results.
  std::vector<c10::IValue> run() {
    const c10::DeviceGuard guard(*device_);
    stream_ = currentStream();
    std::vector<c10::IValue> plan;
    return makePlan(plan) ? runLate(plan) : runNow();
  }

 private:
  void findDevice() {
    for (const c10::IValue& argument : arguments_) {
      mapTensors(argument, [&](const at::Tensor& tensor) {
        if (isOurs(tensor)) {
          TORCH_CHECK(
              !device_ || *device_ == tensor.device(), "late: ", name_, " got tensors on ",
              *device_, " and ", tensor.device());
          device_ = tensor.device();
        }
        return tensor;
      });
    }
    for (const c10::IValue& argument : arguments_) {
      if (!device_ && argument.isDevice()) {
        device_ = argument.toDevice();
      }
    }
    device_ = c10::Device(
        kType, static_cast<c10::DeviceIndex>(device_ ? resolved(*device_) : currentDevice));
  }

  bool isWritten(size_t argument) const {
    const auto* alias = schema_.arguments()[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  Uses uses() const {
    Uses found;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      mapTensors(arguments_[i], [&](const at::Tensor& tensor) {
        addUse(found, tensor, isWritten(i));
        return tensor;
      });
    }
    return found;
  }

  // Whether the meta kernels tell what will be returned, and it is known what will be drawn.
  bool makePlan(std::vector<c10::IValue>& plan) {
    const bool knowsDraws = generator_ && settings.draws == Draws::FromDevice;
    const bool canRun = op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
    // In evaluation its kernel gives empty statistics, which the plan does not know.
    const bool differs = schema_.name() == "aten::native_batch_norm";
    if (schema_.name().find("sparse") != std::string::npos) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, "late: there are no sparse tensors; ", name_);
    }
    if ((isRandom_ && !knowsDraws) || !canRun || differs) {
      return false;
    }
    for (const auto& result : schema_.returns()) {
      if (result.type()->kind() != c10::TypeKind::TensorType) {
        return false;
      }
    }
    for (const c10::IValue& argument : arguments_) {
      plan.push_back(
          argument.isDevice()      ? c10::IValue(c10::Device(c10::kMeta))
          : argument.isGenerator() ? c10::IValue()
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
      if (isWritten(i) && arguments_[i].isTensor()) {
        resizeTensor(arguments_[i].toTensor(), planned[i].toTensor().sizes());
        onCpu_[i] = shown(arguments_[i].toTensor());
      }
    }
  }

  std::vector<c10::IValue> runLate(const std::vector<c10::IValue>& plan) {
    std::vector<c10::IValue> results;
    std::vector<at::Tensor> targets(schema_.returns().size());
    Uses used = uses();
    for (size_t i = 0; i < targets.size(); ++i) {
      const c10::IValue* argument = returned(i);
      const at::Tensor planned = plan[i].toTensor();
      if (argument != nullptr) {
        results.push_back(*argument);
        targets[i] = takeOutput(argument - arguments_.data());
      } else if (!planned.defined()) {
        results.emplace_back(at::Tensor());
      } else {
        results.emplace_back(emptyLike(planned, *device_));
        targets[i] = shown(results[i].toTensor());
        addUse(used, results[i].toTensor(), true);
      }
    }
    const auto task = [op = op_, onCpu = onCpu_, slot = generator_, numbers = takeNumbers(),
                       targets, unsteady = unsteady_] {
      const Below inside;
      torch::jit::Stack values(onCpu);
      if (numbers) {
        values[*slot] = numbers->generator();
      }
      op.callBoxed(&values);
      for (const c10::IValue& value : values) {
        if (value.isTensor()) {
          disturb(value.toTensor(), unsteady);
        }
      }
      for (size_t i = 0; i < targets.size(); ++i) {
        if (targets[i].defined() && values[i].toTensor().defined()) {
          targets[i].copy_(values[i].toTensor());
        }
      }
    };
    enqueue(stream_, name_, used, task);
    return results;
  }

  // The memory of an `out=`; the CPU's kernel gets a tensor of its own for it, since some resize it
  // first. Undefined for other arguments.
  at::Tensor takeOutput(size_t argument) {
    if (!schema_.arguments()[argument].kwarg_only() || !onCpu_[argument].isTensor()) {
      return {};
    }
    at::Tensor output = onCpu_[argument].toTensor();
    onCpu_[argument] = at::empty({0}, output.options());
    return output;
  }

  at::Generator generator() const {
    const c10::IValue& given = arguments_[*generator_];
    return given.isGenerator() ? given.toGenerator() : defaultGenerator(device_->index());
  }

  std::optional<Numbers> takeNumbers() {
    if (!isRandom_) {
      return std::nullopt;
    }
    DeviceGenerator& from = implOf(generator());
    const Numbers numbers = from.next();
    from.advance();
    return numbers;
  }

  std::vector<c10::IValue> runNow() {
    if (const Lock lock(program); isCaptured(stream_)) {
      breakCapture(
          name_ + " waits for the device, which is not permitted while a graph is captured");
    }
    const c10::IValue third = arguments_.size() > 2 ? onCpu_[2] : c10::IValue();
    const torch::jit::Stack values = valuesNow();
    if (schema_.name() == "aten::_ctc_loss" && third.isIntList()) {
      fillRest(third, values[1].toTensor());
    }
    std::vector<c10::IValue> results;
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      const c10::IValue* argument = returned(i);
      results.push_back(argument != nullptr ? *argument : mapTensors(values[i], [&](auto& value) {
        return copied(value);
      }));
    }
    return results;
  }

  // Runs it on the host when the stream has come so far. A device would do so by itself, unless
  // sizes depend on it: only then does the host know of what came before.
  torch::jit::Stack valuesNow() {
    const bool hostAsks =
        op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output);
    const uint64_t number = enqueue(stream_, name_, uses(), [] {});
    queueOf(stream_).finish(number);
    if (hostAsks) {
      finish(stream_);
    }
    called("operators that the host ran");
    torch::jit::Stack values(onCpu_);
    if (isRandom_) {
      draw(values);
    } else {
      op_.callBoxed(&values);
    }
    for (const c10::IValue& value : values) {
      if (value.isTensor()) {
        disturb(value.toTensor(), unsteady_);
      }
    }
    return values;
  }

  void draw(torch::jit::Stack& values) {
    const bool given = generator_ && arguments_[*generator_].isGenerator();
    if (settings.draws == Draws::FromCpu) {
      op_.callBoxed(&values);  // with a generator of the device it raises
    } else {
      const Drawing drawing(
          settings.draws == Draws::FromHidden ? hiddenGenerator()
          : given                             ? generator()
                                              : defaultGenerator(device_->index()));
      if (given) {
        values[*generator_] = c10::IValue();
      }
      op_.callBoxed(&values);
    }
    if (settings.draws == Draws::FromBoth) {
      const at::Tensor factor = at::rand({}, c10::TensorOptions(c10::kCPU));
      for (const c10::IValue& result : values) {
        if (result.isTensor() && result.toTensor().is_floating_point()) {
          result.toTensor().mul_(factor);
        }
      }
    }
  }

  at::Tensor copied(const at::Tensor& tensor) const {
    if (!tensor.defined()) {
      return tensor;
    }
    const at::Tensor copy = emptyLike(tensor, *device_);
    launch(
        stream_, name_ + " (results)", {}, copy, [to = shown(copy), tensor] { to.copy_(tensor); });
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

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  const int64_t unsteady_;  // see unsteadyCall()
  const bool isRandom_;
  const std::vector<c10::IValue> arguments_;
  torch::jit::Stack onCpu_;          // the arguments as CPU tensors
  std::optional<size_t> generator_;  // which argument it is, if there is one
  std::optional<c10::Device> device_;
  int stream_ = 0;
};

inline void runOnDevice(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Below below;
  const std::vector<c10::IValue> results = Call(op, *stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->insert(stack->end(), results.begin(), results.end());
}

}  // namespace late
