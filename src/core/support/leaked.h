// Objects that live until the process ends.
#pragma once

namespace ebb {

// The process's only object of this type, created at first use. It is never destroyed: other
// threads may use it while static objects are destroyed.
template <class T>
T& leaked() {
  static T& only = *new T;
  return only;
}

}  // namespace ebb
