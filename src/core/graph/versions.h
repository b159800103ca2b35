// The version counters of the tensors that write to a storage. See Note [Version stamps].
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <cstring>
#include <forward_list>

#include "memory/arena.h"

namespace ebb {

// The address of the counter object, which VariableVersion does not expose; null for a disabled
// counter.
inline const void* identityOf(const c10::VariableVersion& counter) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));  // the counter is one intrusive_ptr
  const void* identity = nullptr;
  std::memcpy(&identity, static_cast<const void*>(&counter), sizeof(void*));
  return identity;
}

inline bool sameCounter(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  return identityOf(a) == identityOf(b);
}

// A version counter and its version at one time. See Note [Version stamps].
struct VersionStamp {
  c10::VariableVersion counter;  // outlives the tensor; disabled for an inference tensor
  uint32_t version = 0;

  // True if the counter still has this version.
  bool holds() const { return !counter.enabled() || counter.current_version() == version; }
};

// The version counters of all tensors known to share a value's storage, each with its version in
// the value's state. The methods call these tensors writers.
class Versions {
 public:
  // Records `tensor` as the last writer, at its current version.
  void stamp(const at::Tensor& tensor);

  // Version of the last writer of the storage.
  const VersionStamp& written() const { return written_; }
  // False for an inference tensor: a write to it goes unnoticed.
  bool areCounted() const { return written_.counter.enabled(); }
  bool isWriters(const c10::VariableVersion& counter) const {
    return sameCounter(counter, written_.counter);
  }

  // True if every writer's counter still has its recorded version.
  bool areUnmoved() const { return written_.holds() && (others_.empty() || othersHold()); }

  // True if `seen` is the counter of a known writer of the storage.
  bool know(const c10::VariableVersion& seen) const;

  // Adds the writer `seen`, at its current version.
  void learn(const c10::VariableVersion& seen);
  // Adds the writer `seen`, whose version in this state is `at`.
  void learn(const c10::VariableVersion& seen, uint32_t at);

  // Adds the writers that `before` knows.
  void inherit(const Versions& before);

  // If the version of `seen` is one higher than the version stored here, stores the higher one:
  // this increment does not count as a write to the value.
  void allowOne(const c10::VariableVersion& seen);

  // Learns `seen`; allows one increment if it is known.
  void accept(const c10::VariableVersion& seen) { know(seen) ? allowOne(seen) : learn(seen); }

  // Accepts one increment of the last writer's version. More increments mean that other code wrote.
  void countWrite() { ++written_.version; }

  // Releases a counter that has not moved, and that nothing else refers to, so it cannot move.
  void releaseOwn() {
    if (others_.empty() && written_.counter.unique() && written_.holds()) {
      written_.counter = c10::VariableVersion();
    }
  }

  void forgetOthers() { others_.clear(); }
  // True if tensors with several counters share the storage.
  bool haveOthers() const { return !others_.empty(); }

  // Calls `act` with each stamp.
  template <class Act>
  void forEach(const Act& act) const {
    act(written_);
    for (const VersionStamp& stamp : others_) {
      act(stamp);
    }
  }

 private:
  bool othersHold() const;

  // Counters of other writers of this storage: aliases with their own counters, such as the results
  // of unsafe_chunk. Empty for nearly every value.
  std::forward_list<VersionStamp, ArenaAllocator<VersionStamp>> others_;
  [[no_unique_address]] VersionStamp written_;
};

}  // namespace ebb
