#include "conditions/random_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/hash.h>

#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "conditions/fingerprint.h"
#include "stream/capture.h"

namespace ebb {
namespace {

PythonMutex& drawMutex() {
  static auto* mutex = new PythonMutex;
  return *mutex;
}

at::Tensor stateOf(const at::Generator& generator) {
  std::lock_guard<std::mutex> lock(const_cast<at::Generator&>(generator).mutex());
  return generator.get_state();
}

at::Generator cloneOf(const at::Generator& generator) {
  std::lock_guard<std::mutex> lock(const_cast<at::Generator&>(generator).mutex());
  return generator.clone();
}

void setState(at::Generator& generator, const at::Tensor& state) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

// The device whose default generator an op without a Generator argument draws from. Unknown for a
// custom operator without tensor and device arguments.
std::optional<c10::Device> deviceOf(
    const OpTraits& op, c10::DispatchKeySet keys, const c10::IValue* arguments) {
  const auto key = keys.remove(c10::DispatchKey::PythonDispatcher).highestPriorityTypeId();
  std::optional<c10::DeviceType> type;
  if (key != c10::DispatchKey::Undefined) {
    type = c10::dispatchKeyToDeviceType(key);
  }
  std::optional<c10::Device> device;
  for (size_t i = 0; i < op.arguments.types.size() && !device; ++i) {
    const c10::IValue& argument = arguments[i];
    if (argument.isTensor() && argument.toTensor().defined()) {
      device = argument.toTensor().device();
    } else if (argument.isDevice()) {
      device = argument.toDevice();
    }
    if (device && type && device->type() != *type) {
      device.reset();
    }
  }
  if (!type && !device) {
    return {};
  }
  if (!device || !device->has_index()) {
    device = c10::impl::getDeviceGuardImpl(device ? device->type() : *type)->getDevice();
  }
  return device;
}

at::Generator cpuGenerator() { return at::globalContext().defaultGenerator(c10::kCPU); }

// Returns the device's default generator; undefined if the device is unknown or has none.
at::Generator defaultGenerator(std::optional<c10::Device> device) {
  if (!device) {
    return {};
  }
  try {
    return at::globalContext().defaultGenerator(*device);
  } catch (const c10::Error&) {
    return {};
  }
}

bool sameState(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

at::CPUGeneratorImpl& cpu(const at::Generator& generator) {
  return *at::check_generator<at::CPUGeneratorImpl>(generator);
}

// A number that tells states of a generator apart. All numbers of the CPU's state change together,
// so a few of them suffice.
uint64_t digestOf(const at::Generator& generator) {
  if (!generator.device().is_cpu()) {
    return fingerprint(stateOf(generator).storage(), FingerprintOf::Everything);
  }
  std::lock_guard<std::mutex> lock(const_cast<at::Generator&>(generator).mutex());
  const auto engine = cpu(generator).engine().data();
  const std::array<uint32_t, 6> parts{
      static_cast<uint32_t>(engine.left_),
      engine.next_,
      engine.state_.front(),
      engine.state_.back(),
      cpu(generator).next_float_normal_sample().has_value(),
      cpu(generator).next_double_normal_sample().has_value()};
  return c10::get_hash(parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]);
}

}  // namespace

bool mayDrawWith(const OpTraits& op, const c10::IValue* arguments) {
  if (op.random.dropoutArgument >= 0) {
    const c10::IValue& probability = arguments[op.random.dropoutArgument];
    return !(probability.isDouble() && probability.toDouble() == 0.0);
  }
  return true;
}

RandomScope::RandomScope(
    const OpTraits& op, c10::DispatchKeySet keys, c10::IValue* arguments, bool recorded) {
  const bool takesGenerator = op.random.generatorArgument >= 0;
  const bool given = takesGenerator && arguments[op.random.generatorArgument].isGenerator();
  if (!given && !op.limits.custom) {
    lock_ = std::unique_lock<PythonMutex>(drawMutex());
  }
  if (!recorded) {
    return;
  }
  // A custom operator may draw although it has no tag, so finish() compares the generator's states
  // before and after the op. RandomScope takes no lock for such an operator, whose kernel may be
  // Python.
  confirm_ = !op.random.draws;
  state_ = std::make_unique<RandomState>();
  state_->generator = given ? arguments[op.random.generatorArgument].toGenerator()
                            : defaultGenerator(deviceOf(op, keys, arguments));
  const bool onDevice = !state_->generator.defined() || !state_->generator.device().is_cpu();
  if (takesGenerator && !given && !op.limits.custom && !onDevice) {
    letOpDrawFromClone(arguments[op.random.generatorArgument]);
    return;
  }
  if (state_->generator.defined()) {
    before_ = stateOf(state_->generator);
    state_->capture = captureOf(state_->generator.device());
  }
  if (onDevice && !(before_.defined() && state_->generator.device().is_cuda())) {
    cpuBefore_ = stateOf(cpuGenerator());
  }
}

// See Note [Threads that draw outside of regions]
void RandomScope::letOpDrawFromClone(c10::IValue& argument) {
  at::Generator& original = state_->generator;
  std::lock_guard<std::mutex> lock(original.mutex());
  before_ = original.get_state();
  engineBefore_ = cpu(original).engine().data();
  clone_ = original.clone();
  argument = clone_;
}

void RandomScope::putCloneBack() {
  at::Generator& original = state_->generator;
  std::lock_guard<std::mutex> lock(original.mutex());
  const auto engine = cpu(original).engine().data();
  // If another thread has drawn meanwhile, the generator has already advanced, so its state stays.
  // That thread drew the same numbers as this op.
  if (engine.left_ == engineBefore_->left_ && engine.next_ == engineBefore_->next_ &&
      engine.state_ == engineBefore_->state_) {
    cpu(original).set_engine(cpu(clone_).engine());
    cpu(original).set_next_float_normal_sample(cpu(clone_).next_float_normal_sample());
    cpu(original).set_next_double_normal_sample(cpu(clone_).next_double_normal_sample());
  }
}

RandomScope::~RandomScope() {
  if (clone_.defined()) {
    putCloneBack();  // the kernel raised, and may have drawn before
  }
}

std::unique_ptr<RandomState> RandomScope::finish() {
  if (clone_.defined()) {
    putCloneBack();
    state_->digestAfter = digestOf(clone_);
    clone_ = {};
  } else if (state_) {
    findWhatMoved();
  }
  lock_ = {};
  if (state_) {
    state_->keep(before_);
  }
  return std::move(state_);
}

// See Note [Which generator an op drew from]
void RandomScope::findWhatMoved() {
  const bool moved = before_.defined() && !sameState(before_, stateOf(state_->generator));
  const bool cpuMoved = cpuBefore_.defined() && !sameState(cpuBefore_, stateOf(cpuGenerator()));
  const bool shows = before_.defined() && !state_->generator.device().is_privateuseone();
  if (cpuMoved && !moved) {
    state_->generator = cpuGenerator();
    state_->capture = 0;
    before_ = cpuBefore_;
  } else if (moved ? cpuMoved : !confirm_ && !shows) {
    unknown_ = true;
    state_.reset();
  } else if (!moved && confirm_) {
    state_.reset();
  }
  if (state_) {
    state_->digestAfter = digestOf(state_->generator);
  }
}

void RandomState::keep(const at::Tensor& state) {
  if (generator.device().is_cpu()) {
    cpuBefore = cloneOf(generator);
    setState(cpuBefore, state);
  } else {
    stateBefore = state;
  }
}

at::Tensor RandomState::before() const {
  return cpuBefore.defined() ? stateOf(cpuBefore) : stateBefore;
}

bool RandomState::canBeSetNow() const { return capture == captureOf(generator.device()); }

RandomReplay::RandomReplay(const OpTraits& op, const RandomState* state, torch::jit::Stack& stack)
    : state_(state) {
  if (state == nullptr) {
    return;
  }
  if (op.random.generatorArgument >= 0 && state->capture == 0) {
    clone_ = cloneOf(state->generator);
    setState(clone_, state->before());
    stack[stack.size() - op.arguments.types.size() + op.random.generatorArgument] = clone_;
    return;
  }
  if (!op.limits.custom) {
    lock_ = std::unique_lock<PythonMutex>(drawMutex());
  }
  generator_ = state->generator;
  if (!lend()) {
    outer_ = stateOf(generator_);
    setState(generator_, state->before());
  }
}

// Exchanges the state object of the generator for an object with the forward's state. Returns
// false, and does nothing, in a capture and for other generators than CUDA's, which do not support
// the exchange.
bool RandomReplay::lend() {
  if (!generator_.device().is_cuda() || state_->capture != 0) {
    return false;
  }
  std::lock_guard<std::mutex> lock(generator_.mutex());
  const at::Generator other = generator_.clone();
  other.unsafeGetGeneratorImpl()->set_state(*state_->before().unsafeGetTensorImpl());
  lender_ = generator_.graphsafe_get_state();
  generator_.graphsafe_set_state(other);
  return true;
}

bool RandomReplay::drewTheSame() const {
  return state_ == nullptr ||
         digestOf(clone_.defined() ? clone_ : generator_) == state_->digestAfter;
}

void RandomReplay::putBack() {
  at::Generator generator = std::exchange(generator_, {});
  if (lender_.defined()) {
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.graphsafe_set_state(lender_);
  } else if (generator.defined()) {
    setState(generator, outer_);
  }
}

// Restores the generator if putBack() was not called, because the op has thrown. If the restoration
// fails too, the destructor drops the second exception: the first one must reach the program.
RandomReplay::~RandomReplay() {
  if (generator_.defined()) {
    try {
      putBack();
    } catch (const std::exception&) {
    }
  }
}

}  // namespace ebb
