#include "plugins/collectives/collective.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <chrono>

#include "plugins/collectives/ranks.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

constexpr std::chrono::milliseconds kPause{200};  // between two looks at the other ranks

void waitForTensor(const at::Tensor& tensor) {
  static const auto wait = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                               .typed<at::Tensor(const at::Tensor&)>();
  const auto below = belowEverything();
  wait.call(tensor);
}

bool areOnCpu(const c10::IValue* results, size_t count) {
  return std::all_of(results, results + count, [](const c10::IValue& result) {
    const auto isOnCpu = [](const at::Tensor& tensor) { return tensor.is_cpu(); };
    if (result.isTensorList()) {
      return std::ranges::all_of(result.toTensorVector(), isOnCpu);
    }
    return !result.isTensor() || isOnCpu(result.toTensor());
  });
}

// For a collective on the CPU. On a GPU, a wait with a timeout would make the thread wait.
void waitFor(c10d::Work& work, const std::string& group) {
  for (;;) {
    const auto began = std::chrono::steady_clock::now();
    try {
      work.wait(kPause);
      return;
    } catch (const std::exception&) {
      if (work.isCompleted()) {
        work.wait();  // throws the error of the communication, if there is one
        return;
      }
      if (std::chrono::steady_clock::now() - began < kPause / 2) {
        throw;  // not because of the timeout
      }
    }
    checkOtherRanks(group);
  }
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

// Operators of c10d return a Work; functional collectives return tensors only.
void waitForCollective(const c10::IValue* results, size_t count, const std::string& group) {
  for (const c10::IValue* result = results; result != results + count; ++result) {
    if (result->isObject()) {
      const auto work = result->toCustomClass<c10d::Work>();
      if (areOnCpu(results, count)) {
        waitFor(*work, group);
      } else {
        work->wait();
      }
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
