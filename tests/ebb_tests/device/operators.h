// Operators with a kernel of their own: those that make tensors, show them another way, and copy;
// and some that the CPU has no kernel for that could be run in its place.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "generator.h"
#include "memory.h"
#include "streams.h"
#include "tensors.h"
#include "unsteady.h"

namespace late {

inline at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(deviceOf(currentStream())));
  return at::detail::empty_generic(
      size, &deviceMemory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

inline at::Tensor emptyStrided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(deviceOf(currentStream())));
  return at::detail::empty_strided_generic(
      size, stride, &deviceMemory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

inline const at::Tensor& resize(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  resizeTensor(self, size, format);
  return self;
}

inline at::Tensor& setStorage(at::Tensor& self, at::Storage storage) {
  return at::native::set_(self, std::move(storage));
}

inline at::Tensor& setStorageAt(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(storage), offset, size, stride);
}

inline void recordStream(at::Tensor& self, c10::Stream stream) {
  deviceMemory.recordStream(self.storage().data_ptr(), stream);
}

// The memory of a tensor of the host, which is not kept: what is pinned must live until the copy is
// over.
inline at::Tensor sameMemory(const at::Tensor& tensor) {
  return like(
      at::from_blob(
          const_cast<void*>(addressOf(tensor)), tensor.sizes(), tensor.strides(),
          tensor.scalar_type()),
      tensor);
}

inline int streamFor(const at::Tensor& tensor) { return currentOf[tensor.device().index()]; }

inline void copyLater(int stream, const char* what, const at::Tensor& from, const at::Tensor& to) {
  const auto seenBy = [](const at::Tensor& tensor) {
    return isOurs(tensor) ? shown(tensor) : sameMemory(tensor);
  };
  const auto task = [source = seenBy(from), target = seenBy(to)] {
    const Below inside;
    target.copy_(source);
  };
  enqueue(stream, what, {{addressOf(from), false}, {addressOf(to), true}}, task);
}

inline void copyToDevice(const at::Tensor& from, const at::Tensor& to, bool async) {
  const int stream = streamFor(to);
  if (async && isPinned(addressOf(from))) {
    copyLater(stream, "copy to device", from, to);
    return;
  }
  launch(
      stream, "copy to device", {}, to, [from = from.clone(), to = shown(to)] { to.copy_(from); });
  if (!async) {
    called("copies that the host waited for");
    finish(stream);
  }
}

inline void copyToHost(const at::Tensor& from, const at::Tensor& to, bool async) {
  const int stream = streamFor(from);
  copyLater(stream, "copy to host", from, to);
  if (!async || !isPinned(addressOf(to))) {
    called("copies that the host waited for");
    finish(stream);
  }
}

// On the source's stream, with both devices' streams behind each other.
inline void copyBetween(const at::Tensor& from, const at::Tensor& to) {
  const int source = streamFor(from);
  const int target = streamFor(to);
  if (source != target) {
    waitFor(source, endOf(target));
  }
  copyLater(source, "copy", from, to);
  if (source != target) {
    waitFor(target, endOf(source));
  }
}

inline at::Tensor copyFrom(const at::Tensor& from, const at::Tensor& to, bool nonBlocking) {
  const Below below;
  if (to.numel() == 0) {
    return to;
  }
  if (!isOurs(from)) {
    copyToDevice(from, to, nonBlocking);
  } else if (!isOurs(to)) {
    copyToHost(from, to, nonBlocking);
  } else {
    copyBetween(from, to);
  }
  return to;
}

inline at::Tensor copyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  resizeTensor(to, from.sizes());
  return copyFrom(from, to, false);
}

inline at::Scalar item(const at::Tensor& self) {
  const Below below;
  const at::Tensor here = at::empty(self.sizes(), self.options().device(at::kCPU));
  copyToHost(self, here, false);
  return here.item();
}

// A device kernel for an operator that decomposes elsewhere, with bits of its own.
inline at::Tensor mishBackward(const at::Tensor& gradient, const at::Tensor& self) {
  const at::Tensor result = emptyLike(self, self.device());
  const auto kernel = [g = shown(gradient), x = shown(self), y = shown(result)] {
    y.copy_(g.mul(x).mul(3));
  };
  launch(streamFor(self), "mish_backward", {gradient, self}, result, kernel);
  return result;
}

