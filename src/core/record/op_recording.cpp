#include "record/op_recording.h"

#include <algorithm>

#include "conditions/fingerprint.h"
#include "conditions/kernel_state.h"
#include "conditions/repeatable.h"
#include "graph/geometry.h"
#include "intercept/in_transit.h"
#include "intercept/op_traits.h"
#include "record/fresh_results.h"
#include "record/keeper.h"
#include "record/recipe_writer.h"
#include "record/written.h"
#include "stream/event.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

// Calls `act` with each argument whose storage has a known value, and with that value's map entry.
template <class Act>
void forEachKnown(ValueMap& values, const Arguments& arguments, const Act& act) {
  for (const Argument& argument : arguments.tensors()) {
    if (argument.tensor->defined()) {
      if (auto* known = values.find(*argument.tensor)) {
        act(*argument.tensor, *known);
      }
    }
  }
}

// See Note [Bytes of several streams]
[[gnu::noinline]] void noteStream(
    const Context& context, ValueMap& values, const Arguments& arguments) {
  GraphStreams& streams = context.graph->streams;
  streams.note(arguments.device());
  if (streams.areSeveral()) {
    forEachKnown(values, arguments, [&](const at::Tensor& tensor, const auto& value) {
      streams.use(*value, tensor.storage());
    });
  }
}

// Notes the current state and version counter of each known argument of an operator without a
// recipe. Such an operator may write to an argument that its schema marks as read. If the argument
// is an alias with its own counter, only that counter moves. See Note [Version stamps].
[[gnu::cold]] void learnReads(ValueMap& values, const Arguments& arguments) {
  forEachKnown(values, arguments, [&](const at::Tensor& tensor, auto& slot) {
    values.current(slot, tensor);
  });
}

// Note [Uninitialised memory is not a recipe]
// A kernel that bypasses the dispatcher may fill the result of `empty`, so the result stays a leaf
// until a visible op overwrites the memory. The result of zeros, ones or full is recomputed only if
// its first use is a write. If the first use is a read, an unseen write may have filled the result
// before, so the result becomes a leaf.
const char* findObstacle(
    const Context& context, const Call& call, const Arguments& arguments, const Verdict& verdict) {
  const OpTraits& op = call.op;
  if (!arguments.areRecordable() || !call.repeatable) {
    return "an argument is sparse, nested, MKL-DNN or a tensor subclass, which ebb cannot replay";
  }
  if (op.limits.uninitialised) {
    return "uninitialized memory (torch.empty), which code outside of torch may fill";
  }
  if (op.limits.neverReplayed && !verdict.forced) {
    return op.limits.asynchronous ? "collectives are recomputed only by a rule with force=True"
                                  : "ebb recomputes this operator only by a rule with force=True";
  }
  if (arguments.areOffCpu() && !verdict.forced) {
    if (const char* why = whyNotRepeatable(op, call.arguments)) {
      return why;
    }
  }
  if (op.limits.custom) {
    if (op.guard == nullptr) {
      return op.limits.asynchronous ? "this build of ebb has no plug-in 'collectives'"
                                    : "this build of ebb has no plug-in 'custom_operators'";
    }
    if (const char* why = op.guard->whyNotReplayed({context, call, arguments, verdict})) {
      return why;
    }
  }
  return arguments.writesCanBeReplayed() ? nullptr
                                         : "it wrote to a tensor from outside of the region";
}

void lockAgain(std::unique_lock<PythonMutex>& lock) {
  if (!lock.owns_lock()) {
    lock.lock();
  }
}

// A result of _unsafe_view or unsafe_chunk has a counter of its own: see Note [Version stamps].
void learnAlias(ValueMap& values, std::unique_lock<PythonMutex>& lock, const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  const auto* known = values.find(tensor);
  if (known != nullptr && counter.enabled() && !(*known)->versions().know(counter)) {
    lockAgain(lock);
    (*known)->versions().learn(counter);
  }
}

