// Operators with a kernel of their own: those that make tensors, show them another way, and copy.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>

#include <optional>

#include "memory.h"
#include "streams.h"
#include "tensors.h"

namespace late {

inline at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      size,
      &deviceMemory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}

inline at::Tensor emptyStrided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size,
      stride,
      &deviceMemory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

inline at::Tensor asStrided(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

inline at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

inline at::Tensor reshapeAlias(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

inline const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

inline at::Tensor copyFrom(const at::Tensor& from, const at::Tensor& to, bool nonBlocking) {
  const Below below;
  const bool late = nonBlocking && (from.is_cpu() ? isPinned(from.storage().data())
                                                  : isPinned(to.storage().data()));
  const auto show = [](const at::Tensor& tensor) {
    return at::from_blob(
        tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), tensor.scalar_type());
  };
  const at::Tensor source = from.is_cpu() && !late ? from.clone() : show(from);
  enqueue(currentStream, [source, target = show(to)] {
    const Below inside;
    target.copy_(source);
  });
  if (to.is_cpu() && !late) {
    finish(currentStream);
  }
  return to;
}

inline at::Tensor copyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copyFrom(from, to, false);
}

inline at::Scalar item(const at::Tensor& self) {
  const Below below;
  finish(currentStream);
  return shown(self).item();
}

inline at::Tensor& setStorage(
    at::Tensor& self,
    at::Storage storage,
    int64_t offset,
    c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  return at::cpu::set_(self, storage, offset, size, stride);
}

// A device kernel for an operator that decomposes elsewhere, with bits of its own.
inline at::Tensor mishBackward(const at::Tensor& gradient, const at::Tensor& self) {
  const at::Tensor result = emptyLike(self);
  enqueue(currentStream, [g = shown(gradient), x = shown(self), y = shown(result)] {
    const Below inside;
    y.copy_(g.mul(x).mul(3));
  });
  return result;
}

}  // namespace late
