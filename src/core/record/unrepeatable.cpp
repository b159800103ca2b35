#include "record/unrepeatable.h"

#include <map>

#include "support/python_support.h"

namespace ebb {

const char* effectOf(const OpTraits& op) {
  const PythonSupport* python = pythonSupport();
  const bool mayHave = op.limits.custom && !op.limits.communicates && python != nullptr;
  return mayHave && python->hasEffect(op.name)
             ? "registered with an effect, which a second run would repeat; a rule with force=True "
               "applies"
             : nullptr;
}

void Unrepeatable::closing() {
  for (Result& result : all_) {
    const auto value = result.value.lock();
    result.saved = value && value->uses().packed() > 0 ? value->home().nbytes() : 0;
  }
}

void Unrepeatable::tell(const std::string& region) {
  std::map<const OpTraits*, size_t> bytes;
  for (const Result& result : all_) {
    const auto value = result.value.lock();
    bytes[result.op] += result.saved != 0                ? result.saved
                        : value && value->home().bytes() ? value->home().nbytes()
                                                         : 0;
  }
  all_.clear();
  const PythonSupport* python = pythonSupport();
  for (const auto& [op, held] : bytes) {
    if (held > 0 && python != nullptr && !op->state.toldUnrepeatable.exchange(true)) {
      python->tellUnrepeatable(op->name, region, held);
    }
  }
}

}  // namespace ebb
