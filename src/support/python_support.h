// What the core needs of Python and must not know: given by the bindings, absent without them.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/SafePyObject.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ebb/export.h"

namespace ebb {

class Handle;
struct Mismatch;

struct PythonSupport {
  bool (*holdsGil)();     // whether this thread holds the GIL
  void* (*releaseGil)();  // gives it up; the result is passed to acquireGil
  void (*acquireGil)(void*);
  // For compiled autograd: a Python callable and an object to call it with.
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> (*unpackHook)(const Handle&);
  // The tensors that a wrapper subclass holds, and what unflatten needs to put one together again;
  // nothing if the class does not say. See Note [Wrapper subclasses].
  std::optional<c10::SafePyObject> (*flatten)(const at::Tensor&, std::vector<at::Tensor>& inner);
  // Raises ebb.ReplayMismatch.
  void (*throwReplayMismatch)(const std::string& message, const Mismatch& mismatch);
  // Writes to ebb's log how much of an operator's results a region holds, and what frees it.
  void (*tellPinned)(const std::string& op, const std::string& region, size_t bytes);
  at::Tensor (*unflatten)(const c10::SafePyObject& parts, const std::vector<at::Tensor>& inner);
};

EBB_API void setPythonSupport(const PythonSupport& support);
const PythonSupport* pythonSupport();

// Gives up the GIL if this thread holds it: around what may take long.
class EBB_API WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_ = nullptr;  // null: it was not held
};

}  // namespace ebb
