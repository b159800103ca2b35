// Page pools, for tests.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "module.h"
#include "paging/pool/pool.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

py::dict toDict(const PagePoolStatus& status) {
  py::dict dict;
  dict["errors"] = status.errors;
  dict["error_text"] = describePageErrors(status.errors);
  dict["spilled"] = status.spilled;
  dict["epoch"] = status.epoch;
  dict["head"] = py::make_tuple(status.head[0], status.head[1]);
  dict["tail"] = py::make_tuple(status.tail[0], status.tail[1]);
  dict["free"] = py::make_tuple(status.freeIds[0], status.freeIds[1]);
  return dict;
}

}  // namespace

void bindPages(py::module_& module) {
  py::class_<PageTicket>(module, "PageTicket").def_readonly("state", &PageTicket::state);
  py::class_<PagePool>(module, "PagePool")
      .def(
          py::init(
              torch::wrap_pybind_function([](const c10::Device& device,
                                             int64_t rowBytes,
                                             int64_t pageRows,
                                             int64_t devicePages,
                                             int64_t hostPages,
                                             bool isStack) {
                return std::make_unique<PagePool>(
                    PagePoolOptions{device, rowBytes, pageRows, devicePages, hostPages, isStack});
              })),
          py::arg("device"),
          py::arg("row_bytes"),
          py::arg("page_rows"),
          py::arg("device_pages"),
          py::arg("host_pages") = 0,
          py::arg("stack") = false)
      .def("make_ticket", torch::wrap_pybind_function(&PagePool::makeTicket))
      .def("stash", torch::wrap_pybind_function(&PagePool::stash))
      .def(
          "restore",
          torch::wrap_pybind_function([](PagePool& pool,
                                         PageTicket& ticket,
                                         at::Tensor tensor,
                                         int fillDeadRows,
                                         uint8_t dead,
                                         uint8_t failed,
                                         bool keepsPages) {
            pool.restore(
                ticket,
                tensor,
                {static_cast<PageDeadRows>(fillDeadRows), dead, failed, keepsPages});
          }),
          py::arg("ticket"),
          py::arg("tensor"),
          py::arg("fill_dead_rows") = 1,
          py::arg("dead") = 0,
          py::arg("failed") = 255,
          py::arg("keep_pages") = false)
      .def("give_back", torch::wrap_pybind_function(&PagePool::giveBack))
      .def("reset", torch::wrap_pybind_function(&PagePool::reset))
      .def("status", torch::wrap_pybind_function([](const PagePool& pool) {
             return toDict(pool.status());
           }));
}

}  // namespace ebb::bindings
