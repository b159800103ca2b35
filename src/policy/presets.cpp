#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <span>

#include "intercept/op_tables.h"
#include "policy/compiled_policy.h"
#include "policy/glob.h"

namespace ebb {
namespace {

using Patterns = std::span<const char* const>;

// Products of matrices and vectors.
constexpr const char* kProducts[] = {
    "aten::mm",
    "aten::addmm",
    "aten::mv",
    "aten::addmv",
    "aten::dot",
    "aten::linear",
    "aten::mkldnn_linear",
    "aten::_addmm_activation",
    "aten::_scaled_mm",
    "aten::_int_mm",
};

constexpr const char* kBatchedProducts[] = {
    "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::_scaled_grouped_mm"};

constexpr const char* kConvolutionsAndAttention[] = {
    "aten::convolution",
    "aten::_convolution",
    "aten::convolution_overrideable",
    "aten::cudnn_convolution*",
    "aten::miopen_*convolution*",
    "aten::mkldnn_convolution",
    "aten::_scaled_dot_product_*",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
};

constexpr const char* kSavedByTorchtitan[] = {
    "aten::mm.default",
    "aten::linear.default",
    "aten::_scaled_dot_product_efficient_attention.default",
    "aten::_scaled_dot_product_flash_attention.default",
    "aten::_scaled_dot_product_cudnn_attention.default",
    "aten::_scaled_dot_product_attention_math.default",
    "aten::_scaled_dot_product_fused_attention_overrideable.default",
    "_c10d_functional::reduce_scatter_tensor.default",
    "_c10d_functional::all_to_all_single.default",
    "aten::max.default",
};

// Appends rules that save the results of the operators among `patterns` that torch has.
void appendSaved(std::vector<Rule>& rules, Patterns patterns) {
  const auto names = c10::Dispatcher::singleton().getAllOpNames();
  for (const char* pattern : patterns) {
    const bool known = std::ranges::any_of(
        names, [&](const auto& name) { return operatorMatches(pattern, qualifiedName(name)); });
    if (known) {
      rules.push_back({pattern, Decision::Save});
    }
  }
}

PolicyPtr makePreset(std::vector<Rule> rules) {
  for (Rule& rule : rules) {
    rule.preset = true;
  }
  return makePolicy(std::move(rules));
}

// Saves the results of the operators of all lists; the others are recomputed.
PolicyPtr policyThatSaves(std::initializer_list<Patterns> all) {
  std::vector<Rule> rules;
  for (const Patterns patterns : all) {
    appendSaved(rules, patterns);
  }
  return makePreset(std::move(rules));
}

}  // namespace

PolicyPtr recomputeAll() { return makePolicy({}); }

PolicyPtr saveAll() { return makePolicy({}, Decision::Save); }

PolicyPtr saveMatmuls() {
  return policyThatSaves({kProducts, kBatchedProducts, kConvolutionsAndAttention});
}

PolicyPtr dotsSaveable() { return policyThatSaves({kProducts, kBatchedProducts}); }

PolicyPtr dotsWithNoBatchDimsSaveable() { return policyThatSaves({kProducts}); }

PolicyPtr offloadInputs() { return makePolicy({}, Decision::Recompute, Decision::Offload); }

PolicyPtr recomputeCollectives() {
  std::vector<Rule> rules;
  for (const std::string_view name : repeatableCollectives()) {
    if (c10::Dispatcher::singleton().findSchema({std::string(name), ""})) {
      Rule rule{std::string(name) + ".default", Decision::Recompute};
      rule.force = true;
      rules.push_back(std::move(rule));
    }
  }
  return makePreset(std::move(rules));
}

PolicyPtr torchtitan() {
  std::vector<Rule> rules{{"aten::mm.default", Decision::Recompute, /*every=*/2}};
  appendSaved(rules, kSavedByTorchtitan);
  return makePreset(std::move(rules));
}

}  // namespace ebb
