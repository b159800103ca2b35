#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

#include "intercept/op_tables.h"
#include "policy/compiled_policy.h"
#include "policy/operator_names.h"

namespace ebb {
namespace {

// Rules for the operators among `patterns` that this build of torch has.
void appendKnown(
    std::vector<Rule>& rules, std::initializer_list<const char*> patterns, Decision decision) {
  const auto names = c10::Dispatcher::singleton().getAllOpNames();
  for (const char* pattern : patterns) {
    const bool known = std::any_of(names.begin(), names.end(), [&](const auto& name) {
      return operatorMatches(pattern, qualifiedName(name));
    });
    if (known) {
      rules.push_back({pattern, decision});
    }
  }
}

// Rules for products of matrices and vectors.
void appendProducts(std::vector<Rule>& rules, Decision decision) {
  appendKnown(
      rules,
      {"aten::mm",
       "aten::addmm",
       "aten::mv",
       "aten::addmv",
       "aten::dot",
       "aten::linear",
       "aten::mkldnn_linear",
       "aten::_addmm_activation",
       "aten::_scaled_mm",
       "aten::_int_mm"},
      decision);
}

}  // namespace

PolicyPtr recomputeAll() {
  return std::make_shared<const Policy>(std::vector<Rule>{}, Decision::Recompute);
}

PolicyPtr saveAll() {
  return std::make_shared<const Policy>(std::vector<Rule>{}, Decision::Save);
}

PolicyPtr saveMatmuls() {
  std::vector<Rule> rules;
  appendProducts(rules, Decision::Save);
  appendKnown(
      rules,
      {"aten::bmm",
       "aten::baddbmm",
       "aten::_grouped_mm",
       "aten::_scaled_grouped_mm",
       "aten::convolution",
       "aten::_convolution",
       "aten::convolution_overrideable",
       "aten::cudnn_convolution*",
       "aten::miopen_*convolution*",
       "aten::mkldnn_convolution",
       "aten::_scaled_dot_product_*",
       "aten::_flash_attention_forward",
       "aten::_efficient_attention_forward",
       "aten::_cudnn_attention_forward"},
      Decision::Save);
  return std::make_shared<const Policy>(std::move(rules), Decision::Recompute);
}

PolicyPtr dotsSaveable() {
  std::vector<Rule> rules;
  appendProducts(rules, Decision::Save);
  appendKnown(
      rules,
      {"aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::_scaled_grouped_mm"},
      Decision::Save);
  return makePolicy(std::move(rules));
}

PolicyPtr dotsWithNoBatchDimsSaveable() {
  std::vector<Rule> rules;
  appendProducts(rules, Decision::Save);
  return makePolicy(std::move(rules));
}

PolicyPtr offloadDotWithNoBatchDims() {
  std::vector<Rule> rules;
  appendProducts(rules, Decision::Offload);
  return makePolicy(std::move(rules));
}

PolicyPtr offloadInputs() {
  return makePolicy({}, Decision::Recompute, Decision::Offload);
}

PolicyPtr recomputeCollectives() {
  std::vector<Rule> rules;
  for (const std::string_view name : repeatableCollectives()) {
    if (c10::Dispatcher::singleton().findSchema({std::string(name), ""})) {
      Rule rule{std::string(name) + ".default", Decision::Recompute};
      rule.force = true;
      rules.push_back(std::move(rule));
    }
  }
  return makePolicy(std::move(rules));
}

PolicyPtr torchtitan() {
  std::vector<Rule> rules{{"aten::mm.default", Decision::Recompute, /*every=*/2}};
  appendKnown(
      rules,
      {"aten::mm.default",
       "aten::linear.default",
       "aten::_scaled_dot_product_efficient_attention.default",
       "aten::_scaled_dot_product_flash_attention.default",
       "aten::_scaled_dot_product_cudnn_attention.default",
       "aten::_scaled_dot_product_attention_math.default",
       "aten::_scaled_dot_product_fused_attention_overrideable.default",
       "_c10d_functional::reduce_scatter_tensor.default",
       "_c10d_functional::all_to_all_single.default",
       "aten::max.default"},
      Decision::Save);
  return std::make_shared<const Policy>(std::move(rules), Decision::Recompute);
}

}  // namespace ebb
