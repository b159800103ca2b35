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
  double letGo = -1;          // inputs: when ebb first found that only regions refer to it
  double asked = -1;          // first unpack in backward
  double again = -1;          // when the value was recomputed or fetched
  uint64_t againAddress = 0;  // of the bytes after recomputation or fetch
  double ended = -1;          // when the last reference ended
  int64_t rows = 0;           // rows of the storage if ebb knows which are valid; else 0
  int64_t liveRows = 0;       // valid rows, at least 1
  bool rowsMixed = false;     // saved by an operator whose results may mix several rows

  static constexpr auto fields(auto function) {
    return function(
        Field{"memory", &ProfileValue::memory},
        Field{"shape", &ProfileValue::shape},
        Field{"dtype", &ProfileValue::dtype},
        Field{"fate", &ProfileValue::fate},
        Field{"reason", &ProfileValue::reason},
        Field{"saved", &ProfileValue::saved},
        Field{"address", &ProfileValue::address},
        Field{"made", &ProfileValue::made},
        Field{"let_go", &ProfileValue::letGo},
        Field{"asked", &ProfileValue::asked},
        Field{"again", &ProfileValue::again},
        Field{"again_address", &ProfileValue::againAddress},
        Field{"ended", &ProfileValue::ended},
        Field{"rows", &ProfileValue::rows},
        Field{"live_rows", &ProfileValue::liveRows},
        Field{"rows_mixed", &ProfileValue::rowsMixed});
  }
};

// One operator call in a forward, in order of recording.
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

  static constexpr auto fields(auto function) {
    return function(
        Field{"func_name", &ProfileOperator::funcName},
        Field{"region", &ProfileOperator::region},
        Field{"module", &ProfileOperator::module},
        Field{"call", &ProfileOperator::call},
        Field{"start", &ProfileOperator::start},
        Field{"runtime", &ProfileOperator::runtime},
        Field{"inputs", &ProfileOperator::inputs},
        Field{"outputs", &ProfileOperator::outputs},
        Field{"random", &ProfileOperator::random},
        Field{"inplace", &ProfileOperator::inplace},
        Field{"replayable", &ProfileOperator::replayable},
        Field{"reads_rows", &ProfileOperator::readsRows});
  }
};

// An allocation, or a free (`bytes` < 0), on any device.
struct ProfileAllocation {
  double time = 0;
  uint64_t address = 0;
  int64_t bytes = 0;

  static constexpr auto fields(auto function) {
    return function(
        Field{"time", &ProfileAllocation::time},
        Field{"address", &ProfileAllocation::address},
        Field{"bytes", &ProfileAllocation::bytes});
  }
};

// One replay for backward.
struct ProfileReplay {
  std::string funcName;
  double start = 0;
  double runtime = 0;  // host time

  static constexpr auto fields(auto function) {
    return function(
        Field{"func_name", &ProfileReplay::funcName},
        Field{"start", &ProfileReplay::start},
        Field{"runtime", &ProfileReplay::runtime});
  }
};

struct Profile {
  double duration = 0;
  std::vector<ProfileOperator> operators;
  std::vector<ProfileReplay> replays;
  std::vector<ProfileValue> values;
  std::vector<ProfileAllocation> allocations;  // by this thread, and by autograd on its behalf

  static constexpr auto fields(auto function) {
    return function(
        Field{"duration", &Profile::duration},
        Field{"operators", &Profile::operators},
        Field{"replays", &Profile::replays},
        Field{"values", &Profile::values},
        Field{"allocations", &Profile::allocations});
  }
};

// Starts a profile: everything that regions of the process do from now on goes to the profile and
// not to reports. Throws if a profile has begun already, or if torch's profiler runs on this
// thread.
EBB_API void beginProfile();

// Ends the profile. Throws if no profile has begun, or if another thread began the profile; then
// the profile continues.
EBB_API Profile endProfile();

}  // namespace ebb
