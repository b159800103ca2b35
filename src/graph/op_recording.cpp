#include "graph/op_recording.h"

#include <ATen/core/List.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>

#include "graph/fingerprint.h"
#include "graph/witness.h"

namespace ebb {
namespace {

// Calls f(tensor, index, element) for every tensor of `count` values, undefined ones in lists too.
template <class Types, class F>
void forEachTensor(const c10::IValue* values, const Types& types, F&& f) {
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == ArgType::Tensor) {
      if (values[i].isTensor()) {
        f(values[i].toTensor(), i, -1);
      }
    } else if (types[i] == ArgType::TensorList && values[i].isList()) {
      const auto list = values[i].toListRef();
      for (size_t e = 0; e < list.size(); ++e) {
        static const at::Tensor undefined;
        f(list[e].isTensor() ? list[e].toTensor() : undefined, i, static_cast<int32_t>(e));
      }
    }
  }
}

bool coversStorage(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const size_t nbytes = tensor.storage().nbytes();
  // A tensor of no elements is the start of an `out=` that the kernel resizes.
  return nbytes == static_cast<size_t>(impl->numel()) * impl->itemsize() &&
         (nbytes == 0 || impl->is_non_overlapping_and_dense());
}

}  // namespace

OpRecording::OpRecording(Recorder& recorder, Call& call)
    : recorder_(recorder), call_(call), op_(call.op), lock_(recorder.graph_->mutex) {
}

void OpRecording::run() {
  recorder_.settle();
  verdict_ = recorder_.decider_->decide(op_);
  if (op_.demoted.load(std::memory_order_relaxed)) {
    verdict_.decision = Decision::Save;
    verdict_.perResult = 0;
  }
  scanArguments();
  if (!recorder_.rowCounts_.empty()) {
    scanRows();
  }
  obstacle_ = findObstacle();
  if (obstacle_ == nullptr) {
    makeRecipe();
    if (readsOpaque_) {
      recipe_.reset();  // what the op saw is not known
      obstacle_ = "it read what ebb.opaque said was being written";
    }
  }
  if (!writes_.empty()) {
    prepareWrites();
  }
  runKernel();
  // Results are new to everybody else, so a lock is needed again only for what was written.
  if (!writes_.empty() || recorder_.graph_->verify != VerifyMode::Off) {
    lockAgain();
    recordWrites();
  }
  recordOutputs();
  if (recorder_.needsSweep()) {
    lockAgain();
    recorder_.sweep();
  }
}

void OpRecording::lockAgain() {
  if (!lock_.owns_lock()) {
    lock_.lock();
  }
}

// Note [Operators from elsewhere]
// An operator that is not torch's own may keep state that no schema shows: a step counter, a
// generator, a cache. Run again it would give something else, silently. So its results are kept,
// unless a rule of the policy matches it: that is the user's word that it can be repeated.
bool OpRecording::isTrusted(const Verdict& verdict) const {
  return !op_.untrusted || verdict.named;
}

void OpRecording::scanArguments() {
  if (op_.trainingArgument >= 0) {
    const c10::IValue& training = arguments()[op_.trainingArgument];
    training_ = training.isBool() && training.toBool();
  }
  forEachTensor(arguments(), op_.types, [&](const at::Tensor& tensor, size_t i, int32_t element) {
    scanTensor(tensor, i, element);
  });
}

void OpRecording::scanTensor(const at::Tensor& tensor, size_t argument, int32_t element) {
  const ArgUse use = useOf(argument);
  const auto index = static_cast<uint16_t>(argument);
  if (!tensor.defined()) {
    if (element >= 0) {
      tensors_.push_back({&tensor, {}, ArgUse::Read, index, element});
    }
    return;
  }
  if (!isRecordable(tensor)) {
    recordable_ = false;
    return;
  }
  GeometryFlags flags = geometryFlags(tensor);
  flags.requiresGrad = (op_.readsRequiresGrad || op_.untrusted) && tensor.requires_grad();
  shapeCount_ += Input::shapeCount(flags, use);
  tensors_.push_back({&tensor, flags, use, index, element});
  offCpu_ |= !flags.device.is_cpu();
  storages_.push_back(storageOf(tensor));
  if (use != ArgUse::Read) {
    addWrite(tensor, argument, element);
  }
}

