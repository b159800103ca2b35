#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "report/ledger.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

py::dict toDict(const RegionCounters& counters) {
  py::dict dict;
  dict["entered"] = counters.entered;
  dict["ops_seen"] = counters.opsSeen;
  dict["ops_recorded"] = counters.opsRecorded;
  dict["ops_replayed"] = counters.opsReplayed;
  dict["bytes_saved"] = counters.bytesSaved;
  dict["bytes_dropped"] = counters.bytesDropped;
  dict["bytes_copied"] = counters.bytesCopied;
  return dict;
}

py::dict stats() {
  const Ledger ledger = readLedger();
  py::dict regions;
  for (const auto& [name, counters] : ledger.regions) {
    regions[py::str(name)] = toDict(counters);
  }
  const LiveCounts& live = liveCounts();
  py::dict result;
  result["step"] = ledger.step;
  result["regions"] = regions;
  result["total"] = toDict(ledger.total);
  result["live_recipes"] = live.recipes.load();
  result["live_handles"] = live.handles.load();
  result["open_regions"] = live.regions.load();
  return result;
}

}  // namespace

void bindReport(py::module_& module) {
  module.def("stats", &stats);
  module.def("reset_stats", &resetLedger);
}

}  // namespace ebb::bindings
