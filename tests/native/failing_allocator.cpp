#include "failing_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <optional>

#include "intercept/key.h"
#include "memory/relief.h"

namespace ebb {
namespace {

// In the kernel of an op that ebb sees, and in ebb's own work.
bool isEbbsKernel() {
  return c10::impl::tls_is_dispatch_key_excluded(kInterceptionKey);
}

class FailingAllocator final : public c10::Allocator {
 public:
  void configure(const AllocationFaults& faults) {
    faults_ = faults;
    seen_.store(0);
    failed_.store(0);
  }

  uint64_t failed() const {
    return failed_.load();
  }

  c10::DataPtr allocate(size_t nbytes) override {
    if (faults_.every != 0 && nbytes >= faults_.least && nbytes <= faults_.most && isEbbsKernel() &&
        fails()) {
      ++failed_;
      TORCH_CHECK(
          false,
          "DefaultCPUAllocator: can't allocate memory: fault injected, you tried to allocate ",
          nbytes,
          " bytes");
    }
    return real_.allocate(nbytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return real_.raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    real_.copy_data(to, from, nbytes);
  }

 private:
  bool fails() {
    uint64_t drawn = (faults_.seed << 32) + ++seen_;
    drawn = (drawn ^ drawn >> 31) * 0x9E3779B97F4A7C15U;
    drawn = (drawn ^ drawn >> 29) * 0xBF58476D1CE4E5B9U;
    return (drawn >> 32) % faults_.every == 0;
  }

  c10::Allocator& real_ = *c10::GetCPUAllocator();
  AllocationFaults faults_;
  std::atomic<uint64_t> seen_{0};
  std::atomic<uint64_t> failed_{0};
};

// In torch's place from the first call on.
FailingAllocator& allocator() {
  static auto* instance = [] {
    auto* made = new FailingAllocator;
    c10::SetCPUAllocator(made, 1);
    return made;
  }();
  return *instance;
}

}  // namespace

void failAllocations(const AllocationFaults& faults) {
  static std::optional<GiveBack> replaced;
  if (replaced) {
    setReserve(Reserve::Leaving, *replaced);
    replaced.reset();
  }
  if (faults.isGiving) {
    replaced = setReserve(Reserve::Leaving, [](Shortage) { return true; });
  }
  allocator().configure(faults);
}

uint64_t failedAllocations() {
  return allocator().failed();
}

}  // namespace ebb
