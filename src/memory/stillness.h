// What the whole process shares, and replays ahead of backward rely on while they run.
#pragma once

#include <c10/core/Storage.h>

#include "ebb/export.h"
#include "support/python_support.h"

namespace ebb {

// Note [Nothing moves under a replay ahead]
// A replay that backward asks for runs where eager would read what it saved, on the thread that
// would. One that runs ahead has the rest of the program beside it: a hook that switches oneDNN off
// for a moment and on again, a parameter that is resharded. So there are two sides. A replay ahead
// runs one recipe at a time, under a Stillness, and none where somebody has a Commotion: the
// setters of torch's settings, a replay under other settings than the process has, whoever resizes
// a storage. These wait for the recipe that is running, never for each other. A replay ahead never
// waits for them: it gives way, and backward does the work.

// Nothing of that kind happens while one exists that holds.
class EBB_API Stillness {
 public:
  Stillness();
  ~Stillness();
  Stillness(const Stillness&) = delete;
  Stillness& operator=(const Stillness&) = delete;

  bool holds() const {
    return holds_;
  }

 private:
  bool holds_;
};

// No replay ahead runs while one exists. Its making waits, without the GIL.
class EBB_API Commotion {
 public:
  Commotion();
  ~Commotion();
  Commotion(const Commotion&) = delete;
  Commotion& operator=(const Commotion&) = delete;
};

// The same, for what begins and ends in different places.
EBB_API void beginCommotion();
EBB_API void endCommotion();

// Somebody changes the size of `storage` by hand, as those do who shard parameters: at times it is
// empty or about to be filled, which nothing shows. Not to be read ahead from now on.
EBB_API void noteResizedByHand(const c10::Storage& storage);
bool isResizedByHand(const c10::Storage& storage);

}  // namespace ebb