// See Note [Threads that draw outside of regions]
uint64_t fingerprintOfResult(const OpTraits& op, const c10::IValue* results) {
  if (op.results.empty() || !results[0].isTensor()) {
    return 0;
  }
  const at::Tensor& result = results[0].toTensor();
  const bool whole = result.defined() && isRecordable(result) && coversStorage(result);
  return whole ? fingerprint(result.storage()) : 0;
}

// True if a replay may read other bytes than the forward.
bool readsPartial(const Recipe& recipe) {
  return std::any_of(recipe.inputs().begin(), recipe.inputs().end(), [](const Input& input) {
    return input.value && !input.wholeOverwrite && input.value->isPartial();
  });
}

}  // namespace

OpRecording::OpRecording(const Context& context, ValueMap& values, Call& call)
    : context_(context),
      values_(values),
      call_(call),
      op_(call.op),
      lock_(context.graph->mutex),
      arguments_(call, values.applyDeferred(), context.trustCustomOps) {}

void OpRecording::run() {
  writeRecipe();
  if (op_.guard != nullptr) [[unlikely]] {
    guarded_ = op_.guard->begins(
        {context_, call_, arguments_, verdict_, replay_.recipe.get(), replay_.obstacle});
  }
  const Observers& observers = context_.graph->observers;
  observers.tell(
      &OpEvents::willRun, context_, values_, call_, arguments_, replay_.recipe.defined());
  if (!arguments_.writes().empty()) {
    prepareWrites(values_, call_, arguments_, replay_.recipe.get());
  }
  if (guarded_) [[unlikely]] {
    runGuarded();
  } else {
    runKernel();
  }
  // Results are not visible to other threads yet, so only writes and plug-ins need the lock again.
  if (!arguments_.writes().empty() || observers.seeOps() || guarded_) {
    lockAgain(lock_);
    recordWrites();
  }
  recordOutputs();
  observers.tell(&OpEvents::recorded);
  if (values_.needsSweep()) {
    lockAgain(lock_);
    replay_.recipe.reset();
    values_.sweep();
  }
}

void OpRecording::writeRecipe() {
  if (arguments_.areOffCpu()) {
    noteStream(context_, values_, arguments_);
  }
  verdict_ = context_.decider->decide(op_);
  if (op_.state.demoted.load(std::memory_order_relaxed)) {
    verdict_.decision = Decision::Save;
    verdict_.perResult = 0;
  }
  replay_.obstacle = findObstacle(context_, call_, arguments_, verdict_);
  if (replay_.obstacle == nullptr) {
    replay_.recipe = recipeOf(context_, values_, call_, arguments_);
    if (!replay_.recipe) {
      replay_.obstacle = "it read a tensor that ebb.opaque marked as being written";
    }
  }
  if (!replay_.recipe) {
    learnReads(values_, arguments_);
  }
}

void OpRecording::runKernel() {
  lock_.unlock();
  const bool draws = mayDraw(op_, call_.arguments);
  try {
    if (draws) {
      runRandomKernel();
    } else {
      results_ = call_.run();
    }
    context_.graph->observers.tell(&OpEvents::hasRun);
    if (guarded_) [[unlikely]] {
      guarded_->hasRun(results_);
    }
  } catch (...) {
    forgetWritten();
    throw;
  }
  context_.counters->opsRecorded += replay_.recipe.defined();
}

// The kernel threw, and may have written a part of its outputs.
[[gnu::cold]] void OpRecording::forgetWritten() {
  for (const Write& write : arguments_.writes()) {
    values_.forget(write.storage);
  }
}

[[gnu::noinline]] void OpRecording::runGuarded() {
  runKernel();
  lockAgain(lock_);
  if (const char* why = guarded_->whyToGiveUp(values_)) {
    replay_.giveUp(why);
  }
  lock_.unlock();
  guarded_->warn();
}

