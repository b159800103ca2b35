// The collectives that the replays of a graph repeat.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "graph/recipe.h"
#include "graph/value.h"

namespace ebb {

struct Graph;

// Note [Repeated collectives]
// ebb keeps the results of collectives, unless a rule names the collective with force. A replay of
// a collective waits for the replays of all other ranks, so all ranks must repeat the same
// collectives in the same order. Four rules ensure that:
// 1. When a region ends, ebb lists the collectives on which the region's saved tensors depend. The
//    list follows the recipes and the policy's decisions, and not the references that the program
//    happens to hold.
// 2. The first unpack of the graph in backward repeats the whole list, in the order of the forward,
//    even if this rank still has the bytes of the tensor that backward reads. Later replays find
//    the repeated results, which stay in memory even if the forward's results are still alive. So
//    the order depends only on the order in which backward reaches the regions, which is the same
//    on all ranks that run the same program.
// 3. Before the ranks of a process group repeat a list for the first time, they compare the list
//    through the group's store (in verify mode: each time). If a rank has another list, every rank
//    raises. A rank without a list raises nothing; the others raise after the group's timeout.
//    ebb detects later differences on the CPU only, by the fingerprints of repeated results.
// 4. Nothing else repeats a collective: no replay ahead of backward, no second run after an
//    allocation has failed, and no unpack outside of backward.
class RepeatedCollectives {
 public:
  // Autograd packed `value`, which is to be recomputed.
  void needs(const c10::intrusive_ptr<Value>& value);

  // The region has ended: makes the list.
  void close(Graph& graph);

  // Adds to the list, for a backward inside the region. Returns false if the list is empty.
  bool collect(Graph& graph);

  // False if nothing is to be repeated. True while the region is open. May be called without the
  // lock.
  bool areDue() const {
    return due_.load(std::memory_order_acquire);
  }

  // True between take() and finished(): the list is being repeated, or a repetition has failed.
  bool areUnfinished() const {
    return unfinished_;
  }

  // The list, which the caller is about to repeat.
  std::vector<c10::intrusive_ptr<Recipe>> take();

  // The whole list has run.
  void finished() {
    unfinished_ = false;
    due_.store(isOpen_, std::memory_order_release);
  }

  // For the name of each process group, the list in words. Ranks of the group compare these texts.
  std::map<std::string, std::string> ofGroups() const;

 private:
  std::vector<c10::weak_intrusive_ptr<Value>> needed_;
  std::vector<c10::intrusive_ptr<Recipe>> list_;  // in the order of the forward
  bool unfinished_ = false;
  bool isOpen_ = true;
  std::atomic<bool> due_{true};
};

}  // namespace ebb
