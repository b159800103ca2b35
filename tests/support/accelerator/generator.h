// Random numbers: the device's generator, one that it does not show, and which of them is drawn
// from.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <utility>

#include "streams.h"

namespace late {

// Whose numbers an operator draws.
enum class Draws : int64_t { FromDevice, FromCpu, FromBoth, FromHidden };
inline Draws draws = Draws::FromDevice;
inline bool hasGenerator = true;

// A Mersenne Twister of its own.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(at::Generator numbers = at::detail::createCPUGenerator())
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(numbers)) {
  }
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner.get_offset();
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(inner.clone());
  }
  static c10::DeviceType device_type() {
    return kType;
  }
  at::Generator inner;
};

inline const at::Generator& defaultGenerator() {
  static const auto* generator = new at::Generator(at::make_generator<DeviceGenerator>());
  return *generator;
}

inline at::Generator& hiddenGenerator() {
  static auto* hidden = new at::Generator(at::make_generator<DeviceGenerator>());
  return *hidden;
}

// What runs inside draws from `generator`, though it asks for the CPU's.
class Drawing {
 public:
  explicit Drawing(at::Generator generator) : generator_(std::move(generator)) {
    before_ = cpu_.get_state();
    cpu_.set_state(generator_.get_state());
  }
  ~Drawing() {
    generator_.set_state(cpu_.get_state());
    cpu_.set_state(before_);
  }

 private:
  at::Generator generator_;
  at::Generator cpu_ = at::globalContext().defaultGenerator(c10::kCPU);
  at::Tensor before_;
};

}  // namespace late
