// The module ebb._C._testing: what only tests and benchmarks use.
#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "ebb/offload.h"
#include "ebb/paging.h"
#include "ebb/report.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

template <HasFields Struct>
py::list namesOfFields() {
  py::list names;
  forEachField<Struct>([&](auto field) { names.append(field.name); });
  return names;
}

// The keys of each table of fields.
py::dict fields() {
  py::dict found;
  found["OffloadSettings"] = namesOfFields<OffloadSettings>();
  found["OffloadStats"] = namesOfFields<OffloadStats>();
  found["PagingSettings"] = namesOfFields<PagingSettings>();
  found["PagePoolStats"] = namesOfFields<PagePoolStats>();
  found["PagingStats"] = namesOfFields<PagingStats>();
  found["RegionCounters"] = namesOfFields<RegionCounters>();
  found["TransferCounters"] = namesOfFields<TransferCounters>();
  found["Stats"] = namesOfFields<Stats>();
  found["ReportRow"] = namesOfFields<ReportRow>();
  found["ReportPoint"] = namesOfFields<ReportPoint>();
  found["ReportSpan"] = namesOfFields<ReportSpan>();
  found["Report"] = namesOfFields<Report>();
  return found;
}

}  // namespace

void bindTesting(py::module_& module) {
  auto testing = module.def_submodule("_testing", "What only tests and benchmarks use.");
  testing.def("fields", &fields);
}

}  // namespace ebb::bindings
