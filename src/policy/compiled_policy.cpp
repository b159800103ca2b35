#include "policy/compiled_policy.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "hooks/store.h"
#include "intercept/op_tables.h"
#include "policy/glob.h"
#include "policy/module_scope.h"

namespace ebb {
namespace {

std::vector<std::string> registeredOperators() {
  std::vector<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    names.push_back(qualifiedName(name));
  }
  return names;
}

// True if torch decomposes this operator into others before ebb sees the call.
bool isComposite(const std::string& qualified) {
  const size_t dot = qualified.rfind('.');
  const std::string overload = qualified.substr(dot + 1);
  const auto op = c10::Dispatcher::singleton().findSchema(
      {qualified.substr(0, dot), overload == "default" ? "" : overload});
  return op && op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

// Levenshtein's edit distance.
size_t editDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

// The `count` names most like `name`, best first.
std::vector<std::string> nearestNames(
    std::string_view name, const std::vector<std::string>& names, size_t count) {
  std::vector<std::pair<size_t, const std::string*>> ranked;
  for (const std::string& candidate : names) {
    ranked.emplace_back(editDistance(name, candidate), &candidate);
  }
  // A name is not near if more than half of the letters differ, namespace aside.
  const size_t space = name.find("::");
  const size_t letters = name.size() - (space == std::string_view::npos ? 0 : space + 2);
  std::erase_if(ranked, [&](const auto& entry) { return 2 * entry.first > letters; });
  count = std::min(count, ranked.size());
  std::partial_sort(
      ranked.begin(), ranked.begin() + count, ranked.end(), [](const auto& a, const auto& b) {
        return a.first != b.first ? a.first < b.first : *a.second < *b.second;
      });
  std::vector<std::string> nearest;
  for (size_t i = 0; i < count; ++i) {
    nearest.push_back(*ranked[i].second);
  }
  return nearest;
}

std::string unknownInWords(
    const std::string& what, const std::string& pattern, const std::vector<std::string>& all) {
  std::set<std::string> known;
  const bool overload = pattern.find('.') != std::string::npos;
  for (const std::string& name : all) {
    if (!isComposite(name)) {
      known.insert(overload ? name : name.substr(0, name.rfind('.')));
    }
  }
  std::string nearest;
  for (const auto& name : nearestNames(pattern, {known.begin(), known.end()}, 3)) {
    nearest += (nearest.empty() ? "; did you mean " : ", ") + name;
  }
  return what + " matches no registered operator" + (nearest.empty() ? "." : nearest + "?");
}

constexpr const char* kImportFirst =
    " If a library defines the operator, import it before making the policy.";

// True if the rule has a condition that is known when an op is called.
bool isOnCall(const Rule& rule) { return !rule.module.empty() || rule.every > 1 || rule.nth > 0; }

// True if the rule has a condition on a result.
bool isOnResult(const Rule& rule) {
  return !rule.name.empty() || rule.minBytes > 0 || rule.maxBytes < SIZE_MAX || rule.dtype;
}

constexpr size_t kMostCandidates = 64;  // Verdict::perResult has a bit for each

void checkRule(const Rule& rule) {
  const auto check = [&](bool good, const char* what) {
    TORCH_CHECK_VALUE(good, "ebb: the rule '", rule.op, "' ", what);
  };
  check(rule.every >= 1, "has every=0; it must be at least 1 (each call).");
  check(rule.every == 1 || rule.nth == 0, "has both every and nth; give one.");
  check(
      !rule.perModule || rule.every > 1 || rule.nth > 0,
      "has per_module without every or nth, so there is nothing to count.");
  check(rule.minBytes <= rule.maxBytes, "has min_bytes larger than max_bytes: nothing matches.");
  check(
      rule.name.empty() || (rule.every == 1 && rule.nth == 0 && !rule.force),
      "combines name with every, nth or force, but a value gets its name only after the op "
      "has run (ebb.checkpoint_name).");
  check(
      !rule.force || !isGlob(rule.op),
      "combines force with a glob; force needs the exact name of one operator.");
  check(
      !rule.force || !communicates(rule.op) ||
          isRepeatableCollective(rule.op.substr(0, rule.op.rfind('.'))),
      "has force for a communication that replays cannot repeat, because ranks have different "
      "parts "
      "in it; remove force: its results are saved.");
  check(
      !rule.force || !communicates(rule.op) || rule.decision != Decision::RecomputeEachTime,
      "has RECOMPUTE_EACH_TIME for a collective; use RECOMPUTE: all ranks must repeat a collective "
      "equally often.");
  check(
      !rule.force || !isOnResult(rule),
      "combines force with a condition on the result, which is not known before the op runs.");
}

bool matchesSize(const Rule& rule, const at::Tensor& result) {
  const size_t nbytes = result.storage().nbytes();
  return nbytes >= rule.minBytes && nbytes <= rule.maxBytes &&
         (!rule.dtype || *rule.dtype == result.scalar_type());
}

// True if the rule matches a new result. A new result has no name, so no rule with a name matches.
bool matchesResult(const Rule& rule, const at::Tensor& result) {
  return rule.name.empty() && matchesSize(rule, result);
}

}  // namespace

std::string normalisedOperatorName(const std::string& name) {
  if (name.find("::") != std::string::npos) {
    return name;
  }
  const size_t dot = name.find('.');
  if (dot != std::string::npos) {
    return name.substr(0, dot) + "::" + name.substr(dot + 1);
  }
  return isGlob(name) ? name : "aten::" + name;
}

std::vector<std::string> operatorsNamed(const std::string& pattern) {
  std::vector<std::string> found = registeredOperators();
  std::erase_if(found, [&](const auto& name) { return !operatorMatches(pattern, name); });
  TORCH_CHECK_VALUE(
      !found.empty(), "ebb: ", unknownInWords("'" + pattern + "'", pattern, registeredOperators()),
      kImportFirst);
  std::sort(found.begin(), found.end());
  return found;
}

RulePolicy::RulePolicy(std::vector<Rule> rules, Decision fallback, Decision inputs, Names names)
    : rules_(std::move(rules)),
      fallback_(fallback),
      inputs_(inputs),
      table_(new std::atomic<const Candidates*>[kTableSize] {}) {
  TORCH_CHECK_VALUE(
      !recomputes(inputs_),
      "ebb: inputs of a region cannot be recomputed: inputs must be SAVE, OFFLOAD or PAGE.");
  for (Rule& rule : rules_) {
    rule.op = normalisedOperatorName(rule.op);
    checkRule(rule);
  }
  for (const auto& [rule, message] : unmatched()) {
    const bool mayCome = names == Names::Later && !isTorchsOwn(rule->op);
    TORCH_CHECK_VALUE(mayCome, "ebb: ", message, kImportFirst);
  }
  stores_ = gives(Decision::Offload) || gives(Decision::Page);
}

std::vector<std::pair<const Rule*, std::string>> RulePolicy::unmatched() const {
  std::vector<std::pair<const Rule*, std::string>> found;
  const auto known = rules_.empty() ? std::vector<std::string>{} : registeredOperators();
  for (const Rule& rule : rules_) {
    const bool matches = std::any_of(known.begin(), known.end(), [&](const std::string& name) {
      return operatorMatches(rule.op, name);
    });
    if (!matches) {
      found.emplace_back(&rule, unknownInWords("the rule '" + rule.op + "'", rule.op, known));
    }
  }
  return found;
}

std::unique_ptr<Decider> RulePolicy::activate() const {
  for (const Decision decision : {Decision::Offload, Decision::Page}) {
    if (stores_ && gives(decision)) {
      storeOf(decision);  // throws if the decision's plug-in is not built
    }
  }
  return std::make_unique<RuleDecider>(
      std::static_pointer_cast<const RulePolicy>(shared_from_this()));
}

std::vector<std::string> RulePolicy::rulesInWords() const {
  std::vector<std::string> found;
  for (size_t rule = 0; rule < rules_.size(); ++rule) {
    if (!rules_[rule].preset) {
      found.push_back(ruleInWords(*this, static_cast<uint16_t>(rule)));
    }
  }
  return found;
}

bool RulePolicy::asksForModules() const {
  return std::any_of(rules_.begin(), rules_.end(), [](const Rule& rule) {
    return !rule.module.empty() || rule.perModule;
  });
}

bool RulePolicy::gives(Decision decision) const {
  const auto is = [=](Decision given) { return given == decision; };
  return is(inputs_) || is(fallback_) ||
         std::any_of(rules_.begin(), rules_.end(), [&](auto& r) { return is(r.decision); });
}

const RulePolicy::Candidates& RulePolicy::candidates(const OpTraits& op) const {
  if (op.index < kTableSize) {
    if (const auto* known = table_[op.index].load(std::memory_order_acquire)) {
      return *known;
    }
  }
  return compile(op);
}

[[gnu::cold]] const RulePolicy::Candidates& RulePolicy::compile(const OpTraits& op) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = compiled_.find(op.index);
  if (found == compiled_.end()) {
    found = compiled_.emplace(op.index, candidatesFor(op.name)).first;
  }
  TORCH_CHECK_VALUE(
      found->second.size() <= kMostCandidates, "ebb: more than ", kMostCandidates, " rules match ",
      op.name, " (the default counts as one). Merge some of them with a glob.");
  if (op.index < kTableSize) {
    table_[op.index].store(&found->second, std::memory_order_release);
  }
  return found->second;
}

