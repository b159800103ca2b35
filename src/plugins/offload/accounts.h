// Counters of the transfers of offloaded values, a part of ebb::stats().
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ebb/report.h"

namespace ebb {

// The transfers of the values of one op in one region, in bytes. The offload engine writes the
// members, on any thread.
struct TransferAccount {
  explicit TransferAccount(std::string given) : of(std::move(given)) {}
  const std::string of;  // "an output of aten::sin.default offloaded in region 'block'"
  std::atomic<uint64_t> sent{0};
  std::atomic<uint64_t> fetched{0};
  std::atomic<uint64_t> waitedByHost{0};
  std::atomic<uint64_t> waitedByDevice{0};
  std::atomic<uint64_t> refused{0};
  std::atomic<uint64_t> spilled{0};

  TransferCounters counters() const {
    static_assert(memberCount<TransferCounters>() == 6, "each has a counter here");
    return {sent, fetched, waitedByHost, waitedByDevice, refused, spilled};
  }
};
using TransferAccountPtr = std::shared_ptr<TransferAccount>;

// The account for this step's transfers of an op's values in a region. `op` is "input" for inputs.
TransferAccountPtr transferAccount(const std::string& region, const std::string& op);

}  // namespace ebb
