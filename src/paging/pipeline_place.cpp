#include "paging/pipeline_place.h"

#include <mutex>
#include <thread>
#include <unordered_map>

namespace ebb {
namespace {

// Places of the threads that have set one.
struct Places {
  std::mutex mutex;
  std::unordered_map<std::thread::id, PipelinePlace> named;
};

Places& places() {
  static auto* instance = new Places;
  return *instance;
}

}  // namespace

PipelinePlace pipelinePlace() {
  std::lock_guard<std::mutex> lock(places().mutex);
  const auto found = places().named.find(std::this_thread::get_id());
  return found == places().named.end() ? PipelinePlace{} : found->second;
}

PipelinePlace exchangePipelinePlace(PipelinePlace place) {
  const PipelinePlace before = pipelinePlace();
  std::lock_guard<std::mutex> lock(places().mutex);
  if (place == PipelinePlace{}) {
    places().named.erase(std::this_thread::get_id());
  } else {
    places().named.insert_or_assign(std::this_thread::get_id(), place);
  }
  return before;
}

}  // namespace ebb
