// Memory that ebb holds and can free when an allocator runs short.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>

#include "ebb/export.h"

namespace ebb {

// Note [Memory given back]
// ebb holds memory that it does not need at once: values on their way to the host, and recomputable
// values that regions keep. An allocator that runs short asks ebb for this memory, wherever the
// allocation is made: in a region, outside of regions, in backward, in the optimizer.
// * torch's CUDA allocator calls its FreeMemoryCallbacks each time that its cache has no block for
//   an allocation, before it asks the device for more memory. It tells neither the size nor the
//   result, and has no callback after a failure. So ebb gives memory back if the memory that the
//   allocator can still get is less than the largest piece that it has taken so far, or than a
//   twentieth of the device.
// * ebb's allocator for host memory, which a budget installs, asks after a failure, and then tries
//   again.
// The allocator may hold its lock when it asks. So ebb waits for no lock that another thread could
// hold while it allocates, takes a graph's lock only if that is free, and frees nothing whose
// destruction needs the GIL. torch may call Python for each piece of memory that is freed: for
// the history of memory, and for the CUDA sanitizer. Then ebb gives nothing back to the CUDA
// allocator.

// The parts of ebb with memory to free, in the order in which ebb asks them: values on their way to
// the host, and recomputable values that regions keep.
enum class Reserve : uint8_t { Leaving, Recomputable };

// Frees memory on the device, as in Note [Memory given back]. Returns false if there is none.
using GiveBack = bool (*)(c10::Device);

// Sets the function of `reserve` for the whole process.
void setReserve(Reserve reserve, GiveBack giveBack);

// Called by an allocator that has run short: asks all reserves. Returns true if memory was freed.
// Does not throw.
EBB_API bool giveBackMemory(c10::Device device);

// Called by the allocator of the current accelerator when its cache has no block for an allocation.
// Returns true if memory was freed. Does not throw.
EBB_API bool giveBackIfNeeded();

// From now on, giveBackIfNeeded() does nothing: the program records the history of its memory, with
// Python stacks.
EBB_API void stopGivingBack();

// From now on, torch's CUDA allocator calls giveBackIfNeeded(), if the process has loaded it. torch
// does not lock its list of callbacks, so no other thread may allocate meanwhile: called when
// Python imports ebb, else with the first reserve.
EBB_API void listenToCudaAllocator();

// The allocator of `device` may take so many bytes, and raises beyond them. Forgets the pieces that
// it has taken so far, such as those for weights.
EBB_API void allowAllocator(size_t nbytes, c10::Device device);

// True if dropping the last reference to `storage` frees memory of torch's allocator on `device`
// and needs no GIL.
bool mayBeGivenBack(const c10::Storage& storage, c10::Device device);

}  // namespace ebb
