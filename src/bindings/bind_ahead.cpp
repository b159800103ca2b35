#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "allocator/in_use.h"
#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "ebb/ahead.h"
#include "plugins/ahead/room.h"

namespace ebb::bindings {

[[maybe_unused]] const bool isAheadBound = bindPlugin("ahead", [](py::module_& module) {
  module.def("ahead_settings", torch::wrap_pybind_function(&aheadSettings));
  module.def(
      "keep_while_there_is_room",
      [](size_t limit, std::optional<c10::Device> device) {
        device ? Room::get().setLimit(limit, *device) : Room::get().setLimit(limit);
      },
      py::arg("limit"), py::arg("device") = py::none());
  module.def("room_limit", [] { return Room::get().limit(deviceInUse()); });
  module.def("room_stats", torch::wrap_pybind_function(&roomStats));
  module.def("ahead_stats", torch::wrap_pybind_function(&aheadStats));
  module.def("configure_ahead", torch::wrap_pybind_function(&configureAhead));
  module.def("stop_ahead", torch::wrap_pybind_function(&stopAhead));
  module.def("end_ahead", torch::wrap_pybind_function(&endAhead));
});

}  // namespace ebb::bindings
