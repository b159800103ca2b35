#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "plugins/escapes/escapes.h"

namespace ebb::bindings {

[[maybe_unused]] const bool areEscapesBound = bindPlugin("escapes", [](py::module_& module) {
  py::class_<Graph, c10::intrusive_ptr<Graph>>(module, "Escapes")
      .def("refill", torch::wrap_pybind_function([](Graph& graph) {
             graph.observers.tell(&BackwardEvents::unpacks, graph);
           }));
  module.def("leave_emptying_escapes", torch::wrap_pybind_function(&leaveRegionEmptyingEscapes));
});

}  // namespace ebb::bindings