[[gnu::noinline]] void OpRecording::addWrite(
    const at::Tensor& tensor, size_t argument, int32_t element) {
  const ArgUse use = useOf(argument);
  const bool whole = use == ArgUse::Overwrite && coversStorage(tensor);
  c10::StorageImpl* storage = storageOf(tensor);
  const auto same = std::find_if(
      writes_.begin(), writes_.end(), [&](const Write& write) { return write.storage == storage; });
  if (same != writes_.end()) {
    same->whole &= whole;
    same->sideEffect &= use == ArgUse::Scratch;
    return;
  }
  writes_.push_back(
      {storage,
       tensor,
       recorder_.currentValue(tensor),
       static_cast<uint16_t>(argument),
       element,
       whole,
       use == ArgUse::Scratch});
}

// Note [Writes to leaves]
// A write to a storage that was not made inside the region (a parameter, a buffer, an input) is a
// side effect: it happens once, in the forward, and the new state is a leaf. So is the state after
// a write into memory whose old contents no recipe can make. The op's other results then are leaves
// too, since running it again would write again.
bool OpRecording::writesCanBeReplayed() const {
  return std::all_of(writes_.begin(), writes_.end(), [&](const Write& write) {
    const Value& before = *write.before;
    const bool toCpu = offCpu_ && write.tensor.is_cpu();
    return write.sideEffect || (before.born && !toCpu && (write.whole || before.recipe));
  });
}

void OpRecording::makeRecipe() {
  Graph& graph = *recorder_.graph_;
  recipe_ = Recipe::make(op_, static_cast<uint32_t>(tensors_.size()), shapeCount_);
  recipe_->keys = call_.below;
  recipe_->sequence = ++graph.lastSequence;
  recipe_->region = recorder_.region_;
  recipe_->gradMode = c10::GradMode::is_enabled();
  recipe_->state = &graph.kernelStates.current();
  if (op_.precision != PrecisionRead::None) {
    recipe_->precision = float32Precision(op_.precision, call_.below);
  }
  addOthers();
  addInputs();
}

void OpRecording::addOthers() {
  c10::IValue* other = recipe_->others;
  for (const uint16_t i : op_.others) {
    const c10::IValue& argument = arguments()[i];
    if (op_.types[i] == ArgType::TensorList && argument.isList()) {
      // A list of the same type and no elements: replay appends the inputs to a copy of it.
      *other = argument.isTensorList() ? c10::IValue(c10::List<at::Tensor>())
                                       : c10::IValue(c10::List<std::optional<at::Tensor>>());
    } else {
      // TorchScript passes its own lists, which the script may change later.
      const bool shared = argument.isList() && argument.use_count() > 1;
      *other = shared ? argument.deepcopy() : argument;
    }
    ++other;
  }
}

void OpRecording::addInputs() {
  int64_t* shape = recipe_->shapes;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Argument& argument = tensors_[i];
    const at::Tensor& tensor = *argument.tensor;
    Input& input = recipe_->inputs[i];
    input.flags = argument.flags;
    input.use = argument.use;
    input.argument = argument.index;
    input.element = argument.element;
    if (!tensor.defined()) {
      continue;
    }
    input.offset = tensor.unsafeGetTensorImpl()->storage_offset();
    shape = writeShape(tensor, argument.flags, shape);
    if (argument.use == ArgUse::Scratch) {
      *shape++ = static_cast<int64_t>(tensor.storage().nbytes());
    } else if (input.isNumber()) {
      std::memcpy(shape, tensor.const_data_ptr(), tensor.itemsize());
      input.offset = 0;
      shape += Input::kNumberWords;
    } else {
      addValue(input, tensor);
    }
    // Lists may be long, and no kernel compares their elements.
    for (size_t e = 0; argument.element < 0 && e < i; ++e) {
      if (tensors_[e].element < 0 && tensors_[e].tensor->is_same(tensor)) {
        input.sameAs = static_cast<int32_t>(e);
        break;
      }
    }
  }
}

// Whether an op may read more of a storage than its argument shows: as_strided_copy and its like.
bool OpRecording::readsBeyond(const OpTraits& op) {
  return op.name.find("as_strided") != std::string::npos;
}

