// A recorder's entries for reports: see Note [The journal]. Called only while reports are recorded,
// except isReported(), noteRows() and noteSent().
#pragma once

#include <ATen/core/TensorBody.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "graph/value.h"
#include "record/context.h"
#include "report/journal.h"

namespace ebb {

class ValueMap;
class Arguments;
struct Call;

// For a profile: notes a call before it runs. Null if no profile is recorded.
std::unique_ptr<OperatorLine> noteCall(
    const Context& context,
    ValueMap& values,
    const Call& call,
    const Arguments& arguments,
    bool replayable);
// The call's kernel has run.
void noteRun(const Journal& journal, OperatorLine& note);

// Adds a line for a new value to the report. `op` produced the value, and `tensor` is the result;
// value.facts.rule must be set. `reason`: why the value cannot be recomputed; null if it can
// be, or need not be.
void noteMade(
    const Context& context,
    Value& value,
    const at::Tensor& tensor,
    const std::string& op,
    const char* reason);

// Called when autograd saves `tensor`, which no op of the region has read. True if ebb creates a
// value for the tensor, only for the report or the profile. These then show when backward unpacks a
// tensor computed outside of the region.
bool isReported(const Context& context, const at::Tensor& tensor);

// Notes the policy's rule that decided on the value.
void noteRule(const Context& context, const Value& value);

// For a profile: notes how many rows of the value are valid.
void noteRows(Value& value);

void notePacked(Value& value, const at::Tensor& tensor, bool kept);

// The value has been sent away. `kind` is the term for this in traces.
void noteSent(Value& value, Fate fate, const char* kind, std::string_view of, size_t nbytes);

// The value has got a copy of its bytes, and gets a new line. Handles keep the former line.
void noteCopied(Value& value);

// State of a value in the map before the map is cleared.
struct Closing {
  EntryPtr entry;
  c10::weak_intrusive_ptr<Value> value;
  c10::weak_intrusive_ptr<c10::StorageImpl> home;
  bool droppable;  // escapedStorage() is not null
};
// Collects the state of all values with an entry, before the map is cleared.
std::vector<Closing> noteClosing(const ValueMap& values);

// Called after the map has been cleared. Before, the map keeps all values and their recipes alive,
// so ebb cannot tell which of them backward needs.
void noteClosed(const std::vector<Closing>& closing);

}  // namespace ebb
