// What one step did, operator by operator: all that it takes to tell what another policy would
// cost.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "ebb/fields.h"

namespace ebb {

// Times are in milliseconds since the profile began; -1: never. Values and operators are known by
// their places in Profile::values and Profile::operators.

// One state of one storage: what it holds between two writes.
struct ProfileValue {
  uint64_t memory = 0;         // bytes of the storage
  std::vector<int64_t> shape;  // of the tensor that was made
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::string fate;      // as ReportRow::fate
  std::string reason;    // why it cannot be recomputed; else empty
  bool saved = false;    // by autograd
  uint64_t address = 0;  // of its bytes when they were made
  double made = 0;
  double letGo = -1;          // of what came from outside: only regions held it any more
  double asked = -1;          // backward unpacked it first
  double again = -1;          // it was made again, or fetched
  uint64_t againAddress = 0;  // of its bytes then
  double ended = -1;          // nothing knew it any more
  int64_t rows = 0;           // of the storage, if it is known which of them live; else 0
  int64_t liveRows = 0;       // of those, one at least
  bool rowsMixed = false;     // an operator that may mix its rows has saved it

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

// One call of an operator in a forward. The order is that of recording.
struct ProfileOperator {
  std::string funcName;  // "aten::mm.default"
  std::string region;
  std::string module;  // the innermost that ran; empty if nobody tracks modules
  uint64_t call = 0;   // of an outermost region: how many had been entered before
  double start = 0;
  double runtime = 0;             // of its kernel: of the device, else of the host
  std::vector<uint64_t> inputs;   // values that it read
  std::vector<uint64_t> outputs;  // values that it made, or wrote
  bool random = false;            // it drew from a generator
  bool inplace = false;           // it wrote an argument
  bool replayable = false;        // it can be run again
  bool readsRows = false;         // of what it reads it is known which rows live

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

// Memory that was taken, or given back: then bytes are less than 0. On all devices.
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

// One run of an operator again, for backward.
struct ProfileReplay {
  std::string funcName;
  double start = 0;
  double runtime = 0;  // of the host

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
  std::vector<ProfileAllocation> allocations;  // by this thread, and autograd's for it

  static constexpr auto fields(auto function) {
    return function(
        Field{"duration", &Profile::duration},
        Field{"operators", &Profile::operators},
        Field{"replays", &Profile::replays},
        Field{"values", &Profile::values},
        Field{"allocations", &Profile::allocations});
  }
};

// All that regions of the process do from now on becomes part of one profile, and not of reports.
// Throws if one has begun already, or torch's profiler runs on this thread.
EBB_API void beginProfile();

// Throws if none has begun, or on another thread: then it goes on.
EBB_API Profile endProfile();

}  // namespace ebb
