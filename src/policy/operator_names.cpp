#include "policy/operator_names.h"

#include <algorithm>
#include <numeric>

#include "policy/glob.h"

namespace ebb {
namespace {

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

}  // namespace

bool operatorMatches(std::string_view pattern, std::string_view qualifiedName) {
  const std::string_view name = qualifiedName.substr(0, qualifiedName.rfind('.'));
  return globMatches(pattern, name) || globMatches(pattern, qualifiedName);
}

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

}  // namespace ebb
