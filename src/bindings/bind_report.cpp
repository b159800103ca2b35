#include <torch/csrc/Exceptions.h>

#include <concepts>

#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "ebb/profile.h"
#include "ebb/report.h"

namespace ebb::bindings {

// The small structs of which there are many become tuples.
template <class Struct>
concept BecomesTuple =
    HasFields<Struct> &&
    (std::same_as<Struct, ReportValue> || std::same_as<Struct, ReportReplay> ||
     std::same_as<Struct, ReportPoint> || std::same_as<Struct, ReportSpan> ||
     std::same_as<Struct, ProfileReplay> || std::same_as<Struct, ProfileAllocation>);

template <class Struct>
concept HasShape =
    HasFields<Struct> && (std::same_as<Struct, ReportRow> || std::same_as<Struct, ProfileValue>);

}  // namespace ebb::bindings

template <ebb::bindings::BecomesTuple Struct>
struct pybind11::detail::type_caster<Struct> {
  static constexpr auto name = pybind11::detail::const_name("tuple");

  // In the order of the struct's list of fields.
  static pybind11::handle cast(
      const Struct& from, pybind11::return_value_policy, pybind11::handle) {
    return Struct::fields(
               [&](auto... field) { return pybind11::make_tuple(from.*field.member...); })
        .release();
  }
};

// The dtype becomes a string; the shape becomes a tuple, which can be hashed.
template <ebb::bindings::HasShape Struct>
struct pybind11::detail::type_caster<Struct> {
  static constexpr auto name = pybind11::detail::const_name("dict");

  static pybind11::handle cast(
      const Struct& from, pybind11::return_value_policy, pybind11::handle) {
    pybind11::dict found = ebb::bindings::toDict(from);
    found["shape"] = pybind11::tuple(found["shape"]);
    found["dtype"] = c10::getDtypeNames(from.dtype).first;
    return found.release();
  }
};

namespace ebb::bindings {

[[maybe_unused]] const bool isReportBound = bindPlugin("report", [](py::module_& module) {
  module.def("set_reporting", torch::wrap_pybind_function(&setReporting));
  module.def("is_reporting", &isReporting);
  module.def("reports", &reports);
  module.def("begin_counting", torch::wrap_pybind_function(&beginCounting));
  module.def("end_counting", torch::wrap_pybind_function(&endCounting));
  module.def("begin_profile", torch::wrap_pybind_function(&beginProfile));
  module.def("end_profile", torch::wrap_pybind_function(&endProfile));
});

}  // namespace ebb::bindings
