#include "plugins/collectives/ranks.h"

#include <c10/util/Exception.h>

namespace ebb {
namespace {

const CollectivesOfRanks* ranks = nullptr;

}  // namespace

void setCollectivesOfRanks(const CollectivesOfRanks& given) {
  ranks = new CollectivesOfRanks(given);  // set once, at import; never freed
}

const CollectivesOfRanks* collectivesOfRanks() { return ranks; }

void checkOtherRanks(const std::string& group) {
  if (ranks != nullptr) {
    const std::string why = ranks->problem(group);
    TORCH_CHECK(why.empty(), why);
  }
}

}  // namespace ebb
