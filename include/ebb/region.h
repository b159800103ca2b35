// Regions, and what a program says inside of them.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "ebb/policy.h"

namespace ebb {

// A region from construction to destruction, on the constructing thread. The outermost region is
// the boundary of recomputation; inner ones change the policy and the name.
class EBB_API Region {
 public:
  explicit Region(PolicyPtr policy = recomputeAll(), std::string name = "region");
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

 private:
  uint64_t id_;  // of this entry
};

// Gives the value that `tensor` shows a name, for rules that ask for one. If an earlier rule did
// not decide on it when it was made, the first rule with that name does now. Nothing outside of
// regions, nor to what no region computed.
EBB_API void nameValue(const at::Tensor& tensor, const std::string& name);

// Ops of this thread belong to the module of this name, from construction to destruction, for rules
// that ask for one.
class EBB_API ModuleScope {
 public:
  explicit ModuleScope(const std::string& name);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  uint32_t before_;  // the module around it
};

// Marks a write that torch does not see, to any of `tensors`, from construction to destruction: a
// raw kernel, a C library. Needed for tensors that were computed in the region or that recipes
// read; not for a result of `empty` or `zeros` that is filled before torch reads it.
class EBB_API Opaque {
 public:
  explicit Opaque(std::vector<at::Tensor> tensors);
  ~Opaque();
  Opaque(const Opaque&) = delete;
  Opaque& operator=(const Opaque&) = delete;

 private:
  std::vector<at::Tensor> tensors_;  // as given
};

}  // namespace ebb
