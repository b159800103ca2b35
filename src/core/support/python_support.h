// Functions that the core needs from Python without depending on Python. The bindings provide the
// functions; without bindings there are none.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/SafePyObject.h>

#include <optional>
#include <utility>
#include <vector>

#include "ebb/export.h"

namespace ebb {

class Handle;

struct PythonSupport {
  bool (*holdsGil)();
  void* (*releaseGil)();  // releases the GIL; the result is passed to acquireGil
  void (*acquireGil)(void*);
  // For compiled autograd: a Python callable and its argument.
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> (*unpackHook)(const Handle&);
  // The inner tensors of a wrapper subclass, and the data that unflatten needs to rebuild the
  // wrapper; nothing if the class defines no flattening. See Note [Wrapper subclasses].
  std::optional<c10::SafePyObject> (*flatten)(const at::Tensor&, std::vector<at::Tensor>& inner);
  at::Tensor (*unflatten)(const c10::SafePyObject& parts, const std::vector<at::Tensor>& inner);
};

EBB_API void setPythonSupport(const PythonSupport& support);
const PythonSupport* pythonSupport();

// Releases the GIL, if this thread holds the GIL, around code that may take long.
class EBB_API WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_ = nullptr;  // null: this thread did not hold the GIL
};

}  // namespace ebb
