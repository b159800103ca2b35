// Iteration over the tensors among an op's arguments or results.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>

#include "intercept/op_traits.h"

namespace ebb {

// Calls f(tensor, index, element) for every tensor of the values, including undefined tensors in
// lists. `element` is the index in a list, or through all lists of a list; -1: not in a list.
template <class Types, class F>
void forEachTensor(const c10::IValue* values, const Types& types, F&& f) {
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == ArgType::Tensor) {
      if (values[i].isTensor()) {
        f(values[i].toTensor(), i, -1);
      }
    } else if (types[i] == ArgType::TensorList && values[i].isList()) {
      const auto list = values[i].toListRef();
      for (size_t e = 0; e < list.size(); ++e) {
        static const at::Tensor undefined;
        f(list[e].isTensor() ? list[e].toTensor() : undefined, i, static_cast<int32_t>(e));
      }
    } else if (types[i] == ArgType::TensorLists && values[i].isList()) {
      int32_t element = 0;
      for (const c10::IValue& list : values[i].toListRef()) {
        for (const c10::IValue& tensor : list.toListRef()) {
          f(tensor.toTensor(), i, element++);
        }
      }
    }
  }
}

// Calls f(tensor) for every tensor that a call with these arguments may write.
template <class F>
void forEachWritten(const ArgumentTraits& traits, const c10::IValue* arguments, F&& f) {
  forEachTensor(arguments, traits.types, [&](const at::Tensor& tensor, size_t i, int32_t) {
    if (tensor.defined() && isWritten(traits.uses[i])) {
      f(tensor);
    }
  });
}

}  // namespace ebb
