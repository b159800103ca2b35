// Functions and classes for tests of plug-ins: names of fields, a fake and an instant transfer.
#include <linux/mempolicy.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../module.h"
#include "ahead_threads.h"
#include "bindings/field_dicts.h"
#include "ebb/offload.h"
#include "ebb/paging.h"
#include "ebb/profile.h"
#include "ebb/report.h"
#include "fake_transfer.h"
#include "instant_transfer.h"
#include "memory/bytes.h"
#include "plugins/ahead/graph_replay.h"
#include "plugins/ahead/room.h"
#include "plugins/offload/offload_engine.h"
#include "plugins/offload/transfer/pinned.h"
#include "plugins/paging/pool/pool.h"
#include "plugins/report/step_trace.h"
#include "stores/share_storage.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

template <HasFields Struct>
py::list namesOfFields() {
  py::list names;
  forEachField<Struct>([&](auto field) { names.append(field.name.data()); });
  return names;
}

// The keys of each table of fields.
py::dict fields() {
  py::dict found;
  found["AheadSettings"] = namesOfFields<AheadSettings>();
  found["AheadStats"] = namesOfFields<AheadStats>();
  found["OffloadSettings"] = namesOfFields<OffloadSettings>();
  found["OffloadStats"] = namesOfFields<OffloadStats>();
  found["PagingSettings"] = namesOfFields<PagingSettings>();
  found["PagePoolStats"] = namesOfFields<PagePoolStats>();
  found["PagingStats"] = namesOfFields<PagingStats>();
  found["RegionCounters"] = namesOfFields<RegionCounters>();
  found["TransferCounters"] = namesOfFields<TransferCounters>();
  found["Stats"] = namesOfFields<Stats>();
  found["Totals"] = namesOfFields<Totals>();
  found["ReportRow"] = namesOfFields<ReportRow>();
  found["ReportValue"] = namesOfFields<ReportValue>();
  found["ReportReplay"] = namesOfFields<ReportReplay>();
  found["ReportPoint"] = namesOfFields<ReportPoint>();
  found["ReportSpan"] = namesOfFields<ReportSpan>();
  found["ReportAhead"] = namesOfFields<ReportAhead>();
  found["Report"] = namesOfFields<Report>();
  found["Profile"] = namesOfFields<Profile>();
  found["ProfileOperator"] = namesOfFields<ProfileOperator>();
  found["ProfileValue"] = namesOfFields<ProfileValue>();
  found["RoomStats"] = namesOfFields<RoomStats>();
  found["ProfileReplay"] = namesOfFields<ProfileReplay>();
  found["ProfileAllocation"] = namesOfFields<ProfileAllocation>();
  return found;
}

// Puts another transfer in the real one's place until it is closed.
class InPlace {
 public:
  explicit InPlace(std::shared_ptr<Transfer> given) {
    putEngineInPlace(std::make_shared<Offload>(std::move(given)));
  }
  ~InPlace() { close(); }
  void close() {
    if (std::exchange(open_, false)) {
      putEngineInPlace(nullptr);
    }
  }

 private:
  bool open_ = true;
};

class InstantAccelerator {
 public:
  // The calls that `count` tensors of `nbytes` bytes take there and back in the reverse order, each
  // to host memory of its own, which is used again.
  void transferOnly(size_t count, size_t nbytes) {
    const c10::Stream out = instant_.outStream(c10::kCPU);
    const c10::Stream in = instant_.inStream(c10::kCPU);
    onHost_.resize(std::max(onHost_.size(), count));
    for (size_t i = 0; i < count; ++i) {
      const c10::Storage device = instant_.allocateOnDevice(nbytes, c10::kCPU);
      if (!onHost_[i] || onHost_[i].nbytes() != nbytes) {
        onHost_[i] = instant_.allocateOnHost(nbytes, c10::kCPU);
      }
      instant_.copy(onHost_[i], device, nbytes, out);
    }
    for (size_t i = count; i-- > 0;) {
      instant_.copy(instant_.allocateOnDevice(nbytes, c10::kCPU), onHost_[i], nbytes, in);
    }
  }

  // The same by way of the engine: all are sent, then fetched in the reverse order.
  static void sendAndFetch(size_t count, size_t nbytes) {
    const auto account = std::make_shared<TransferAccount>("a tensor of a benchmark");
    std::vector<HostStashPtr> stashes;
    stashes.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const c10::Storage bytes = offloadEngine().transfer().allocateOnDevice(nbytes, c10::kCPU);
      stashes.push_back(offloadEngine().send(bytes, nbytes, account));
    }
    for (; !stashes.empty(); stashes.pop_back()) {
      offloadEngine().fetch(*stashes.back());
    }
  }

  void close() { inPlace_.close(); }

 private:
  InstantTransfer& instant_ = *new InstantTransfer;  // leaked: its memory may outlive it
  std::vector<c10::Storage> onHost_;                 // of transferOnly
  InPlace inPlace_{std::shared_ptr<Transfer>(&instant_, [](Transfer*) {})};
};

class FakeAccelerator {
 public:
  explicit FakeAccelerator(size_t hostBytes) : fake_(std::make_shared<FakeTransfer>(hostBytes)) {}

  void close() { inPlace_.close(); }

