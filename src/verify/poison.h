// Verify mode: storages whose bytes are overwritten before they are freed.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

namespace ebb {

struct Value;

// Note [Poison]
// A raw pointer into memory that eager's autograd would have kept (a pointer that a custom function
// stored) may outlive what ebb drops, and what it points to may look right for a while. In verify
// mode the deleter of such a storage first gives the value that lives in it a copy of its bytes,
// then fills it with NaN (floating-point) or 0xA5 (everything else), and then frees it. Only memory
// of the plain CPU allocator is wrapped like that: others recognise theirs by the deleter.

// From now on `storage` is poisoned when it is freed, and `owner`, if not null, is told before.
// False if this storage cannot be wrapped.
bool poisonWhenFreed(
    const c10::Storage& storage, c10::ScalarType dtype, const c10::intrusive_ptr<Value>& owner);

// The value that was to be told of the end of `storage` is not in it any more.
void forgetOwner(const c10::Storage& storage);

}  // namespace ebb
