#include "graph/random_state.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <optional>

namespace ebb {
namespace {

std::mutex& drawMutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

at::Tensor stateOf(const at::Generator& generator) {
  std::lock_guard<std::mutex> lock(const_cast<at::Generator&>(generator).mutex());
  return generator.get_state();
}

void setState(at::Generator& generator, const at::Tensor& state) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

// The device whose default generator an op without a Generator argument draws from.
c10::Device deviceOf(const OpTraits& op, c10::DispatchKeySet keys, const c10::IValue* arguments) {
  const auto type = c10::dispatchKeyToDeviceType(keys.highestPriorityTypeId());
  if (type == c10::kCPU) {
    return c10::kCPU;
  }
  std::optional<c10::Device> device;
  for (size_t i = 0; i < op.argumentCount && !device; ++i) {
    const c10::IValue& argument = arguments[i];
    if (argument.isTensor() && argument.toTensor().defined()) {
      device = argument.toTensor().device();
    } else if (argument.isDevice()) {
      device = argument.toDevice();
    }
    if (device && device->type() != type) {
      device.reset();
    }
  }
  if (!device || !device->has_index()) {
    device = c10::impl::getDeviceGuardImpl(type)->getDevice();
  }
  return *device;
}

bool sameState(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

bool mayDraw(const OpTraits& op, const c10::IValue* arguments) {
  if (!op.random && !op.untrusted) {
    return false;
  }
  if (op.dropoutArgument >= 0) {
    const c10::IValue& probability = arguments[op.dropoutArgument];
    return !(probability.isDouble() && probability.toDouble() == 0.0);
  }
  return true;
}

}  // namespace

RandomScope::RandomScope(
    const OpTraits& op, c10::DispatchKeySet keys, const c10::IValue* arguments) {
  if (!mayDraw(op, arguments)) {
    return;
  }
  state_ = std::make_unique<RandomState>();
  // An operator from elsewhere may draw without saying so, and its kernel may be Python: compare
  // states around it, and hold no lock.
  confirm_ = !op.random;
  if (op.generatorArgument >= 0 && arguments[op.generatorArgument].isGenerator()) {
    state_->generator = arguments[op.generatorArgument].toGenerator();
  } else {
    state_->generator = at::globalContext().defaultGenerator(deviceOf(op, keys, arguments));
    if (!op.untrusted) {
      lock_ = std::unique_lock<std::mutex>(drawMutex());
    }
  }
  state_->state = stateOf(state_->generator);
}

std::unique_ptr<RandomState> RandomScope::finish() {
  if (confirm_ && sameState(state_->state, stateOf(state_->generator))) {
    state_.reset();
  }
  lock_ = {};
  return std::move(state_);
}

RandomReplay::RandomReplay(const OpTraits& op, const RandomState* state, torch::jit::Stack& stack) {
  if (state == nullptr) {
    return;
  }
  if (op.generatorArgument >= 0) {
    at::Generator clone = state->generator.clone();
    setState(clone, state->state);
    stack[stack.size() - op.argumentCount + op.generatorArgument] = std::move(clone);
    return;
  }
  if (!op.untrusted) {
    lock_ = std::unique_lock<std::mutex>(drawMutex());
  }
  generator_ = state->generator;
  outer_ = stateOf(generator_);
  setState(generator_, state->state);
}

RandomReplay::~RandomReplay() {
  if (generator_.defined()) {
    setState(generator_, outer_);
  }
}

}  // namespace ebb
