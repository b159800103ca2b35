// The Python context managers of four scopes: a region, the module that currently runs, an opaque
// write, and code without regions.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/scope_type.h"
#include "policy/module_scope.h"
#include "region/enter_region.h"
#include "support/python_support.h"

namespace ebb::bindings {

namespace {

// True if a tracer or mode may be active, so that asking Python is worth the time.
bool hasModes() {
  return c10::impl::TorchDispatchModeTLS::stack_len() > 0 ||
         at::impl::PythonTorchFunctionTLS::stack_len() > 0 || torch::jit::tracer::isTracing();
}

thread_local int disabled = 0;                // open scopes without regions
std::atomic<bool> disabledEverywhere{false};  // regions have no effect in this process

bool regionsAreDisabled() {
  return disabled > 0 || disabledEverywhere.load(std::memory_order_relaxed);
}

class RegionScope {
 public:
  // Takes six settings: the policy (None while a compiler traces), the name, a flag that says if
  // the policy may offload, the function of a plug-in that leaves the region (or None), and two
  // flags that say if ebb logs the end of the region, and if ebb may replay all custom operators.
  void configure(PyObject* const* arguments, Py_ssize_t count) {
    TORCH_CHECK_TYPE(count == 6, "ebb: a region takes 6 settings");
    policy_ =
        arguments[0] == Py_None ? nullptr : py::handle(arguments[0]).cast<const PyPolicy&>().policy;
    name_ = py::handle(arguments[1]).cast<std::string>();
    offloads_ = arguments[2] == Py_True;
    leave_ =
        arguments[3] == Py_None ? py::object() : py::reinterpret_borrow<py::object>(arguments[3]);
    logs_ = arguments[4] == Py_True;
    repeats_ = arguments[5] == Py_True ? Repeats::All : Repeats::IfRulesSaySo;
  }

  void enter(PyObject* self) {
    if (!policy_) {
      return;
    }
    TORCH_CHECK(
        !isOpen(), "ebb: region '", name_,
        "' is already open. Create a second ebb.region object to nest regions.");
    if (regionsAreDisabled() || (hasModes() && callMethod(self, "_is_traced").cast<bool>())) {
      hasNoEffect_ = true;
      return;
    }
    if (offloads_) {
      callMethod(self, "_refuse_to_offload_twice");
    }
    id_ = enterRegion(policy_, name_, repeats_);
    passesThrough_ = !at::SavedTensorDefaultHooks::is_enabled();
    if (passesThrough_) {
      auto leaving = c10::make_scope_exit([&] { drop(); });
      callMethod(self, "_warn_hooks_disabled");
      leaving.release();
    }
  }

  void exit(PyObject* self, bool failed) {
    if (!policy_) {
      return;
    }
    if (std::exchange(hasNoEffect_, false)) {
      forgetResults(self);
      return;
    }
    TORCH_CHECK(id_ != 0, "ebb: region '", name_, "' was left but had not been entered");
    if (leave_ && !failed && !passesThrough_) {
      leaveWithResults(self);
    } else {
      leaveRegion(std::exchange(id_, 0));
      forgetResults(self);
    }
    if (logs_) {
      callMethod(self, "_log_left");
    }
  }

  bool isOpen() const { return id_ != 0 || hasNoEffect_; }

  void drop() noexcept {
    try {
      leaveRegion(std::exchange(id_, 0));
    } catch (const std::exception&) {
      // leaveRegion() raises if another thread entered the region. That thread drops the region.
    }
  }

 private:
  // Only a region that a plug-in leaves has a list of results.
  void forgetResults(PyObject* self) const {
    if (leave_) {
      py::setattr(self, "_results", py::none());
    }
  }

  // Calls the plug-in's function with the id, the region's results, a flag (true if the program
  // named the results), and another (true if a result has a backward). The function leaves the
  // region, even if it throws, and returns an object for `_refill_before_backward`, or None.
  void leaveWithResults(PyObject* self) {
    const auto anyhow = c10::make_scope_exit([&] {
      if (id_ != 0) {
        drop();
      }
    });
    // _take_results() returns the region's results, a flag (true if the program named the results),
    // and the results that have a backward. C++ switches grad mode off for the call: Python's
    // no_grad would stay on if a signal handler raised in the call.
    std::optional<c10::AutoGradMode> noGrad(std::in_place, false);
    const auto results =
        callMethod(self, "_take_results").cast<std::tuple<py::list, bool, py::list>>();
    noGrad.reset();
    const auto& [plain, named, differentiable] = results;
    const py::tuple arguments = py::make_tuple(id_, plain, named, !differentiable.empty());
    id_ = 0;
    const py::object left = leave_(*arguments);
    if (!left.is_none()) {
      callMethod(self, "_refill_before_backward", left, differentiable);
    }
  }

