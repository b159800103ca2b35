#include "region/splitting.h"

namespace ebb {

bool Splitter::storageEmptied(c10::StorageImpl* storage) {
  const bool splits = recorder_.storageEmptied(storage);
  isDue_ |= splits;
  return splits;
}

void Splitter::call(Call& call) {
  split_();
  recorder_.call(call);
}

void Splitter::aliased(const at::Tensor& tensor, const at::Tensor& result) {
  recorder_.aliased(tensor, result);
}

}  // namespace ebb