  // From now on each allocation calls `told`, as a device that is out of memory calls Python's
  // observers. None ends this.
  void onDeviceAllocation(const py::object& told) {
    if (told.is_none()) {
      fake_->onDeviceAllocation(nullptr);
      return;
    }
    fake_->onDeviceAllocation(
        [function = c10::SafePyObject(told.inc_ref().ptr(), getPyInterpreter())] {
          const py::gil_scoped_acquire gil;
          py::reinterpret_borrow<py::object>(function.ptr(getPyInterpreter()))();
        });
  }

  py::dict counts() {
    const auto now = fake_->counts();
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

  FakeTransfer& fake() { return *fake_; }

 private:
  const std::shared_ptr<FakeTransfer> fake_;  // what was sent through it may outlive this
  InPlace inPlace_{fake_};
};

std::atomic<uint32_t> longestDelay{0};

void delay(uint64_t sequence) {
  if (const uint32_t longest = longestDelay.load()) {
    const uint64_t drawn = (sequence + 1) * 0x9E3779B97F4A7C15U >> 40;
    std::this_thread::sleep_for(std::chrono::microseconds(drawn % longest));
  }
}

// Before each recipe that runs ahead its thread sleeps, at random, up to so many microseconds.
void delayReplaysAhead(uint32_t microseconds) {
  longestDelay.store(microseconds);
  beforeReplayAhead.store(microseconds == 0 ? nullptr : &delay);
}

// The memory node that was preferred for `memory`; -1 if none was.
int preferredNode(const void* memory) {
  constexpr int kMostNodes = 1024;
  constexpr int kWordBits = CHAR_BIT * sizeof(unsigned long);
  std::array<unsigned long, kMostNodes / kWordBits> nodes{};
  int policy = MPOL_DEFAULT;
  const long failed =
      ::syscall(SYS_get_mempolicy, &policy, nodes.data(), kMostNodes, memory, MPOL_F_ADDR);
  if (failed != 0 || policy != MPOL_PREFERRED) {
    return -1;
  }
  for (int node = 0; node < kMostNodes; ++node) {
    if ((nodes[node / kWordBits] >> (node % kWordBits) & 1) != 0) {
      return node;
    }
  }
  return -1;
}

void bindTestsOfPlugins(py::module_& module) {
  module.def("fields", &fields);
  module.def("clear_reports", torch::wrap_pybind_function(&clearReports));
  module.def("live_traces", &StepTrace::live);
  module.def("graphs_with_room", [] { return Room::get().graphs(); });
  module.def("drain_offload", torch::wrap_pybind_function_no_gil([] { offloadEngine().drain(); }));
  module.def("release_offloaded", torch::wrap_pybind_function_no_gil([] {
               offloadEngine().giveBack(c10::kCPU);
               offloadEngine().stats();  // releases the lock, and drops the storages
             }));
  module.def("pinned_memory", torch::wrap_pybind_function_no_gil([](size_t nbytes, int8_t device) {
               return bytesOf(allocatePinned(nbytes, c10::Device(c10::kCUDA, device)));
             }));
  module.def(
      "show_memory", torch::wrap_pybind_function([](const at::Tensor& dst, const at::Tensor& src) {
        fillStorage(dst.storage(), src.storage());
      }));
  module.def("cpu_page_mover", [] { return reinterpret_cast<uintptr_t>(&cpuPageMover()); });
  module.def("set_page_mover", [](uintptr_t mover) {
    setPageMover(reinterpret_cast<const PageMover*>(mover));
  });
  module.def("preferred_node", [](const at::Tensor& memory) {
    return preferredNode(memory.const_data_ptr());
  });
  module.def("replays_ahead_are_idle", &replaysAheadAreIdle);
  module.def("replay_when_closed", [](bool on) { replaysWhenClosed.store(on); });
  module.def("delay_replays_ahead", &delayReplaysAhead);
  module.def("hands_are_known", torch::wrap_pybind_function_no_gil(&handsAreKnown));
  module.def("hands_without_lock", torch::wrap_pybind_function_no_gil(&handsWithoutLock));
  py::class_<FakeAccelerator>(module, "FakeAccelerator")
      .def(py::init<size_t>())
      .def("advance", [](FakeAccelerator& self, size_t count) { self.fake().advance(count); })
      .def("use_stream", torch::wrap_pybind_function([](FakeAccelerator& self, int64_t number) {
             self.fake().useComputeStream(number);
           }))
      .def(
          "fail_allocations_after",
          [](FakeAccelerator& self, size_t count) { self.fake().failAllocationsAfter(count); })
      .def("on_device_allocation", &FakeAccelerator::onDeviceAllocation)
      .def("counts", &FakeAccelerator::counts)
      .def("take_violations", [](FakeAccelerator& self) { return self.fake().takeViolations(); })
      .def("close", &FakeAccelerator::close);
  py::class_<InstantAccelerator>(module, "InstantAccelerator")
      .def(py::init())
      .def("transfer_only", &InstantAccelerator::transferOnly)
      .def_static("send_and_fetch", &InstantAccelerator::sendAndFetch)
      .def("close", &InstantAccelerator::close);
}

[[maybe_unused]] const bool isBound = bindTests(&bindTestsOfPlugins);

}  // namespace

}  // namespace ebb::bindings
