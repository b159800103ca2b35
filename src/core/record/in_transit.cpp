#include "record/in_transit.h"

#include <c10/util/Synchronized.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include "graph/geometry.h"

namespace ebb {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct InTransit {
  // A weak reference prevents reuse of the key's address.
  ska::flat_hash_map<const c10::StorageImpl*, WeakStorage> storages;
  size_t sweepAt = 64;  // size at which freed storages are removed
};

c10::Synchronized<InTransit>& inTransit() {
  static auto* all = new c10::Synchronized<InTransit>;
  return *all;
}

}  // namespace

void noteInTransit(const at::Tensor& tensor) {
  if (!isRecordable(tensor)) {
    return;
  }
  inTransit().withLock([&](InTransit& all) {
    if (all.storages.size() >= all.sweepAt) {
      for (auto entry = all.storages.begin(); entry != all.storages.end();) {
        entry = entry->second.expired() ? all.storages.erase(entry) : std::next(entry);
      }
      all.sweepAt = 2 * all.storages.size() + 64;
    }
    c10::StorageImpl* storage = storageOf(tensor);
    all.storages.insert_or_assign(storage, WeakStorage::reclaim_copy(storage));
  });
}

bool mayBeInTransit(const at::Tensor& tensor) {
  return inTransit().withLock(
      [&](const InTransit& all) { return all.storages.count(storageOf(tensor)) > 0; });
}

}  // namespace ebb
