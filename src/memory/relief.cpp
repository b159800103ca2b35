#include "memory/relief.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <new>
#include <string_view>

namespace ebb {
namespace {

std::array<std::atomic<GiveBack>, 2> reserves{};
std::atomic<uint64_t> failures{0};
std::atomic<uint64_t> overcome{0};

// torch has no exception class for host memory, so the message decides.
bool isOfCpuAllocator(const c10::Error& error) {
  const std::string_view what = error.what_without_backtrace();
  return what.find("DefaultCPUAllocator: can't allocate memory") != std::string_view::npos ||
         what.find("DefaultCPUAllocator: not enough memory") != std::string_view::npos;
}

}  // namespace

Shortage shortageNow() {
  try {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    return Shortage::Device;
  } catch (const c10::Error& error) {
    return isOfCpuAllocator(error) ? Shortage::Host : Shortage::None;
  } catch (const std::bad_alloc&) {
    return Shortage::Host;
  } catch (...) {
    return Shortage::None;
  }
}

GiveBack setReserve(Reserve reserve, GiveBack giveBack) {
  return reserves[static_cast<size_t>(reserve)].exchange(giveBack);
}

bool relieved() {
  const Shortage shortage = shortageNow();
  if (shortage == Shortage::None) {
    return false;
  }
  failures.fetch_add(1, std::memory_order_relaxed);
  try {
    return std::any_of(reserves.begin(), reserves.end(), [&](const auto& reserve) {
      const GiveBack giveBack = reserve.load();
      return giveBack != nullptr && giveBack(shortage);
    });
  } catch (const std::exception&) {
    return false;  // perhaps the device has failed: the exception being handled says more
  }
}

void noteOvercome() {
  overcome.fetch_add(1, std::memory_order_relaxed);
}

ReliefCounts reliefCounts() {
  return {failures.load(std::memory_order_relaxed), overcome.load(std::memory_order_relaxed)};
}

}  // namespace ebb
