#include "policy/glob.h"

namespace ebb {
namespace {

constexpr size_t kNone = std::string_view::npos;

// The UTF-8 code point at `at`; advances `at` past it. In invalid UTF-8, a byte that begins no
// sequence is returned as it is.
char32_t takePoint(std::string_view text, size_t& at) {
  const auto first = static_cast<unsigned char>(text[at++]);
  const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : first >= 0xC0 ? 1 : 0;
  char32_t point = more == 0 ? first : first & (0x3F >> more);
  for (int k = 0; k < more && at < text.size(); ++k) {
    point = point << 6 | (static_cast<unsigned char>(text[at++]) & 0x3F);
  }
  return point;
}

// The position of the `]` that closes a set; `at` is the position after the set's `[`. kNone: there
// is no such `]`.
size_t endOfSet(std::string_view pattern, size_t at) {
  at += at < pattern.size() && pattern[at] == '!';
  return pattern.find(']', at + 1);  // a first `]` belongs to the set
}

// True if the set, given without brackets, contains `point`.
bool setHas(std::string_view set, char32_t point) {
  const bool without = !set.empty() && set[0] == '!';
  bool found = false;
  for (size_t i = without; i < set.size();) {
    const char32_t first = takePoint(set, i);
    char32_t last = first;
    if (i + 1 < set.size() && set[i] == '-') {
      last = takePoint(set, ++i);
    }
    found |= first <= point && point <= last;
  }
  return found != without;
}

// True if the pattern's element at `at` matches `point`; moves `at` behind the element.
bool takesPoint(std::string_view pattern, size_t& at, char32_t point) {
  const size_t end = pattern[at] == '[' ? endOfSet(pattern, at + 1) : kNone;
  if (end != kNone) {
    const auto set = pattern.substr(at + 1, end - at - 1);
    at = end + 1;
    return setHas(set, point);
  }
  const bool any = pattern[at] == '?';
  return takePoint(pattern, at) == point || any;
}

}  // namespace

bool globMatches(std::string_view pattern, std::string_view text) {
  size_t p = 0;
  size_t t = 0;
  size_t star = kNone;  // the last `*` seen
  size_t retry = 0;     // the position in `text` up to which the star matches
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      retry = t;
      continue;
    }
    size_t nextOfText = t;
    const char32_t point = takePoint(text, nextOfText);
    size_t nextOfPattern = p;
    if (p < pattern.size() && takesPoint(pattern, nextOfPattern, point)) {
      p = nextOfPattern;
      t = nextOfText;
    } else if (star != kNone) {
      p = star + 1;
      takePoint(text, retry);
      t = retry;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == kNone;
}

bool isGlob(std::string_view pattern) { return pattern.find_first_of("*?[") != kNone; }

bool operatorMatches(std::string_view pattern, std::string_view qualifiedName) {
  const std::string_view name = qualifiedName.substr(0, qualifiedName.rfind('.'));
  return globMatches(pattern, name) || globMatches(pattern, qualifiedName);
}

}  // namespace ebb
