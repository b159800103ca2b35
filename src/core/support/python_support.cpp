#include "support/python_support.h"

namespace ebb {
namespace {

const PythonSupport* support = nullptr;

}  // namespace

void setPythonSupport(const PythonSupport& given) {
  support = new PythonSupport(given);  // set once, at import; never freed
}

const PythonSupport* pythonSupport() { return support; }

WithoutGil::WithoutGil() {
  if (support != nullptr && support->holdsGil()) {
    state_ = support->releaseGil();
  }
}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) {
    support->acquireGil(state_);
  }
}

}  // namespace ebb