// The CPU's asks its default generator, and cannot be told another.
inline std::tuple<at::Tensor, at::Tensor> nativeDropout(
    const at::Tensor& input, double probability, std::optional<bool> train) {
  const Below below;
  const c10::DeviceGuard guard(input.device());
  const at::Tensor result = emptyLike(planOf(input), input.device());
  const at::Tensor mask = emptyLike(planOf(input).to(at::kBool), input.device());
  const bool draws = train.value_or(true) && probability > 0;
  std::optional<Numbers> numbers;
  if (draws) {
    DeviceGenerator& from = implOf(defaultGenerator(input.device().index()));
    numbers = from.next();
    from.advance();
  }
  const auto kernel = [=, x = shown(input), y = shown(result), m = shown(mask)] {
    m.fill_(true);
    if (numbers) {
      m.bernoulli_(1 - probability, numbers->generator());
    }
    const double scale = !draws || probability == 1 ? 1 : 1 / (1 - probability);
    y.copy_(x.mul(m).mul(scale));
  };
  launch(currentStream(), "native_dropout", {input}, {result, mask}, kernel);
  return {result, mask};
}

// torch asks backends out of tree for these two; the CPU has others.
struct Convolved {
  std::vector<int64_t> stride, padding, dilation;
  bool transposed;
  std::vector<int64_t> outputPadding;
  int64_t groups;

  at::Tensor forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) const {
    const auto bias = b.defined() ? std::optional<at::Tensor>(b) : std::nullopt;
    return at::convolution(
        x, w, bias, stride, padding, dilation, transposed, outputPadding, groups);
  }
};

inline at::Tensor convolution(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef outputPadding, int64_t groups) {
  const Below below;
  const Convolved how{stride.vec(), padding.vec(),       dilation.vec(),
                      transposed,   outputPadding.vec(), groups};
  const at::Tensor b = bias.value_or(at::Tensor());
  const at::Tensor result =
      emptyLike(how.forward(planOf(x), planOf(w), planOf(b)).contiguous(), x.device());
  const int64_t unsteady = transposed ? unsteadyCall("aten::convolution") : 0;
  const auto kernel = [=, x = shown(x), w = shown(w), b = shown(b), to = shown(result)] {
    to.copy_(how.forward(x, w, b));
    disturb(to, unsteady);
  };
  launch(streamFor(x), "convolution", {x, w, b}, result, kernel);
  return result;
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolutionBackward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& w, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef outputPadding, int64_t groups, std::array<bool, 3> wanted) {
  const Below below;
  const Convolved how{stride.vec(), padding.vec(),       dilation.vec(),
                      transposed,   outputPadding.vec(), groups};
  const int64_t channels = transposed ? w.size(1) * groups : w.size(0);
  const at::Tensor plans[] = {
      planOf(x).contiguous(), planOf(w).contiguous(), at::empty({channels}, planOf(w).options())};
  std::array<at::Tensor, 3> results;
  std::array<at::Tensor, 3> targets;
  for (int i = 0; i < 3; ++i) {
    if (wanted[i]) {
      results[i] = emptyLike(plans[i], x.device());
      targets[i] = shown(results[i]);
    }
  }
  const auto kernel = [=, g = shown(gradient), x = shown(x), w = shown(w)] {
    const std::vector<int64_t> bias{channels};
    const auto [a, b, c] = at::convolution_backward(
        g, x, w, at::OptionalIntArrayRef(bias), how.stride, how.padding, how.dilation,
        how.transposed, how.outputPadding, how.groups, wanted);
    const at::Tensor* from[] = {&a, &b, &c};
    for (int i = 0; i < 3; ++i) {
      if (targets[i].defined()) {
        targets[i].copy_(*from[i]);
      }
    }
  };
  launch(streamFor(x), "convolution_backward", {gradient, x, w}, results, kernel);
  return {results[0], results[1], results[2]};
}

}  // namespace late
