// Storages that a collective may still be writing, after it has returned.
#pragma once

#include <ATen/core/TensorBody.h>

#include "ebb/export.h"
#include "intercept/op_traits.h"

namespace ebb {

// True if a call of a collective with these arguments is synchronous (async_op=False): the program
// waits for it before it goes on.
bool isSynchronous(const OpTraits& op, const c10::IValue* arguments);

// From now on a collective may be writing to the storage of `tensor`. ebb sees only one kind of
// wait, _c10d_functional::wait_tensor, which ends this. So no store takes the bytes of such a
// storage: a copy could miss data that has not arrived. See Note [Communication].
void noteInTransit(const at::Tensor& tensor);
void hasArrived(const at::Tensor& tensor);
EBB_API bool isInTransit(const c10::Storage& storage);

}  // namespace ebb
