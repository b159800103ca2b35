#include "region/policy.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <set>

#include "region/op_pattern.h"

namespace ebb {
namespace {

std::vector<std::string> registeredOperators() {
  std::vector<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    names.push_back(qualifiedName(name));
  }
  return names;
}

[[noreturn]] void throwUnknown(const std::string& pattern, const std::vector<std::string>& all) {
  std::set<std::string> known;
  const bool overload = pattern.find('.') != std::string::npos;
  for (const std::string& name : all) {
    known.insert(overload ? name : name.substr(0, name.rfind('.')));
  }
  std::string nearest;
  for (const auto& name : nearestNames(pattern, {known.begin(), known.end()}, 3)) {
    nearest += (nearest.empty() ? "" : ", ") + name;
  }
  TORCH_CHECK_VALUE(
      false,
      "ebb: the rule '",
      pattern,
      "' matches no registered operator. Nearest names: ",
      nearest,
      ". If a library defines the operator, import it before making the policy.");
}

void checkDecision(Decision decision) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      decision != Decision::Page,
      "ebb: PAGE needs the device page pool, which this version does not have. Use SAVE, "
      "RECOMPUTE or OFFLOAD.");
}

}  // namespace

std::string normalisedOperatorName(const std::string& name) {
  if (name.find("::") != std::string::npos) {
    return name;
  }
  const size_t dot = name.find('.');
  return dot == std::string::npos ? name : name.substr(0, dot) + "::" + name.substr(dot + 1);
}

Policy::Policy(std::vector<Rule> rules, Decision fallback, Decision inputs, uint32_t faultAt)
    : rules_(std::move(rules)),
      fallback_(fallback),
      inputs_(inputs),
      faultAt_(faultAt),
      table_(new std::atomic<const Candidates*>[kTableSize] {}) {
  checkDecision(fallback_);
  TORCH_CHECK_VALUE(
      inputs_ == Decision::Save || inputs_ == Decision::Offload,
      "ebb: a region's inputs have no recipe: their decision is SAVE or OFFLOAD.");
  const auto known = rules_.empty() ? std::vector<std::string>{} : registeredOperators();
  for (Rule& rule : rules_) {
    rule.op = normalisedOperatorName(rule.op);
    checkDecision(rule.decision);
    TORCH_CHECK_VALUE(
        rule.every >= 1, "ebb: the rule '", rule.op, "' has every=0; the least is 1, each call.");
    TORCH_CHECK_VALUE(
        !rule.force || !isGlob(rule.op),
        "ebb: the rule '",
        rule.op,
        "' is a glob with force; name the operator exactly to have it replayed.");
    const bool matches = std::any_of(known.begin(), known.end(), [&](const std::string& name) {
      return operatorMatches(rule.op, name);
    });
    if (!matches) {
      throwUnknown(rule.op, known);
    }
  }
}

Policy::~Policy() = default;

const Policy::Candidates& Policy::candidates(const OpTraits& op) const {
  if (op.index < kTableSize) {
    if (const auto* known = table_[op.index].load(std::memory_order_acquire)) {
      return *known;
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return compile(op);
}

[[gnu::cold]] const Policy::Candidates& Policy::compile(const OpTraits& op) const {
  for (const auto& [index, known] : beyond_) {
    if (index == op.index) {
      return *known;
    }
  }
  Candidates& candidates = compiled_.emplace_back();
  if (faultAt_ != 0) {
    candidates.push_back({{}, 0, static_cast<uint32_t>(rules_.size())});
  }
  for (uint32_t i = 0; i < rules_.size(); ++i) {
    if (operatorMatches(rules_[i].op, op.name)) {
      candidates.push_back({{rules_[i].decision, rules_[i].force, true}, rules_[i].every, i});
      if (rules_[i].every == 1) {
        break;
      }
    }
  }
  if (candidates.empty() || candidates.back().every != 1) {
    candidates.push_back({{fallback_, false, false}, 1, 0});
  }
  if (op.index < kTableSize) {
    table_[op.index].store(&candidates, std::memory_order_release);
  } else {
    beyond_.emplace_back(op.index, &candidates);
  }
  return candidates;
}

PolicyPtr makePolicy(std::vector<Rule> rules, Decision fallback, Decision inputs) {
  return std::make_shared<const Policy>(std::move(rules), fallback, inputs);
}

ActivePolicy::ActivePolicy(PolicyPtr policy) : policy_(std::move(policy)) {
}

Decision ActivePolicy::inputs() const {
  return policy_->inputs();
}

Verdict ActivePolicy::decide(const OpTraits& op) {
  for (const auto& candidate : policy_->candidates(op)) {
    if (candidate.every == 1) {
      return candidate.verdict;
    }
    if (calls_.empty()) {
      calls_.resize(policy_->rules().size() + 1, 0);
    }
    const uint32_t calls = ++calls_[candidate.rule];
    if (candidate.every == 0) {
      TORCH_CHECK(calls != policy_->faultAt(), "ebb: fault injected before ", op.name);
    } else if (calls % candidate.every == 0) {
      return candidate.verdict;
    }
  }
  TORCH_INTERNAL_ASSERT(false, "no rule decides on ", op.name);
}

}  // namespace ebb
