// Tensors on the device, as the CPU's kernels and the meta kernels see them.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "memory.h"

namespace late {

struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard others{c10::DispatchKeySet(
      {c10::DispatchKey::CustomRNGKeyId, c10::DispatchKey::Python,
       c10::DispatchKey::PythonTLSSnapshot})};
};

inline at::Tensor like(at::Tensor tensor, const at::Tensor& original) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (original.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  impl->_set_conj(original.is_conj());
  impl->_set_neg(original.is_neg());
  return tensor;
}

inline bool isOurs(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

inline const void* addressOf(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : tensor.const_data_ptr();
}

// The device's memory as kernels see it. A tensor of the CPU is copied: kernels have its value of
// now.
inline at::Tensor shown(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  if (!isOurs(tensor)) {
    return like(tensor.clone(), tensor);
  }
  return like(
      at::from_blob(
          seen(addressOf(tensor)), tensor.sizes(), tensor.strides(), tensor.scalar_type()),
      tensor);
}

// Meta kernels take numbers of the CPU, and no others.
inline at::Tensor planOf(const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.unsafeGetTensorImpl()->is_wrapped_number())) {
    return tensor;
  }
  return like(
      at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()),
      tensor);
}

inline at::Tensor emptyLike(const at::Tensor& plan, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      plan.sizes(), plan.strides(), &deviceMemory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), plan.scalar_type());
}

inline void resizeStorage(const c10::Storage& storage, size_t nbytes) {
  const c10::DeviceGuard guard(storage.device());
  at::DataPtr fresh = deviceMemory.allocate(nbytes);
  if (const size_t both = std::min(nbytes, storage.nbytes()); both > 0) {
    deviceMemory.copy_data(fresh.get(), storage.data(), both);
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(nbytes);
}

inline void resizeTensor(
    const at::Tensor& tensor, c10::IntArrayRef size,
    std::optional<at::MemoryFormat> format = std::nullopt) {
  if (tensor.sizes() == size) {
    return;
  }
  const size_t needed = at::detail::computeStorageNbytesContiguous(
      size, tensor.element_size(), tensor.storage_offset());
  if (c10::multiply_integers(size) > 0 && tensor.storage().nbytes() < needed) {
    TORCH_CHECK(tensor.storage().resizable(), "Trying to resize storage that is not resizable");
    resizeStorage(tensor.storage(), needed);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) {
    tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
}

template <class F>
c10::IValue mapTensors(const c10::IValue& value, const F& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(change(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    }
    return list;
  }
  return value.isList() ? value.deepcopy() : value;  // a script may change it later
}

inline void addUse(Uses& uses, const at::Tensor& tensor, bool writes) {
  if (isOurs(tensor) && tensor.numel() > 0) {
    uses.push_back({addressOf(tensor), writes});
  }
}

// Queues a kernel that reads and writes these tensors, as far as they are of the device.
inline void launch(
    int stream, const std::string& what, std::initializer_list<at::Tensor> reads,
    c10::ArrayRef<at::Tensor> writes, Task kernel) {
  Uses uses;
  for (const at::Tensor& tensor : reads) {
    addUse(uses, tensor, false);
  }
  for (const at::Tensor& tensor : writes) {
    addUse(uses, tensor, true);
  }
  enqueue(stream, what, uses, [kernel = std::move(kernel)] {
    const Below inside;
    kernel();
  });
}

}  // namespace late
