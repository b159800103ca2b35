// Writes the recipe of one call.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include "graph/recipe.h"
#include "intercept/interceptor.h"
#include "record/arguments.h"
#include "record/context.h"

namespace ebb {

// Null if the op reads a tensor during an opaque write: see Note [Opaque writes].
c10::intrusive_ptr<Recipe> recipeOf(
    const Context& context, ValueMap& values, const Call& call, const Arguments& arguments);

}  // namespace ebb
