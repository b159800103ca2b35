// Bytes that one stream has made and another one uses.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

namespace ebb {

c10::Stream currentStream(c10::Device device);

// Memory is given back to the stream that it was allocated on. If that is another one than `user`,
// it is not used again before `user` has done what it was given until then; else nothing happens.
void noteUse(const c10::Storage& storage, c10::Stream user);
void noteUse(const c10::Storage& storage);  // by the current stream

// `made` was current when `storage` was made; the current stream may use it from now on.
void takeOver(const c10::Storage& storage, c10::Stream made);

}  // namespace ebb
