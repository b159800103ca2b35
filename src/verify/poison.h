// Verify mode: overwrites the bytes of storages before they are freed.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

namespace ebb {

struct Value;

// Note [Poison]
// A custom function may store a raw pointer into memory that eager's autograd would have kept. Such
// a pointer may outlive memory that ebb frees, and the contents may look right for a while. In
// verify mode the deleter of such a storage therefore does three steps. First it gives the value
// that lives in the storage a copy of the bytes. Then it fills the memory with NaN (floating-point)
// or 0xA5 (all other types). Finally it frees the memory. Only memory of the plain CPU allocator is
// wrapped like this: other allocators recognise their memory by the deleter.

// From now on `storage` is poisoned when it is freed. `owner`, if not null, is told before. Returns
// false if the storage cannot be wrapped.
bool poisonWhenFreed(
    const c10::Storage& storage, c10::ScalarType dtype, const c10::intrusive_ptr<Value>& owner);

// The value that owns `storage` is no longer in it, and is not told of its end.
void forgetOwner(const c10::Storage& storage);

}  // namespace ebb
