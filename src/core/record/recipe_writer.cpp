#include "record/recipe_writer.h"

#include <ATen/core/List.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <utility>

#include "conditions/kernel_state.h"
#include "graph/geometry.h"
#include "hooks/call_guard.h"
#include "intercept/op_tables.h"
#include "record/keeper.h"
#include "record/value_map.h"

namespace ebb {
namespace {

// Writes one recipe.
class RecipeWriter {
 public:
  RecipeWriter(
      const Context& context, ValueMap& values, const Call& call, const Arguments& arguments)
      : context_(context), values_(values), call_(call), op_(call.op), arguments_(arguments) {}

  c10::intrusive_ptr<Recipe> write() {
    Graph& graph = *context_.graph;
    recipe_ = Recipe::make(
        op_, static_cast<uint32_t>(arguments_.tensors().size()), arguments_.shapeCount());
    recipe_->kernel.keys = call_.below;
    recipe_->sequence = ++graph.numbers.sequence;
    recipe_->region = context_.region;
    recipe_->nested = context_.nested;
    recipe_->kernel.gradMode = c10::GradMode::is_enabled();
    recipe_->kernel.state = &graph.kernelStates.current();
    if (op_.kernel.precision != PrecisionRead::None) {
      recipe_->kernel.precision = productPrecision(op_.kernel.precision, call_.below);
    }
    addOthers();
    addInputs();
    return readsOpaque_ ? nullptr : std::move(recipe_);  // the op's input contents are unknown
  }

 private:
  void addOthers() {
    c10::IValue* other = recipe_->others();
    for (const uint16_t i : op_.arguments.others) {
      const c10::IValue& argument = call_.arguments[i];
      if (op_.arguments.types[i] == ArgType::TensorList && argument.isList()) {
        // The recipe stores an empty list of the same type; each replay fills a new list.
        *other = argument.isTensorList() ? c10::IValue(c10::List<at::Tensor>())
                                         : c10::IValue(c10::List<std::optional<at::Tensor>>());
      } else {
        // TorchScript passes its own lists, and the script may change them later.
        const bool shared = argument.isList() && argument.use_count() > 1;
        *other = shared ? argument.deepcopy() : argument;
      }
      ++other;
    }
  }

  void addInputs() {
    int64_t* shape = recipe_->shapes();
    for (size_t i = 0; i < arguments_.tensors().size(); ++i) {
      const Argument& argument = arguments_.tensors()[i];
      const at::Tensor& tensor = *argument.tensor;
      Input& input = recipe_->inputs()[i];
      input.flags = argument.flags;
      input.use = argument.use;
      input.argument = argument.index;
      input.element = argument.element;
      if (!tensor.defined()) {
        continue;
      }
      shape = writeShape(tensor, argument.flags, shape);
      if (input.isStandIn()) {
        *shape++ = bytesOfStandIn(argument);
        continue;  // a stand-in is never the same tensor as another input
      }
      if (input.isNumber()) {
        std::memcpy(shape, tensor.const_data_ptr(), tensor.itemsize());
        shape += Input::kNumberWords;
      } else {
        addValue(input, tensor);
      }
      input.sameAs = earlierInput(i);
    }
  }

  // The index of an earlier input that is the same tensor, or -1. Skips elements of lists:
  // lists may be long, and no kernel compares their elements.
  int32_t earlierInput(size_t index) const {
    const auto& tensors = arguments_.tensors();
    for (size_t e = 0; tensors[index].element < 0 && e < index; ++e) {
      if (tensors[e].element < 0 && tensors[e].tensor->is_same(*tensors[index].tensor) &&
          !recipe_->inputs()[e].isStandIn()) {
        return static_cast<int32_t>(e);
      }
    }
    return -1;
  }

  // The size in bytes of the memory that a replay passes in place of this argument. A scratch
  // argument keeps its offset (Input::showsStorage), so it gets a whole storage. An unread argument
  // starts at offset 0. Its kernel may still touch the memory, unless the op reads only shapes, as
  // zeros_like does.
  int64_t bytesOfStandIn(const Argument& argument) const {
    const bool scratch = argument.use == ArgUse::Scratch;
    return static_cast<int64_t>(
        scratch                         ? argument.tensor->storage().nbytes()
        : op_.arguments.readsOnlyShapes ? 0
                                        : bytesShown(*argument.tensor));
  }

  void addValue(Input& input, const at::Tensor& tensor) {
    input.wholeOverwrite = input.use == ArgUse::Overwrite && coversStorage(tensor);
    const auto& value = values_.current(tensor);
    readsOpaque_ |= value->facts().opaque;
    if (input.use == ArgUse::Read && value->decision().isKept() && !value->home().bytes() &&
        !value->stash()) {
      values_.keeper().keep(*value, tensor);
    }
    if (value->facts().inTransit && value->recipe() && input.use == ArgUse::Read &&
        !op_.limits.asynchronous) [[unlikely]] {
      value->recipe()->op.guard->isRead(*value, tensor);
    }
    input.value = ReaderOf(value);
  }

  const Context& context_;
  ValueMap& values_;
  const Call& call_;
  const OpTraits& op_;
  const Arguments& arguments_;
  c10::intrusive_ptr<Recipe> recipe_;
  bool readsOpaque_ = false;
};

}  // namespace

c10::intrusive_ptr<Recipe> recipeOf(
    const Context& context, ValueMap& values, const Call& call, const Arguments& arguments) {
  return RecipeWriter(context, values, call, arguments).write();
}

}  // namespace ebb
