#include <torch/csrc/Exceptions.h>

#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "ebb/profile.h"
#include "ebb/report.h"

// The dtype becomes a string; the shape becomes a tuple, which can be hashed.
template <>
struct pybind11::detail::type_caster<ebb::ReportRow> {
  static constexpr auto name = const_name("dict");

  static handle cast(const ebb::ReportRow& row, return_value_policy, handle) {
    dict found = ebb::bindings::toDict(row);
    found["shape"] = tuple(found["shape"]);
    found["dtype"] = c10::getDtypeNames(row.dtype).first;
    return found.release();
  }
};

template <>
struct pybind11::detail::type_caster<ebb::ReportValue>
    : ebb::bindings::TupleCaster<ebb::ReportValue> {};

template <>
struct pybind11::detail::type_caster<ebb::ReportReplay>
    : ebb::bindings::TupleCaster<ebb::ReportReplay> {};

template <>
struct pybind11::detail::type_caster<ebb::ReportPoint>
    : ebb::bindings::TupleCaster<ebb::ReportPoint> {};

template <>
struct pybind11::detail::type_caster<ebb::ReportSpan>
    : ebb::bindings::TupleCaster<ebb::ReportSpan> {};

template <>
struct pybind11::detail::type_caster<ebb::ProfileValue> {
  static constexpr auto name = const_name("dict");

  static handle cast(const ebb::ProfileValue& value, return_value_policy, handle) {
    dict found = ebb::bindings::toDict(value);
    found["dtype"] = c10::getDtypeNames(value.dtype).first;
    return found.release();
  }
};

template <>
struct pybind11::detail::type_caster<ebb::ProfileReplay>
    : ebb::bindings::TupleCaster<ebb::ProfileReplay> {};

template <>
struct pybind11::detail::type_caster<ebb::ProfileAllocation>
    : ebb::bindings::TupleCaster<ebb::ProfileAllocation> {};

namespace ebb::bindings {

namespace py = pybind11;

void bindReport(py::module_& module) {
  module.def("stats", &stats);
  module.def("reset_stats", &resetStats);
  module.def("set_reporting", torch::wrap_pybind_function(&setReporting));
  module.def("is_reporting", &isReporting);
  module.def("reports", &reports);
  module.def("begin_profile", torch::wrap_pybind_function(&beginProfile));
  module.def("end_profile", torch::wrap_pybind_function(&endProfile));
}

}  // namespace ebb::bindings
