// The storage with a value's contents.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <utility>

namespace ebb {

// Where a value's contents are: a weak reference to their storage, and the bytes if ebb holds them.
class Home {
 public:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

  // Records that the contents are in `storage` now.
  void stamp(c10::StorageImpl* storage);

  // The storage, which other code may free.
  const Weak& storage() const { return storage_; }
  // The bytes, if ebb holds them; else null.
  const c10::Storage& bytes() const { return bytes_; }
  // Size of the storage in this state.
  size_t nbytes() const { return nbytes_; }
  // Address of the storage's memory in this state.
  const void* address() const { return address_; }
  // True if only ebb can write to bytes().
  bool isPrivate() const { return isPrivate_; }
  // True if the storage holds, or may hold, a later state than this one.
  bool isOverwritten() const { return isOverwritten_; }
  // Fingerprint of a kept leaf; 0: unknown. See Note [Fingerprints of leaves].
  uint64_t fingerprint() const { return fingerprint_; }

  // True if `storage` still has the memory of this state. Other code may have resized the storage
  // to 0 bytes, or given it other memory.
  bool hasMemoryOf(const c10::StorageImpl& storage) const {
    return storage.nbytes() == nbytes_ && storage.data() == address_;
  }

  // The storage, if it is alive, still has its memory, and ebb has noted no write to it. Does not
  // check the version counters.
  c10::Storage living() const;

  // Holds `bytes`. `onlyOurs`: no other code can write to them.
  void setBytes(c10::Storage bytes, bool onlyOurs) {
    bytes_ = std::move(bytes);
    isPrivate_ = onlyOurs;
  }
  // Holds `bytes`, whose memory is the value's from now on. Other code can write to the bytes.
  void share(const c10::Storage& bytes);

  // Releases the bytes.
  c10::Storage take() { return std::exchange(bytes_, c10::Storage()); }
  // Releases the bytes, and keeps a weak reference to their storage as storage().
  void demoteToWeak();

  // Drops the weak reference to the storage.
  void forgetStorage() { storage_.reset(); }
  void markOverwritten() { isOverwritten_ = true; }
  // Notes that no other code can write to the bytes, in memory or in a stash.
  void own() { isPrivate_ = true; }
  void setFingerprint(uint64_t fingerprint) { fingerprint_ = fingerprint; }

 private:
  Weak storage_{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::Storage bytes_;
  const void* address_ = nullptr;
  size_t nbytes_ = 0;
  uint64_t fingerprint_ = 0;
  bool isPrivate_ = false;
  bool isOverwritten_ = false;
};

}  // namespace ebb
