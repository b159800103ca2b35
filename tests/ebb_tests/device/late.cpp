// "late": a device for tests, on the CPU (PrivateUse1), made for finding faults. Operators run on
// CPU tensors that show its memory, on streams that may be as late as hardware's. What they return
// is planned by their meta kernels; where those cannot, the host waits.
//
// Its parts are headers, and this is the one file that is compiled: torch's own headers take
// longest.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "device.h"
#include "fallback.h"
#include "generator.h"
#include "memory.h"
#include "operators.h"
#include "pages.h"

namespace late {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}  // namespace late

REGISTER_ALLOCATOR(late::kType, &late::deviceMemory)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  using at::autocast::CastPolicy;
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&late::runOnDevice>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", late::empty);
  m.impl("empty_strided", late::emptyStrided);
  m.impl("as_strided", TORCH_FN(at::cpu::as_strided));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", late::resize);
  m.impl("_copy_from", late::copyFrom);
  m.impl("_copy_from_and_resize", late::copyFromAndResize);
  m.impl("_local_scalar_dense", late::item);
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage", late::setStorage);
  m.impl("set_.source_Storage_storage_offset", late::setStorageAt);
  m.impl("record_stream", late::recordStream);
  m.impl("mish_backward", late::mishBackward);
  m.impl("convolution_overrideable", late::convolution);
  m.impl("convolution_backward_overrideable", late::convolutionBackward);
  for (const char* name :
       {"native_dropout_backward", "native_layer_norm", "native_group_norm", "_fused_sdp_choice"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&late::runOnDevice>());
  }
}

// Copies see to both bits themselves; torch's fallback would copy first, for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

namespace late {

// native_dropout draws from the device's own generator only where that is asked for.
void dropoutOnDevice(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (settings.draws != Draws::FromDevice) {
    runOnDevice(op, stack);
    return;
  }
  const auto arguments = torch::jit::last(*stack, 3);
  auto results = nativeDropout(
      arguments[0].toTensor(), arguments[1].toDouble(), arguments[2].toOptional<bool>());
  torch::jit::drop(*stack, 3);
  torch::jit::push(*stack, std::get<0>(results), std::get<1>(results));
}

template <class T>
std::vector<T> taken(std::vector<T>& from) {
  const Lock lock(program);
  return std::exchange(from, {});
}

void finishAll() {
  for (int stream = kStreams; stream-- > 0;) {
    finish(stream);
  }
}

}  // namespace late

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", torch::CppFunction::makeFromBoxedFunction<&late::dropoutOnDevice>());
}

// ebb finds CUDA's runtime by the first of these names, and uses only the second on this device.
#define LATE_EXPORT extern "C" __attribute__((visibility("default")))
LATE_EXPORT int cudaHostRegister(void*, size_t, unsigned) { return 1; }
LATE_EXPORT int cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, late::captureMode);
  return 0;
}

