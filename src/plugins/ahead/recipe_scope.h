// The process's state, which must not change while a recipe runs ahead, and the storages that
// replays ahead must not read.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

#include "ebb/export.h"

namespace ebb {

// Note [Nothing moves under a replay ahead]
// A replay that backward asks for runs at the time, and on the thread, at which eager would read
// the saved tensor. A replay ahead runs beside the rest of the program, which may switch oneDNN off
// and on again in a hook, or reshard a parameter. Two objects exclude each other. A replay ahead
// holds an AheadRecipeScope while it runs one recipe, and runs only if no ProcessStateChange
// exists: see Note [Changes of the process's state]. A ProcessStateChange waits for the recipe that
// is running, never for another ProcessStateChange. A replay ahead never waits for a
// ProcessStateChange: the replay ends, and backward runs the recipes.

// If holds() is true, the thread may run one recipe ahead, and a new ProcessStateChange waits for
// the destruction of this object. If not, a ProcessStateChange existed at the construction.
class EBB_API AheadRecipeScope {
 public:
  AheadRecipeScope();
  ~AheadRecipeScope();
  AheadRecipeScope(const AheadRecipeScope&) = delete;
  AheadRecipeScope& operator=(const AheadRecipeScope&) = delete;

  bool holds() const { return holds_; }

  // Called once, if holds() is true. The recipe reads these storages until the destruction of this
  // object. `closed`: the number of the recipe's graph, as in excludeFromAhead(). Returns false if
  // the recipe may not read them: see Note [Hands on a storage].
  bool mayRead(std::vector<c10::Storage> storages, uint64_t closed);

 private:
  bool holds_;
  std::vector<c10::Storage> storages_;  // see mayRead()
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
EBB_API void excludeFromAhead(const c10::Storage& storage, uint64_t until);

}  // namespace ebb
