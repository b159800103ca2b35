// Lets ebb run code when Python calls certain functions of torch's C extension.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "ebb/region.h"
#include "hooks/observer.h"
#include "hooks/process_state.h"
#include "stream/stream.h"
#include "torch_seams/key.h"

namespace ebb::bindings {

namespace {

// Note [Watched functions]
// ebb must know of some calls that reach no operator, such as `p.data`, the setters of torch's
// settings, `resize_` of a storage, a backend's collectives, and backward itself. ebb replaces the
// pointer to the C definition inside the function's Python object. The new definition is a copy
// whose C function does ebb's part and then calls torch's function. The Python object stays the
// same, so torch.overrides, __torch_function__ tables, pickle and modules that have imported the
// function still recognise the function. ebb never undoes the replacement.

enum class Watch : uint8_t {
  Waits,         // changes state of the process: see Note [Changes of the process's state]
  Resizes,       // also changes the size or the memory of the storage
  Aliases,       // the program may write to the arguments' memory unseen: see beforeUnseenWrite()
  Writes,        // writes to `self` without an operator: see Note [Opaque writes]
  Told,          // a Python function is called first, with the arguments but `self`
  Uses,          // a stream uses the memory of `self`: see Note [Memory of another storage]
  Communicates,  // also told; operators that the method calls are not intercepted
};

// The arguments of a Python call, for each calling convention of C functions.
struct CallArguments {
  PyObject* self;
  PyObject* const* listed = nullptr;
  Py_ssize_t count = 0;
  PyObject* named = nullptr;  // a dictionary, or null
  PyObject* names = nullptr;  // a tuple: the last of `listed` have these names; or null
};

template <class F>
void eachTensor(const CallArguments& arguments, F&& function) {
  const auto look = [&](PyObject* object) {
    if (object != nullptr && THPVariable_Check(object)) {
      function(THPVariable_Unpack(object));
    }
  };
  look(arguments.self);
  std::for_each(arguments.listed, arguments.listed + arguments.count, look);
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; arguments.named && PyDict_Next(arguments.named, &at, nullptr, &value);) {
    look(value);
  }
}

struct Watched {
  Watch watch;
  PyMethodDef method{};  // the copy, for a function or method
  PyGetSetDef attribute{};
  void* original = nullptr;  // the C function
  PyObject* told = nullptr;  // the Python function that is called first; never freed
};

// Calls the Python function with the arguments of the watched call, except `self`.
void tell(PyObject* function, const CallArguments& arguments) {
  const auto& [self, listed, count, named, names] = arguments;
  PyObject* result =
      names != nullptr
          ? PyObject_Vectorcall(function, listed, count - PyTuple_GET_SIZE(names), names)
          : PyObject_VectorcallDict(function, listed, count, named);
  if (result == nullptr) {
    throw py::error_already_set();
  }
  Py_DECREF(result);
}

// record_stream(self, s). torch's function tells the allocator too, but not through the owner.
void noteProgramsUse(const CallArguments& arguments) {
  const at::Tensor& tensor = THPVariable_Unpack(arguments.self);
  PyObject* stream = arguments.count > 0          ? arguments.listed[0]
                     : arguments.named != nullptr ? PyDict_GetItemString(arguments.named, "s")
                                                  : nullptr;
  if (stream == nullptr || !THPStream_Check(stream) || !tensor.has_storage() || tensor.is_cpu()) {
    return;  // torch's function raises the error
  }
  const auto* given = reinterpret_cast<const THPStream*>(stream);
  noteUse(
      tensor.storage(), c10::Stream::unpack3(
                            given->stream_id, static_cast<c10::DeviceIndex>(given->device_index),
                            static_cast<c10::DeviceType>(given->device_type)));
}

// Lives during one call of a watched function, and does all that the function's Watch requires.
class Watching {
 public:
  Watching(const Watched& watched, const CallArguments& arguments) {
    switch (watched.watch) {
      case Watch::Resizes:
        beforeUnseenResize(torch::createStorage(arguments.self));
        [[fallthrough]];
      case Watch::Waits:
        change_.emplace();
        break;
      case Watch::Aliases:
        eachTensor(arguments, beforeUnseenWrite);
        break;
      case Watch::Writes:
        opaque_.emplace(std::vector<at::Tensor>{THPVariable_Unpack(arguments.self)});
        break;
      case Watch::Uses:
        noteProgramsUse(arguments);
        break;
      case Watch::Told:
        tell(watched.told, arguments);
        break;
      case Watch::Communicates:
        tell(watched.told, arguments);
        unseen_.emplace();
        break;
    }
  }

