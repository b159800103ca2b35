#include "stand_in_generator.h"

#include <ATen/Utils.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <utility>

#include "conditions/random_state.h"
#include "intercept/op_traits.h"
#include "stream/capture.h"

namespace ebb {
namespace {

constexpr uint64_t kEachDraw = 4;

// As in CUDA's generator, states are objects of their own that generators exchange, and each time
// that a state is set counts as a beginning.
struct State {
  uint64_t seed = 0;
  uint64_t offset = 0;
};

struct StandInGenerator final : c10::GeneratorImpl {
  StandInGenerator(c10::Device device, std::shared_ptr<State> state)
      : GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        state(std::move(state)) {}
  void set_current_seed(uint64_t seed) override {
    TORCH_CHECK(!*fails, "the device is lost");
    *state = {seed, 0};
    ++begunAnew;
  }
  uint64_t current_seed() const override { return state->seed; }
  uint64_t seed() override { return state->seed; }
  void set_offset(uint64_t offset) override {
    state->offset = offset;
    ++begunAnew;
  }
  uint64_t get_offset() const override { return state->offset; }
  void set_state(const c10::TensorImpl& given) override {
    checkLocked();
    uint64_t offset = 0;
    uint64_t newSeed = 0;
    const auto* bytes = static_cast<const char*>(given.data());
    std::memcpy(&newSeed, bytes, sizeof(newSeed));
    std::memcpy(&offset, bytes + sizeof(newSeed), sizeof(offset));
    set_current_seed(newSeed);
    state->offset = offset;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    checkLocked();
    const at::Tensor bytes = at::empty({sizeof(State)}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), state.get(), sizeof(State));
    return bytes.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    checkLocked();
    state = static_cast<StandInGenerator&>(*other).state;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    checkLocked();
    return c10::make_intrusive<StandInGenerator>(device(), state);
  }
  StandInGenerator* clone_impl() const override {
    checkLocked();
    TORCH_CHECK(!isCapturing(device()), "a generator cannot be cloned in a capture");
    auto* made = new StandInGenerator(device(), std::make_shared<State>(*state));
    made->fails = fails;
    made->isShared = false;
    return made;
  }
  // By another thread, since this one may have the lock.
  void checkLocked() const {
    auto& mutex = const_cast<StandInGenerator*>(this)->mutex_;
    const bool isFree = isShared && std::async(std::launch::async, [&] {
                                      return std::unique_lock(mutex, std::try_to_lock).owns_lock();
                                    }).get();
    TORCH_CHECK(!isFree, "a generator is used without its lock");
  }

  std::shared_ptr<State> state;
  std::shared_ptr<bool> fails = std::make_shared<bool>(false);  // what sets a state raises
  uint64_t begunAnew = 0;
  bool isShared = true;  // not a clone
};

const OpTraits& traitsOf(const char* name, const char* overload) {
  return opTraits(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
}

StandInGenerator& implOf(const at::Generator& generator) {
  return static_cast<StandInGenerator&>(*generator.unsafeGetGeneratorImpl());
}

// An op to which the generator is given, so that it need not be the device's.
std::unique_ptr<RandomState> draw(const at::Generator& generator, State& state) {
  const OpTraits& op = traitsOf("aten::bernoulli_", "float");
  torch::jit::Stack arguments(op.arguments.types.size());
  arguments[op.random.generatorArgument] = generator;
  RandomScope scope(op, c10::DispatchKeySet(c10::DispatchKey::CUDA), arguments.data(), true);
  state.offset += kEachDraw;
  return scope.finish();
}

}  // namespace

ReplayedDraw replayDraw(c10::Device device, const ReplayCircumstances& circumstances) {
  auto generator =
      at::make_generator<StandInGenerator>(device, std::make_shared<State>(State{1, 8}));
  StandInGenerator& shared = implOf(generator);
  ReplayedDraw found{.forward = shared.state->offset};
  const auto drawn = draw(generator, *shared.state);
  shared.state->offset += kEachDraw;
  found.before = shared.state->offset;
  if (circumstances.between) {
    circumstances.between();
  }
  TORCH_CHECK(drawn->canBeSetNow(), "drawn in another capture");
  {
    const OpTraits& op = circumstances.takesGenerator ? traitsOf("aten::bernoulli_", "float")
                                                      : traitsOf("aten::native_dropout", "");
    torch::jit::Stack stack(op.arguments.types.size(), generator);
    RandomReplay replay(op, drawn.get(), stack);
    StandInGenerator& used =
        implOf(stack[std::max<int>(op.random.generatorArgument, 0)].toGenerator());
    found.replayed = used.state->offset;
    used.state->offset += kEachDraw;
    *shared.fails = circumstances.settingFails;
    TORCH_CHECK(!circumstances.kernelRaises, "the kernel failed");
    TORCH_CHECK(replay.drewTheSame(), "other numbers were drawn");
    replay.putBack();
  }
  found.after = shared.state->offset;
  found.begunAnew = shared.begunAnew;
  return found;
}

}  // namespace ebb
