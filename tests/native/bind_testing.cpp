// Functions for tests and benchmarks that need no plug-in.
#include <ATen/core/Generator.h>
#include <ATen/ops/rand.h>
#include <torch/csrc/Exceptions.h>

#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "allocator/in_use.h"
#include "allocator/shortage.h"
#include "bindings/bindings.h"
#include "failing_allocator.h"
#include "failing_policy.h"
#include "many_threads.h"
#include "memory/bytes.h"
#include "module.h"
#include "policy/module_scope.h"
#include "recomputed_bytes.h"
#include "record/sweep_window.h"
#include "stand_in_generator.h"
#include "stream/capture.h"
#include "stream/stream.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

// By CUDA's runtime: whether `stream` is being captured, and which capture that would be.
std::pair<bool, uint64_t> cudaCapture(uintptr_t stream) {
  void* const handle = reinterpret_cast<void*>(stream);
  return {isCapturingForCuda(handle), captureForCuda(handle)};
}

// Whether the current stream of `device` is being captured: by the device, and by the stream.
std::pair<bool, bool> capturesOf(const std::string& name) {
  const c10::Device device(name);
  return {isCapturing(device), isCapturing(currentStream(device))};
}

py::dict replayedDraw(
    const std::string& device, bool takesGenerator, bool kernelRaises, bool settingFails,
    const py::object& between) {
  const auto told = [&] {
    if (!between.is_none()) {
      between();
    }
  };
  const ReplayedDraw draw =
      replayDraw(c10::Device(device), {takesGenerator, kernelRaises, settingFails, told});
  py::dict dict;
  dict["forward"] = draw.forward;
  dict["replayed"] = draw.replayed;
  dict["before"] = draw.before;
  dict["after"] = draw.after;
  dict["begun_anew"] = draw.begunAnew;
  return dict;
}

// As a kernel that draws: under the generator's lock it is elsewhere for a while. It is left as it
// was.
void useGenerator(at::Generator generator, double seconds) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  const at::Tensor before = generator.get_state();
  generator.set_current_seed(generator.current_seed() + 1);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  generator.set_state(before);
}

void bindTesting(py::module_& module) {
  module.def("count_recomputed_bytes", &countRecomputedBytes);
  module.def("recomputed_bytes", &recomputedBytes);
  module.def("failing_policy", [](uint32_t at) { return PyPolicy{failingPolicy(at)}; });
  module.def(
      "fail_allocations",
      [](uint32_t every, uint64_t seed, size_t least, size_t most, bool isAnywhere, bool onlyAsks) {
        failAllocations({every, seed, least, most, isAnywhere, onlyAsks});
      },
      py::arg("every"), py::arg("seed") = 0, py::arg("least") = 0,
      py::arg("most") = size_t{1} << 40, py::arg("is_anywhere") = false,
      py::arg("only_asks") = false);
  module.def("failed_allocations", &failedAllocations);
  module.def("give_back_function", [] { return reinterpret_cast<uintptr_t>(&giveBackIfNeeded); });
  module.def("module_names", [](uint32_t number) {
    const ModuleNames& names = moduleNames(number);
    return std::make_pair(names.plain, names.full);
  });
  // As an extension that calls an operator and does not release the GIL.
  module.def("draw_with_the_gil", [] { return at::rand({8}); });
  module.def("values_looked_at", &valuesLookedAt);
  module.def("cuda_capture", &cudaCapture);
  module.def("pretend_bytes_in_use", [](size_t nbytes) { insteadOfBytesInUse.store(nbytes); });
  module.def("captures", torch::wrap_pybind_function(&capturesOf));
  module.def("arena_objects_are_apart", torch::wrap_pybind_function_no_gil(&arenaObjectsAreApart));
  module.def("events_are_apart", [](const std::string& device, size_t threads, size_t rounds) {
    const py::gil_scoped_release noGil;
    return eventsAreApart(c10::Device(device), threads, rounds);
  });
  module.def("use_generator", torch::wrap_pybind_function_no_gil(&useGenerator));
  module.def(
      "replay_draw", torch::wrap_pybind_function(&replayedDraw), py::arg("device"), py::kw_only(),
      py::arg("takes_generator") = false, py::arg("kernel_raises") = false,
      py::arg("setting_fails") = false, py::arg("between") = py::none());
}

[[maybe_unused]] const bool isTestingBound = bindTests(&bindTesting);

}  // namespace

}  // namespace ebb::bindings
