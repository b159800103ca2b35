// Streams: the current stream, the order between streams, and the memory that a stream uses.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "ebb/export.h"

namespace ebb {

// The stream on which this thread's ops on `device` run.
EBB_API c10::Stream currentStream(c10::Device device);

// A stream from torch's pool, so other code may use the same stream. A stream of high priority is
// rarely shared, because few programs take one.
c10::Stream streamFromPool(c10::Device device, bool isHighPriority);

// Work given to `later` from now on runs after all work given to `earlier` so far. The host does
// not wait.
void orderAfter(c10::Stream later, c10::Stream earlier);

// Tells the allocator that `user` uses the storage. Without this call, freed memory returns at once
// to the stream of its allocation. With this call, the memory is not reused before `user` has done
// all work given to `user` before the memory was freed. No effect if `user` is the stream of the
// allocation.
EBB_API void noteUse(const c10::Storage& storage, c10::Stream user);

// Like noteUse() above, by the current stream.
void noteUse(const c10::Storage& storage);

// Lets the current stream use `storage`, which was made on the stream `maker`.
void useOnCurrent(const c10::Storage& storage, c10::Stream maker);

}  // namespace ebb