  PolicyPtr policy_;  // null: a scope without effect
  std::string name_;
  py::object leave_;       // a plug-in's function that leaves the region; null: leaveRegion()
  uint64_t id_ = 0;        // number of the entry; 0: not entered
  bool offloads_ = false;  // the policy may offload
  bool logs_ = false;      // leaving is logged
  Repeats repeats_ = Repeats::IfRulesSaySo;
  bool passesThrough_ = false;  // saved-tensor hooks were disabled at the entry
  bool hasNoEffect_ = false;    // entered, while a tracer is active or regions are disabled
};

// While a module runs, rules see the module's name.
class ModuleScopeInPython {
 public:
  // Takes one setting: the module's number.
  void configure(PyObject* const* arguments, Py_ssize_t count) {
    TORCH_CHECK_TYPE(count == 1, "ebb: a module that runs is one number");
    number_ = py::handle(arguments[0]).cast<uint32_t>();
  }

  void enter(PyObject*) {
    before_ = exchangeModule(number_);
    isOpen_ = true;
  }

  void exit(PyObject*, bool) { drop(); }

  bool isOpen() const { return isOpen_; }

  void drop() noexcept {
    if (std::exchange(isOpen_, false)) {
      exchangeModule(before_);
    }
  }

 private:
  uint32_t number_ = 0;
  uint32_t before_ = 0;  // the number of the calling module
  bool isOpen_ = false;
};

// While the scope is open, code unseen by torch writes to tensors; see Note [Opaque writes].
class OpaqueScope {
 public:
  // Takes the tensors that the code writes.
  void configure(PyObject* const* arguments, Py_ssize_t count) {
    tensors_.clear();
    for (Py_ssize_t i = 0; i < count; ++i) {
      tensors_.push_back(py::handle(arguments[i]).cast<at::Tensor>());
    }
  }

  void enter(PyObject*) {
    const WithoutGil withoutGil;
    for (; open_ < tensors_.size(); ++open_) {
      opaqueWriteBegins(tensors_[open_]);
    }
  }

  void exit(PyObject*, bool) {
    const WithoutGil withoutGil;
    while (open_ > 0) {
      opaqueWriteEnds(tensors_[--open_]);
    }
  }

  bool isOpen() const { return open_ > 0; }

  void drop() noexcept {
    try {
      exit(nullptr, true);
    } catch (const std::exception&) {
      open_ = 0;
    }
  }

 private:
  std::vector<at::Tensor> tensors_;
  size_t open_ = 0;  // the number of tensors that are being written
};

// While the scope is open, regions that the thread enters have no effect.
class DisabledScope {
 public:
  void configure(PyObject* const*, Py_ssize_t count) {
    TORCH_CHECK_TYPE(count == 0, "ebb: disable takes no settings");
  }

  void enter(PyObject*) {
    TORCH_CHECK(!isOpen_, "ebb: this ebb.disable() is already entered");
    TORCH_CHECK(
        !inRegion(), "ebb: ebb.disable() was entered inside a region. Enter it before the region.");
    isOpen_ = true;
    thread_ = std::this_thread::get_id();
    ++disabled;
  }

  void exit(PyObject*, bool) {
    TORCH_CHECK(
        !isOpen_ || thread_ == std::this_thread::get_id(),
        "ebb: ebb.disable() was left in another thread than it was entered in");
    drop();
  }

  bool isOpen() const { return isOpen_; }

  void drop() noexcept {
    if (std::exchange(isOpen_, false) && thread_ == std::this_thread::get_id()) {
      --disabled;
    }
  }

 private:
  bool isOpen_ = false;
  std::thread::id thread_;  // that has entered the scope
};

}  // namespace

void bindScopes(py::module_& module) {
  module.def("running_module", &currentModule);
  module.def("collective_writes", torch::wrap_pybind_function(&collectiveWrites));
  ScopeType<RegionScope>::add(module, "Region", "ebb._C.Region");
  ScopeType<ModuleScopeInPython>::add(module, "RunningModule", "ebb._C.RunningModule");
  ScopeType<OpaqueScope>::add(module, "OpaqueWrites", "ebb._C.OpaqueWrites");
  ScopeType<DisabledScope>::add(module, "Disabled", "ebb._C.Disabled");
  module.def("regions_are_disabled", &regionsAreDisabled);
  module.def("disable_everywhere", [](bool disables) { disabledEverywhere = disables; });
  module.def("are_disabled_everywhere", [] { return disabledEverywhere.load(); });
}

}  // namespace ebb::bindings