RulePolicy::Candidates RulePolicy::candidatesFor(const std::string& op) const {
  Candidates candidates;
  for (size_t i = 0; i < rules_.size(); ++i) {
    const Rule& rule = rules_[i];
    if (operatorMatches(rule.op, op)) {
      const bool onCall = isOnCall(rule);
      const bool onResult = isOnResult(rule);
      const Verdict verdict{rule.decision, rule.force, true, static_cast<uint16_t>(i)};
      candidates.push_back({verdict, &rule, onCall, onResult});
      if (!onCall && !onResult) {
        return candidates;
      }
    }
  }
  candidates.push_back({{fallback_}, nullptr, false, false});
  return candidates;
}

bool RulePolicy::matchesModule(const Rule& rule, uint32_t module) const {
  if (module == 0) {
    if (!anyModuleHasNumber()) {
      TORCH_WARN_ONCE(
          "ebb: rules with module= have no effect in this region, because it has no root model. "
          "Use ebb.apply, or ebb.region(policy, root=model).");
    }
    return false;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  modules_.resize(rules_.size());
  auto& known = modules_[static_cast<size_t>(&rule - rules_.data())];
  known.resize(std::max<size_t>(known.size(), module + 1), 0);
  if (known[module] == 0) {
    const ModuleNames& names = moduleNames(module);
    const bool matches =
        globMatches(rule.module, names.plain) || globMatches(rule.module, names.full);
    known[module] = matches ? 1 : -1;
  }
  return known[module] > 0;
}

PolicyPtr makePolicy(std::vector<Rule> rules, Decision fallback, Decision inputs) {
  return std::make_shared<const RulePolicy>(std::move(rules), fallback, inputs);
}

const RulePolicy& rulesOf(const PolicyPtr& policy) {
  const auto* rules = dynamic_cast<const RulePolicy*>(policy.get());
  TORCH_CHECK_VALUE(rules != nullptr, "ebb: this policy consists of no rules.");
  return *rules;
}

Verdict RuleDecider::decide(const OpTraits& op) {
  const auto& candidates = policy_->candidates(op);
  return candidates.size() == 1 ? candidates.front().verdict : decideWith(candidates);
}

Verdict RuleDecider::decideWith(const RulePolicy::Candidates& candidates) {
  uint64_t matching = 0;
  Verdict verdict;
  bool byRule = false;
  bool dependsOnResult = false;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const auto& candidate = candidates[i];
    if (candidate.onCall && !matchesCall(candidate)) {
      continue;
    }
    matching |= uint64_t{1} << i;
    byRule |= candidate.verdict.byRule;
    if (!candidate.onResult) {
      verdict = candidate.verdict;
      break;
    }
    dependsOnResult = true;
  }
  verdict.byRule = byRule;
  verdict.perResult = dependsOnResult ? matching : 0;
  return verdict;
}

