#include "hooks/observer.h"

#include <vector>

namespace ebb {
namespace {

// Filled while libraries are loaded, so the lists need no lock.
std::vector<AddObservers>& plugins(Turn turn) {
  static auto* any = new std::vector<AddObservers>;
  static auto* last = new std::vector<AddObservers>;
  return turn == Turn::Any ? *any : *last;
}

std::vector<void (*)(const at::Tensor&)>& beforeWrites() {
  static auto* all = new std::vector<void (*)(const at::Tensor&)>;
  return *all;
}

}  // namespace

bool observeGraphs(AddObservers add, Turn turn) {
  plugins(turn).push_back(add);
  return true;
}

void addObservers(Graph& graph) {
  for (const Turn turn : {Turn::Any, Turn::Last}) {
    for (const auto add : plugins(turn)) {
      add(graph);
    }
  }
}

bool callBeforeUnseenWrites(void (*before)(const at::Tensor& tensor)) {
  beforeWrites().push_back(before);
  return true;
}

void beforeUnseenWrite(const at::Tensor& tensor) {
  for (const auto before : beforeWrites()) {
    before(tensor);
  }
}

}  // namespace ebb
