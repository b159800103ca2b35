#include "plugins/paging/row_flow.h"

#include <algorithm>
#include <initializer_list>
#include <mutex>
#include <string_view>
#include <unordered_map>

namespace ebb {

// The effect of an op on the rows of its arguments: see Note [Rows].
enum class RowRule : uint8_t {
  Unknown,      // may mix rows
  EachRow,      // element by element, with broadcasting
  OneArgument,  // result row i depends on row i of one argument, and on all of the others
  Groups,       // result row i depends on row i of argument 0, if argument 1 is a stack of matrices
  Batches,      // batched matrix products
  TrailingDims,  // normalises over the last dimensions; RowTraits::argument has their sizes
  AlongDims,     // works along given dimensions
};

struct RowTraits {
  RowRule rule = RowRule::Unknown;
  // The argument with rows (OneArgument), or the argument with the sizes or dimensions for `rule`.
  int16_t argument = -1;
};

namespace {

struct Operators {
  RowRule rule;
  std::string_view argument;  // the name of RowTraits::argument; empty: none
  std::initializer_list<std::string_view> names;
};

const Operators kRules[] = {
    // Operators that torch does not tag as pointwise, but that treat rows as pointwise ones do.
    {RowRule::EachRow,
     "",
     {"aten::_to_copy", "aten::copy_", "aten::native_dropout", "aten::_fused_dropout",
      "aten::masked_fill", "aten::masked_fill_", "aten::floor_divide", "aten::floor_divide_",
      "aten::_prelu_kernel", "aten::rrelu_with_noise_functional"}},
    {RowRule::OneArgument,
     "self",
     {"aten::mm", "aten::mv", "aten::_scaled_mm", "aten::mkldnn_linear"}},
    {RowRule::OneArgument, "mat1", {"aten::addmm", "aten::_addmm_activation"}},
    {RowRule::OneArgument, "input", {"aten::linear"}},
    {RowRule::Groups, "", {"aten::_grouped_mm", "aten::_scaled_grouped_mm"}},
    {RowRule::Batches, "", {"aten::bmm", "aten::baddbmm"}},
    {RowRule::TrailingDims,
     "normalized_shape",
     {"aten::native_layer_norm", "aten::_fused_rms_norm", "aten::rms_norm"}},
    {RowRule::AlongDims,
     "dim",
     {"aten::_softmax",  "aten::_log_softmax", "aten::softmax", "aten::log_softmax",
      "aten::sum",       "aten::mean",         "aten::amax",    "aten::amin",
      "aten::max",       "aten::min",          "aten::argmax",  "aten::argmin",
      "aten::logsumexp", "aten::cumsum",       "aten::std",     "aten::var",
      "aten::std_mean",  "aten::var_mean",     "aten::norm",    "aten::linalg_vector_norm",
      "aten::all",       "aten::any",          "aten::sort",    "aten::topk",
      "aten::glu",       "aten::cat"}},
};

RowTraits findRule(const OpTraits& op) {
  const auto& schema = op.op.schema();
  if (op.limits.custom || op.arguments.readsOnlyShapes) {
    return {};
  }
  if (op.op.hasTag(at::Tag::pointwise)) {
    return {RowRule::EachRow};
  }
  for (const auto& [rule, argument, names] : kRules) {
    if (std::ranges::find(names, schema.name()) != names.end()) {
      const auto index = schema.argumentIndexWithName(argument);
      const bool fits = index || argument.empty();
      return fits ? RowTraits{rule, static_cast<int16_t>(index.value_or(-1))} : RowTraits{};
    }
  }
  return {};
}

struct KnownRules {
  std::mutex mutex;
  std::unordered_map<uint32_t, RowTraits>
      byOperator;  // keys: OpTraits::index; values stay in place
};

// The rule for an operator. Takes a lock.
const RowTraits& rowTraitsOf(const OpTraits& op) {
  static auto* known = new KnownRules;
  std::lock_guard<std::mutex> lock(known->mutex);
  const auto found = known->byOperator.find(op.index);
  return found != known->byOperator.end()
             ? found->second
             : known->byOperator.emplace(op.index, findRule(op)).first->second;
}

// True if a reduction over `dims` leaves dimension 0, the rows, alone. A reduction without `dims`
// covers all dimensions.
bool leavesRows(const c10::IValue& dims, int64_t dimensions) {
  const auto leaves = [&](int64_t dim) { return dim != 0 && dim != -dimensions; };
  if (dims.isInt()) {
    return leaves(dims.toInt());
  }
  if (!dims.isIntList()) {
    return false;
  }
  const auto list = dims.toIntVector();
  return !list.empty() && std::all_of(list.begin(), list.end(), leaves);
}

}  // namespace

int64_t rowsShown(const at::Tensor& tensor, const RowFacts& rows, size_t nbytes) {
  if (tensor.dim() == 0 || tensor.size(0) == 0 || tensor.size(0) % rows.total != 0) {
    return 0;
  }
  const int64_t shown = tensor.size(0);
  const int64_t rowBytes = static_cast<int64_t>(nbytes) / rows.total;
  const int64_t parts = shown / rows.total;  // rows of the tensor per row of the storage
  const int64_t each = rowBytes / parts;     // bytes of the storage per row of the tensor
  const int64_t item = tensor.itemsize();
  int64_t end = tensor.storage_offset() + 1;  // end of the tensor's first row, in elements
  for (int64_t d = 1; d < tensor.dim(); ++d) {
    end += (tensor.size(d) - 1) * tensor.stride(d);
  }
  const bool inStep = shown == 1 || tensor.stride(0) * item == each;
  return rowBytes % parts == 0 && inStep && end * item <= each ? shown : 0;
}

RowFlow::RowFlow(const OpTraits& op, const c10::IValue* arguments)
    : op_(op), rows_(rowTraitsOf(op)), arguments_(arguments) {}

void RowFlow::add(const at::Tensor& tensor, size_t argument, const Value* value) {
  if (value == nullptr || value->extra<Rows>() == nullptr) {
    extents_.push_back({tensor.dim(), tensor.dim() > 0 ? tensor.size(0) : 1, argument});
    return;
  }
  const Rows& rows = *value->extra<Rows>();
  lossy_ |= rows.lossy;
  several_ |= first_ != nullptr && first_ != value;
  first_ = value;
  const int64_t shown = rowsShown(tensor, rows, value->home().nbytes());
  const bool first = live_ == nullptr;
  if (first) {
    live_ = rows.live;
    total_ = rows.total;
    leading_ = shown;
    dimensions_ = tensor.dim();
  }
  apart_ = apart_ && shown > 0 && keepsApart(tensor, argument) && rows.live == live_ &&
           rows.total == total_ && shown == leading_ && tensor.dim() == dimensions_;
}

// An argument without rows must have the same data for each row.
bool RowFlow::keepsApart() const {
  const auto sameForEach = [&](const Extent& extent) {
    const bool product = rows_.rule == RowRule::OneArgument || rows_.rule == RowRule::Groups;
    if (product && extent.argument != 0) {
      return true;  // the other matrix, its scales, and the ends of groups
    }
    return extent.dimensions < dimensions_ ||
           (extent.dimensions == dimensions_ && extent.leading == 1 && leading_ > 1);
  };
  return apart_ && std::all_of(extents_.begin(), extents_.end(), sameForEach);
}

bool RowFlow::keepsApart(const at::Tensor& tensor, size_t argument) const {
  switch (rows_.rule) {
    case RowRule::Unknown:
      return false;
    case RowRule::EachRow:
      return true;
    case RowRule::OneArgument:
      return static_cast<int16_t>(argument) == rows_.argument && tensor.dim() >= 2;
    case RowRule::Groups:
      return argument == 0 && tensor.dim() == 2 && arguments_[1].isTensor() &&
             arguments_[1].toTensor().dim() == 3;
    case RowRule::Batches:
      return tensor.dim() == 3;
    case RowRule::TrailingDims:
      return argument == 0 && arguments_[rows_.argument].isIntList() &&
             static_cast<int64_t>(arguments_[rows_.argument].toIntVector().size()) < tensor.dim();
    case RowRule::AlongDims:
      return leavesRows(arguments_[rows_.argument], tensor.dim());
  }
  return false;
}

RowsPtr RowFlow::rowsOf(c10::ScalarType dtype) const {
  return c10::make_intrusive<Rows>(RowFacts{live_, total_, dtype, lossy_, /*pads=*/several_});
}

RowsPtr RowFlow::of(const at::Tensor& result) const {
  const bool same = live_ && keepsApart() && isRowAfterRow(result) && result.size(0) == leading_;
  // copy_ copies to another device, and repeats rows along further dimensions of its destination.
  const bool stays = same && result.device() == live_->count.device() &&
                     (rows_.rule != RowRule::EachRow || result.dim() == dimensions_);
  return stays ? rowsOf(result.scalar_type()) : RowsPtr();
}

RowsPtr RowFlow::ofWritten(const at::Tensor& argument, const Value& before) const {
  if (!before.extra<Rows>()) {
    return of(argument);
  }
  const Rows& rows = *before.extra<Rows>();
  const bool same = live_ == rows.live && total_ == rows.total && keepsApart() &&
                    rowsShown(argument, rows, before.home().nbytes()) == leading_;
  return live_ && same ? rowsOf(rows.dtype) : RowsPtr();
}

}  // namespace ebb
