#include "plugins/paging/row_rules.h"

#include <algorithm>
#include <initializer_list>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace ebb {
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
