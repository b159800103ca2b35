// Python types of context managers whose scope is always left.
#pragma once

#include <torch/csrc/python_headers.h>

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <new>
#include <utility>

namespace ebb::bindings {

// Note [Scopes that are left for sure]
// A signal handler may raise between any two steps of Python code: after a context manager written
// in Python has entered a scope and before the object has noted the entry, or before the exit has
// begun. So entering and leaving are each one call into C++. Python's with statement makes these
// calls without a step in between; if the with statement never gets to own the object, the
// destructor leaves the scope. A scope that must call Python code is already open, or already
// closed, at the time of the call.
//
// `Scope` has
//   configure(arguments, count)  takes the settings: the arguments of the type's call, or those of
//                                `_configure` in a subclass;
//   enter(self)                  throws if the scope is already entered;
//   exit(self, failed)           leaves, even if it throws; `failed`: an exception is propagating;
//   isOpen()                     entered and not left;
//   drop()                       leaves; must not throw.
template <class Scope>
class ScopeType {
 public:
  // Adds the type to the module, under this name. Python classes may derive from the type.
  static void add(pybind11::module_& module, const char* name, const char* qualifiedName) {
    PyTypeObject& type = typeObject();
    type.tp_name = qualifiedName;
    type.tp_basicsize = sizeof(Object);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE;
    type.tp_new = &make;
    type.tp_init = &initialise;
    type.tp_dealloc = &destroy;
    type.tp_methods = methods();
    if (PyType_Ready(&type) != 0 ||
        PyModule_AddObjectRef(module.ptr(), name, reinterpret_cast<PyObject*>(&type)) != 0) {
      throw pybind11::error_already_set();
    }
  }

 private:
  struct Object {
    PyObject_HEAD;
    Scope scope;
    bool isUnused;  // configured, and not entered since
  };

  static Scope& scopeOf(PyObject* self) { return reinterpret_cast<Object*>(self)->scope; }

  static bool& isUnused(PyObject* self) { return reinterpret_cast<Object*>(self)->isUnused; }

  static PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
    PyObject* self = type->tp_alloc(type, 0);
    if (self != nullptr) {
      new (&scopeOf(self)) Scope();
    }
    return self;
  }

  static int initialise(PyObject* self, PyObject* arguments, PyObject*) {
    PyObject* done = configure(self, &PyTuple_GET_ITEM(arguments, 0), PyTuple_GET_SIZE(arguments));
    Py_XDECREF(done);
    return done == nullptr ? -1 : 0;
  }

  static void destroy(PyObject* self) {
    const pybind11::error_scope unchanged;  // keeps the exception that is propagating
    if (scopeOf(self).isOpen()) {
      scopeOf(self).drop();
    }
    scopeOf(self).~Scope();
    Py_TYPE(self)->tp_free(self);
  }

  static PyObject* configure(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(
        !scopeOf(self).isOpen(), "ebb: __init__ was called on an open '", Py_TYPE(self)->tp_name,
        "' object; create a new object");
    scopeOf(self).configure(arguments, count);
    isUnused(self) = true;
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
  }

  static PyObject* enter(PyObject* self, PyObject*) {
    HANDLE_TH_ERRORS
    isUnused(self) = false;
    scopeOf(self).enter(self);
    Py_INCREF(self);
    return self;
    END_HANDLE_TH_ERRORS
  }

  static PyObject* exit(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    scopeOf(self).exit(self, count > 0 && arguments[0] != Py_None);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
  }

  static PyObject* isOpen(PyObject* self, PyObject*) {
    return PyBool_FromLong(scopeOf(self).isOpen() ? 1 : 0);
  }

  static PyObject* tellUnused(PyObject* self, PyObject*) {
    return PyBool_FromLong(isUnused(self) ? 1 : 0);
  }

  template <class Function>
  static PyCFunction method(Function* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
  }

  static PyMethodDef* methods() {
    static PyMethodDef all[] = {
        {"_configure", method(&configure), METH_FASTCALL, nullptr},
        {"_is_open", method(&isOpen), METH_NOARGS, nullptr},
        {"_is_unused", method(&tellUnused), METH_NOARGS, nullptr},
        {"__enter__", method(&enter), METH_NOARGS, nullptr},
        {"__exit__", method(&exit), METH_FASTCALL, nullptr},
        {nullptr, nullptr, 0, nullptr}};
    return all;
  }

  static PyTypeObject& typeObject() {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
    static PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
#pragma GCC diagnostic pop
    return type;
  }
};

// Calls a method of `self` that is written in Python; throws the method's exception.
template <class... Arguments>
pybind11::object callMethod(PyObject* self, const char* name, Arguments&&... arguments) {
  return pybind11::handle(self).attr(name)(std::forward<Arguments>(arguments)...);
}

}  // namespace ebb::bindings
