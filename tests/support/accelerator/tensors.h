// Tensors on the device, as the CPU's kernels and the meta kernels see them.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

#include "memory.h"

namespace late {

struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard others{c10::DispatchKeySet(
      {c10::DispatchKey::CustomRNGKeyId,
       c10::DispatchKey::Python,
       c10::DispatchKey::PythonTLSSnapshot})};
};

inline at::Tensor asNumber(at::Tensor tensor, const at::Tensor& original) {
  if (original.unsafeGetTensorImpl()->is_wrapped_number()) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

// The device's memory as kernels see it.
inline at::Tensor shown(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  return asNumber(
      at::from_blob(
          tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), tensor.scalar_type()),
      tensor);
}

inline at::Tensor planOf(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  return asNumber(
      at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()),
      tensor);
}

inline at::Tensor emptyLike(const at::Tensor& plan) {
  return at::detail::empty_strided_generic(
      plan.sizes(),
      plan.strides(),
      &deviceMemory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      plan.scalar_type());
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
  return value;
}

}  // namespace late
