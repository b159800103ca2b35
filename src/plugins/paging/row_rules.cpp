#include "plugins/paging/row_rules.h"

#include <array>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "intercept/op_tables.h"

namespace ebb {
namespace {

// Operators that torch does not tag as pointwise, but that treat rows as pointwise operators do.
constexpr std::array<std::string_view, 10> kEachRow{
    "aten::_to_copy",       "aten::copy_",
    "aten::native_dropout", "aten::_fused_dropout",
    "aten::masked_fill",    "aten::masked_fill_",
    "aten::floor_divide",   "aten::floor_divide_",
    "aten::_prelu_kernel",  "aten::rrelu_with_noise_functional",
};

struct RowArgument {
  std::string_view name;
  std::string_view argument;  // the argument with rows
};

constexpr RowArgument kOneArgument[] = {
    {"aten::mm", "self"},
    {"aten::addmm", "mat1"},
    {"aten::_addmm_activation", "mat1"},
    {"aten::mv", "self"},
    {"aten::_scaled_mm", "self"},
    {"aten::linear", "input"},
    {"aten::mkldnn_linear", "self"},
};

constexpr std::array<std::string_view, 2> kGroups{"aten::_grouped_mm", "aten::_scaled_grouped_mm"};

constexpr std::array<std::string_view, 2> kBatches{"aten::bmm", "aten::baddbmm"};

// Operators with an argument `normalized_shape`.
constexpr std::array<std::string_view, 3> kTrailingDims{
    "aten::native_layer_norm", "aten::_fused_rms_norm", "aten::rms_norm"};

// Operators with an argument `dim`.
constexpr std::array<std::string_view, 26> kAlongDims{
    "aten::_softmax",  "aten::_log_softmax", "aten::softmax", "aten::log_softmax",
    "aten::sum",       "aten::mean",         "aten::amax",    "aten::amin",
    "aten::max",       "aten::min",          "aten::argmax",  "aten::argmin",
    "aten::logsumexp", "aten::cumsum",       "aten::std",     "aten::var",
    "aten::std_mean",  "aten::var_mean",     "aten::norm",    "aten::linalg_vector_norm",
    "aten::all",       "aten::any",          "aten::sort",    "aten::topk",
    "aten::glu",       "aten::cat",
};

RowTraits findRule(const OpTraits& op) {
  RowTraits rows;
  const auto& schema = op.op.schema();
  const std::string& name = schema.name();
  const auto apply = [&](RowRule rule, std::string_view argument) {
    if (const auto index = schema.argumentIndexWithName(argument)) {
      rows.rule = rule;
      rows.argument = static_cast<int16_t>(*index);
    }
  };
  if (op.limits.custom || op.arguments.readsOnlyShapes) {
    return rows;
  }
  if (op.op.hasTag(at::Tag::pointwise) || contains(kEachRow, name)) {
    rows.rule = RowRule::EachRow;
  } else if (contains(kBatches, name)) {
    rows.rule = RowRule::Batches;
  } else if (contains(kGroups, name)) {
    rows.rule = RowRule::Groups;
  } else if (contains(kTrailingDims, name)) {
    apply(RowRule::TrailingDims, "normalized_shape");
  } else if (contains(kAlongDims, name)) {
    apply(RowRule::AlongDims, "dim");
  } else {
    for (const RowArgument& entry : kOneArgument) {
      if (entry.name == name) {
        apply(RowRule::OneArgument, entry.argument);
      }
    }
  }
  return rows;
}

struct KnownRules {
  std::mutex mutex;
  std::unordered_map<uint32_t, RowTraits>
      byOperator;  // keys: OpTraits::index; values stay in place
};

}  // namespace

const RowTraits& rowTraitsOf(const OpTraits& op) {
  static auto* known = new KnownRules;
  std::lock_guard<std::mutex> lock(known->mutex);
  const auto found = known->byOperator.find(op.index);
  return found != known->byOperator.end()
             ? found->second
             : known->byOperator.emplace(op.index, findRule(op)).first->second;
}

}  // namespace ebb