// RandomScope is large. Inside runKernel(), it would move the stack frames of all kernels to memory
// that the cache does not hold, so the code is in a separate function.
[[gnu::noinline]] void OpRecording::runRandomKernel() {
  RandomScope random(op_, call_.below, call_.arguments, replay_.recipe.defined());
  results_ = call_.run();
  auto drawn = random.finish();
  if (random.drewFromUnknown()) {
    replay_.giveUp("it drew random numbers from a generator that ebb cannot identify");
  }
  if (replay_.recipe) {
    if (drawn && op_.random.generatorArgument < 0 && !readsPartial(*replay_.recipe)) {
      drawn->fingerprint = fingerprintOfResult(op_, results_);
    }
    replay_.recipe->kernel.random = std::move(drawn);
  }
}

[[gnu::noinline]] void OpRecording::recordWrites() {
  for (const Write& write : arguments_.writes()) {
    const Value& before = *write.before;
    if (op_.limits.asynchronous && !before.facts().madeHere) {
      moveVersionOfComputed(write.tensor);  // see Note [Communication]
    }
    const Verdict verdict = verdictOn(write.tensor);
    const bool decides = replay_.recipe || !op_.limits.asynchronous;
    auto after = stateAfter(write, op_, verdict, decides);
    const char* veto =
        context_.graph->observers.whyNotReplayed({*after, write.tensor, &before, write.whole});
    giveRecipe(after, write, verdict, veto);
    if (after->facts().writtenHere) {
      values_.keeper().noteStream(write.tensor.device());
    }
    if (storageOf(write.tensor) != write.storage) {
      values_.forget(write.storage);  // the op gave the tensor another storage
      continue;
    }
    if (context_.graph->observers.seeOps()) [[unlikely]] {
      tellMade(*after, write.tensor, verdict, veto);
    }
    const bool followed = before.uses().packed() > 0;
    values_.deferVersionCheck(
        {after,
         followed ? write.before : nullptr,
         followed ? write.tensor.storage() : c10::Storage(),
         {},
         write.counted && versionOf(write.tensor) == write.version,
         write.movedFirst ? &op_ : nullptr});
    values_.put(write.storage, std::move(after));
  }
}

void OpRecording::giveRecipe(
    const c10::intrusive_ptr<Value>& after, const Write& write, const Verdict& verdict,
    const char* veto) {
  if (replay_.recipe && veto == nullptr && isTrusted(verdict) && canBeRepeated(write)) {
    addOutput(
        after, write.tensor, {.written = true, .slot = write.argument, .element = write.element});
  }
  if (guarded_) [[unlikely]] {
    guarded_->made({after, write.tensor, true, verdict});
  }
  if (!after->recipe()) {
    after->decide(after->decision().orKept());
  }
}

void OpRecording::addOutput(
    const c10::intrusive_ptr<Value>& value, const at::Tensor& tensor, Output output) {
  value->recomputeFrom(replay_.recipe);
  output.value = c10::weak_intrusive_ptr<Value>(value);
  replay_.recipe->outputs.push_back(std::move(output));
  context_.graph->observers.tell(
      &OpEvents::canBeReplayed, *replay_.recipe, replay_.recipe->outputs.back(), tensor);
}

void OpRecording::recordOutputs() {
  forEachTensor(results_, op_.results, [&](const at::Tensor& x, size_t i, int32_t e) {
    if (x.defined() && isRecordable(x)) {
      recordOutput(x, i, e);
    }
  });
}

Verdict OpRecording::verdictOn(const at::Tensor& result) const {
  return verdict_.perResult == 0 ? verdict_ : context_.decider->decideOn(op_, result, verdict_);
}

