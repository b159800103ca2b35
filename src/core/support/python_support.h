// Functions that the core needs from Python without depending on Python. The bindings provide the
// functions; without bindings there are none.
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

// Calls by which the ranks of a process group compare the collectives that replays repeat. See Note
// [Repeated collectives]. `group` is the name of the process group. `place` says which of the
// group's lists a list is. `list` has the names of the collectives; it may be empty.
struct CollectivesOfRanks {
  // The number of a new region with such collectives, in the order of the forward.
  uint64_t (*number)(const std::string& group);
  // Makes a list known, so that ebb can answer other ranks. Returns true if the ranks have not
  // compared such a list before.
  bool (*tell)(
      const std::string& group,
      const std::string& region,
      const std::string& place,
      const std::string& list);
  // Compares a list with those of the other ranks, unless such a list was compared before.
  // `always`: compares in any case. Returns why the ranks cannot repeat the list; empty: they can.
  std::string (*compare)(
      const std::string& group,
      const std::string& region,
      const std::string& place,
      const std::string& list,
      bool always);
  // Why another rank cannot take part in a collective for which this rank waits; empty: unknown.
  std::string (*problem)(const std::string& group);
};

struct PythonSupport {
  bool (*holdsGil)();
  void* (*releaseGil)();  // releases the GIL; the result is passed to acquireGil
  void (*acquireGil)(void*);
  // For compiled autograd: a Python callable and its argument.
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> (*unpackHook)(const Handle&);
  // The inner tensors of a wrapper subclass, and the data that unflatten needs to rebuild the
  // wrapper; nothing if the class defines no flattening. See Note [Wrapper subclasses].
  std::optional<c10::SafePyObject> (*flatten)(const at::Tensor&, std::vector<at::Tensor>& inner);
  // Logs how many bytes of an operator's results a region holds, and how to free them.
  void (*tellUnrepeatable)(const std::string& op, const std::string& region, size_t bytes);
  CollectivesOfRanks collectives;
  // True if a custom operator was registered with an effect.
  bool (*hasEffect)(const std::string& op);
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
