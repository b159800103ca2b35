#include "verify/mode.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "report/statistics.h"
#include "support/python_support.h"
#include "verify/compare.h"

namespace ebb {
namespace {

VerifyMode modeFromEnvironment() {
  const char* variable = std::getenv("EBB_VERIFY");
  const std::string_view value = variable == nullptr ? "" : variable;
  if (value.empty() || value == "0") {
    return VerifyMode::Off;
  }
  if (value == "1") {
    return VerifyMode::Raise;
  }
  TORCH_CHECK_VALUE(
      value == "demote", "ebb: EBB_VERIFY must be 0, 1 or demote; it is '", value, "'");
  return VerifyMode::Demote;
}

std::atomic<VerifyMode>& currentMode() {
  static std::atomic<VerifyMode> mode{modeFromEnvironment()};
  return mode;
}

}  // namespace

VerifyMode verifyMode() {
  return currentMode().load(std::memory_order_relaxed);
}

VerifyMode setVerifyMode(VerifyMode mode) {
  return currentMode().exchange(mode);
}

void reportMismatch(VerifyMode mode, const Mismatch& mismatch) {
  const std::string message = describe(mismatch);
  if (mode == VerifyMode::Demote) {
    if (!mismatch.op->state.demoted.exchange(true)) {
      statisticsDemoted(mismatch.op->name);
      TORCH_WARN(message, " ebb saves the outputs of ", mismatch.op->name, " from now on.");
    }
    return;
  }
  if (const PythonSupport* python = pythonSupport()) {
    python->throwReplayMismatch(message, mismatch);
  }
  throw ReplayMismatch({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

}  // namespace ebb
