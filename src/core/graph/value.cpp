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
  home.take();
  recipe_.reset();
}

void Value::restore(c10::Storage made, bool onlyOurs) {
  home.setBytes(std::move(made), onlyOurs);
  dropStash();
  recipe_.reset();
}

void Value::stamp(const at::Tensor& tensor) {
  home.stamp(storageOf(tensor));
  versions.stamp(tensor);
}

bool Value::releaseGone() {
  const bool isGone = !facts.compared && home.storage().expired();
  if (isGone) {
    home.forgetStorage();
    versions.releaseOwn();
  }
  return isGone;
}

void Value::showInstead(const c10::Storage& now) {
  home.markOverwritten();
  if (uses.packed() > 0) {
    rare.set(&RareParts::redefined, now);
  }
}

c10::Storage Value::available() const {
  const c10::Storage& bytes = home.bytes();
  if (bytes && (home.isPrivate() || (versions.areUnmoved() && !home.isOverwritten() &&
                                     bytes.nbytes() == home.nbytes()))) {
    return bytes;
  }
  return !versions.areUnmoved() || (facts.compared && recipe_) ? c10::Storage() : home.living();
}

void Value::release_resources() {
  recipe_.reset();
  home.take();
  home.forgetStorage();
  versions = Versions();
  rare.clear();
}

bool onlyHandlesOwn(const c10::intrusive_ptr<Value>& value) {
  return value.use_count() == value->uses.handles();
}

bool hasChanged(const Value& value, const c10::Storage& storage, FingerprintOf what) {
  return value.home.fingerprint() != 0 && fingerprint(storage, what) != value.home.fingerprint();
}

}  // namespace ebb
