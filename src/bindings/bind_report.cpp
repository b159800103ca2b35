#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

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
  dict["bytes_paged"] = counters.bytesPaged;
  dict["bytes_not_paged"] = counters.bytesNotPaged;
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

py::dict toDict(const ReportRow& row) {
  py::dict dict;
  dict["region"] = row.region;
  dict["module"] = row.module;
  dict["op"] = row.op;
  dict["shape"] = py::tuple(py::cast(row.shape));
  dict["dtype"] = c10::str(c10::getDtypeNames(row.dtype).first);
  dict["decision"] = row.fate;
  dict["rule"] = row.rule;
  dict["reason"] = row.reason;
  dict["count"] = row.count;
  dict["bytes"] = row.bytes;
  dict["replays"] = row.replays;
  dict["replay_seconds"] = row.replaySeconds;
  return dict;
}

py::dict toDict(const Report& report) {
  py::list rows;
  for (const ReportRow& row : report.rows) {
    rows.append(toDict(row));
  }
  py::list timeline;
  for (const ReportPoint& point : report.timeline) {
    timeline.append(py::make_tuple(point.seconds, point.held, point.eager));
  }
  py::list spans;
  for (const ReportSpan& span : report.spans) {
    spans.append(
        py::make_tuple(span.kind, span.name, span.start, span.seconds, span.thread, span.bytes));
  }
  py::dict dict;
  dict["step"] = report.step;
  dict["rows"] = rows;
  dict["timeline"] = timeline;
  dict["spans"] = spans;
  dict["idle_rules"] = report.idleRules;
  dict["peak_held"] = report.peakHeld;
  dict["peak_eager"] = report.peakEager;
  return dict;
}

py::list reportDicts() {
  py::list dicts;
  for (const Report& report : reports()) {
    dicts.append(toDict(report));
  }
  return dicts;
}

}  // namespace

void bindReport(py::module_& module) {
  module.def("stats", &statsDict);
  module.def("reset_stats", &resetStats);
  module.def("set_reporting", torch::wrap_pybind_function(&setReporting));
  module.def("is_reporting", &isReporting);
  module.def("clear_reports", torch::wrap_pybind_function(&clearReports));
  module.def("reports", &reportDicts);
}

}  // namespace ebb::bindings
