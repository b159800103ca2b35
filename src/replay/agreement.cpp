#include "replay/agreement.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <set>

#include "support/python_support.h"

namespace ebb {
namespace {

// The lists on which this process agreed with the others of a group.
struct Agreed {
  std::mutex mutex;
  std::set<std::string> lists;

  static Agreed& get() {
    static auto* instance = new Agreed;
    return *instance;
  }

  bool has(const std::string& list) {
    std::lock_guard<std::mutex> lock(mutex);
    return lists.contains(list);
  }

  void add(const std::string& list) {
    std::lock_guard<std::mutex> lock(mutex);
    lists.insert(list);
  }
};

}  // namespace

void agreeOnCollectives(
    const std::string& group,
    const std::string& region,
    const std::string& collectives,
    bool always) {
  const std::string list = group + '\n' + region + '\n' + collectives;
  if (!always && Agreed::get().has(list)) {
    return;
  }
  const PythonSupport* python = pythonSupport();
  TORCH_CHECK(
      python != nullptr,
      "ebb: cannot recompute the collectives of region '",
      region,
      "' in a program without Python: its ranks cannot compare them. Use a policy that keeps the "
      "results of collectives.");
  const std::string why = python->compareCollectives(group, region, collectives);
  TORCH_CHECK(why.empty(), why);
  Agreed::get().add(list);
}

}  // namespace ebb
