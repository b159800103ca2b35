#include "ahead/idle_cores.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace ebb {
namespace {

int coresOfAffinity() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return CPU_COUNT(&set);
  }
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

// The share that a container has: version 2 of cgroups, as seen from inside; large if none is set.
int coresOfCgroup() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0;
  double period = 0;
  if (file >> quota >> period && quota > 0 && period > 0) {
    return static_cast<int>(std::max(1.0, std::floor(quota / period)));
  }
  return 1 << 20;
}

int usableCores() {
  static const int cores = std::max(1, std::min(coresOfAffinity(), coresOfCgroup()));
  return cores;
}

}  // namespace

bool hasIdleCores() {
  return 2 * at::get_num_threads() <= usableCores();
}

}  // namespace ebb
