#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <unordered_set>

#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "plugins/paging/paging_engine.h"
#include "plugins/paging/pool/pool.h"
#include "plugins/paging/schedule.h"

template <>
struct pybind11::detail::type_caster<ebb::PageOverflowMode>
    : ebb::bindings::NumberCaster<ebb::PageOverflowMode> {};

template <>
struct pybind11::detail::type_caster<ebb::DeadRows> : ebb::bindings::NumberCaster<ebb::DeadRows> {};

namespace ebb::bindings {

namespace py = pybind11;

namespace {

void throwOverflow(const std::string& message) {
  py::gil_scoped_acquire gil;
  const py::object type = importFrom("ebb.experimental.paging._agreement", "PageOverflowError");
  PyErr_SetObject(type.ptr(), type(message).ptr());
  python_error thrown;
  thrown.persist();
  throw thrown;
}

// The tensors whose `grad` a backward from `roots` would add to.
std::vector<at::Tensor> leavesBehind(const std::vector<at::Tensor>& roots) {
  namespace autograd = torch::autograd;
  std::vector<autograd::Node*> toDo;
  std::unordered_set<autograd::Node*> seen;
  std::vector<at::Tensor> leaves;
  const auto visit = [&](autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      toDo.push_back(node);
    }
  };
  for (const at::Tensor& root : roots) {
    visit(root.requires_grad() ? autograd::impl::gradient_edge(root).function.get() : nullptr);
  }
  while (!toDo.empty()) {
    autograd::Node* node = toDo.back();
    toDo.pop_back();
    if (const auto* last = dynamic_cast<const autograd::AccumulateGrad*>(node)) {
      leaves.push_back(last->variable);
    }
    for (const autograd::Edge& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  return leaves;
}

// The default generators of the accelerator's devices; empty if the backend has none.
std::vector<at::Generator> deviceGenerators() {
  std::vector<at::Generator> generators;
  const auto type = at::getAccelerator(false);
  try {
    for (c10::DeviceIndex index = 0; index < at::accelerator::deviceCount(); ++index) {
      generators.push_back(at::globalContext().defaultGenerator({*type, index}));
    }
  } catch (const c10::Error&) {
    return {};
  }
  return generators;
}

void bindPaging(py::module_& module) {
  Paging::get().throwOverflow = &throwOverflow;
  // Wraps a function that may wait for a device or for another thread: it runs without the GIL.
  const auto withoutGil = [](auto function) {
    return torch::wrap_pybind_function_no_gil(function);
  };
  module.def("mark_rows", withoutGil(&markRows));
  module.def("paging_settings", torch::wrap_pybind_function(&pagingSettings));
  module.def("configure_paging", torch::wrap_pybind_function(&configurePaging));
  module.def("paging_stats", torch::wrap_pybind_function(&pagingStats));
  module.def("paging_step_begins", withoutGil([](bool fixedOrder, bool raisesLate) {
               Paging::get().beginStep(fixedOrder, raisesLate);
             }));
  module.def("paging_step_ends", withoutGil([] { Paging::get().endStep(); }));
  module.def("paging_step_abandoned", withoutGil([] { Paging::get().abandonStep(); }));
  module.def("exchange_paging_place", withoutGil([](int32_t stage, int32_t microbatch) {
               const PipelinePlace before = exchangePipelinePlace({stage, microbatch});
               return std::pair(before.stage, before.microbatch);
             }));
  module.def("paging_record_next", withoutGil([] { Paging::get().recordNext(); }));
  module.def("paging_step_ok", withoutGil([] { return Paging::get().stepOk(); }));
  module.def("paging_errors", withoutGil([] { return Paging::get().errors(); }));
  module.def("paging_found_inf", withoutGil([](c10::Device device) {
               return Paging::get().foundInf(device);
             }));
  module.def("paging_reset", withoutGil([] { Paging::get().reset(); }));
  module.def("describe_page_errors", &describePageErrors);
  module.def("device_generators", torch::wrap_pybind_function(&deviceGenerators));
  module.def("leaves_behind", torch::wrap_pybind_function(&leavesBehind));
}

[[maybe_unused]] const bool isPagingBound = bindPlugin("paging", &bindPaging);

}  // namespace

}  // namespace ebb::bindings
