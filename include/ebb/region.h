// Regions, and declarations that a program makes inside a region.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "ebb/policy.h"

namespace ebb {

// A region lasts from construction to destruction, on the constructing thread. The outermost region
// is the boundary of recomputation; inner regions change only the policy and the name.
class EBB_API Region {
 public:
  explicit Region(PolicyPtr policy = recomputeAll(), std::string name = "region");
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

 private:
  uint64_t id_;  // identifies this entry
};

// Names the value that `tensor` shows, for rules with a name. The first rule with this name decides
// on the value now, unless a rule above it decided when the op ran. Does nothing outside of
// regions, or for a value that no region computed.
EBB_API void nameValue(const at::Tensor& tensor, const std::string& name);

// From construction to destruction, this thread's ops belong to the module with this name, for
// rules with a module.
class EBB_API ModuleScope {
 public:
  explicit ModuleScope(const std::string& name);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  uint32_t before_;  // the surrounding module
};

// Marks, from construction to destruction, a write to `tensors` that torch does not see: by a raw
// kernel or a C library. A mark is needed for tensors that the region computed or that recipes
// read. Results of `empty` or `zeros` that are filled before torch reads them need no mark.
class EBB_API Opaque {
 public:
  explicit Opaque(std::vector<at::Tensor> tensors);
  ~Opaque();
  Opaque(const Opaque&) = delete;
  Opaque& operator=(const Opaque&) = delete;

 private:
  std::vector<at::Tensor> tensors_;
};

}  // namespace ebb