void OpRecording::recordOutput(const at::Tensor& tensor, size_t slot, int32_t element) {
  c10::StorageImpl* storage = storageOf(tensor);
  if (arguments_.add(storage)) {
    learnAlias(values_, lock_, tensor);
    return;  // the tensor aliases an argument or an earlier result: same value
  }
  StateFacts facts;
  // The thread of a collective holds the results for a time that differs between ranks, so the
  // reference count must not decide about `madeHere`.
  const bool isRepeated = replay_.recipe && op_.limits.asynchronous;
  facts.madeHere = isRepeated || onlyResultsHold(op_, results_, tensor);
  facts.inTransit = op_.limits.asynchronous;
  if (facts.inTransit) [[unlikely]] {
    noteInTransit(tensor);
  }
  facts.unfilled = op_.limits.uninitialised && context_.trustCustomOps && tensor.is_cpu();
  auto value = c10::make_intrusive<Value>(tensor, facts);
  const Verdict verdict = verdictOn(tensor);
  const char* veto = context_.graph->observers.whyNotReplayed({*value, tensor, nullptr, true});
  decideOnResult(
      value, tensor, verdict, veto, {.slot = static_cast<uint16_t>(slot), .element = element});
  if (guarded_) [[unlikely]] {
    guarded_->made({value, tensor, false, verdict});
  }
  if (facts.unfilled) {
    value->watch(fingerprint(tensor.storage(), FingerprintOf::Everything));
  }
  if (context_.graph->observers.seeOps()) [[unlikely]] {
    tellMade(*value, tensor, verdict, veto);
  }
  values_.put(storage, std::move(value));
}

void OpRecording::decideOnResult(
    const c10::intrusive_ptr<Value>& value, const at::Tensor& tensor, const Verdict& verdict,
    const char* veto, Output output) {
  const bool fromDevice = arguments_.areOffCpu() && tensor.is_cpu();
  const bool canBeRecomputed = replay_.recipe && value->facts().madeHere && !fromDevice &&
                               isTrusted(verdict) && veto == nullptr;
  const bool takesAll =
      isStored(verdict.decision) && storeOf(verdict.decision)->takesWithoutRecipe();
  // Other code completes the bytes after the op has returned: it fills uninitialised memory, and an
  // asynchronous op still writes.
  const bool isComplete = !op_.limits.uninitialised && !op_.limits.asynchronous;
  ValueDecision decision(Decision::Save, false);
  if (canBeRecomputed) {
    const bool stays = takesAll && !isComplete;
    decision = ValueDecision(stays ? Decision::Save : verdict.decision, true, verdict.rule);
    decision = op_.limits.constantFill ? decision.orKept() : decision;
    addOutput(value, tensor, std::move(output));
  } else if (takesAll && isComplete && value->facts().madeHere) {
    decision = ValueDecision(verdict.decision, false);
  }
  value->decide(decision);
}

[[gnu::cold]] void OpRecording::tellMade(
    Value& value, const at::Tensor& tensor, const Verdict& verdict, const char* veto) {
  const bool wanted = recomputes(verdict.decision) && !value.decision().isSaved();
  const bool can = value.recipe() && !op_.limits.constantFill;
  const char* why = wanted && !can ? whyNotRecomputed(value, tensor, veto) : nullptr;
  const uint16_t rule = value.recipe() ? value.decision().rule() : verdict.rule;
  context_.graph->observers.tell(
      &OpEvents::made, Made{context_, value, tensor, op_.name, why, rule});
}

// Returns why a result has no recipe, or why ebb keeps the result in spite of a recipe.
[[gnu::cold]] const char* OpRecording::whyNotRecomputed(
    const Value& value, const at::Tensor& tensor, const char* veto) const {
  if (replay_.obstacle != nullptr) {
    return replay_.obstacle;
  }
  if (arguments_.areOffCpu() && tensor.is_cpu()) {
    return "copied from the device to the CPU";
  }
  if (!value.facts().madeHere) {
    return "its memory is shared with another tensor";
  }
  if (veto != nullptr) {
    return veto;
  }
  if (op_.limits.constantFill) {
    return "a constant that was read before an operator wrote to it";
  }
  return "this call of the operator cannot be replayed";
}

}  // namespace ebb
