#include "plugins/offload/accounts.h"

#include <map>
#include <mutex>

#include "counts/statistics.h"
#include "support/leaked.h"

namespace ebb {
namespace {

struct Accounts {
  std::mutex mutex;
  std::map<std::string, std::map<std::string, TransferAccountPtr>> ofStep;  // by region and op
};

Accounts& accounts() { return leaked<Accounts>(); }

void forgetLastStep(uint64_t) {
  std::lock_guard<std::mutex> lock(accounts().mutex);
  accounts().ofStep.clear();
}

void addTransfers(Stats& stats) {
  std::lock_guard<std::mutex> lock(accounts().mutex);
  for (const auto& [region, ofRegion] : accounts().ofStep) {
    for (const auto& [op, account] : ofRegion) {
      stats.transfers[region][op] = account->counters();
    }
  }
}

[[maybe_unused]] const bool areRegistered =
    callWhenStepBegins(&forgetLastStep) && addToStats(&addTransfers);

}  // namespace

TransferAccountPtr transferAccount(const std::string& region, const std::string& op) {
  std::lock_guard<std::mutex> lock(accounts().mutex);
  TransferAccountPtr& account = accounts().ofStep[region][op];
  if (!account) {
    account = std::make_shared<TransferAccount>(
        (op == "input" ? "an input" : "an output of " + op) + " offloaded in region '" + region +
        "'");
  }
  return account;
}

}  // namespace ebb
