// Functions that check what src/torch_seams assumes of torch.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "module.h"
#include "torch_seams/generated_nodes.h"
#include "torch_seams/key.h"
#include "torch_seams/owners.h"
#include "torch_seams/storage_memory.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

// True for each key whose kernels run after ebb's.
std::vector<bool> runAfterInterception(const std::vector<std::string>& keys) {
  const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER, kInterceptionKey);
  std::vector<bool> found;
  for (const std::string& key : keys) {
    found.push_back(after.has(c10::parseDispatchKey(key)));
  }
  return found;
}

// Counts the owners of a tensor in six situations: one C++ owner, two, a Python object that is in
// use, the same object unused, and no or one weak reference. True where the count is right.
std::vector<bool> countsOfOwners() {
  at::Tensor tensor = at::empty({2});
  std::vector<bool> right{hasNoOtherOwner(tensor, 1)};
  {
    const at::Tensor second = tensor;
    right.push_back(!hasNoOtherOwner(tensor, 1) && hasNoOtherOwner(tensor, 2));
  }
  {
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    right.push_back(!hasNoOtherOwner(tensor, 1));
  }
  right.push_back(hasNoOtherOwner(tensor, 1));
  const c10::Storage storage = tensor.storage();
  right.push_back(weakReferences(storage) == 1);
  const auto weak = storage.getWeakStorageImpl();
  right.push_back(weakReferences(storage) == 2);
  return right;
}

// The message of a read without memory, and what is read after `tensor` has got memory again.
std::pair<std::string, at::Tensor> emptiedAndFilled(const at::Tensor& tensor) {
  const c10::Storage storage = tensor.storage();
  const size_t nbytes = storage.nbytes();
  takeMemory(storage, "nothing is here");
  std::string message;
  try {
    tensor.const_data_ptr();
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  }
  const at::Tensor ones = at::ones_like(tensor.detach().new_empty(tensor.sizes()));
  allowAccess(storage);
  auto* owner = new c10::Storage(ones.storage());
  giveMemory(
      storage,
      c10::DataPtr(
          owner->mutable_data(), owner,
          [](void* context) { delete static_cast<c10::Storage*>(context); }, storage.device()),
      nbytes);
  return {message, tensor.clone()};
}

void bindSeams(py::module_& module) {
  module.def("run_after_interception", &runAfterInterception);
  module.def("counts_of_owners", &countsOfOwners);
  module.def("emptied_and_filled", &emptiedAndFilled);
  module.def(
      "is_generated", [](const at::Tensor& tensor) { return isGenerated(*tensor.grad_fn()); });
}

[[maybe_unused]] const bool isSeamsBound = bindTests(&bindSeams);

}  // namespace

}  // namespace ebb::bindings
