// Page pools, for tests.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "../module.h"
#include "plugins/paging/pool/pool.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

// The ids from head to tail; empty in a stack.
std::vector<int64_t> freeIds(const PagePool& pool, const PageTier& tier, int which) {
  std::vector<int64_t> found;
  const at::Tensor ids = pool.freeIds(which).cpu();
  for (int64_t at = tier.head; at < tier.tail && !pool.options().isStack; ++at) {
    found.push_back(ids.const_data_ptr<int64_t>()[at % tier.capacity]);
  }
  return found;
}

// The state in the pool's memory; waits for the device.
py::dict status(const PagePool& pool) {
  const at::Tensor copy = pool.state().cpu();
  const auto& state = *static_cast<const PagePoolState*>(copy.const_data_ptr());
  const auto& [first, second] = state.tiers;
  py::dict dict;
  dict["errors"] = state.errors;
  dict["error_text"] = describePageErrors(state.errors);
  dict["spilled"] = state.spilled != 0;
  dict["epoch"] = state.epoch;
  dict["head"] = py::make_tuple(first.head, second.head);
  dict["tail"] = py::make_tuple(first.tail, second.tail);
  dict["free"] = py::make_tuple(freeIds(pool, first, 0), freeIds(pool, second, 1));
  return dict;
}

// `device` in the form of a tensor's device: with an index, but on the CPU without.
c10::Device deviceOfTensors(c10::Device device) {
  return device.is_cpu()      ? c10::kCPU
         : device.has_index() ? device
                              : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

void bindPages(py::module_& module) {
  py::class_<PageTicket>(module, "PageTicket").def_readonly("state", &PageTicket::state);
  py::class_<PagePool>(module, "PagePool")
      .def(
          py::init(
              torch::wrap_pybind_function([](const c10::Device& device, int64_t rowBytes,
                                             int64_t pageRows, int64_t devicePages,
                                             int64_t hostPages, bool isStack) {
                return std::make_unique<PagePool>(PagePoolOptions{
                    deviceOfTensors(device), rowBytes, pageRows, devicePages, hostPages, isStack});
              })),
          py::arg("device"), py::arg("row_bytes"), py::arg("page_rows"), py::arg("device_pages"),
          py::arg("host_pages") = 0, py::arg("stack") = false)
      .def("make_ticket", torch::wrap_pybind_function(&PagePool::makeTicket))
      .def(
          "stash", torch::wrap_pybind_function(
                       [](PagePool& pool, PageTicket& ticket, const at::Tensor& tensor,
                          const at::Tensor& rows) { pool.stash(ticket, tensor.storage(), rows); }))
      .def(
          "restore",
          torch::wrap_pybind_function([](PagePool& pool, PageTicket& ticket, at::Tensor tensor,
                                         int fillDeadRows, uint8_t dead, uint8_t failed,
                                         bool keepsPages) {
            pool.restore(
                ticket, tensor.storage(),
                {static_cast<PageDeadRows>(fillDeadRows), dead, failed, keepsPages});
          }),
          py::arg("ticket"), py::arg("tensor"), py::arg("fill_dead_rows") = 1, py::arg("dead") = 0,
          py::arg("failed") = 255, py::arg("keep_pages") = false)
      .def("give_back", torch::wrap_pybind_function(&PagePool::giveBack))
      .def("reset", torch::wrap_pybind_function(&PagePool::reset))
      .def("status", torch::wrap_pybind_function(&status));
}

[[maybe_unused]] const bool isPagesBound = bindTests(&bindPages);

}  // namespace

}  // namespace ebb::bindings
