#include "report/journal_names.h"

#include <algorithm>
#include <utility>

namespace ebb {

const std::string* JournalNames::intern(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  return &*strings_.insert(text).first;
}

const std::string* JournalNames::ruleThatDecided(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  return *decidingRules_.insert(&*strings_.insert(text).first).first;
}

bool JournalNames::isNewPolicy(std::shared_ptr<const void> policy) {
  std::lock_guard<std::mutex> lock(mutex_);
  return policies_.insert(std::move(policy)).second;
}

void JournalNames::addRule(const std::string& text) {
  const std::string* rule = intern(text);
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(rules_.begin(), rules_.end(), rule) == rules_.end()) {
    rules_.push_back(rule);
  }
}

std::vector<std::string> JournalNames::idleRules() const {
  std::vector<std::string> idle;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const std::string* rule : rules_) {
    if (decidingRules_.count(rule) == 0) {
      idle.push_back(*rule);
    }
  }
  return idle;
}

}  // namespace ebb