TORCH_LIBRARY(late, m) {
  using late::Lock;
  using late::program;
  using late::settings;
  at::RegisterPrivateUse1HooksInterface(new late::Hooks);

  // Settings
  m.def(
      "configure(bool lazy, int compute_us, int side_us) -> ()",
      [](bool lazy, int64_t c, int64_t s) {
        late::finishAll();
        settings.lazy = lazy;
        settings.computeUs = c;
        settings.sideUs = s;
      });
  m.def("limit(int device, int host) -> ()", [](int64_t device, int64_t host) {
    settings.limit = device < 0 ? SIZE_MAX : static_cast<size_t>(device);
    settings.hostLimit = host < 0 ? SIZE_MAX : static_cast<size_t>(host);
  });
  m.def("call_when_short(int function) -> ()", [](int64_t function) {
    settings.whenShort = reinterpret_cast<bool (*)()>(function);
  });
  m.def("let_others_have(int bytes) -> ()", [](int64_t bytes) {
    settings.others = static_cast<size_t>(bytes);
  });
  m.def("break_device(int after) -> ()", [](int64_t after) {
    settings.callsLeft = after < 0 ? INT64_MAX : after + 1;
  });
  m.def("fail_page_kernel(int which) -> ()", [](int64_t which) { settings.failPages = which; });
  m.def("fail_asked_of_captures(int error) -> ()", [](int64_t error) {
    settings.captureError = static_cast<int>(error);
  });
  m.def("draw_from(int whose) -> ()", [](int64_t whose) {
    settings.draws = static_cast<late::Draws>(whose);
  });
  m.def("count_bytes(bool counts) -> ()", [](bool counts) { settings.countsBytes = counts; });
  m.def("be_unsteady(bool unsteady) -> ()", [](bool unsteady) {
    const Lock lock(program);
    settings.isUnsteady = unsteady;
    late::calls.clear();
  });
  m.def("have_generator(bool has) -> ()", [](bool has) { settings.hasGenerator = has; });

  // Leaves out one wait from now on, -1: none. Gives how many there were since the last call.
  m.def("drop_wait(int which) -> int", [](int64_t which) {
    const Lock lock(program);
    settings.dropWait = which;
    late::leftOut = which < 0 ? late::leftOut : std::pair(late::kHost, late::kHost);
    return std::exchange(late::waits, 0);
  });

  // Of the one that was left out last: which stream was to wait, -1: the host, and for which one.
  // Those of the first device come first, its default stream before the others.
  m.def("left_out() -> (int, int)", [] {
    const Lock lock(program);
    return std::tuple<int64_t, int64_t>(late::leftOut.first, late::leftOut.second);
  });

  // What was found, and forgets it
  m.def("races() -> str[]", [] { return late::taken(late::races); });
  m.def("errors() -> str[]", [] { return late::taken(late::errors); });
  m.def("counts() -> Dict(str, int)", [] {
    const Lock lock(program);
    c10::Dict<std::string, int64_t> found;
    for (const auto& [what, times] : std::exchange(late::counts, {})) {
      found.insert(what, times);
    }
    return found;
  });
  m.def("device_usage(int device) -> int", [](int64_t device) {  // bytes of its memory, now
    const Lock lock(program);
    return static_cast<int64_t>(late::deviceUsage[device].now);
  });
  m.def("host_usage() -> (int, int)", [] {  // bytes of pinned memory: now, and the most
    const Lock lock(program);
    return std::tuple<int64_t, int64_t>(late::hostUsage.now, late::hostUsage.peak);
  });

  // The host as a program that looks at memory itself
  m.def("host_uses(Tensor tensor, bool writes) -> ()", [](const at::Tensor& tensor, bool writes) {
    late::hostUses(late::addressOf(tensor), writes, "the host");
  });
  m.def("kernel_address(Tensor tensor) -> int", [](const at::Tensor& tensor) {
    return static_cast<int64_t>(reinterpret_cast<intptr_t>(late::seen(late::addressOf(tensor))));
  });

  // Devices and generators
  m.def("current_device() -> int", []() -> int64_t { return late::currentDevice; });
  m.def("set_device(int device) -> ()", [](int64_t device) {
    late::setDevice(c10::Device(late::kType, static_cast<c10::DeviceIndex>(device)));
  });
  m.def("manual_seed(int seed) -> ()", [](int64_t seed) {
    for (c10::DeviceIndex device = 0; device < late::kDevices; ++device) {
      late::implOf(late::defaultGenerator(device)).set_current_seed(static_cast<uint64_t>(seed));
    }
  });
  m.def("hidden_seed(int seed) -> ()", [](int64_t seed) {
    late::implOf(late::hiddenGenerator()).set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("random_state(int device=0) -> Tensor", [](int64_t device) {
    return late::defaultGenerator(static_cast<c10::DeviceIndex>(device)).get_state();
  });
  m.def(
      "set_random_state(Tensor state, int device=0) -> ()",
      [](const at::Tensor& state, int64_t device) {
        at::Generator generator = late::defaultGenerator(static_cast<c10::DeviceIndex>(device));
        generator.set_state(state);
      });

  // Graphs, on the current stream of the current device
  m.def("begin_capture() -> ()", [] { late::beginCapture(late::currentStream()); });
  m.def("end_capture() -> int", [] {
    return static_cast<int64_t>(late::endCapture(late::currentStream()));
  });
  m.def("abandon_capture() -> ()", [] {
    const Lock lock(program);
    late::capture.reset();
  });
  m.def("replay(int graph) -> ()", [](int64_t graph) {
    const auto known = late::graphs.at(static_cast<uint64_t>(graph));
    auto& generator = late::implOf(late::defaultGenerator(known->device));
    const late::Drawn drawn{generator.current_seed(), generator.get_offset()};
    late::replay(known, late::currentStream(), drawn);
    generator.set_offset(drawn.place + known->draws);
  });

  // A mover of pages that cannot; one whose work `mover` does.
  m.def("failing_page_mover() -> int", [] {
    return static_cast<int64_t>(reinterpret_cast<intptr_t>(new late::FailingMover));
  });
  m.def("page_mover(int mover) -> int", [](int64_t mover) {
    const auto* cpu = reinterpret_cast<const ebb::PageMover*>(static_cast<intptr_t>(mover));
    return static_cast<int64_t>(reinterpret_cast<intptr_t>(new late::LateMover(*cpu)));
  });
}
