#include "graph/value.h"

#include <ATen/core/TensorBody.h>

#include "graph/geometry.h"
#include "graph/recipe.h"
#include "hooks/store.h"

namespace ebb {

RareParts::RareParts() = default;
RareParts::~RareParts() = default;

const RareParts ValueData::kNone;

static_assert(alignof(Value) <= kArenaAlignment && alignof(RareParts) <= kArenaAlignment);
ValueData::ValueData() = default;
ValueData::~ValueData() = default;

c10::Storage ValueData::available() const {
  const c10::Storage& bytes = home_.bytes();
  if (bytes && (home_.isPrivate() || (versions_.areUnmoved() && !home_.isOverwritten() &&
                                      bytes.nbytes() == home_.nbytes()))) {
    return bytes;
  }
  return !versions_.areUnmoved() || (facts_.compared && recipe_) ? c10::Storage() : home_.living();
}

bool ValueData::ownsItsBytes() const {
  const size_t handles = uses_.relyOnBytes() ? 0 : uses_.handles();
  return home_.bytes() && home_.bytes().nbytes() == home_.nbytes() &&
         home_.bytes().use_count() <= 1 + handles;
}

void ValueData::release_resources() {
  recipe_.reset();
  home_.take();
  home_.forgetStorage();
  versions_ = Versions();
  rare_.reset();
}

Value::Value(
    const at::Tensor& tensor, StateFacts facts, ValueDecision decision, const Versions* before) {
  home_.stamp(storageOf(tensor));
  versions_.stamp(tensor);
  if (before != nullptr) {
    versions_.inherit(*before);
  }
  decision_ = decision;
  facts_ = facts;
}

RareParts& Value::allocateRare() {
  if (!rare_) {
    rare_ = std::make_unique<RareParts>();
  }
  return *rare_;
}

void Value::recomputeFrom(c10::intrusive_ptr<Recipe> recipe) {
  TORCH_INTERNAL_ASSERT(state() == ValueState::Empty);
  recipe_ = std::move(recipe);
}

void Value::dropRecipe(bool onlyOurs) {
  if (onlyOurs) {
    home_.own();
  }
  if (!decision_.isDue()) {
    recipe_.reset();
  }
}

void Value::keep(const c10::Storage& storage, bool due, bool handlesRely) {
  TORCH_INTERNAL_ASSERT(!stash());
  decision_ = decision_.withDue(due);
  home_.setBytes(storage, false);
  uses_.letRelyOnBytes(handlesRely);
  if (!decision_.isSaved()) {
    recipe_.reset();
  }
}

void Value::holdAlone(c10::Storage copy, bool changed) {
  TORCH_INTERNAL_ASSERT(state() != ValueState::Empty && !stash());
  home_.setBytes(std::move(copy), true);
  facts_.changedBeforeCopy |= changed;
}

void Value::restore(c10::Storage made, bool onlyOurs) {
  onlyOurs ? home_.setBytes(std::move(made), true) : home_.share(made);
  if (rare_) {
    rare_->stash.reset();
  }
  recipe_.reset();
}

void Value::putAway(c10::intrusive_ptr<Stash> away) {
  TORCH_INTERNAL_ASSERT(!stash());
  allocateRare().stash = std::move(away);
  home_.take();
  recipe_.reset();
}

c10::Storage Value::release() {
  TORCH_INTERNAL_ASSERT(!stash());
  c10::Storage bytes = home_.take();
  home_.setBytes(c10::Storage(), false);
  return bytes;
}

void Value::giveUp() {
  TORCH_INTERNAL_ASSERT(home_.bytes());
  home_.demoteToWeak();
}

void Value::overwritten() {
  home_.markOverwritten();
  home_.forgetStorage();
  if (stash()) {
    stash()->beforeWrite();
    home_.own();
  }
}

void Value::showInstead(const c10::Storage& now, bool isLater) {
  if (isLater) {
    home_.markOverwritten();
  }
  if (uses_.handles() > 0) {
    allocateRare().redefined = now;
  }
}

bool Value::isShownBy(const at::Tensor& tensor) {
  // See Note [Communication]
  if (facts_.inTransit && uses_.packed() == 0 && !home_.bytes()) {
    versions_.forgetOthers();
    home_.stamp(storageOf(tensor));
    versions_.stamp(tensor);
    return true;
  }
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  const bool sameMemory = home_.hasMemoryOf(*storageOf(tensor));
  if (sameMemory && (!counter.enabled() || !versions_.areCounted())) {
    return true;
  }
  if (!sameMemory || !versions_.areUnmoved()) {
    return false;
  }
  if (versions_.know(counter)) {
    return true;
  }
  const bool isNew = !facts_.madeHere || counter.current_version() == 0;
  if (isNew) {
    versions_.learn(counter);
  }
  return isNew;
}

void Value::watch(uint64_t fingerprint) { home_.setFingerprint(fingerprint); }

void Value::loseStorage() { home_.forgetStorage(); }

bool Value::releaseGone() {
  const bool isGone = !facts_.compared && home_.storage().expired();
  if (isGone) {
    home_.forgetStorage();
    versions_.releaseOwn();
  }
  return isGone;
}

bool onlyHandlesOwn(const c10::intrusive_ptr<Value>& value) {
  return value.use_count() == value->uses().handles();
}

std::shared_ptr<LatestState> LatestState::of(Value& value) {
  auto shared = value.rare().latest.lock();
  if (!shared && value.versions().haveOthers() && value.uses().packed() == 1) {
    shared = std::make_shared<LatestState>();
    value.allocateRare().latest = shared;
  }
  return shared;
}

bool LatestState::handOn(const Value& before, const c10::intrusive_ptr<Value>& after) {
  const auto shared = before.rare().latest.lock();
  if (!shared || after->state() != ValueState::Recomputable || after->decision().isKept() ||
      after->isPartial()) {
    return false;
  }
  after->allocateRare().latest = shared;
  after->uses().notePacked(true, false);
  shared->value = HandleOn(after);
  return true;
}

bool hasChanged(const Value& value, const c10::Storage& storage, FingerprintOf what) {
  return value.home().fingerprint() != 0 &&
         fingerprint(storage, what) != value.home().fingerprint();
}

}  // namespace ebb
