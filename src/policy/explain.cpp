#include <c10/util/StringUtil.h>

#include <vector>

#include "policy/compiled_policy.h"

namespace ebb {
namespace {

const char* nameOf(Decision decision) {
  switch (decision) {
    case Decision::Save:
      return "SAVE";
    case Decision::Recompute:
      return "RECOMPUTE";
    case Decision::Offload:
      return "OFFLOAD";
    case Decision::Page:
      return "PAGE";
    case Decision::RecomputeEachTime:
      return "RECOMPUTE_EACH_TIME";
  }
  return "?";
}

// The rule's conditions besides the operator's name; empty if there are none.
std::string conditionsOf(const Rule& rule) {
  std::vector<std::string> all;
  if (!rule.module.empty()) {
    all.push_back(c10::str("in modules that match '", rule.module, "'"));
  }
  const char* counted = rule.perModule ? " of a module" : " of a region";
  if (rule.nth > 0) {
    all.push_back(c10::str("for call ", rule.nth, counted));
  }
  if (rule.every > 1) {
    all.push_back(c10::str("for calls ", rule.every, ", ", 2 * rule.every, ", ..", counted));
  }
  if (!rule.name.empty()) {
    all.push_back(c10::str("with name '", rule.name, "'"));
  }
  if (rule.minBytes > 0) {
    all.push_back(c10::str("of at least ", rule.minBytes, " bytes"));
  }
  if (rule.maxBytes < SIZE_MAX) {
    all.push_back(c10::str("of at most ", rule.maxBytes, " bytes"));
  }
  if (rule.dtype) {
    all.push_back(c10::str("of dtype ", *rule.dtype));
  }
  std::string joined;
  for (const std::string& condition : all) {
    joined += (joined.empty() ? "" : ", ") + condition;
  }
  return joined;
}

}  // namespace

std::string ruleInWords(const RulePolicy& policy, uint16_t rule) {
  if (rule == Verdict::kNoRule) {
    return "default";
  }
  const Rule& which = policy.rules().at(rule);
  const std::string conditions = conditionsOf(which);
  const char* separator = conditions.empty() ? "" : ", ";
  return c10::str("rule ", rule, ", '", which.op, "'", separator, conditions);
}

std::string explain(const RulePolicy& policy, const std::string& op) {
  std::string text;
  for (const std::string& name : operatorsNamed(normalisedOperatorName(op))) {
    text += name + "\n";
    for (const auto& candidate : policy.candidatesFor(name)) {
      const Verdict& verdict = candidate.verdict;
      text +=
          c10::str("  ", nameOf(verdict.decision), " by ", ruleInWords(policy, verdict.rule), "\n");
    }
  }
  text.pop_back();
  return text;
}

}  // namespace ebb
