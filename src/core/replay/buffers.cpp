#include "replay/buffers.h"

#include <algorithm>
#include <utility>

#include "memory/bytes.h"

namespace ebb {

const c10::Storage* Buffers::find(const Input& input) const {
  const auto found = std::find_if(all_.begin(), all_.end(), [&](const Buffer& buffer) {
    return buffer.value == input.value.get();
  });
  return found == all_.end() ? nullptr : &found->storage;
}

c10::Storage Buffers::of(const Input& input) {
  if (const c10::Storage* known = find(input)) {
    return *known;
  }
  size_t ours = 0;
  bool contentsMatter = false;
  for (const Input& other : recipe_.inputs()) {
    if (other.value.pointer() == input.value.pointer()) {
      ++ours;
      contentsMatter |= !other.wholeOverwrite;
    }
  }
  Value& value = *input.value;
  c10::Storage storage;
  if (!contentsMatter) {
    storage = allocate(value.home().nbytes(), input.flags.device);
  } else if (mayBeTaken(value) && nothingNeeds(input, ours)) {
    storage = value.release();
  } else {
    storage = value.available();
    graph_.streams.use(value, storage);
    storage = copyOf(storage);
  }
  all_.push_back({&value, storage});
  return storage;
}

// True if no other code can be using the bytes, on any stream, and a failed replay need not restore
// the bytes.
bool Buffers::mayBeTaken(const Value& value) const {
  return value.home().isPrivate() && !graph_.streams.areSeveral() && mayTake_;
}

// True if only this replay needs the bytes of `input`. `ours`: how many inputs of the recipe refer
// to the value. See Note [Made each time], 3.
bool Buffers::nothingNeeds(const Input& input, size_t ours) const {
  return transient_.isLastToRead(recipe_, *input.value) ||
         (input.value.pointer().use_count() == ours && runsForTheLastTime());
}

// True if every output that is still referenced takes its bytes from this replay and stays
// resident, so the recipe need not run again.
bool Buffers::runsForTheLastTime() const {
  return std::all_of(recipe_.outputs.begin(), recipe_.outputs.end(), [&](const Output& output) {
    const auto value = output.value.lock();
    return !value || !(value->available() || transient_.staysUnmade(*value));
  });
}

}  // namespace ebb
