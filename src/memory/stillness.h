// What the whole process shares, and replays ahead of backward rely on while they run.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

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

// Note [Hands on a storage]
// Whoever resizes a storage by hand shards parameters: at times it is empty or about to be filled,
// which nothing shows, so it is not read ahead any more. Whoever takes an alias with a version of
// its own (`p.data`, `p.numpy()`, a pointer) while graphs wait for their backward may write through
// that and put back what was there, which nothing shows either; so those graphs do not read it
// ahead, and who takes the alias waits for the recipe that is reading: its kernel, on the CPU, and
// the launch of that on a device. An alias that was taken before is not noticed.
constexpr uint64_t kForEver = UINT64_MAX;

// `storage` is not to be read ahead for graphs that were closed as number `until` or before. Waits
// while a recipe reads it.
EBB_API void noteHandOn(const c10::Storage& storage, uint64_t until);

// How many weak references there are to `storage` but for those that are kept for that. All strong
// ones count as one.
EBB_API size_t weakReferencesTo(const c10::Storage& storage);

// What a recipe reads, while it runs ahead. Of a graph that was closed as number `closed`.
class EBB_API ReadAhead {
 public:
  ReadAhead(std::vector<c10::Storage> storages, uint64_t closed);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Whether nobody has a hand on one of them.
  bool isAllowed() const {
    return allowed_;
  }

 private:
  std::vector<c10::Storage> storages_;
  bool allowed_;
};

}  // namespace ebb
