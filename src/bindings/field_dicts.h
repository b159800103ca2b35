// Conversion of structs with a list of fields to and from Python dictionaries, keyed by the names
// of the fields.
#pragma once

#include <torch/csrc/python_headers.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <type_traits>

#include "ebb/fields.h"

namespace ebb::bindings {

template <HasFields Struct>
pybind11::dict toDict(const Struct& from) {
  pybind11::dict dict;
  forEachField<Struct>([&](auto field) { dict[field.name.data()] = from.*field.member; });
  return dict;
}

template <HasFields Struct>
Struct fromDict(const pybind11::dict& dict) {
  Struct to;
  forEachField<Struct>([&](auto field) {
    using Type = std::remove_reference_t<decltype(to.*field.member)>;
    to.*field.member = dict[field.name.data()].template cast<Type>();
  });
  return to;
}

// Converts an enumeration to and from a Python integer.
template <class Enum>
struct NumberCaster {
  PYBIND11_TYPE_CASTER(Enum, pybind11::detail::const_name("int"));

  bool load(pybind11::handle from, bool convert) {
    pybind11::detail::make_caster<int> number;
    if (!number.load(from, convert)) {
      return false;
    }
    value = static_cast<Enum>(pybind11::detail::cast_op<int>(number));
    return true;
  }
  static pybind11::handle cast(Enum from, pybind11::return_value_policy, pybind11::handle) {
    return pybind11::int_(static_cast<int>(from)).release();
  }
};

}  // namespace ebb::bindings

template <ebb::HasFields Struct>
struct pybind11::detail::type_caster<Struct> {
  PYBIND11_TYPE_CASTER(Struct, const_name("dict"));

  bool load(handle from, bool) {
    const bool isDict = isinstance<dict>(from);
    if (isDict) {
      value = ebb::bindings::fromDict<Struct>(reinterpret_borrow<dict>(from));
    }
    return isDict;
  }
  static handle cast(const Struct& from, return_value_policy, handle) {
    return ebb::bindings::toDict(from).release();
  }
};