void OpRecording::addValue(Input& input, const at::Tensor& tensor) {
  input.wholeOverwrite = input.use == ArgUse::Overwrite && coversStorage(tensor);
  const auto& value = recorder_.currentValue(tensor);
  readsOpaque_ |= value->opaque;
  if (input.use == ArgUse::Read && value->keep && !value->bytes && !value->stash) {
    recorder_.keep(*value, tensor);
    if (value->offload && !value->paged && !readsBeyond(op_)) {
      value->part = Part::ofSmall(tensor);
    }
  } else if (value->part && !input.wholeOverwrite) {
    if (input.use != ArgUse::Read || readsBeyond(op_) || !value->part->isOf(tensor)) {
      recorder_.needAll(*value, tensor);
    }
  }
  input.value = value;
}

[[gnu::noinline]] void OpRecording::prepareWrites() {
  for (const Write& write : writes_) {
    // References that do not need the old state: the map's, this write's, and the recipe's where
    // it gives the op a buffer with other contents.
    size_t own = 2;
    if (recipe_) {
      own += std::count_if(
          recipe_->inputs, recipe_->inputs + recipe_->inputCount, [&](const Input& input) {
            return input.value == write.before && input.wholeOverwrite;
          });
    }
    recorder_.supersede(write.before, own);
  }
}

void OpRecording::runKernel() {
  lock_.unlock();
  try {
    if (mayDraw(op_, call_.arguments)) {
      runRandomKernel();
    } else {
      results_ = call_.run();
    }
  } catch (...) {
    // The kernel may have written a part: nothing is known about these storages any more.
    for (const Write& write : writes_) {
      recorder_.values_.erase(write.storage);
    }
    throw;
  }
  recorder_.counters_->opsRecorded += recipe_.defined();
}

// Apart, since the scope is large and would push the kernel's frames to colder parts of the stack.
[[gnu::noinline]] void OpRecording::runRandomKernel() {
  RandomScope random(op_, call_.below, call_.arguments, recipe_.defined());
  results_ = call_.run();
  auto drawn = random.finish();
  if (recipe_) {
    if (drawn && op_.generatorArgument < 0 && !readsLossy()) {
      drawn->fingerprint = fingerprintOfResult();
    }
    recipe_->random = std::move(drawn);
  }
}

// See Note [Threads that draw outside of regions]
uint64_t OpRecording::fingerprintOfResult() const {
  if (op_.returnCount == 0 || !results_[0].isTensor()) {
    return 0;
  }
  const at::Tensor& result = results_[0].toTensor();
  const bool whole = result.defined() && isRecordable(result) && coversStorage(result);
  return whole ? fingerprint(result.storage()) : 0;
}

// Note [A write into a saved value]
// An in-place op on a value that the policy saves leaves one storage to keep, the written one. The
// new state inherits the decision, else `relu_` after a saved convolution would undo it.
[[gnu::noinline]] void OpRecording::recordWrites() {
  for (const Write& write : writes_) {
    const Value& before = *write.before;
    auto after = c10::make_intrusive<Value>();
    after->stamp(write.tensor);
    after->inheritCounters(before);
    after->born = before.born;
    after->opaque = before.opaque;
    const Verdict verdict = verdictOn(write.tensor);
    const bool inherits = before.saved && verdict.decision == Decision::Recompute;
    after->rows = rows_ ? rows_->ofWritten(write.tensor, before) : nullptr;
    after->rule = inherits ? before.rule : verdict.rule;
    after->saved = !write.sideEffect && before.born &&
                   (before.saved || verdict.decision != Decision::Recompute);
    after->paged = after->saved && (inherits ? before.paged : verdict.decision == Decision::Page);
    after->offload = after->saved && (after->paged || before.offload || before.stash ||
                                      verdict.decision == Decision::Offload);
    // An `out=` that the kernel shrank is not written whole: views of it still show the rest.
    const bool asAssumed = !write.whole || coversStorage(write.tensor);
    const bool wasLossy = !write.whole && before.rows && before.rows->lossy;
    const bool exact = after->rows || !(readsLossy() || wasLossy);
    if (recipe_ && !write.sideEffect && asAssumed && isTrusted(verdict) && exact) {
      after->recipe = recipe_;
      Output& output = recipe_->outputs.emplace_back();
      output.value = c10::weak_intrusive_ptr<Value>(after);
      output.written = true;
      output.slot = write.argument;
      output.element = write.element;
      if (recorder_.graph_->verify != VerifyMode::Off) {
        witness(*recipe_, output, write.tensor);
      }
    }
    if (after->rows) {
      after->rows->lossy |= after->paged || wasLossy;
    }
    after->keep = after->saved || !after->recipe;
    after->writtenHere = !after->born;
    if (storageOf(write.tensor) != write.storage) {
      recorder_.values_.erase(write.storage);  // the op gave the tensor another storage
      continue;
    }
    if (recorder_.graph_->journal) {
      noteMade(*after, write.tensor, verdict);
    }
    const bool followed = write.before->packed > 0;
    recorder_.unsettled_.push_back(
        {after,
         followed ? write.before : nullptr,
         followed ? write.tensor.storage() : c10::Storage(),
         {}});
    recorder_.values_[write.storage] = std::move(after);
  }
}

