#include <c10/util/Exception.h>

#include "plugins/paging/paging_engine.h"

namespace ebb {
namespace {

constexpr double kMostHeadroom = 1000;

void check(bool good, const char* what) { TORCH_CHECK_VALUE(good, "ebb: paging: ", what); }

}  // namespace

void configurePaging(const PagingSettings& settings) {
  check(settings.pageRows >= 1, "page_rows must be at least 1");
  check(
      settings.headroom >= 1 && settings.headroom <= kMostHeadroom,
      "headroom must be from 1 to 1000");
  check(
      settings.hostHeadroom >= 0 && settings.hostHeadroom <= kMostHeadroom,
      "host_headroom must be from 0 to 1000");
  check(
      settings.prefetch >= -1 && settings.prefetch <= 1,
      "prefetch must be 0, 1, or -1 (the device's default)");
  Paging::get().configure(settings);
}

PagingSettings pagingSettings() { return Paging::get().settings(); }

bool pagingStepOk() { return Paging::get().stepOk(); }

PagingStats pagingStats() { return Paging::get().stats(); }

}  // namespace ebb
