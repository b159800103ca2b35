#include "graph/value.h"

#include <ATen/core/TensorBody.h>

#include "graph/geometry.h"
#include "graph/recipe.h"
#include "hooks/store.h"

namespace ebb {

RareParts::RareParts() = default;
RareParts::~RareParts() = default;

const RareParts Rare::kNone;

void Rare::allocate() {
  parts_ = std::make_unique<RareParts>();
}

static_assert(alignof(Value) <= kArenaAlignment && alignof(RareParts) <= kArenaAlignment);
Value::Value() = default;

Value::~Value() = default;

void Value::setRecipe(c10::intrusive_ptr<Recipe> recipe) {
  recipe_ = std::move(recipe);
}

void Value::dropStash() {
  rare.set(&RareParts::stash, nullptr);
}

void Value::putAway(c10::intrusive_ptr<Stash> away) {
  rare.set(&RareParts::stash, std::move(away));
  home_.take();
  recipe_.reset();
}

void Value::restore(c10::Storage made, bool onlyOurs) {
  home_.setBytes(std::move(made), onlyOurs);
  dropStash();
  recipe_.reset();
}

void Value::stamp(const at::Tensor& tensor) {
  home_.stamp(storageOf(tensor));
  versions_.stamp(tensor);
}

bool Value::releaseGone() {
  const bool isGone = !facts_.compared && home_.storage().expired();
  if (isGone) {
    home_.forgetStorage();
    versions_.releaseOwn();
  }
  return isGone;
}

void Value::showInstead(const c10::Storage& now) {
  home_.markOverwritten();
  if (uses_.packed() > 0) {
    rare.set(&RareParts::redefined, now);
  }
}

c10::Storage Value::available() const {
  const c10::Storage& bytes = home_.bytes();
  if (bytes && (home_.isPrivate() || (versions_.areUnmoved() && !home_.isOverwritten() &&
                                     bytes.nbytes() == home_.nbytes()))) {
    return bytes;
  }
  return !versions_.areUnmoved() || (facts_.compared && recipe_) ? c10::Storage() : home_.living();
}

void Value::release_resources() {
  recipe_.reset();
  home_.take();
  home_.forgetStorage();
  versions_ = Versions();
  rare.clear();
}

bool onlyHandlesOwn(const c10::intrusive_ptr<Value>& value) {
  return value.use_count() == value->uses().handles();
}

bool hasChanged(const Value& value, const c10::Storage& storage, FingerprintOf what) {
  return value.home().fingerprint() != 0 && fingerprint(storage, what) != value.home().fingerprint();
}

}  // namespace ebb
