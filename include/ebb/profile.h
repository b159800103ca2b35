// A profile: one step, operator by operator, with all data needed to estimate the cost of another
// policy.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "ebb/fields.h"

namespace ebb {

// Times are in milliseconds since the profile began; -1 means never. Values and operators are
// identified by their indices in Profile::values and Profile::operators.

// The contents of a storage between two writes.
struct ProfileValue {
  uint64_t memory = 0;         // bytes of the storage
  std::vector<int64_t> shape;  // of the tensor that the operator returned
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::string fate;      // as ReportRow::fate
  std::string reason;    // why it cannot be recomputed; else empty
  bool saved = false;    // autograd saved the value
  uint64_t address = 0;  // of the bytes when the value was made
  double made = 0;
  double letGo = -1;          // of an input: when ebb first found that only regions refer to it
  double asked = -1;          // first unpack in backward
  uint64_t node = 0;          // number of the node that unpacked it first; the values of a node
                              // have the same number
  double again = -1;          // when the value was recomputed or fetched
  uint64_t againAddress = 0;  // of the bytes after recomputation or fetch
  double ended = -1;          // when the last reference ended
  int64_t rows = 0;           // rows of the storage if ebb knows which are valid; else 0
  int64_t liveRows = 0;       // valid rows, at least 1
  bool rowsMixed = false;     // saved by an operator whose results may mix several rows

  EBB_FIELDS(ProfileValue, memory, shape, dtype, fate, reason, saved, address, made, letGo, asked,
             node, again, againAddress, ended, rows, liveRows, rowsMixed)
};

// One operator call in a forward.
struct ProfileOperator {
  std::string funcName;  // "aten::mm.default"
  std::string region;
  std::string module;  // innermost running module; empty if modules are not tracked
  uint64_t call = 0;   // number of outermost regions entered before
  double start = 0;
  double runtime = 0;             // of the kernel: device time if there is a device, else host time
  std::vector<uint64_t> inputs;   // values read
  std::vector<uint64_t> outputs;  // values created or written
  bool random = false;            // drew from a random generator
  bool inplace = false;           // wrote an argument
  bool replayable = false;        // can be replayed
  bool readsRows = false;         // ebb knows which rows of the inputs are valid

  EBB_FIELDS(ProfileOperator, funcName, region, module, call, start, runtime, inputs, outputs,
             random, inplace, replayable, readsRows)
};

// An allocation, or a free (`bytes` < 0), on the type of accelerator in use; if none is in use, in
// host memory.
struct ProfileAllocation {
  double time = 0;
  uint64_t address = 0;
  int64_t bytes = 0;

  EBB_FIELDS(ProfileAllocation, time, address, bytes)
};

// One replay for backward.
struct ProfileReplay {
  std::string funcName;
  double start = 0;
  double runtime = 0;  // host time

  EBB_FIELDS(ProfileReplay, funcName, start, runtime)
};

struct Profile {
  double duration = 0;
  std::vector<ProfileOperator> operators;  // in order of recording
  std::vector<ProfileReplay> replays;
  std::vector<ProfileValue> values;
  std::vector<ProfileAllocation> allocations;  // by this thread, and by autograd on its behalf

  EBB_FIELDS(Profile, duration, operators, replays, values, allocations)
};

// Starts a profile: everything that regions of the process do from now on goes to the profile and
// not to reports. Throws if a profile has begun already, or if torch's profiler runs on this
// thread.
EBB_API void beginProfile();

// Ends the profile. Throws if no profile has begun, or if another thread began the profile; then
// nothing more is recorded, and the other thread can end the profile.
EBB_API Profile endProfile();

// Counts the peak of tensorBytes() exactly, on an accelerator, until endCounting(). Returns false,
// and does nothing, if a profile has begun or torch's profiler runs on this thread.
EBB_API bool beginCounting();

// Does nothing if counting has not begun.
EBB_API void endCounting();

}  // namespace ebb
