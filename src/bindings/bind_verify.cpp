#include <torch/csrc/Exceptions.h>

#include <utility>

#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "ebb/verify.h"
#include "plugins/verify/compare.h"

template <>
struct pybind11::detail::type_caster<ebb::VerifyMode>
    : ebb::bindings::NumberCaster<ebb::VerifyMode> {};

namespace ebb::bindings {

namespace {

void throwReplayMismatch(const std::string& message, const Mismatch& mismatch) {
  py::gil_scoped_acquire gil;
  const py::object type = importFrom("ebb._region.verify", "ReplayMismatch");
  const py::object error = type(
      message, mismatch.region, mismatch.op->name, mismatch.output, mismatch.largestDifference);
  PyErr_SetObject(type.ptr(), error.ptr());
  python_error thrown;
  thrown.persist();
  throw thrown;
}

}  // namespace

[[maybe_unused]] const bool isVerifyBound = bindPlugin("verify", [](py::module_& module) {
  module.def("verify_mode", torch::wrap_pybind_function(&verifyMode));
  module.def("set_verify_mode", torch::wrap_pybind_function(&setVerifyMode));
  module.def("verify_counts", [] {
    const VerifyCounts counts = verifyCounts();
    return std::pair(counts.compared, counts.differing);
  });
  throwMismatch.store(&throwReplayMismatch);
});

}  // namespace ebb::bindings
