#include "kernel/collective.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "intercept/key.h"

namespace ebb {
namespace {

void waitForTensor(const at::Tensor& tensor) {
  static const auto wait = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                               .typed<at::Tensor(const at::Tensor&)>();
  const auto below = belowEverything();
  wait.call(tensor);
}

}  // namespace

std::string processGroupOf(const OpTraits& op, const c10::IValue* others) {
  const auto& arguments = op.op.schema().arguments();
  for (const uint16_t i : op.arguments.others) {
    const c10::IValue& argument = *others++;
    const std::string& name = arguments[i].name();
    if (name == "group_name" && argument.isString()) {
      return argument.toStringRef();
    }
    if (name == "process_group" || name == "group_name") {
      return argument.toCustomClass<c10d::ProcessGroup>()->getGroupName();
    }
  }
  return {};
}

bool isSynchronous(const OpTraits& op, const c10::IValue* arguments) {
  const auto index = op.op.schema().argumentIndexWithName("async_op");
  return index && !arguments[*index].toBool();
}

// Operators of c10d return a Work; functional collectives return tensors only.
void waitForCollective(const c10::IValue* results, size_t count) {
  for (const c10::IValue* result = results; result != results + count; ++result) {
    if (result->isObject()) {
      result->toCustomClass<c10d::Work>()->wait();
      return;
    }
  }
  for (const c10::IValue* result = results; result != results + count; ++result) {
    if (result->isTensor()) {
      waitForTensor(result->toTensor());
    } else if (result->isTensorList()) {
      for (const at::Tensor& tensor : result->toTensorVector()) {
        waitForTensor(tensor);
      }
    }
  }
}

}  // namespace ebb
