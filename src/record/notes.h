// What a recorder writes down for reports. None of it is called unless they are recorded: see Note
// [The journal].
#pragma once

#include <ATen/core/TensorBody.h>

#include <string>
#include <vector>

#include "graph/value.h"
#include "record/context.h"
#include "report/journal.h"

namespace ebb {

class ValueMap;

// `op` made the value, whose `rule` is set, in a result shown by `tensor`. `reason` tells why it
// cannot be recomputed; null if it can, or need not. Whether the program still holds what came from
// outside is looked at later.
void noteMade(
    const Context& context,
    Value& value,
    const at::Tensor& tensor,
    const std::string& op,
    const char* reason);

// True if a tensor that autograd saves, and that no op of the region has read yet, gets a value. A
// profile needs one to show when backward asks for what another function computed. A report needs
// one to show whether only autograd holds the tensor in the end.
bool isReported(const Context& context, const at::Tensor& tensor);

// For a profile: which rows of the value live.
void noteRows(Value& value);

void notePacked(Value& value, const at::Tensor& tensor, bool kept);

// The value has been sent away; `kind` is the word for it in traces.
void noteSent(Value& value, Fate fate, const char* kind, const std::string& of, size_t nbytes);

// The value has got bytes of its own; handles still know the line of the storage it was in.
void noteCopied(Value& value);

// What is known of a value of the map before that is cleared.
struct Closing {
  EntryPtr entry;
  c10::weak_intrusive_ptr<Value> value;
  c10::weak_intrusive_ptr<c10::StorageImpl> home;
  bool droppable;  // its storage is there, and could be dropped
};
std::vector<Closing> noteClosing(const ValueMap& values);

// The map has been cleared. Which values somebody needs shows only then: most recipes are needed by
// nothing but the map.
void noteClosed(const std::vector<Closing>& closing);

}  // namespace ebb
