#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "memory/numa_node.h"
#include "memory/pinned.h"
#include "offload/offload.h"
#include "testing/fake_transfer.h"
#include "testing/instant_transfer.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

// Like hasattr and getattr, but no exception is made for what is not there, which is the rule.
bool isTrue(PyObject* object, PyObject* attribute) {
  PyObject* found = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  const int there = PyObject_GetOptionalAttr(object, attribute, &found);
#else
  const int there = _PyObject_LookupAttr(object, attribute, &found);
#endif
  const auto value = py::reinterpret_steal<py::object>(found);
  const int truth = there > 0 ? PyObject_IsTrue(value.ptr()) : there;
  if (truth < 0) {
    throw python_error();
  }
  return truth != 0;
}

// The marks by which users of other libraries keep tensors on the device.
bool optedOut(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() == nullptr) {
    return false;  // Python has never seen it
  }
  py::gil_scoped_acquire gil;
  static PyObject* const marks[] = {
      PyUnicode_InternFromString("_do_not_offload"),
      PyUnicode_InternFromString("_TE_do_not_offload")};
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  return isTrue(object.ptr(), marks[0]) || isTrue(object.ptr(), marks[1]);
}

// Puts another transfer in the real one's place until it is closed.
class InPlace {
 public:
  explicit InPlace(std::shared_ptr<Transfer> given) {
    Offload::putInPlace(std::make_shared<Offload>(std::move(given)));
  }
  ~InPlace() {
    close();
  }
  void close() {
    if (std::exchange(open_, false)) {
      Offload::putInPlace(nullptr);
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
      const c10::Storage bytes = Offload::get().transfer().allocateOnDevice(nbytes, c10::kCPU);
      stashes.push_back(Offload::get().send(bytes, nbytes, account));
    }
    for (; !stashes.empty(); stashes.pop_back()) {
      Offload::get().fetch(*stashes.back());
    }
  }

  void close() {
    inPlace_.close();
  }

 private:
  InstantTransfer& instant_ = *new InstantTransfer;  // leaked: its memory may outlive it
  std::vector<c10::Storage> onHost_;                 // of transferOnly
  InPlace inPlace_{std::shared_ptr<Transfer>(&instant_, [](Transfer*) {})};
};

class FakeAccelerator {
 public:
  explicit FakeAccelerator(size_t hostBytes) : fake_(std::make_shared<FakeTransfer>(hostBytes)) {
  }

  void close() {
    inPlace_.close();
  }

  // From now on `told` is called for each allocation, as Python's observers of a device that is out
  // of memory are; None: nobody is.
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

  FakeTransfer& fake() {
    return *fake_;
  }

 private:
  const std::shared_ptr<FakeTransfer> fake_;  // what was sent through it may outlive this
  InPlace inPlace_{fake_};
};

}  // namespace

void bindOffload(py::module_& module) {
  Offload::setOptOut(&optedOut);
  module.def("offload_settings", torch::wrap_pybind_function(&offloadSettings));
  module.def("offload_stats", torch::wrap_pybind_function(&offloadStats));
  module.def("configure_offload", torch::wrap_pybind_function(&configureOffload));
  module.def("drain_offload", torch::wrap_pybind_function_no_gil([] { Offload::get().drain(); }));
  module.def("pinned_memory_node", torch::wrap_pybind_function([](size_t nbytes, int8_t device) {
               const auto memory = allocatePinned(nbytes, c10::Device(c10::kCUDA, device));
               return preferredNode(memory.data());
             }));
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

}  // namespace ebb::bindings
