#include "plugins/hooked_inputs/hooked_inputs.h"

#include <ATen/ops/copy.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <memory>
#include <mutex>
#include <utility>

#include "graph/geometry.h"
#include "graph/graph.h"
#include "hooks/observer.h"
#include "memory/bytes.h"
#include "record/recorder.h"
#include "replay/replay_lock.h"

namespace ebb {
namespace {

// Stands for the bytes of one argument, which hooks have saved.
struct HookedStash final : Stash {
  HookedStash(const at::Tensor& tensor, std::shared_ptr<HookedInputs> of)
      : inputs(std::move(of)),
        home(tensor.storage().getWeakStorageImpl()),
        nbytes(tensor.storage().nbytes()),
        strides(tensor.strides().vec()) {
    geometry.take(tensor);
  }

  c10::Storage fetch(const c10::Storage& living) override {
    inputs->unpack();
    return living ? living : bytes;
  }

  // Hooks run on the thread of backward.
  c10::Storage fetchAhead(const c10::Storage& /*living*/) override { return {}; }

  // The hooks may have kept the storage itself.
  void beforeWrite() override {
    const auto living = home.lock();
    if (living && (!bytes || bytes.unsafeGetStorageImpl() == living.get())) {
      bytes = copyOf(c10::Storage(living));
    }
  }

  // Runs when the last strong reference goes. The destructor waits for the weak reference of
  // `inputs`, which `inputs` would then keep.
  void release_resources() override {
    inputs.reset();
    bytes = c10::Storage();
  }

  void take(at::Tensor unpacked) {
    if (bytes) {
      return;
    }
    if (auto living = home.lock()) {
      bytes = c10::Storage(std::move(living));
      return;
    }
    checkIsLike(unpacked);
    c10::Storage storage = unpacked.storage();
    if (unpacked.strides() != strides || !coversStorage(unpacked)) {
      const c10::AutoGradMode noGrad(false);
      storage = allocate(nbytes, geometry.device());
      geometry.viewOf(storage).copy_(unpacked);
    }
    unpacked.reset();
    bytes = storage.use_count() > 1 ? copyOf(storage) : std::move(storage);  // only ours
  }

  void checkIsLike(const at::Tensor& unpacked) const {
    TORCH_CHECK(
        unpacked.defined() && unpacked.sizes() == geometry.sizes() &&
            unpacked.scalar_type() == geometry.dtype() && unpacked.device() == geometry.device(),
        "ebb: saved-tensor hooks around a checkpointed call packed an input of shape ",
        geometry.sizes(), " and gave back ",
        unpacked.defined() ? c10::str("a ", unpacked.toString(), " of shape ", unpacked.sizes())
                           : "nothing",
        ". Let the unpack hook restore dtype, device and shape, or set EBB_DISABLE=1.");
  }

  std::shared_ptr<HookedInputs> inputs;
  const c10::weak_intrusive_ptr<c10::StorageImpl> home;
  const size_t nbytes;
  const std::vector<int64_t> strides;
  Geometry geometry;
  c10::Storage bytes;
};

// From now on `stash` stands for the bytes of `tensor`. Does nothing if an earlier argument has the
// same storage.
void putStash(Recorder& recorder, const at::Tensor& tensor, StashPtr stash) {
  std::lock_guard<PythonMutex> lock(recorder.context().graph->mutex);
  ValueMap& values = recorder.values();
  if (values.applyDeferred().find(tensor) == nullptr) {
    Value& leaf = *values.current(tensor);
    leaf.decide(leaf.decision().withDue(false));  // the policy's store must not take the bytes too
    leaf.putAway(std::move(stash));
  }
}

// Unpacks the inputs when backward reaches the region. Comes after the observer of replays ahead,
// which was added when the graph opened: no replay ahead of the graph begins any more. Observers of
// collectives and escapes come later, and replay recipes, which would unpack the inputs anyway.
class UnpacksInputs final : public BackwardEvents {
 public:
  explicit UnpacksInputs(std::shared_ptr<HookedInputs> inputs) : inputs_(std::move(inputs)) {}

  void unpacks(Graph& graph) override {
    const ReplayLock locked(graph);
    inputs_->unpack();
  }

 private:
  const std::shared_ptr<HookedInputs> inputs_;
};

bool canBeStashed(const at::Tensor& tensor) {
  const bool isParameter = tensor.is_leaf() && tensor.requires_grad();
  const bool ofParameter = tensor.is_view() && tensor._base().is_leaf();
  return isRecordable(tensor) && tensor.numel() > 0 && coversStorage(tensor) && !tensor.is_conj() &&
         !tensor.is_neg() && !isParameter && !ofParameter;
}

}  // namespace

HookedInputs::HookedInputs(const std::vector<at::Tensor>& tensors) {
  inputs_.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    inputs_.push_back(
        {torch::autograd::SavedVariable(tensor, /*is_output=*/false), tensor,
         c10::weak_intrusive_ptr<Stash>(c10::intrusive_ptr<Stash>())});
  }
}

HookedInputs::~HookedInputs() = default;

void HookedInputs::enterRegion(const std::shared_ptr<HookedInputs>& inputs) {
  Recorder* recorder = openRecorder();
  for (Input& input : inputs->inputs_) {
    const at::Tensor tensor = std::exchange(input.tensor, at::Tensor());
    if (recorder != nullptr && canBeStashed(tensor)) {
      StashPtr stash = c10::make_intrusive<HookedStash>(tensor, inputs);
      input.stash = c10::weak_intrusive_ptr<Stash>(stash);
      putStash(*recorder, tensor, std::move(stash));
    }
  }
  if (recorder != nullptr) {
    Graph& graph = *recorder->context().graph;
    std::lock_guard<PythonMutex> lock(graph.mutex);
    graph.observers.add(std::make_unique<UnpacksInputs>(inputs));
  }
}

void HookedInputs::unpack() {
  const std::vector<Input> inputs = std::exchange(inputs_, {});
  for (const Input& input : inputs) {
    at::Tensor tensor = input.saved.unpack();
    if (const auto stash = input.stash.lock()) {
      static_cast<HookedStash&>(*stash).take(std::move(tensor));
    }
  }
}

}  // namespace ebb
