// Lists of fields: a struct lists its members once. Code that visits every member (to add structs,
// or to convert them to Python dictionaries) iterates over this list.
//
// A struct with a list has EBB_FIELDS(Pool, pages, rowBytes, isStack): all members, in any order.
// Their names in Python's dictionaries and in documents are then pages, row_bytes and stack.
// A list that does not name each member exactly once is a compile error.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <string_view>

namespace ebb {

using FieldName = std::array<char, 32>;  // ends with a zero

// "rowBytes" becomes "row_bytes", and "isStack" becomes "stack".
consteval FieldName fieldName(std::string_view member) {
  constexpr auto isCapital = [](char letter) { return letter >= 'A' && letter <= 'Z'; };
  const bool isQuestion = member.starts_with("is") && isCapital(member[2]);
  FieldName name{};
  char* end = name.data();
  for (const char letter : member.substr(isQuestion ? 2 : 0)) {
    if (isCapital(letter) && end != name.data()) {
      *end++ = '_';
    }
    *end++ = isCapital(letter) ? static_cast<char>(letter - 'A' + 'a') : letter;
  }
  return name;
}

template <class Struct, class Type>
struct Field {
  FieldName name;  // the key in Python's dictionaries and in the documentation
  Type Struct::* member;
};

// A static method that calls `function` once; the arguments are Fields, one for each listed member.
// A macro cannot call itself, so EBB_EACH ends in EBB_EACH_AGAIN, and EBB_SCAN expands
// EBB_EACH_AGAIN. A list has at most 22 members.
#define EBB_FIELDS(Struct, ...)                               \
  static constexpr auto fields(auto function) {               \
    return function(EBB_SCAN(EBB_EACH(Struct, __VA_ARGS__))); \
  }
#define EBB_EACH(Struct, member, ...)                                  \
  ::ebb::Field{::ebb::fieldName(#member), &Struct::member} __VA_OPT__( \
      , EBB_EACH_AGAIN EBB_NOTHING(Struct, __VA_ARGS__))
#define EBB_EACH_AGAIN() EBB_EACH
#define EBB_NOTHING ()
#define EBB_SCAN(...) EBB_SCAN16(EBB_SCAN16(EBB_SCAN16(EBB_SCAN16(__VA_ARGS__))))
#define EBB_SCAN16(...) EBB_SCAN4(EBB_SCAN4(EBB_SCAN4(EBB_SCAN4(__VA_ARGS__))))
#define EBB_SCAN4(...) __VA_ARGS__

template <class Struct>
concept HasFields = requires { Struct::fields([](auto...) {}); };

namespace detail {
struct Anything {
  template <class Type>
  operator Type() const;  // never called
};
}  // namespace detail

// The number of members of an aggregate: the most initialisers that the aggregate accepts.
template <class Struct, class... Given>
consteval size_t memberCount() {
  if constexpr (requires { Struct{Given{}..., detail::Anything{}}; }) {
    return memberCount<Struct, Given..., detail::Anything>();
  } else {
    return sizeof...(Given);
  }
}

namespace detail {

template <class One, class Other>
constexpr bool areTheSame(One one, Other other) {
  bool same = one.name == other.name;
  if constexpr (std::same_as<One, Other>) {
    same |= one.member == other.member;
  }
  return same;
}

template <HasFields Struct>
constexpr bool namesEachMemberOnce() {
  const auto isOnce = [](auto one, auto... all) { return (areTheSame(one, all) + ...) == 1; };
  const auto areOnce = [&](auto... all) {
    return sizeof...(all) == memberCount<Struct>() && (isOnce(all, all...) && ...);
  };
  return Struct::fields(areOnce);
}

}  // namespace detail

// Calls `function` with each Field of the struct's list, in order.
template <HasFields Struct, class Function>
constexpr void forEachField(Function&& function) {
  static_assert(detail::namesEachMemberOnce<Struct>(), "the list must name each member once");
  Struct::fields([&](auto... field) { (function(field), ...); });
}

}  // namespace ebb
