// Tables of fields: a struct lists its members once. Code that visits every member (to add structs,
// or to convert them to Python dictionaries) iterates over this table.
//
// A struct with a table has
//   static constexpr auto fields(auto function) {
//     return function(Field{"row_bytes", &Pool::rowBytes}, ...);
//   }
// Using a table that does not name each member exactly once is a compile error.
#pragma once

#include <concepts>
#include <cstddef>
#include <string_view>

namespace ebb {

template <class Struct, class Type>
struct Field {
  const char* name;  // the key in Python's dictionaries and in the documentation
  Type Struct::* member;
};

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
  bool same = std::string_view(one.name) == other.name;
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

// Calls `function` with each row of the struct's table, in order.
template <HasFields Struct, class Function>
constexpr void forEachField(Function&& function) {
  static_assert(detail::namesEachMemberOnce<Struct>(), "the table must name each member once");
  Struct::fields([&](auto... field) { (function(field), ...); });
}

}  // namespace ebb
