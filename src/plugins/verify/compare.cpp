#include "plugins/verify/compare.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "counts/statistics.h"
#include "graph/recipe.h"
#include "memory/bytes.h"
#include "stores/rows.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

// Compares the elements of two storages.
void measure(
    Mismatch& mismatch, const c10::Storage& is, const c10::Storage& was, c10::ScalarType dtype) {
  const auto below = belowEverything();
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  const auto count = static_cast<int64_t>(std::min(is.nbytes(), was.nbytes())) / size;
  const at::Tensor now = bytesOf(is, count * size).cpu();
  const at::Tensor then = bytesOf(was, count * size).cpu();
  mismatch.elements = count;
  mismatch.differing = now.ne(then).view({count, size}).any(1).sum().item<int64_t>();
  const auto asDoubles = [&](const at::Tensor& bytes) {
    const at::Tensor elements = bytes.view(dtype);
    return (elements.is_complex() ? at::view_as_real(elements) : elements).to(c10::kDouble);
  };
  const at::Tensor x = asDoubles(now);
  const at::Tensor y = asDoubles(then);
  const at::Tensor areEqual = x.eq(y).logical_or(x.isnan().logical_and(y.isnan()));
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor differences = x.sub(y);  // x and y may show the bytes themselves
  differences.abs_().masked_fill_(areEqual, 0.0).nan_to_num_(kInfinity, kInfinity);
  mismatch.largestDifference = count == 0 ? 0.0 : differences.max().item<double>();
}

// "ebb: replay mismatch: ..." with likely causes and the fix.
std::string describe(const Mismatch& mismatch) {
  const std::string& op = mismatch.op->name;
  const std::string cause =
      mismatch.changedInputs.empty()
          ? "1. code that torch does not see (numpy, ctypes, pybind, raw Triton) wrote to the "
            "result: put that write into `with ebb.opaque(tensor):`; 2. the operator is not "
            "deterministic, or depends on state outside its arguments"
          : c10::str(
                "its input ", mismatch.changedInputs,
                " has changed since the forward: by code that torch does not see, or by a write "
                "that does not change the version counter (.data, a fused optimizer, batch norm "
                "statistics, numpy)");
  return c10::str(
      "ebb: replay mismatch: the replay of ", op, " in region '", mismatch.region,
      "' differs from the forward in ", mismatch.output, ": ", mismatch.differing, " of ",
      mismatch.elements, " elements, the largest difference is ", mismatch.largestDifference,
      ". Likely causes: ", cause, ". Or give ", op,
      " the decision SAVE, which EBB_VERIFY=demote does by itself.");
}

// The storage with the forward's bytes of `value`; null if unknown.
c10::Storage forwardsBytes(Value& value) {
  Witness& record = *value.extra<Witness>();
  {
    std::lock_guard<std::mutex> lock(record.mutex);
    if (record.lost) {
      return {};
    }
    if (record.bytes) {
      return record.bytes;
    }
  }
  if (value.home().isOverwritten() || !value.versions().areUnmoved()) {
    return {};
  }
  auto living = value.home().storage().lock();
  return living && living->nbytes() == value.home().nbytes() ? c10::Storage(std::move(living))
                                                             : c10::Storage();
}

}  // namespace

bool sameBytes(const c10::Storage& a, const c10::Storage& b) {
  if (a.nbytes() != b.nbytes()) {
    return false;
  }
  if (a.device().is_cpu()) {
    return a.nbytes() == 0 || std::memcmp(a.data(), b.data(), a.nbytes()) == 0;
  }
  const auto below = belowEverything();
  return at::equal(bytesOf(a), bytesOf(b));
}

const Mismatch& mismatchOf(const Graph& graph, Value& value, const c10::Storage& truth) {
  Witness& record = *value.extra<Witness>();
  if (!record.mismatch) {
    auto mismatch = std::make_shared<Mismatch>();
    mismatch->region = graph.names[record.region];
    mismatch->op = record.op;
    mismatch->output = c10::str(
        record.output.written ? "argument " : "result ", record.output.slot,
        record.output.written ? ", which it writes" : "");
    if (record.output.element >= 0) {
      mismatch->output += c10::str(" (element ", record.output.element, " of the list)");
    }
    mismatch->changedInputs = record.changedInputs;
    measure(*mismatch, value.home().bytes(), truth, record.dtype);
    record.mismatch = std::move(mismatch);
  }
  return *record.mismatch;
}

// The padding rows of the result are those of `replayed`, since padding rows may differ after a
// replay: see Note [Rows].
c10::Storage trueBytes(Value& value, const c10::Storage& replayed) {
  const c10::Storage truth = forwardsBytes(value);
  const Rows* rows = value.extra<Rows>();
  if (!truth || rows == nullptr || replayed.nbytes() != truth.nbytes()) {
    return truth;
  }
  const auto below = belowEverything();
  const auto nbytes = static_cast<int64_t>(truth.nbytes());
  const int64_t live =
      rows->live->count.item<int64_t>() * (nbytes / std::max<int64_t>(rows->total, 1));
  const c10::Storage expected = copyOf(truth);
  if (live >= 0 && live < nbytes) {
    const int64_t dead = nbytes - live;
    bytesOf(expected).narrow(0, live, dead).copy_(bytesOf(replayed).narrow(0, live, dead));
  }
  return expected;
}

bool sameBits(const Geometry& geometry, const c10::Storage& a, const c10::Storage& b) {
  const auto below = belowEverything();
  const auto bits = [&](const c10::Storage& storage) {
    return geometry.viewOf(storage).resolve_conj().resolve_neg().contiguous().cpu();
  };
  const at::Tensor x = bits(a);
  const at::Tensor y = bits(b);
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

std::atomic<void (*)(const std::string&, const Mismatch&)> throwMismatch{nullptr};

void reportMismatch(VerifyMode mode, const Mismatch& mismatch) {
  const std::string message = describe(mismatch);
  if (mode == VerifyMode::Demote) {
    if (!mismatch.op->state.demoted.exchange(true)) {
      statisticsDemoted(mismatch.op->name);
      TORCH_WARN(message, " ebb saves the outputs of ", mismatch.op->name, " from now on.");
    }
    return;
  }
  if (const auto raise = throwMismatch.load()) {
    raise(message, mismatch);
  }
  throw ReplayMismatch({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

}  // namespace ebb
