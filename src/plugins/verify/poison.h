// Verify mode: overwrites the bytes of storages before they are freed.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

namespace ebb {

struct Value;

// Note [Poison]
// A custom function may store a raw pointer into memory that eager's autograd would have kept. The
// pointer may outlive memory that ebb frees early, and the contents may look right for a while. In
// verify mode the deleter of such a storage therefore does three steps: give the value in the
// storage a copy of the bytes, fill the memory with NaN (floating-point) or 0xA5 (all other types),
// and free the memory. Only memory of the plain CPU allocator is wrapped in this way: other
// allocators recognise memory by the deleter.

// From now on `storage` is poisoned when it is freed. Before that, `owner` (may be null) gets a
// copy of the bytes. Returns false if the storage cannot be wrapped.
bool poisonWhenFreed(
    const c10::Storage& storage, c10::ScalarType dtype, const c10::intrusive_ptr<Value>& owner);

// Call this when the owner's bytes are no longer in `storage`: the deleter then makes no copy.
void forgetOwner(const c10::Storage& storage);

}  // namespace ebb
