// Bytes made on one stream and used on another.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

namespace ebb {

c10::Stream currentStream(c10::Device device);

// Tells the allocator that `user` uses the storage. Without this call, freed memory returns at once
// to the stream of its allocation. With this call, the memory is not reused before `user` has done
// the work given by then. No effect if `user` is that stream.
void noteUse(const c10::Storage& storage, c10::Stream user);
void noteUse(const c10::Storage& storage);  // by the current stream

// Lets the current stream use `storage`, which was made on the stream `made`.
void takeOver(const c10::Storage& storage, c10::Stream made);

}  // namespace ebb
