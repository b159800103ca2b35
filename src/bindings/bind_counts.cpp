// Counters, the memory in use, and changes of the process's state.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "allocator/in_use.h"
#include "allocator/shortage.h"
#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "ebb/report.h"
#include "hooks/process_state.h"

namespace ebb::bindings {

void bindCounts(py::module_& module) {
  module.def("stats", &stats);
  module.def("reset_stats", &resetStats);
  module.def("totals", &totals);
  module.def("time_replays", &timeReplays);
  module.def("report_on_signals", torch::wrap_pybind_function(&reportOnSignals));
  module.def(
      "allow_allocator", torch::wrap_pybind_function(&allowAllocator), py::arg("nbytes"),
      py::arg("device"));
  module.def("stop_giving_back", torch::wrap_pybind_function(&stopGivingBack));
  module.def("bytes_in_use", [] { return bytesInUse(deviceInUse()); });
  module.def("use_counting_allocator", torch::wrap_pybind_function(&useCountingAllocator));
  module.def("tensor_bytes", [] {
    const TensorBytes bytes = tensorBytes(deviceInUse());
    return std::tuple(bytes.now, bytes.most, bytes.isExact);
  });
  module.def("reset_most_tensor_bytes", [] { resetMostTensorBytes(deviceInUse()); });
  py::class_<PeakWindow>(module, "PeakWindow")
      .def(py::init<>())
      .def("begin", [](PeakWindow& window) { window.begin(deviceInUse()); })
      .def("read", [](const PeakWindow& window) {
        const TensorBytes bytes = window.read(deviceInUse());
        return std::tuple(bytes.now, bytes.most, bytes.isExact);
      });
  module.def("begin_process_state_change", torch::wrap_pybind_function(&beginProcessStateChange));
  module.def("end_process_state_change", torch::wrap_pybind_function(&endProcessStateChange));
}

}  // namespace ebb::bindings
