#include "record/fresh_results.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

#include "intercept/op_traits.h"
#include "torch_seams/owners.h"

namespace ebb {
namespace {

struct Base {
  const at::TensorBase* tensor;
  size_t views;  // results that hold this base
};

}  // namespace

// Note [Results that others hold]
// If other code holds a result's storage too, this call did not make the result: the op returned a
// cached tensor. Another run would return the same memory with other contents. So the result is a
// leaf, and writes to it are side effects. A kernel may return a view of a new tensor. The view
// holds the base, and ebb counts the reference as the result's own.
bool onlyResultsHold(const OpTraits& op, const c10::IValue* results, const at::Tensor& tensor) {
  const size_t holders = tensor.storage().use_count();
  if (holders == 1) {
    return hasNoOtherOwner(tensor, 1);
  }
  size_t known = 0;
  c10::SmallVector<Base, 2> bases;
  forEachTensor(results, op.results, [&](const at::Tensor& x, size_t, int32_t) {
    if (!x.defined() || !x.has_storage() || !x.storage().is_alias_of(tensor.storage())) {
      return;
    }
    ++known;
    if (x.is_view()) {
      const at::TensorBase& base = x._base();
      const auto same = std::find_if(
          bases.begin(), bases.end(), [&](const Base& b) { return b.tensor->is_same(base); });
      if (same != bases.end()) {
        ++same->views;
      } else if (base.has_storage() && base.storage().is_alias_of(tensor.storage())) {
        bases.push_back({&base, 1});
      }
    }
  });
  return holders == known + bases.size() &&
         std::all_of(bases.begin(), bases.end(), [](const Base& base) {
           return hasNoOtherOwner(*base.tensor, base.views);
         });
}

}  // namespace ebb
