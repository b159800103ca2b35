// State shared by the whole process, which must not change while a replay ahead runs.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

#include "ebb/export.h"
#include "support/python_support.h"

namespace ebb {

// Note [Nothing moves under a replay ahead]
// A replay that backward asks for runs at the time, and on the thread, at which eager would read
// the saved tensor. A replay ahead runs beside the rest of the program, which may switch oneDNN off
// and on again in a hook, or reshard a parameter. Two objects exclude each other. A replay ahead
// holds a Stillness while it runs one recipe, and runs only if no Commotion exists. Three kinds of
// code hold a Commotion: the setters of torch's settings, a replay under settings other than the
// process's, and code that resizes a storage. A Commotion waits for the recipe that is running,
// never for another Commotion. A replay ahead never waits for a Commotion: the replay ends, and
// backward runs the recipes.

// If holds() is true, the thread may run one recipe ahead, and a new Commotion waits for the
// destruction of this object. If not, a Commotion existed at the construction.
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

// Between the two calls no replay ahead runs. The first call waits for the recipes that run ahead,
// without the GIL.
EBB_API void beginCommotion();
EBB_API void endCommotion();

// A commotion for as long as the object lives.
struct Commotion {
  Commotion() {
    beginCommotion();
  }
  ~Commotion() {
    endCommotion();
  }
  Commotion(const Commotion&) = delete;
  Commotion& operator=(const Commotion&) = delete;
};

// Note [Hands on a storage]
// The program *has a hand on a storage* if it may change the storage without ebb's knowledge.
// Replays ahead do not read such a storage. There are two cases:
// 1. The program has resized the storage, as code that shards parameters does. Such a storage may
//    be empty, or its data may not have arrived yet, and ebb cannot tell. No replay ahead reads the
//    storage any more.
// 2. While graphs wait for their backward, the program has taken an alias with its own version
//    (`p.data`, `p.numpy()`, a pointer). The program may write through the alias and later restore
//    the contents, and ebb cannot tell. Recipes of those graphs do not read the storage ahead.
//    If a replay ahead is reading the storage when the program takes the alias, the program first
//    waits until that recipe has run on the CPU, or has been launched on a device. ebb does not
//    notice an alias that was taken before the recording of those graphs ended.
constexpr uint64_t kForEver = UINT64_MAX;

// Graphs are numbered in the order in which their recording ends. From now on, recipes of graphs
// with a number up to `until` do not read `storage` in a replay ahead. Waits while a recipe that
// runs ahead reads `storage`.
EBB_API void noteHandOn(const c10::Storage& storage, uint64_t until);

// The number of weak references to `storage`, without the one that ebb holds for noteHandOn(). All
// strong references count as one.
EBB_API size_t weakReferencesTo(const c10::Storage& storage);

// The storages that a recipe reads while it runs ahead. `closed`: the number of the recipe's graph,
// as in noteHandOn().
class EBB_API ReadAhead {
 public:
  ReadAhead(std::vector<c10::Storage> storages, uint64_t closed);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // True if the recipe may read the storages: see Note [Hands on a storage].
  bool isAllowed() const {
    return allowed_;
  }

 private:
  std::vector<c10::Storage> storages_;
  bool allowed_;
};

}  // namespace ebb
