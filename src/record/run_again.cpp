#include "record/run_again.h"

#include <ATen/ops/copy.h>

#include <algorithm>

#include "intercept/key.h"
#include "memory/bytes.h"
#include "memory/relief.h"
#include "stream/capture.h"

namespace ebb {
namespace {

// Note [Operators that are tried again]
// A kernel may throw after a part of its work. The failed run leaves no trace under four
// conditions: the op writes to no argument except small buffers beside its results, such as the
// running statistics of batch norm; the op is torch's own and so keeps no state; the op does not
// communicate; and its random numbers can be drawn again. During a capture, launched work would be
// a part of the graph, so ebb does not try again. A boxed call may have taken arguments from the
// stack before it fails. So if ebb has memory to free, ebb holds the arguments and copies of the
// small buffers during the run, and restores them before the next run.
bool leavesNoTrace(const Call& call, const Arguments& arguments) {
  const auto isSmall = [](const Write& write) {
    constexpr size_t kSmall = size_t{1} << 20;
    return write.sideEffect && write.storage->nbytes() <= kSmall;
  };
  const OpTraits& op = call.op;
  return call.repeatable && arguments.areRecordable() && !op.limits.untrusted &&
         !op.limits.communicates && !op.limits.neverReplayed &&
         std::all_of(arguments.writes().begin(), arguments.writes().end(), isSmall);
}

bool isCaptured(const Arguments& arguments) {
  return std::any_of(
      arguments.tensors().begin(), arguments.tensors().end(), [](const Argument& argument) {
        return isCapturing(argument.flags.device);
      });
}

void putBack(Call& call, const KeptArguments& kept) {
  if (call.stack != nullptr) {
    call.stack->resize(kept.below);
    call.stack->insert(call.stack->end(), kept.values.begin(), kept.values.end());
    call.arguments = call.stack->data() + kept.below;
  }
  for (const KeptArguments::Before& before : kept.written) {
    const auto below = belowEverything();
    bytesOf(before.storage).copy_(bytesOf(before.bytes));
  }
}

}  // namespace

[[gnu::noinline]] std::unique_ptr<KeptArguments> keepArguments(
    const Call& call, const Arguments& arguments) {
  if (!usesUp(call, arguments) || !leavesNoTrace(call, arguments)) {
    return nullptr;
  }
  auto kept = std::make_unique<KeptArguments>();
  if (call.stack != nullptr) {
    const size_t count = call.op.arguments.types.size();
    kept->values.assign(call.arguments, call.arguments + count);
    kept->below = call.stack->size() - count;
  }
  for (const Write& write : arguments.writes()) {
    const c10::Storage& storage = write.tensor.storage();
    kept->written.push_back({storage, withRelief([&] { return copyOf(storage); })});
  }
  return kept;
}

[[gnu::noinline]] const c10::IValue* runKeeping(
    Call& call, const Arguments& arguments, bool holds, RandomScope* random) {
  const auto kept = holds ? keepArguments(call, arguments) : nullptr;
  try {
    return call.run();
  } catch (...) {
    return runAgain(call, arguments, kept.get(), random);
  }
}

[[gnu::cold]] const c10::IValue* runAgain(
    Call& call, const Arguments& arguments, const KeptArguments* kept, RandomScope* random) {
  const bool can = leavesNoTrace(call, arguments) &&
                   (kept != nullptr || !usesUp(call, arguments)) && !isCaptured(arguments);
  const auto relieve = [&] {
    if (!can || (random != nullptr && !random->canBeginAgain()) || !relieved()) {
      throw;
    }
  };
  relieve();
  for (;;) {
    if (random != nullptr) {
      random->beginAgain();
    }
    if (kept != nullptr) {
      putBack(call, *kept);
    }
    try {
      const c10::IValue* results = call.run();
      noteOvercome();
      return results;
    } catch (...) {
      relieve();
    }
  }
}

}  // namespace ebb
