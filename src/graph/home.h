// The storage with a value's contents.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <utility>

namespace ebb {

// The storage with a value's contents: where it was, and ebb's own reference to it.
class Home {
 public:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

  // The contents are in `storage` now.
  void stamp(c10::StorageImpl* storage);

  // The storage, which other code may free.
  const Weak& storage() const {
    return storage_;
  }
  // The bytes, if ebb holds them; else null.
  const c10::Storage& bytes() const {
    return bytes_;
  }
  // Size of the storage in this state.
  size_t nbytes() const {
    return nbytes_;
  }
  // Where the bytes were.
  const void* address() const {
    return address_;
  }
  // Only ebb writes the buffer bytes().
  bool isPrivate() const {
    return isPrivate_;
  }
  // The storage was written since, and holds another state.
  bool isSuperseded() const {
    return isSuperseded_;
  }
  // Of a kept leaf; 0: unknown. See Note [Fingerprints of leaves].
  uint64_t fingerprint() const {
    return fingerprint_;
  }

  // True if `storage` still has the memory of this state. Other code may have emptied it to save
  // memory, or given it other memory.
  bool hasMemoryOf(const c10::StorageImpl& storage) const {
    return storage.nbytes() == nbytes_ && storage.data() == address_;
  }

  // The storage, if other code keeps it alive, it still has its memory, and ebb has seen no write
  // to it. A tensor with a counter of its own may have written to it.
  c10::Storage living() const;

  // Holds `bytes`. `onlyOurs`: no other code can write to them.
  void hold(c10::Storage bytes, bool onlyOurs) {
    bytes_ = std::move(bytes);
    isPrivate_ = onlyOurs;
  }
  // Holds `bytes`, the value's storage from now on, which other code can write to.
  void share(const c10::Storage& bytes);

  // Gives up the bytes.
  c10::Storage take() {
    return std::exchange(bytes_, c10::Storage());
  }
  // Gives up the bytes. Their storage is the value's from now on.
  void moveOut();

  // Gives up the weak reference to the storage.
  void leave() {
    storage_.reset();
  }
  void supersede() {
    isSuperseded_ = true;
  }
  // No other code can write to the bytes, wherever they are.
  void own() {
    isPrivate_ = true;
  }
  void setFingerprint(uint64_t fingerprint) {
    fingerprint_ = fingerprint;
  }

 private:
  Weak storage_{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::Storage bytes_;
  const void* address_ = nullptr;
  size_t nbytes_ = 0;
  uint64_t fingerprint_ = 0;
  bool isPrivate_ = false;
  bool isSuperseded_ = false;
};

}  // namespace ebb
