#include "plugins/ahead/lookahead.h"

#include <algorithm>
#include <utility>

#include "allocator/shortage.h"
#include "graph/graph.h"

namespace ebb {

constinit AheadBudget aheadBudget;
constinit AheadCounts aheadCounts;

bool AheadBudget::take(size_t nbytes) {
  const size_t now = taken += nbytes;
  if (now > limit) {
    taken -= nbytes;
    return false;
  }
  size_t before = most;
  while (before < now && !most.compare_exchange_weak(before, now)) {
  }
  return true;
}

const SlotNumber Lookahead::kSlot = takeSlot();

Lookahead::Lookahead(uint64_t number, const Observers& observers, bool hasRoom)
    : number(number), observers(observers), hasRoom(hasRoom) {}

Lookahead::~Lookahead() {
  const AheadState last = state.load();
  if (last != AheadState::Recorded && last < AheadState::Reached) {
    became(AheadFate::InVain);
  }
  giveBack(taken);
}

void Lookahead::became(AheadFate fate) const {
  ++aheadCounts.graphs[static_cast<size_t>(fate)];
  observers.tell(&BackwardEvents::counted, kAheadFates[static_cast<size_t>(fate)]);
}

bool Lookahead::take(size_t nbytes) {
  const bool taken = aheadBudget.take(nbytes);
  this->taken += taken ? nbytes : 0;
  return taken;
}

void Lookahead::giveBack(size_t nbytes) {
  aheadBudget.taken -= nbytes;
  taken -= nbytes;
}

void Lookahead::wants(Value& value, const c10::Storage& storage) {
  if (wanted.empty()) {
    device = storage.device();
  }
  const bool isHeld =
      hasRoom || (!value.decision().isMadeEachTime() && take(value.home().nbytes()));
  value.uses().pin(isHeld);
  if (isHeld) {
    holds.store(true);
  }
  wanted.push_back(
      {c10::weak_intrusive_ptr<Value>::reclaim_copy(&value), isHeld ? storage : c10::Storage(),
       value.home().nbytes()});
}

void Lookahead::dropHeld() {
  if (!holds.exchange(false)) {
    return;
  }
  for (Wanted& each : wanted) {
    if (!each.held) {
      continue;
    }
    if (const auto value = each.value.lock()) {
      value->uses().pin(false);
    }
    if (!hasRoom) {
      giveBack(each.nbytes);
    }
    each.held = c10::Storage();
  }
}

// Takes no reference to a value: it could be the last one, whose end would free more.
size_t Lookahead::giveBackOn(c10::Device device, std::vector<c10::Storage>& freed) {
  size_t given = 0;
  for (Wanted& each : wanted) {
    if (!mayBeGivenBack(each.held, device)) {
      continue;
    }
    each.value._unsafe_get_target()->uses().pin(false);
    if (!hasRoom) {
      giveBack(each.nbytes);
    }
    given += each.held.use_count() == 1 ? each.nbytes : 0;
    freed.push_back(std::exchange(each.held, c10::Storage()));
  }
  holds.store(keptBytes() != 0);
  return given;
}

size_t Lookahead::keptBytes() const {
  size_t nbytes = 0;
  for (const Wanted& each : wanted) {
    nbytes += each.held ? each.nbytes : 0;
  }
  return nbytes;
}

namespace {

std::atomic<uint64_t> allClosings{0};

// True if only the caller holds `storage`, and it still has the value's bytes. False for a kept
// value: the value holds the storage too.
bool isAlone(const Value& value, const c10::Storage& storage) {
  return value.recipe() && !value.redefined() && !value.home().isOverwritten() &&
         value.versions().areCounted() && value.versions().areUnmoved() &&
         storage.nbytes() == value.home().nbytes() && storage.data() == value.home().address() &&
         storage.use_count() == 1;
}

}  // namespace

void Lookahead::close() {
  closed = ++allClosings;
  for (Wanted& each : wanted) {
    const auto value = each.held ? each.value.lock() : nullptr;
    each.wasShared = value && !isAlone(*value, each.held);
  }
}

uint64_t Lookahead::closings() { return allClosings.load(); }

void OnArrival::hasRead(const Value& leaf, const std::string& op) {
  leaf.versions().forEach([&](const VersionStamp& stamp) { leavesRead.push_back({stamp, &op}); });
}

const std::string* OnArrival::readerOfWritten() const {
  const auto written = std::find_if(leavesRead.begin(), leavesRead.end(), [](const ReadLeaf& read) {
    return !read.stamp.holds();
  });
  return written == leavesRead.end() ? nullptr : written->op;
}

void Lookahead::reads(const WeakGraph& other) {
  if (std::find(earlier.read.begin(), earlier.read.end(), other) == earlier.read.end()) {
    earlier.read.push_back(other);
  }
}

void Lookahead::reached() {
  for (Wanted& each : std::exchange(wanted, {})) {
    const auto value = each.value.lock();
    if (!value) {
      continue;
    }
    value->uses().pin(false);
    if (each.held && isAlone(*value, each.held)) {
      if (each.wasShared && value->uses().readers() > 0) {
        value->showInstead(each.held);
      } else {
        value->restore(std::move(each.held), true);
      }
    }
  }
  holds.store(false);
  giveBack(taken);
}

}  // namespace ebb
