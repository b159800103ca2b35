// Writes the recipe of one call.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>

#include "graph/recipe.h"
#include "intercept/interceptor.h"
#include "record/arguments.h"
#include "record/context.h"

namespace ebb {

class Sender;

class RecipeWriter {
 public:
  RecipeWriter(
      const Context& context, ValueMap& values, const Call& call, const Arguments& arguments)
      : context_(context),
        values_(values),
        sender_(values.sender()),
        call_(call),
        op_(call.op),
        arguments_(arguments) {
  }

  // Null if the op reads a tensor during an opaque write: see Note [Opaque writes].
  c10::intrusive_ptr<Recipe> write();

 private:
  void addOthers();
  void addInputs();
  // The index of an earlier input with the same tensor object; -1: none.
  int32_t earlierInput(size_t index) const;
  void addValue(Input& input, const at::Tensor& tensor);
  int64_t bytesOfStandIn(const Argument& argument) const;

  const Context& context_;
  ValueMap& values_;
  Sender& sender_;
  const Call& call_;
  const OpTraits& op_;
  const Arguments& arguments_;
  c10::intrusive_ptr<Recipe> recipe_;
  bool readsOpaque_ = false;
};

}  // namespace ebb
