#include "plugins/custom_operators/unsaid_writes.h"

#include <c10/util/Exception.h>
#include <c10/util/Synchronized.h>

#include <algorithm>
#include <set>

#include "conditions/fingerprint.h"
#include "record/value_map.h"

namespace ebb {

UnsaidWrites::UnsaidWrites(const OpTraits& op, const Arguments& arguments) : op_(op) {
  const auto& writes = arguments.writes();
  const auto isKnown = [&](const c10::StorageImpl* storage) {
    const auto isWritten = [&](const Write& write) { return write.storage == storage; };
    const auto isRead = [&](const Read& read) { return storageOf(read.tensor) == storage; };
    return std::any_of(writes.begin(), writes.end(), isWritten) ||
           std::any_of(read_.begin(), read_.end(), isRead);
  };
  for (const Argument& argument : arguments.tensors()) {
    const at::Tensor& tensor = *argument.tensor;
    if (tensor.defined() && argument.flags.device.is_cpu() && !isKnown(storageOf(tensor))) {
      read_.push_back({tensor, fingerprint(tensor.storage()), argument.index});
    }
  }
}

bool UnsaidWrites::giveUp(ValueMap& values) {
  for (const Read& read : read_) {
    if (fingerprint(read.tensor.storage()) != read.fingerprint) {
      values.replaceByLeaf(read.tensor, UnseenWrite::Undeclared);
      written_ = read.argument;
    }
  }
  return written_ >= 0;
}

void UnsaidWrites::warn() {
  read_.clear();
  static auto* warned = new c10::Synchronized<std::set<const OpTraits*>>;
  const auto isFirst = [&](auto& ops) { return ops.insert(&op_).second; };
  if (written_ < 0 || !warned->withLock(isFirst)) {
    return;
  }
  TORCH_WARN(
      "ebb: the operator ", op_.name, " writes to its argument '",
      op_.op.schema().arguments()[written_].name(),
      "', but its schema does not declare that. Declare it (mutates_args of "
      "torch.library.custom_op), or wrap the call in `with ebb.opaque(tensor):`: ebb detects such "
      "writes only on the CPU and in verify mode, and gradients may be wrong elsewhere.");
}

}  // namespace ebb
