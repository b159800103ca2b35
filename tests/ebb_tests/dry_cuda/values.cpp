// The module that gives the dry CUDA runtime results. A device pointer is a host address there. So
// each CUDA kernel of torch that has a counterpart for the CPU is replaced by a function that runs
// the counterpart on the same memory. torch's CUDA allocator provides the results' memory, and
// results have the CPU's bits.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAFunctions.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;

bool isOnDevice(const Tensor& t) { return t.defined() && t.is_cuda(); }

void copyFlags(const Tensor& from, const Tensor& to) {
  c10::TensorImpl* impl = to.unsafeGetTensorImpl();
  if (from.is_conj()) {
    impl->_set_conj(true);
  }
  if (from.is_neg()) {
    impl->_set_neg(true);
  }
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
}

// A tensor of the CPU that shows the memory of `t`; `t` itself if it is not on a device.
Tensor onHost(const Tensor& t) {
  if (!isOnDevice(t)) {
    return t;
  }
  const c10::Storage storage = t.storage();
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  const Tensor bytes = at::from_blob(
      storage.mutable_data(), {nbytes}, [storage](void*) {}, at::TensorOptions().dtype(at::kByte));
  Tensor result = at::empty({0}, t.options().device(at::kCPU));
  c10::TensorImpl* impl = result.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(bytes.storage());
  impl->set_sizes_and_strides(t.sizes(), t.strides());
  impl->set_storage_offset(t.storage_offset());
  copyFlags(t, result);
  return result;
}

// A copy on the device of a tensor of the CPU, with the same strides.
Tensor onDevice(const Tensor& t, c10::Device device) {
  if (!t.defined() || !t.device().is_cpu()) {
    return t;
  }
  Tensor result = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
  if (t.storage().nbytes() != 0 && t.numel() != 0) {
    int64_t last = 0;  // the index of the last element, in the order of memory
    for (int64_t i = 0; i < t.dim(); ++i) {
      last += (t.size(i) - 1) * t.stride(i);
    }
    std::memcpy(result.mutable_data_ptr(), t.const_data_ptr(), (last + 1) * t.itemsize());
  }
  copyFlags(t, result);
  return result;
}

using Change = std::function<Tensor(const Tensor&)>;

// Replaces all tensors in an argument or result.
IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    std::vector<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) {
      list.push_back(change(t));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList()) {
      list.push_back(t ? std::optional(change(*t)) : std::nullopt);
    }
    return list;
  }
  return value;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        count_(schema_.arguments().size()),
        begin_(stack.size() - count_) {}

  void run() {
    const at::AutoDispatchBelowADInplaceOrView below;
    given_.assign(stack_.begin() + begin_, stack_.end());
    findDevice();
    for (size_t i = 0; i < count_; ++i) {
      stack_[begin_ + i] = forHost(i);
    }
    hosts_.assign(stack_.begin() + begin_, stack_.end());
    op_.callBoxed(&stack_);
    const size_t results = schema_.returns().size();
    for (size_t r = stack_.size() - results; r < stack_.size(); ++r) {
      stack_[r] = forDevice(stack_[r]);
    }
  }

 private:
  void findDevice() {
    for (const IValue& value : given_) {
      changed(value, [&](const Tensor& t) {
        if (isOnDevice(t)) {
          device_ = t.device();
        }
        return t;
      });
    }
  }

  IValue forHost(size_t i) const {
    const IValue& value = given_[i];
    if (value.isDevice()) {
      return c10::Device(at::kCPU);
    }
    if (value.isGenerator()) {
      return IValue();
    }
    const c10::AliasInfo* alias = schema_.arguments()[i].alias_info();
    if (value.isTensor() && alias != nullptr && alias->isWrite() && isOnDevice(value.toTensor()) &&
        value.toTensor().numel() == 0) {
      // An output that the kernel may resize.
      const Tensor& t = value.toTensor();
      return at::empty(t.sizes(), t.options().device(at::kCPU));
    }
    return changed(value, onHost);
  }

  IValue forDevice(const IValue& value) const {
    if (value.isTensor()) {
      for (size_t i = 0; i < count_; ++i) {
        if (given_[i].isTensor() && hosts_[i].isTensor() &&
            hosts_[i].toTensor().is_same(value.toTensor())) {
          return written(given_[i].toTensor(), value.toTensor());
        }
      }
    }
    return changed(value, [&](const Tensor& t) { return onDevice(t, device_); });
  }

  // An argument that the kernel wrote, and perhaps resized.
  static Tensor written(const Tensor& argument, const Tensor& result) {
    if (isOnDevice(argument) &&
        (argument.sizes() != result.sizes() || argument.strides() != result.strides())) {
      const Tensor fresh = onDevice(result, argument.device());
      c10::TensorImpl* impl = argument.unsafeGetTensorImpl();
      impl->set_sizes_and_strides(result.sizes(), result.strides());
      if (result.numel() != 0) {
        impl->set_storage_keep_dtype(fresh.storage());
        impl->set_storage_offset(0);
      }
    }
    return argument;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const size_t count_, begin_;
  std::vector<IValue> given_, hosts_;  // the arguments on the device, and for the CPU's kernel
  c10::Device device_{at::kCUDA, c10::cuda::current_device()};
};

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call(op, *stack).run();
}

bool isReplaceable(const c10::OperatorName& name, const c10::OperatorHandle& op) {
  // copy_ handles all devices in one kernel.
  return name.name == "aten::copy_" || (op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
                                        op.hasKernelForDispatchKey(c10::DispatchKey::CPU));
}

// Returns the number of replaced kernels.
int install(const std::unordered_set<std::string>& except) {
  static auto* registered = new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || except.count(name.name.substr(6)) != 0 ||
        !isReplaceable(name, *op)) {
      continue;
    }
    registered->push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&run>(),
        std::nullopt, nullptr, "dry CUDA"));
  }
  return static_cast<int>(registered->size());
}

}  // namespace

PYBIND11_MODULE(dry_cuda_values, m) { m.def("install", &install); }