 private:
  std::optional<ProcessStateChange> change_;
  std::optional<Opaque> opaque_;
  std::optional<ExcludeInterception> unseen_;
};

constexpr size_t kMost = 96;
std::array<Watched, kMost> all;  // guarded by the GIL
size_t known = 0;

template <class Function, class... Arguments>
PyObject* call(const Watched& watched, const CallArguments& seen, Arguments... arguments) {
  HANDLE_TH_ERRORS
  const Watching watching(watched, seen);
  return reinterpret_cast<Function>(watched.original)(arguments...);
  END_HANDLE_TH_ERRORS
}

CallArguments inTuple(PyObject* self, PyObject* tuple, PyObject* named = nullptr) {
  return {self, &PyTuple_GET_ITEM(tuple, 0), PyTuple_GET_SIZE(tuple), named};
}

// The C functions that ebb puts in place of the C function of `all[I]`: one for each calling
// convention.
template <size_t I>
struct Entry {
  static PyObject* one(PyObject* self, PyObject* argument) {  // null: no argument
    return call<PyCFunction>(all[I], {self, &argument, argument ? 1 : 0}, self, argument);
  }
  static PyObject* tuple(PyObject* self, PyObject* arguments) {
    return call<PyCFunction>(all[I], inTuple(self, arguments), self, arguments);
  }
  static PyObject* keywords(PyObject* self, PyObject* arguments, PyObject* named) {
    return call<PyCFunctionWithKeywords>(
        all[I], inTuple(self, arguments, named), self, arguments, named);
  }
  static PyObject* fast(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return call<_PyCFunctionFast>(all[I], {self, arguments, count}, self, arguments, count);
  }
  static PyObject* fastKeywords(
      PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    const Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    return call<_PyCFunctionFastWithKeywords>(
        all[I], {self, arguments, count + named, nullptr, names}, self, arguments, count, names);
  }
  static PyObject* get(PyObject* self, void* closure) {
    return call<getter>(all[I], {self}, self, closure);
  }
};

struct Entries {
  void *one, *tuple, *keywords, *fast, *fastKeywords;
  getter get;
};

template <size_t... I>
constexpr auto entriesFor(std::index_sequence<I...>) {
  return std::array<Entries, sizeof...(I)>{Entries{
      reinterpret_cast<void*>(&Entry<I>::one), reinterpret_cast<void*>(&Entry<I>::tuple),
      reinterpret_cast<void*>(&Entry<I>::keywords), reinterpret_cast<void*>(&Entry<I>::fast),
      reinterpret_cast<void*>(&Entry<I>::fastKeywords), &Entry<I>::get}...};
}

// Returns the entry for the calling convention in `flags`; null for a convention that torch does
// not use.
void* entryFor(int flags, const Entries& entries) {
  switch (flags & (METH_VARARGS | METH_KEYWORDS | METH_NOARGS | METH_O | METH_FASTCALL)) {
    case METH_NOARGS:
    case METH_O:
      return entries.one;
    case METH_VARARGS:
      return entries.tuple;
    case METH_VARARGS | METH_KEYWORDS:
      return entries.keywords;
    case METH_FASTCALL:
      return entries.fast;
    case METH_FASTCALL | METH_KEYWORDS:
      return entries.fastKeywords;
    default:
      return nullptr;
  }
}

// The pointer to the definition in a C function or method; null for other objects.
PyMethodDef** definitionIn(PyObject* function) {
  if (PyCFunction_Check(function)) {
    return &reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
  }
  if (PyObject_TypeCheck(function, &PyMethodDescr_Type)) {
    return &reinterpret_cast<PyMethodDescrObject*>(function)->d_method;
  }
  return nullptr;
}

// Makes `function` a watched function. Returns false if `function` is no C function, method or
// attribute, or if entryFor() does not know its calling convention.
bool watch(const py::object& function, Watch what, const py::object& told) {
  static const auto entries = entriesFor(std::make_index_sequence<kMost>());
  const auto isOurs = [&](const void* definition) {
    return definition >= all.data() && definition < all.data() + all.size();
  };
  TORCH_INTERNAL_ASSERT(known < all.size());
  Watched& next = all[known];
  next.watch = what;
  if (PyMethodDef** definition = definitionIn(function.ptr())) {
    if (isOurs(*definition)) {
      return true;
    }
    void* entry = entryFor((*definition)->ml_flags, entries[known]);
    if (entry == nullptr) {
      return false;
    }
    next.method = **definition;
    next.original = reinterpret_cast<void*>(next.method.ml_meth);
    next.method.ml_meth = reinterpret_cast<PyCFunction>(entry);
    *definition = &next.method;
  } else if (Py_TYPE(function.ptr()) == &PyGetSetDescr_Type) {
    PyGetSetDef*& attribute = reinterpret_cast<PyGetSetDescrObject*>(function.ptr())->d_getset;
    if (isOurs(attribute)) {
      return true;
    }
    next.attribute = *attribute;
    next.original = reinterpret_cast<void*>(next.attribute.get);
    next.attribute.get = entries[known].get;
    attribute = &next.attribute;
  } else {
    return false;
  }
  all[known++].told = told.inc_ref().ptr();
  return true;
}

}  // namespace

void bindWatchedFunctions(py::module_& module) {
  py::enum_<Watch>(module, "Watch")
      .value("WAITS", Watch::Waits)
      .value("RESIZES", Watch::Resizes)
      .value("ALIASES", Watch::Aliases)
      .value("WRITES", Watch::Writes)
      .value("USES", Watch::Uses)
      .value("TOLD", Watch::Told)
      .value("COMMUNICATES", Watch::Communicates);
  module.def(
      "watch", torch::wrap_pybind_function(&watch), py::arg("function"), py::arg("what"),
      py::arg("told") = py::none());
}

}  // namespace ebb::bindings
