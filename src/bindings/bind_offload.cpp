#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>

#include "bindings/bindings.h"
#include "region/placeholder.h"
#include "residency/fake_transfer.h"
#include "residency/offload.h"
#include "residency/share_storage.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

// The marks by which users of other libraries keep tensors on the device.
bool optedOut(const at::Tensor& tensor) {
  py::gil_scoped_acquire gil;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  for (const char* mark : {"_do_not_offload", "_TE_do_not_offload"}) {
    if (py::hasattr(object, mark) && object.attr(mark).cast<bool>()) {
      return true;
    }
  }
  return false;
}

py::dict settingsDict() {
  const OffloadSettings now = offloadSettings();
  py::dict dict;
  dict["min_bytes"] = now.minBytes;
  dict["pinned_limit"] = now.pinnedLimit;
  dict["in_flight_bytes"] = now.inFlightBytes;
  dict["prefetch_bytes"] = now.prefetchBytes;
  dict["keep_last"] = now.keepLast;
  dict["disk"] = now.disk;
  dict["disk_limit"] = now.diskLimit;
  dict["static"] = now.isStatic;
  return dict;
}

py::dict offloadStatsDict() {
  const OffloadStats now = offloadStats();
  py::dict dict;
  dict["bytes_sent"] = now.bytesSent;
  dict["bytes_fetched"] = now.bytesFetched;
  dict["bytes_refused"] = now.bytesRefused;
  dict["host_waits"] = now.hostWaits;
  dict["fetched_late"] = now.fetchedLate;
  dict["most_in_flight"] = now.mostInFlight;
  dict["in_flight_bytes"] = now.inFlightBytes;
  dict["host_bytes_held"] = now.hostBytesHeld;
  dict["host_bytes_used"] = now.hostBytesUsed;
  dict["stashes"] = now.stashes;
  dict["bytes_spilled"] = now.bytesSpilled;
  dict["disk_bytes_used"] = now.diskBytesUsed;
  return dict;
}

// Puts a fake accelerator in the real one's place until it is closed.
class FakeAccelerator {
 public:
  explicit FakeAccelerator(size_t hostBytes) : fake_(hostBytes) {
    TORCH_CHECK(
        offloadStats().stashes == 0,
        "ebb: a fake accelerator cannot be put in place while offloaded values exist");
    putInPlace(&fake_);
  }
  ~FakeAccelerator() {
    if (open_) {
      close();
    }
  }

  void close() {
    open_ = false;
    putInPlace(nullptr);
  }

  py::dict counts() {
    const auto now = fake_.counts();
    py::dict dict;
    dict["queued"] = now.queued;
    dict["copies_out"] = now.copiesOut;
    dict["copies_in"] = now.copiesIn;
    dict["host_allocations"] = now.hostAllocations;
    dict["host_bytes"] = now.hostBytes;
    dict["host_waits"] = now.hostWaits;
    dict["device_waits"] = now.deviceWaits;
    dict["asked"] = now.asked;
    return dict;
  }

  FakeTransfer& fake() {
    return fake_;
  }

 private:
  static void putInPlace(Transfer* given) {
    Offload::get().drain();
    setTransfer(given);
  }

  FakeTransfer fake_;
  bool open_ = true;
};

}  // namespace

void bindOffload(py::module_& module) {
  Offload::get().setOptOut(&optedOut);
  module.def("offload_settings", &settingsDict);
  module.def("offload_stats", torch::wrap_pybind_function(&offloadStatsDict));
  const auto configure = [](const py::dict& settings) {
    OffloadSettings given;
    given.minBytes = settings["min_bytes"].cast<size_t>();
    given.pinnedLimit = settings["pinned_limit"].cast<size_t>();
    given.inFlightBytes = settings["in_flight_bytes"].cast<size_t>();
    given.prefetchBytes = settings["prefetch_bytes"].cast<size_t>();
    given.keepLast = settings["keep_last"].cast<size_t>();
    given.disk = settings["disk"].cast<std::string>();
    given.diskLimit = settings["disk_limit"].cast<size_t>();
    given.isStatic = settings["static"].cast<bool>();
    configureOffload(given);
  };
  module.def("configure_offload", torch::wrap_pybind_function(configure));
  module.def("drain_offload", torch::wrap_pybind_function([] { Offload::get().drain(); }));
  module.def("share_storage", torch::wrap_pybind_function(&shareStorage));
  py::class_<Placeholder>(module, "Placeholder")
      .def(py::init(torch::wrap_pybind_function([](const at::Tensor& tensor) {
        return std::make_unique<Placeholder>(tensor);
      })))
      .def("discard", torch::wrap_pybind_function(&Placeholder::discard))
      .def("refill", torch::wrap_pybind_function(&Placeholder::refill));
  py::class_<FakeAccelerator>(module, "FakeAccelerator")
      .def(py::init<size_t>())
      .def("advance", [](FakeAccelerator& self, size_t count) { self.fake().advance(count); })
      .def("use_stream", torch::wrap_pybind_function([](FakeAccelerator& self, int64_t number) {
             self.fake().useComputeStream(number);
           }))
      .def(
          "fail_allocations_after",
          [](FakeAccelerator& self, size_t count) { self.fake().failAllocationsAfter(count); })
      .def("counts", &FakeAccelerator::counts)
      .def("take_violations", [](FakeAccelerator& self) { return self.fake().takeViolations(); })
      .def("close", &FakeAccelerator::close);
}

}  // namespace ebb::bindings
