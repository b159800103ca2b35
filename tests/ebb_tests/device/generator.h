// Random numbers. A generator of the device is, as CUDA's, a seed and how far it has come, so that
// who is given what can be said before it is drawn, and in a graph when it is replayed.
// Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>

#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "settings.h"
#include "streams.h"

namespace late {

// What one operator draws.
struct Numbers {
  uint64_t seed;
  uint64_t place;  // in a graph: after what came before the graph
  bool isInGraph;

  // Gives them. On the stream, if they are of a graph.
  at::Generator generator() const {
    const uint64_t key = isInGraph ? drawnBefore.seed : seed;
    const uint64_t from = isInGraph ? drawnBefore.place + place : place;
    const uint64_t mixed = (key ^ (from + 1) * 0x9E3779B97F4A7C15U) * 0xBF58476D1CE4E5B9U;
    return at::detail::createCPUGenerator(mixed >> 32);
  }
};

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex index, bool isDefault = false)
      : GeneratorImpl(
            c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        isDefault_(isDefault) {}
  void set_current_seed(uint64_t seed) override {
    TORCH_CHECK(!isInCapture() || seed == seed_, "late: seeding while a graph is captured");
    seed_ = seed;
    place() = 0;
  }
  void set_offset(uint64_t offset) override { place() = offset; }
  uint64_t get_offset() const override { return place(); }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    std::array<uint64_t, 2> words{};
    TORCH_CHECK(state.numel() == sizeof words, "late: not the state of a generator of late");
    called("set_state");
    std::memcpy(words.data(), state.data(), sizeof words);
    TORCH_CHECK(!isInCapture() || words[0] == seed_, "late: seeding while a graph is captured");
    seed_ = words[0];
    place() = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const std::array<uint64_t, 2> words{seed_, place()};
    at::Tensor state = at::empty({sizeof words}, at::TensorOptions(at::kByte).device(at::kCPU));
    std::memcpy(state.mutable_data_ptr(), words.data(), sizeof words);
    return state.getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override {
    TORCH_CHECK(!isInCapture(), "late: a generator cannot be cloned while a graph is captured");
    auto* copy = new DeviceGenerator(device().index());
    copy->seed_ = seed_;
    copy->place_ = place_;
    return copy;
  }
  static c10::DeviceType device_type() { return kType; }

  Numbers next() const {
    const Lock lock(program);
    TORCH_CHECK(
        isDefault_ || !capture || !isCaptured(currentOf[device().index()]),
        "late: a generator that is not the default one while a graph is captured");
    return {seed_, place(), isInCapture()};
  }
  void advance() { place() += 4; }

 private:
  bool isInCapture() const {
    const Lock lock(program);
    return isDefault_ && capture && capture->graph.device == device().index() &&
           isCaptured(currentOf[device().index()]);
  }
  uint64_t& place() const { return isInCapture() ? capture->graph.draws : place_; }

  const bool isDefault_;
  uint64_t seed_ = c10::default_rng_seed_val;
  mutable uint64_t place_ = 0;
};

inline const at::Generator& defaultGenerator(c10::DeviceIndex device) {
  static const auto* generators = new std::vector<at::Generator>{
      at::make_generator<DeviceGenerator>(0, true), at::make_generator<DeviceGenerator>(1, true)};
  return (*generators)[device < 0 ? currentDevice : device];
}

// Drawn from, and not shown.
inline const at::Generator& hiddenGenerator() {
  static const auto* hidden = new at::Generator(at::make_generator<DeviceGenerator>(0));
  return *hidden;
}

inline DeviceGenerator& implOf(const at::Generator& generator) {
  return *at::check_generator<DeviceGenerator>(generator);
}

// What runs inside draws from `generator`, though it asks for the CPU's. The generator has come
// further then if something was drawn.
class Drawing {
 public:
  explicit Drawing(const at::Generator& generator) : generator_(implOf(generator)) {
    before_ = cpu_.get_state();
    cpu_.set_state(generator_.next().generator().get_state());
    start_ = cpu_.get_state();
  }
  ~Drawing() {
    if (!cpu_.get_state().equal(start_)) {
      generator_.advance();
    }
    cpu_.set_state(before_);
  }

 private:
  DeviceGenerator& generator_;
  at::Generator cpu_ = at::globalContext().defaultGenerator(c10::kCPU);
  at::Tensor before_;
  at::Tensor start_;
};

}  // namespace late
