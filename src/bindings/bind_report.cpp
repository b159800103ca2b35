#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "ebb/ebb.h"

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
  dict["bytes_offloaded"] = counters.bytesOffloaded;
  dict["bytes_fell_back"] = counters.bytesFellBack;
  dict["bytes_escaped"] = counters.bytesEscaped;
  return dict;
}

py::dict toDict(const TransferCounters& counters) {
  py::dict dict;
  dict["bytes_offloaded"] = counters.sent;
  dict["bytes_reloaded"] = counters.fetched;
  dict["bytes_waited_host"] = counters.waitedByHost;
  dict["bytes_waited_device"] = counters.waitedByDevice;
  dict["bytes_fell_back"] = counters.refused;
  dict["bytes_spilled"] = counters.spilled;
  return dict;
}

py::dict statsDict() {
  const Stats now = ebb::stats();
  py::dict regions;
  for (const auto& [name, counters] : now.regions) {
    regions[py::str(name)] = toDict(counters);
  }
  py::dict result;
  result["step"] = now.step;
  result["regions"] = regions;
  result["total"] = toDict(now.total);
  py::dict transfers;
  for (const auto& [region, ops] : now.transfers) {
    py::dict ofRegion;
    for (const auto& [op, counters] : ops) {
      ofRegion[py::str(op)] = toDict(counters);
    }
    transfers[py::str(region)] = ofRegion;
  }
  result["transfers"] = transfers;
  result["demoted_ops"] = now.demoted;
  result["live_recipes"] = now.liveRecipes;
  result["live_handles"] = now.liveHandles;
  result["open_regions"] = now.openRegions;
  return result;
}

}  // namespace

void bindReport(py::module_& module) {
  module.def("stats", &statsDict);
  module.def("reset_stats", &resetStats);
}

}  // namespace ebb::bindings