void OpRecording::recordOutputs() {
  forEachTensor(results_, op_.results, [&](const at::Tensor& x, size_t i, int32_t e) {
    if (x.defined() && isRecordable(x)) {
      recordOutput(x, i, e);
    }
  });
}

Verdict OpRecording::verdictOn(const at::Tensor& result) const {
  return verdict_.perResult == 0 ? verdict_ : recorder_.decider_->decideOn(op_, result, verdict_);
}

void OpRecording::recordOutput(const at::Tensor& tensor, size_t slot, int32_t element) {
  c10::StorageImpl* storage = storageOf(tensor);
  if (std::find(storages_.begin(), storages_.end(), storage) != storages_.end()) {
    learnAlias(tensor);
    return;  // it aliases an argument, or an earlier result: the same value
  }
  storages_.push_back(storage);
  auto value = c10::make_intrusive<Value>();
  value->stamp(tensor);
  value->born = onlyResultsHold(tensor);
  const bool fromDevice = offCpu_ && tensor.is_cpu();
  const Verdict verdict = verdictOn(tensor);
  value->rows = rows_ ? rows_->of(tensor) : nullptr;
  if (value->born && !op_.uninitialised && verdict.decision == Decision::Page) {
    value->paged = value->offload = true;  // with a recipe or without
  }
  const bool exact = value->rows || !readsLossy();
  if (recipe_ && value->born && !fromDevice && isTrusted(verdict) && exact) {
    value->recipe = recipe_;
    value->rule = verdict.rule;
    value->saved = verdict.decision != Decision::Recompute;
    value->offload |= verdict.decision == Decision::Offload;
    Output& output = recipe_->outputs.emplace_back();
    output.value = c10::weak_intrusive_ptr<Value>(value);
    output.slot = static_cast<uint16_t>(slot);
    output.element = element;
    if (recorder_.graph_->verify != VerifyMode::Off) {
      witness(*recipe_, output, tensor);
    }
  }
  if (value->rows) {
    value->rows->lossy |= value->paged;
  }
  value->keep = !value->recipe || value->saved || op_.constantFill;
  if (recorder_.graph_->journal) {
    noteMade(*value, tensor, verdict);
  }
  recorder_.values_[storage] = std::move(value);
}

// A result of _unsafe_view or unsafe_chunk has a counter of its own: see Note [Version stamps].
void OpRecording::learnAlias(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  const auto found = recorder_.values_.find(storageOf(tensor));
  if (found != recorder_.values_.end() && counter.enabled() && !found->second->knows(counter)) {
    lockAgain();
    found->second->learn(counter);
  }
}

// Note [Results that others hold]
// A result whose storage somebody else holds too was not made by this call: the op returned
// something it caches. Another run would hand out the same memory with other contents in it, so it
// is a leaf, and writes to it are side effects.
bool OpRecording::onlyResultsHold(const at::Tensor& tensor) const {
  const size_t holders = tensor.storage().use_count();
  if (holders == 1) {
    // The stack holds the tensor; so may its Python object, which a Python kernel left behind.
    const size_t owners = tensor.use_count();
    return owners == 1 ||
           (owners == 2 && tensor.unsafeGetTensorImpl()->pyobj_slot()->has_unique_reference());
  }
  size_t results = 0;
  forEachTensor(results_, op_.results, [&](const at::Tensor& x, size_t, int32_t) {
    results += x.defined() && x.has_storage() && x.storage().is_alias_of(tensor.storage());
  });
  return holders == results;
}

}  // namespace ebb