Verdict RuleDecider::decideOn(const OpTraits& op, const at::Tensor& result, const Verdict& call) {
  const auto& candidates = policy_->candidates(op);
  for (size_t i = 0; i < candidates.size(); ++i) {
    const auto& candidate = candidates[i];
    const bool matches = (call.perResult >> i & 1) != 0;
    if (matches && (!candidate.onResult || matchesResult(*candidate.rule, result))) {
      return candidate.verdict;
    }
  }
  return {};
}

// Returns the verdict of the first rule with this name that comes before `rule`. Such a rule counts
// no calls (see checkRule), since the number of the call is no longer known.
std::optional<Verdict> RuleDecider::decideOnNamed(
    const OpTraits& op, const at::Tensor& result, uint16_t rule, const std::string& name) {
  for (const auto& candidate : policy_->candidates(op)) {
    if (candidate.rule == nullptr || candidate.verdict.rule >= rule) {
      continue;
    }
    const Rule& asked = *candidate.rule;
    const bool inModule = asked.module.empty() || policy_->matchesModule(asked, currentModule());
    if (asked.name == name && inModule && matchesSize(asked, result)) {
      return candidate.verdict;
    }
  }
  return {};
}

bool RuleDecider::matchesCall(const RulePolicy::Candidate& candidate) {
  const Rule& rule = *candidate.rule;
  if (!rule.module.empty() && !policy_->matchesModule(rule, currentModule())) {
    return false;
  }
  if (rule.every == 1 && rule.nth == 0) {
    return true;
  }
  const uint32_t calls = countCall(rule);
  return rule.nth != 0 ? calls == rule.nth : calls % rule.every == 0;
}

uint32_t RuleDecider::countCall(const Rule& rule) {
  if (rule.perModule) {
    return ++callsInModule_[{&rule, currentModule()}];
  }
  if (calls_.empty()) {
    calls_.resize(policy_->rules().size(), 0);
  }
  return ++calls_[static_cast<size_t>(&rule - policy_->rules().data())];
}

const std::string& RuleDecider::module() const { return moduleNames(currentModule()).plain; }

}  // namespace ebb
