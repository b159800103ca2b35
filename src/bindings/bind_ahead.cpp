#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "plugins/ahead/room.h"
#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "ebb/ahead.h"
#include "memory/in_use.h"
#include "memory/shortage.h"
#include "memory/stillness.h"

namespace ebb::bindings {

namespace py = pybind11;

void bindAhead(py::module_& module) {
  module.def("ahead_settings", torch::wrap_pybind_function(&aheadSettings));
  module.def(
      "keep_while_there_is_room",
      [](size_t limit, std::optional<c10::Device> device) {
        device ? Room::get().setLimit(limit, *device) : Room::get().setLimit(limit);
      },
      py::arg("limit"),
      py::arg("device") = py::none());
  module.def(
      "allow_allocator",
      torch::wrap_pybind_function(&allowAllocator),
      py::arg("nbytes"),
      py::arg("device"));
  module.def("stop_giving_back", torch::wrap_pybind_function(&stopGivingBack));
  module.def("room_limit", [] { return Room::get().limit(deviceInUse()); });
  module.def("bytes_in_use", [] { return bytesInUse(deviceInUse()); });
  module.def("use_counting_allocator", torch::wrap_pybind_function(&useCountingAllocator));
  module.def("tensor_bytes", [] {
    const TensorBytes bytes = tensorBytes(deviceInUse());
    return std::tuple(bytes.now, bytes.most, bytes.isExact);
  });
  module.def("reset_most_tensor_bytes", [] { resetMostTensorBytes(deviceInUse()); });
  module.def("room_stats", torch::wrap_pybind_function(&roomStats));
  module.def("ahead_stats", torch::wrap_pybind_function(&aheadStats));
  module.def("configure_ahead", torch::wrap_pybind_function(&configureAhead));
  module.def("stop_ahead", torch::wrap_pybind_function(&stopAhead));
  module.def("end_ahead", torch::wrap_pybind_function(&endAhead));
  module.def("begin_commotion", torch::wrap_pybind_function(&beginCommotion));
  module.def("end_commotion", torch::wrap_pybind_function(&endCommotion));
}

}  // namespace ebb::bindings
