// The collectives that the replays of a graph repeat.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"
#include "graph/recipe.h"
#include "graph/value.h"
#include "hooks/slots.h"

namespace ebb {

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
//    raises. ebb numbers the regions in which a group has such collectives, in the order of the
//    forward, since the ranks run these collectives in the same order. So ranks find the same
//    region on each other by number, and not by name. A region whose list is empty has a number
//    too. See Note [Lists that change later].
//    ebb detects later differences on the CPU only, by the fingerprints of repeated results. ebb
//    compares each result of the list, whether or not this rank still has or needs its bytes.
// 4. Nothing else repeats a collective: no replay ahead of backward, and no unpack outside of
//    backward.
class RepeatedCollectives final : public Extra {
 public:
  static const SlotNumber kSlot;

  // `rules`: of the graph.
  explicit RepeatedCollectives(GraphRules& rules)
      : rules_(rules), wasOnlyInBackward_(rules.onlyInBackward) {}

  // The region records a collective of the process group `group`, which a replay may repeat.
  void records(const std::string& group);

  // Autograd packed `value`, which is to be recomputed.
  void needs(Value& value);

  // The region has ended: makes the list.
  void close(Graph& graph);

  // Adds to the list, for a backward inside the region. Returns false if the list is empty.
  bool collect(Graph& graph);

  // False if nothing is to be repeated, and other ranks need not know. True while the region is
  // open and has recorded a collective. May be called without the lock.
  bool areDue() const { return due_.load(std::memory_order_acquire); }

  // True between take() and finished(): the list is being repeated, or a repetition has failed.
  bool areUnfinished() const { return unfinished_; }

  // One collective of the list.
  struct Repeated {
    c10::intrusive_ptr<Recipe> recipe;
    // The results, which carry the fingerprints of the forward. Without these references, a result
    // would die if replays ahead have computed all values that depend on the result.
    std::vector<c10::intrusive_ptr<Value>> results;
  };

  // The list, which the caller is about to repeat.
  std::vector<Repeated> take();

  // The whole list has run.
  void finished() {
    ++part_;
    unfinished_ = false;
    setDue(isOpen_);
  }

  bool isOpen() const { return isOpen_; }

  // A list in words.
  struct InWords {
    std::string place;  // the same on all ranks of the group
    std::string list;   // empty: none of the group's collectives
  };
  // For the name of each process group. Ranks of the group compare these texts.
  std::map<std::string, InWords> inWords() const;

 private:
  // There is no replay ahead of backward while collectives are due.
  void setDue(bool due) {
    due_.store(due, std::memory_order_release);
    rules_.onlyInBackward = due || wasOnlyInBackward_;
  }
  bool tellOtherRanks(const std::string& region) const;

  // The groups' names, and the number of the region in each.
  std::vector<std::pair<std::string, uint64_t>> groups_;
  std::vector<c10::weak_intrusive_ptr<Value>> needed_;
  std::vector<Repeated> list_;  // in the order of the forward
  bool unfinished_ = false;
  bool isOpen_ = true;
  uint32_t part_ = 0;  // the lists before, which a backward inside the region has repeated
  std::atomic<bool> due_{false};
  GraphRules& rules_;
  const bool wasOnlyInBackward_;  // what another plug-in wanted
};

}  // namespace ebb
