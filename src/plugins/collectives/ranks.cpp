#include "plugins/collectives/ranks.h"

#include <c10/util/Exception.h>

#include "conditions/collective.h"

namespace ebb {
namespace {

const CollectivesOfRanks* ranks = nullptr;

// Throws if another rank will not take part in a collective of the process group `group`.
void checkOtherRanks(const std::string& group) {
  if (ranks != nullptr) {
    const std::string why = ranks->problem(group);
    TORCH_CHECK(why.empty(), why);
  }
}

[[maybe_unused]] const bool isCalledWhileWaiting = callWhileWaiting(&checkOtherRanks);

}  // namespace

void setCollectivesOfRanks(const CollectivesOfRanks& given) {
  ranks = new CollectivesOfRanks(given);  // set once, at import; never freed
}

const CollectivesOfRanks* collectivesOfRanks() {
  return ranks;
}

}  // namespace ebb
