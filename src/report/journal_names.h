// The strings that a journal's lines refer to.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

namespace ebb {

// The strings and rules of a journal. Strings live as long as the journal, so lines compare and
// copy them as pointers.
class JournalNames {
 public:
  const std::string* intern(const std::string& text);

  // Like intern(), for a rule that has decided on a value.
  const std::string* ruleThatDecided(const std::string& text);

  // True at the first call for this policy. The policy lives as long as the journal.
  bool isNewPolicy(std::shared_ptr<const void> policy);

  // Adds a policy's rule, in words.
  void addRule(const std::string& text);

  // The rules that decided on nothing.
  std::vector<std::string> idleRules() const;

 private:
  mutable std::mutex mutex_;  // guards all members below
  std::unordered_set<std::string> strings_;
  std::set<std::shared_ptr<const void>> policies_;
  std::vector<const std::string*> rules_;       // of all policies
  std::set<const std::string*> decidingRules_;  // rules that decided on a value
};

}  // namespace ebb
