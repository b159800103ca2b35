#include "conditions/repeatable.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <string>

#include "intercept/op_tables.h"

namespace ebb {
namespace {

#define EBB_FORCE "; a rule with force=True recomputes it anyway"

// The call's argument of this name; null if the schema has no such argument.
const c10::IValue* find(const OpTraits& op, const c10::IValue* arguments, const std::string& name) {
  const auto index = op.op.schema().argumentIndexWithName(name);
  return index ? &arguments[*index] : nullptr;
}

bool isInexact(c10::ScalarType type) {
  return c10::isFloatingType(type) || c10::isComplexType(type);
}

// True if the kernel may add floating-point numbers.
bool addsInexact(const OpTraits& op, const c10::IValue* arguments) {
  bool found = find(op, arguments, "dtype") != nullptr && !find(op, arguments, "dtype")->isNone();
  forEachTensor(arguments, op.arguments.types, [&](const at::Tensor& tensor, size_t, int32_t) {
    found |= tensor.defined() && isInexact(tensor.scalar_type());
  });
  return found;
}

// True if the indices are masks, which name each element once.
bool areMasks(const OpTraits& op, const c10::IValue* arguments) {
  const c10::IValue* indices = find(op, arguments, "indices");
  if (indices == nullptr || !indices->isList()) {
    return false;
  }
  for (const c10::IValue& index : indices->toListRef()) {
    const bool isMask = index.isNone() || !index.toTensor().defined() ||
                        index.toTensor().scalar_type() == c10::kBool ||
                        index.toTensor().scalar_type() == c10::kByte;
    if (!isMask) {
      return false;
    }
  }
  return true;
}

// True for a scan along the only dimension that is not 1.
bool scansAll(const c10::IValue& self, const c10::IValue& dim) {
  const at::Tensor& tensor = self.toTensor();
  return !dim.isInt() || tensor.dim() == 0 || tensor.numel() == tensor.size(dim.toInt());
}

// True if torch takes a kernel that repeats its bits.
bool isDeterministic(const NotRepeatable& entry) {
  const at::Context& context = at::globalContext();
  return entry.hasOther && context.deterministicAlgorithms() &&
         !context.deterministicAlgorithmsWarnOnly();
}

// See NotRepeatable::from
bool isAbsentOrOne(const c10::IValue* from) {
  return from == nullptr || from->isNone() || (from->isTensor() && from->toTensor().numel() == 1);
}

// See Note [Kernels that do not repeat their bits]
[[gnu::cold]] const char* whyUnordered(const OpTraits& op, const c10::IValue* arguments) {
  const NotRepeatable& entry = *op.kernel.notRepeatable;
  const c10::IValue* from = find(op, arguments, std::string(entry.from));
  if (isDeterministic(entry) || (!entry.from.empty() && isAbsentOrOne(from))) {
    return nullptr;
  }
  switch (entry.what) {
    case Unordered::Scans:
      if (!scansAll(arguments[0], *from)) {
        return nullptr;
      }
      [[fallthrough]];
    case Unordered::Sums:
      return addsInexact(op, arguments) ? "its kernel adds numbers in an order that differs from "
                                          "run to run, so a replay may give other bits" EBB_FORCE
                                        : nullptr;
    case Unordered::Writes:
      return areMasks(op, arguments)
                 ? nullptr
                 : "if indices repeat, its kernel writes in an order that differs from run to run, "
                   "so a replay may give other bits" EBB_FORCE;
    case Unordered::Picks:
      return "of equal elements its kernel may choose any, so a replay may choose another "
             "one" EBB_FORCE;
  }
  return nullptr;
}

// See Note [Kernels chosen by timing]
[[gnu::cold]] const char* whyConvolutionDiffers(const OpTraits& op, const c10::IValue* arguments) {
  const at::Context& context = at::globalContext();
  if (!context.userEnabledCuDNN()) {
    return nullptr;
  }
  if (context.benchmarkCuDNN()) {
    return "cuDNN picks the algorithm by timing (torch.backends.cudnn.benchmark), so a replay may "
           "give other bits" EBB_FORCE;
  }
  const c10::IValue* transposed = find(op, arguments, "transposed");
  const bool isBackward = (transposed != nullptr && transposed->isBool() && transposed->toBool()) ||
                          op.name.find("transpose") != std::string::npos ||
                          op.name.find("backward") != std::string::npos;
  if (isBackward && !context.deterministicCuDNN() && !context.deterministicAlgorithms()) {
    return "cuDNN's algorithms for it may add with atomics, so a replay may give other bits; "
           "torch.backends.cudnn.deterministic=True, or a rule with force=True, recomputes it";
  }
  return nullptr;
}

#undef EBB_FORCE

}  // namespace

const char* whyNotRepeatable(const OpTraits& op, const c10::IValue* arguments) {
  return op.kernel.isConvolution              ? whyConvolutionDiffers(op, arguments)
         : op.kernel.notRepeatable != nullptr ? whyUnordered(op, arguments)
                                              : nullptr;
}

}  // namespace ebb
